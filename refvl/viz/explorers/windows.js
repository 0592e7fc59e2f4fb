// The image with patches, merge blocks and windows; the permutation of its tokens; the mask; a patch's angles.
import { explorer } from "./shared.js";

export default explorer(view => {
  const W = () => (view.big && view.shared.windowed ? Math.min(640, view.fit(1120) - 24 - side()) : view.fit(440));
  const BAND = 160, AXIS = 30, side = () => (view.big ? 330 : 260), mask = () => side() - AXIS;
  const grid = () => view.row.grid;
  const cell = () => W() / Math.max(...grid());
  const tokens = () => view.row.window_index.length;
  const block = () => view.shared.merge ** 2;
  const token = () => (view.item < 0 ? -1 : Math.floor(view.item / block()));  // rows are in merge-block order
  const place = t => view.row.window_index.indexOf(t);
  const windows = () => view.row.cu_window_seqlens.length - 1;
  const borders = () => Array.from(view.row.cu_window_seqlens, n => n / block());
  const window = t => borders().findIndex(n => n > place(t)) - 1;
  const color = k => view.colors.sequence(windows() < 2 ? 0.5 : k / (windows() - 1));
  const { windowed } = view.shared;
  const shown = () => `${grid().join(" x ")} patches, ${tokens()} merged tokens` +
    (windowed ? `, ${windows()} window${windows() > 1 ? "s" : ""}` : "");
  const corner = patch => [view.row.patches[2 * patch + 1] * cell(), view.row.patches[2 * patch] * cell()];

  const number = (pen, n, x, y) => {  // on the colour of its window
    pen.fillStyle = color(n - 1); pen.fillRect(x - 13, y - 11, 26, 22);
    pen.strokeStyle = "#fff"; pen.lineWidth = 1; pen.strokeRect(x - 13, y - 11, 26, 22);
    pen.font = "bold 13px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.strokeStyle = "#000"; pen.lineWidth = 3; pen.strokeText(n, x, y);
    pen.fillStyle = "#fff"; pen.fillText(n, x, y);
  };

  function at(x, y) {
    const column = Math.floor(x / cell()), row = Math.floor(y / cell()), { patches } = view.row;
    for (let i = 0; i < patches.length; i += 2) if (patches[i] === row && patches[i + 1] === column) return i / 2;
    return -1;
  }
  view.title(() => {
    if (!windowed) return `The image becomes ${tokens()} tokens`;
    const all = view.row.patches.length / 2, k = token() < 0 ? -1 : window(token());
    return k < 0 ? `The image has ${all} patches in ${windows()} window${windows() > 1 ? "s" : ""}`
      : `The chosen patch may attend to ${view.row.cu_window_seqlens[k + 1] - view.row.cu_window_seqlens[k]} of the ${all} patches: those of its window`;
  });
  view.column();
  view.canvas({
    name: shown,
    caption: () => shown() + (view.item < 0 ? ". Choose a patch" : windowed ? ". Not faded: the patches that the chosen patch may attend to. Orange: the chosen patch; the frame also encloses the three patches that merge with it"
      : ". Framed: its merge block, which becomes one token"),
    size: () => [grid()[1] * cell(), grid()[0] * cell()],
    at,
    step(item, dx, dy) {
      const [x, y] = corner(item), c = cell();
      return at(x + c / 2 + dx * c, y + c / 2 + dy * c);
    },
    draw(pen, width, height) {
      const c = cell(), m = view.shared.merge, edges = borders(), middle = [];
      pen.drawImage(view.shared.photos[view.row.photo], 0, 0, width, height);
      for (let k = 0; windowed && k < windows(); k++) {
        const inside = view.row.window_index.slice(edges[k], edges[k + 1]);
        const [x, y] = corner(inside[0] * block()), [right, bottom] = corner(inside.at(-1) * block());
        const box = [x, y, right - x + m * c, bottom - y + m * c];
        if (token() >= 0 && k !== window(token())) view.fade(pen, ...box, 0.65);
        for (const [color, thickness] of [["#000", 4], ["#fff", 2.5]]) {
          pen.strokeStyle = color; pen.lineWidth = thickness; pen.strokeRect(...box);
        }
        middle.push([(x + right + m * c) / 2, (y + bottom + m * c) / 2]);
      }
      const lines = (step, thickness) => {
        pen.beginPath(); pen.strokeStyle = "#ffffffa0"; pen.lineWidth = thickness;
        for (let x = step; x < width - 1; x += step) { pen.moveTo(x, 0); pen.lineTo(x, height); }
        for (let y = step; y < height - 1; y += step) { pen.moveTo(0, y); pen.lineTo(width, y); }
        pen.stroke();
      };
      lines(c, 0.3); lines(m * c, 0.9);
      if (windowed && windows() <= 40) middle.forEach(([x, y], k) => number(pen, k + 1, x, y));
      if (view.item < 0) return;
      const [bx, by] = corner(token() * block()), [x, y] = corner(view.item);
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 3;
      pen.strokeRect(bx, by, m * c, m * c);
      pen.fillStyle = view.colors.highlight; pen.fillRect(x, y, c, c);
    },
  });

  view.readout(() => {
    const t = token(), [row, column] = view.row.patches.slice(2 * view.item, 2 * view.item + 2);
    return `The patch in row ${row}, column ${column} ` + (windowed
      ? `may attend to the ${view.row.cu_window_seqlens[window(t) + 1] - view.row.cu_window_seqlens[window(t)]} patches of window ${window(t) + 1}.`
      : `becomes part of token ${t}.`);
  }, () => {
    const t = token();
    return `It is row ${view.item} of the input and belongs to merged token ${t} of ${tokens()}` +
      (windowed ? `, which is number ${place(t)} in window order. Windows are counted from 1, everything else from 0.` : ". All are counted from 0.");
  });
  const parts = { count: () => view.row.patches.length / 2 };
  if (!windowed) return parts;

  view.canvas({
    name: () => "the patch's rotary angles: pairs rotated by its row (first line) and its column (second line)",
    caption: () => "The new order loses no location: each patch carries its row (first line) and its column (second line) as angles of rotary pairs",
    size: () => [W(), 56],
    draw(pen, width) {
      const planes = view.shared.cos.shape[1], step = width / planes, radius = step / 2 - 2;
      if (view.item < 0) { pen.fillStyle = view.colors.muted; pen.fillText("point at a patch", 4, 30); return; }
      ["h", "w"].forEach((axis, line) => {
        const position = view.row.patches[2 * view.item + line];
        for (let p = 0; p < planes; p++) {
          const i = position * planes + p, x = (p + 0.5) * step, y = 14 + 28 * line;
          pen.lineWidth = 1; pen.strokeStyle = view.colors.line;
          pen.beginPath(); pen.arc(x, y, radius, 0, 7); pen.stroke();
          pen.lineWidth = 2.5; pen.strokeStyle = view.colors[axis];
          pen.beginPath(); pen.moveTo(x, y);
          pen.lineTo(x + radius * view.shared.cos[i], y - radius * view.shared.sin[i]); pen.stroke();
        }
      });
    },
  });

  view.column();
  view.canvas({
    name: () => "reading order above, window order below: x[window_index]",
    caption: () => "The tokens in reading order (above) and in window order (below); the colours are those of the windows",
    size: () => [side(), BAND],
    at: x => Math.floor((x / side()) * tokens()) * block(),
    draw(pen, width, height) {
      const step = width / tokens(), index = view.row.window_index, edges = borders();
      let k = 0;
      index.forEach((t, i) => {
        while (edges[k + 1] <= i) k++;
        const chosen = t === token();
        pen.strokeStyle = pen.fillStyle = chosen ? view.colors.highlight : color(k);
        pen.lineWidth = chosen ? 3 : Math.min(1, step / 2);
        pen.fillRect(t * step, 0, Math.max(step, chosen ? 3 : 0), 14);
        const to = view.ease(t, i) * step;
        pen.fillRect(to, height - 14, Math.max(step, chosen ? 3 : 0), 14);
        pen.beginPath(); pen.moveTo((t + 0.5) * step, 14); pen.lineTo(to + step / 2, height - 14); pen.stroke();
      });
    },
  });

  view.canvas({
    name: () => "which token attends to which, in window order",
    caption: () => "Which token attends to which, in window order: a token attends only to the tokens of its own square. Each number is an entry of cu_seqlens: the first patch of that square",
    size: () => [side(), mask()],
    at: (x, y) => view.row.window_index[Math.floor((y / mask()) * tokens())] * block(),
    draw(pen, width, height) {
      const edges = borders(), step = height / tokens();
      pen.fillStyle = view.colors.muted; pen.textAlign = "right"; pen.textBaseline = "middle";
      let free = 0;  // where the next number has room
      view.row.cu_window_seqlens.forEach((n, k) => {
        const y = Math.min(height - 6, Math.max(6, edges[k] * step));
        if (y < free) return;
        pen.fillText(n, AXIS - 4, y); free = y + 12;
      });
      pen.translate(AXIS, 0);
      pen.fillStyle = view.colors.empty; pen.fillRect(0, 0, height, height);
      for (let k = 0; k < windows(); k++) {
        pen.fillStyle = color(k);
        pen.fillRect(edges[k] * step, edges[k] * step, (edges[k + 1] - edges[k]) * step, (edges[k + 1] - edges[k]) * step);
      }
      if (token() < 0) return;
      const k = window(token());
      pen.fillStyle = view.colors.highlight;
      pen.fillRect(edges[k] * step, place(token()) * step, (edges[k + 1] - edges[k]) * step, Math.max(step, 2));
    },
  });

  return parts;
});
