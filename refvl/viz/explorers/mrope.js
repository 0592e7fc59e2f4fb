// The key's position, the score at every other position, and the angle between query and key in every rotary pair.
import { explorer } from "./shared.js";

export default explorer(view => {
  const MARGIN = 24, LEGEND = 44, NAMES = ["t", "h", "w"];
  const narrow = () => view.fit(960) < 960, ACROSS = () => (narrow() ? 8 : 16);
  const CELL = () => Math.floor((view.fit(360) - MARGIN) / 13), DIAL = () => Math.floor(narrow() ? view.fit(342) / 8 : 40);
  const here = () => [view.place("sections"), view.place("theta")];
  const of = what => view.shared[what][here()[0]][here()[1]];
  const axes = () => view.shared.axes[here()[0]];
  const key = () => NAMES.map(name => view.option(name));
  const query = () => view.shared.query;
  const part = (axis, position) => of("scores")[axis * of("scores").shape[1] + Math.abs(position - query()[axis])];
  const score = place => place.reduce((sum, position, axis) => sum + part(axis, position), 0);
  const turn = (what, plane, position) => of(what)[position * axes().length + plane];
  const sizes = () => NAMES.map(name => view.options(name).length);

  const words = axis => view.colors[`${NAMES[axis]}_text`] ?? view.colors[NAMES[axis]];

  // every score of the map, and its range
  function scores() {
    const [, rows, columns] = sizes(), all = Array.from({ length: rows * columns },
      (_, i) => score([key()[0], Math.floor(i / columns), i % columns]));
    return { all, low: Math.min(...all), high: Math.max(...all) };
  }
  view.canvas({
    name: () => `score of a key at every h (down) and w (across), at t = ${key()[0]}; the query ○ is at ` +
      `t, h, w = ${query().join(", ")}; drag the key ✕`,
    caption: () => `the score of a key at every h (down) and w (across), at t = ${key()[0]}. The query ○ is fixed at ` +
      `t, h, w = ${query().join(", ")}; drag the key ✕`,
    size: () => [MARGIN + sizes()[2] * CELL(), MARGIN + sizes()[1] * CELL() + LEGEND],
    drag(x, y) {
      [x, y].forEach((v, i) => {
        const name = NAMES[2 - i], last = view.options(name).length - 1;
        view.choose(name, Math.max(0, Math.min(last, Math.floor((v - MARGIN) / CELL()))));
      });
    },
    grab(x, y) {
      const [, h, w] = key().map(v => MARGIN + (v + 0.5) * CELL());
      return Math.hypot(x - w, y - h) < 30;
    },
    draw(pen, width) {
      const [, h, w] = key(), [, rows, columns] = sizes(), { all, low, high } = scores(), c = CELL();
      const tone = value => view.colors.sequence((value - low) / (high - low || 1));
      pen.translate(MARGIN, MARGIN);
      all.forEach((value, i) => {
        pen.fillStyle = tone(value); pen.fillRect((i % columns) * c, Math.floor(i / columns) * c, c - 1, c - 1);
      });
      pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillStyle = words(2);
      for (let j = 0; j < columns; j += 3) pen.fillText(j ? j : "w 0", (j + 0.5) * c, -10);
      pen.fillStyle = words(1);
      for (let i = 0; i < rows; i += 3) pen.fillText(i ? i : "h 0", -12, (i + 0.5) * c);
      const top = rows * c + 12, wide = columns * c;
      for (let i = 0; i < wide; i++) { pen.fillStyle = view.colors.sequence(i / wide); pen.fillRect(i, top, 1.5, 10); }
      pen.fillStyle = view.colors.ink; pen.textBaseline = "top";
      pen.textAlign = "left"; pen.fillText(low.toFixed(2), 0, top + 14); pen.textAlign = "right"; pen.fillText(high.toFixed(2), wide, top + 14);
      pen.textAlign = "center"; pen.fillText("score", wide / 2, top + 14);
      const mark = (row, column, draw) => [["#000", 6], ["#fff", 3]].forEach(([style, thick]) => {
        pen.strokeStyle = style; pen.lineWidth = thick; pen.beginPath();
        draw((column + 0.5) * c, (row + 0.5) * c); pen.stroke();
      });
      mark(query()[1], query()[2], (x, y) => pen.arc(x, y, 7, 0, 7));
      mark(h, w, (x, y) => {
        pen.moveTo(x - 6, y - 6); pen.lineTo(x + 6, y + 6); pen.moveTo(x + 6, y - 6); pen.lineTo(x - 6, y + 6);
      });
    },
  });

  view.canvas({
    name: () => `the ${axes().length} rotary pairs, fastest first; the wedge is the angle from the query to the key, on ` +
      "the axis that rotates the pair (t, h, w)",
    size: () => [ACROSS() * DIAL(), Math.ceil(axes().length / ACROSS()) * (DIAL() + 14)],
    at: (x, y) => Math.floor(y / (DIAL() + 14)) * ACROSS() + Math.floor(x / DIAL()),
    step: (item, dx, dy) => item + dx + dy * ACROSS(),
    draw(pen) {
      pen.textAlign = "center"; pen.textBaseline = "top"; pen.font = "bold 12px system-ui, sans-serif";
      axes().forEach((axis, plane) => {
        const d = DIAL(), x = (plane % ACROSS() + 0.5) * d, y = Math.floor(plane / ACROSS()) * (d + 14) + d / 2, r = d / 2 - 3;
        const angle = position => Math.atan2(turn("sin", plane, position), turn("cos", plane, position));
        const [from, to] = [angle(query()[axis]), angle(key()[axis])], far = Math.atan2(Math.sin(to - from), Math.cos(to - from));
        const chosen = plane === view.item, moved = query()[axis] !== key()[axis], color = view.colors[NAMES[axis]];
        pen.fillStyle = color; pen.globalAlpha = 0.45; pen.beginPath(); pen.moveTo(x, y);
        pen.arc(x, y, r, -from, -from - far, far > 0); pen.fill(); pen.globalAlpha = 1;
        pen.strokeStyle = chosen ? view.colors.ink : view.colors.line; pen.lineWidth = chosen ? 3 : 1;
        pen.beginPath(); pen.arc(x, y, r, 0, 7); pen.stroke();
        for (const [at, style, thick] of [[from, view.colors.muted, 1.5], [to, moved ? color : view.colors.muted, moved ? 3 : 1.5]]) {
          pen.strokeStyle = style; pen.lineWidth = thick; pen.beginPath(); pen.moveTo(x, y);
          pen.lineTo(x + r * Math.cos(at), y - r * Math.sin(at)); pen.stroke();
        }
        pen.fillStyle = words(axis);
        pen.fillText(NAMES[axis], x, y + r + 3);
      });
    },
  });

  view.canvas({
    name: () => `score ${score(key()).toFixed(3)}: what the pairs of each axis add to it`,
    caption: () => `score ${score(key()).toFixed(3)}: what the pairs of each axis add to it; frame: at distance 0`,
    size: () => [300, 84],
    draw(pen) {
      pen.textBaseline = "middle";
      NAMES.forEach((name, axis) => {
        const value = part(axis, key()[axis]), most = part(axis, query()[axis]), y = 4 + axis * 28;
        pen.strokeStyle = view.colors.line; pen.strokeRect(110, y, 170 * most, 20);  // its value without rotation
        pen.fillStyle = view.colors[name];
        pen.fillRect(value < 0 ? 110 + 170 * value : 110, y, 170 * Math.abs(value), 20);
        pen.fillStyle = words(axis); pen.fillText(`${name}: ${value.toFixed(3)}`, 4, y + 10);
      });
    },
  });

  view.readout(() => {
    const plane = view.item, axis = axes()[plane], [a, b] = [query()[axis], key()[axis]];
    const angle = position => Math.atan2(turn("sin", plane, position), turn("cos", plane, position)).toFixed(2);
    return `rotary pair ${plane} rotates with ${NAMES[axis]}\nquery at ${a}: ${angle(a)} rad, key at ${b}: ${angle(b)} rad`;
  });
  return {
    count: () => axes().length,
    read() {
      const parts = key().map((position, axis) => part(axis, position));
      const turns = what => Array.from(axes(), (axis, plane) => turn(what, plane, key()[axis]));
      return { axes: axes(), cos: turns("cos"), sin: turns("sin"), parts, score: score(key()) };
    },
  };
});
