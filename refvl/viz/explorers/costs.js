// The patches that a patch attends to in both kinds of block, and the operations of every block and of the tower.
import { explorer } from "./shared.js";

export default explorer(view => {
  const { depth } = view.shared;
  const side = () => view.option("side"), full = () => view.option("full"), across = () => Math.ceil(side() / view.option("window"));
  const in_words = (n, name) => `${n < 9.95 ? n.toFixed(1) : Math.round(n)} ${name}`;
  const trillion = n => (n < 99.5e9 ? in_words(n / 1e9, "billion") : in_words(n / 1e12, "trillion"));
  const times = n => `${n < 9.95 ? n.toFixed(1) : Math.round(n)} times`;
  const PICTURE = () => (view.big ? 250 : Math.min(220, view.fit(460) / 2 - 12));
  const window_size = () => PICTURE() * view.option("window") / side();

  function picture(title, words, sees) {
    view.canvas({
      name: title, caption: words,
      size: () => [PICTURE(), PICTURE()],
      at: (x, y) => Math.min(across() - 1, Math.floor(y / window_size())) * across() + Math.min(across() - 1, Math.floor(x / window_size())),
      step(item, dx, dy) {
        const x = item % across() + dx, y = Math.floor(item / across()) + dy;
        return x < 0 || y < 0 || x >= across() || y >= across() ? -1 : y * across() + x;
      },
      draw(pen, width) {
        pen.drawImage(view.shared.photo, 0, 0, width, width);
        const [item, s] = [view.item, window_size()], x = (item % across()) * s, y = Math.floor(item / across()) * s;
        const [w, h] = [Math.min(s, width - x), Math.min(s, width - y)];
        if (!sees && item >= 0) {
          pen.fillStyle = view.colors.surface; pen.globalAlpha = 0.75; pen.beginPath();
          pen.rect(0, 0, width, width); pen.rect(x, y, w, h); pen.fill("evenodd"); pen.globalAlpha = 1;
        }
        pen.strokeStyle = view.colors.line; pen.lineWidth = 0.75; pen.beginPath();
        for (let k = 1; k < across(); k++) {
          if (sees) break;
          pen.moveTo(k * s, 0); pen.lineTo(k * s, width); pen.moveTo(0, k * s); pen.lineTo(width, k * s);
        }
        pen.stroke();
        if (item < 0) return;
        pen.strokeStyle = view.colors.ink; pen.lineWidth = 1.5; if (!sees) pen.strokeRect(x, y, w, h);
        const dot = Math.max(9, width * view.shared.patch / side());
        pen.fillStyle = view.colors.highlight; pen.strokeStyle = "#fff"; pen.lineWidth = 1.5;
        pen.fillRect(x + w / 2 - dot / 2, y + h / 2 - dot / 2, dot, dot); pen.strokeRect(x + w / 2 - dot / 2, y + h / 2 - dot / 2, dot, dot);
      },
    });
  }
  const in_window = () => (view.option("window") / view.shared.patch) ** 2;
  picture(() => `a block with windowed attention: the patch attends to ${in_window()} patches`,
    () => `In a block with windowed attention, the marked patch attends to at most ${in_window()} patches: those that are not faded`, false);
  picture(() => `a block with full attention: the patch attends to ${view.row.patches.toLocaleString("en")} patches`,
    () => `In a block with full attention, the marked patch attends to all ${view.row.patches.toLocaleString("en")} patches`, true);

  // blocks with full attention are spread as evenly as possible
  const is_full = block => Math.floor((block + 1) * full() / depth) > Math.floor(block * full() / depth);
  const BLOCKS = () => (view.fit(1120) >= 760 ? view.fit(1120) - 2 * PICTURE() - 56 : view.fit(460)), HIGH = () => (view.big ? 250 : 200), HEAD = 26;
  view.canvas({
    name: () => `the ${depth} blocks of the tower: ${full()} with full attention`,
    caption: () => `Operations in each of the ${depth} blocks: matrix multiplications (gray) and, on top, windowed attention (blue, a thin line) or full attention (purple)`,
    size: () => [BLOCKS(), HIGH()],
    drag(x) {
      const wanted = x / BLOCKS() * depth, options = view.options("full");
      const near = options.reduce((best, count, i) => (Math.abs(count - wanted) < Math.abs(options[best] - wanted) ? i : best), 0);
      view.choose("full", near);
    },
    draw(pen, width, height) {
      const step = width / depth, most = view.row.linear + view.row.whole, unit = (height - HEAD - 2) / most;
      pen.font = "bold 14px sans-serif"; pen.textBaseline = "top"; pen.fillStyle = view.colors.ink;
      pen.fillText(`${trillion(view.row.total)} operations`, 0, 2);
      for (let block = 0; block < depth; block++) {
        const looked = view.ease(`block ${block}`, (is_full(block) ? view.row.whole : view.row.windowed) * unit), matrices = view.row.linear * unit;
        pen.fillStyle = view.colors.text; pen.fillRect(block * step, height - matrices, step - 2, matrices);
        pen.fillStyle = view.colors[is_full(block) ? "video" : "image"];
        pen.fillRect(block * step, height - matrices - Math.max(2, looked), step - 2, Math.max(2, looked));
      }
    },
  });

  const LEFT = 76, RIGHT = () => (view.big ? 190 : 0), BOTTOM = 24, TOP = 12, TALL = () => (view.big ? 300 : 230);
  const sides = () => view.options("side"), curve = k => Array.from(view.row.curves.slice(k * sides().length, (k + 1) * sides().length));
  const along = (value, low, high, length) => length * Math.log(value / low) / Math.log(high / low);
  const x = size => LEFT + along(size, sides()[0], sides().at(-1), view.fit(1120) - LEFT - RIGHT() - 12);
  function doubled() {  // what the last doubling of the side costs
    const [from, to] = [sides().indexOf(sides().at(-1) / 2), sides().length - 1], grows = k => times(curve(k)[to] / curve(k)[from]);
    return from < 0 ? "" : `. From ${sides()[from]} to ${sides()[to]} px, 4 times as many pixels take ${grows(0)} the operations with windows, and ${grows(2)} with full attention`;
  }
  const COLORS = ["image", "ink", "video"], NAMES = () => ["windows in every block", `full attention in ${full()} of ${depth}`, "full attention in every block"];
  view.canvas({
    name: () => `operations of the tower against the side of the image: ${NAMES().map((name, k) => `${name}: ${trillion(curve(k)[view.place("side")])}`).join("; ")}`,
    caption: () => `Operations of the whole tower for a square image; drag to resize it. Both axes are logarithmic. At ${side()} px, full attention in every block ` +
      `takes ${times(curve(2)[view.place("side")] / curve(0)[view.place("side")])} as many operations as windows in every block${doubled()}`,
    size: () => [view.fit(1120), TALL()],
    drag(px) {
      const near = sides().reduce((best, size, i) => (Math.abs(x(size) - px) < Math.abs(x(sides()[best]) - px) ? i : best), 0);
      view.choose("side", near);
    },
    draw(pen, width, height) {
      const low = curve(0)[0], high = curve(2).at(-1), y = value => height - BOTTOM - along(value, low, high, height - BOTTOM - TOP);
      pen.textBaseline = "middle"; pen.strokeStyle = view.colors.line; pen.lineWidth = 1;
      for (const power of [1, 10, 100, 1000].map(n => n * 1e12).filter(n => n > low && n < high)) {
        pen.globalAlpha = 0.4; pen.beginPath(); pen.moveTo(LEFT, y(power)); pen.lineTo(width - RIGHT(), y(power)); pen.stroke(); pen.globalAlpha = 1;
        pen.fillStyle = view.colors.muted; pen.textAlign = "right"; pen.fillText(`${power / 1e12} trillion`, LEFT - 6, y(power));
      }
      pen.textAlign = "center"; pen.fillStyle = view.colors.muted; pen.textBaseline = "bottom";
      sides().forEach((size, i) => { if (view.big || i % 2 === 0) pen.fillText(i === sides().length - 1 ? `${size} px` : size, x(size) - (i === sides().length - 1 ? 12 : 0), height); });
      const now = view.ease("side", x(side()));
      pen.setLineDash([4, 3]); pen.beginPath(); pen.moveTo(now, TOP); pen.lineTo(now, height - BOTTOM); pen.stroke(); pen.setLineDash([]);
      COLORS.forEach((color, k) => {
        const values = curve(k).map((value, i) => view.ease(`curve ${k} ${i}`, y(value)));
        pen.strokeStyle = pen.fillStyle = view.colors[color]; pen.lineWidth = k === 1 ? 3 : 2.5; pen.setLineDash(k === 1 ? [] : [6, 3]);
        pen.beginPath(); values.forEach((v, i) => pen.lineTo(x(sides()[i]), v)); pen.stroke(); pen.setLineDash([]);
        pen.beginPath(); pen.arc(now, view.ease(`dot ${k}`, y(curve(k)[view.place("side")])), 5, 0, 7); pen.fill();
      });
      pen.textAlign = "left"; pen.textBaseline = "middle"; pen.font = "bold 13px sans-serif"; pen.fillStyle = view.colors.ink;
      const ends = [0, 1, 2].map(k => [y(curve(k).at(-1)), NAMES()[k]]).sort((a, b) => a[0] - b[0]);
      let lowest = -Infinity;
      if (view.big) ends.forEach(([at, name], i) => {
        lowest = Math.max(at, lowest + 17, TOP);
        pen.fillText(name, width - RIGHT() + 4, Math.min(lowest, height - BOTTOM - 17 * (2 - i)));
      });
      else ends.forEach(([, name], i) => {  // on a phone, a legend in the corner that no curve reaches
        const k = NAMES().indexOf(name), at = TOP + 18 * i;
        pen.strokeStyle = view.colors[COLORS[k]]; pen.lineWidth = 2.5; pen.setLineDash(k === 1 ? [] : [6, 3]);
        pen.beginPath(); pen.moveTo(LEFT + 4, at); pen.lineTo(LEFT + 26, at); pen.stroke(); pen.setLineDash([]);
        pen.strokeStyle = view.colors.surface; pen.lineWidth = 4; pen.strokeText(name, LEFT + 32, at); pen.fillText(name, LEFT + 32, at);
      });
    },
  });

  view.readout(() => `Window ${view.item + 1} of ${across() ** 2}: in a block, full attention takes ${times(view.row.whole / view.row.windowed)} as many operations as windowed attention.`,
    () => `In one block, windowed attention takes ${trillion(view.row.windowed)} operations, and full attention takes ${trillion(view.row.whole)}. ` +
      `The matrix multiplications take ${trillion(view.row.linear)} in both cases.`);
  return { count: () => across() ** 2 };
});
