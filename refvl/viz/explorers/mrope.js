// Where the key stands, the score at every other place, and the angle of every rotary plane.
import { explorer } from "./shared.js";

export default explorer(view => {
  const CELL = 24, MARGIN = 22, DIAL = 26, ACROSS = 16, NAMES = ["t", "h", "w"];
  const here = () => [view.place("sections"), view.place("theta")];
  const of = what => view.shared[what][here()[0]][here()[1]];
  const axes = () => view.shared.axes[here()[0]];
  const key = () => NAMES.map(name => view.option(name));
  const query = () => view.shared.query;
  const part = (axis, position) => of("scores")[axis * of("scores").shape[1] + Math.abs(position - query()[axis])];
  const score = place => place.reduce((sum, position, axis) => sum + part(axis, position), 0);
  const turn = (what, plane, position) => of(what)[position * axes().length + plane];
  const sizes = () => NAMES.map(name => view.options(name).length);

  view.canvas({
    name: () => `score of a key at every h (down) and w (across), at t = ${key()[0]}; the query ○ is at ` +
      `t, h, w = ${query().join(", ")}; drag the key ✕`,
    size: () => [MARGIN + sizes()[2] * CELL, MARGIN + sizes()[1] * CELL],
    drag(x, y) {
      [x, y].forEach((v, i) => {
        const name = NAMES[2 - i], last = view.options(name).length - 1;
        view.choose(name, Math.max(0, Math.min(last, Math.floor((v - MARGIN) / CELL))));
      });
    },
    draw(pen) {
      const [t, h, w] = key(), [, rows, columns] = sizes();
      pen.translate(MARGIN, MARGIN);
      for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
        pen.fillStyle = view.colors.sequence(score([t, i, j]));
        pen.fillRect(j * CELL, i * CELL, CELL - 1, CELL - 1);
      }
      pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillStyle = view.colors.w;
      for (let j = 0; j < columns; j += 3) pen.fillText(j, (j + 0.5) * CELL, -10);
      pen.fillStyle = view.colors.h;
      for (let i = 0; i < rows; i += 3) pen.fillText(i, -10, (i + 0.5) * CELL);
      const mark = (row, column, draw) => [["#000", 5], ["#fff", 2.5]].forEach(([style, width]) => {
        pen.strokeStyle = style; pen.lineWidth = width; pen.beginPath();
        draw((column + 0.5) * CELL, (row + 0.5) * CELL); pen.stroke();
      });
      mark(query()[1], query()[2], (x, y) => pen.arc(x, y, 7, 0, 7));
      mark(h, w, (x, y) => {
        pen.moveTo(x - 6, y - 6); pen.lineTo(x + 6, y + 6); pen.moveTo(x + 6, y - 6); pen.lineTo(x - 6, y + 6);
      });
    },
  });

  view.canvas({
    name: () => `angles of the ${axes().length} planes, fastest first: the query's hand grey, the key's in the colour of ` +
      "the axis that turns it (t, h, w)",
    size: () => [ACROSS * DIAL, Math.ceil(axes().length / ACROSS) * (DIAL + 12)],
    at: (x, y) => Math.floor(y / (DIAL + 12)) * ACROSS + Math.floor(x / DIAL),
    step: (item, dx, dy) => item + dx + dy * ACROSS,
    draw(pen) {
      pen.textAlign = "center"; pen.textBaseline = "top"; pen.font = "10px system-ui, sans-serif";
      axes().forEach((axis, plane) => {
        const x = (plane % ACROSS + 0.5) * DIAL, y = Math.floor(plane / ACROSS) * (DIAL + 12) + DIAL / 2, r = DIAL / 2 - 2;
        const hand = (position, color, width) => {
          pen.strokeStyle = color; pen.lineWidth = width; pen.beginPath(); pen.moveTo(x, y);
          pen.lineTo(x + r * turn("cos", plane, position), y - r * turn("sin", plane, position)); pen.stroke();
        };
        const chosen = plane === view.item;
        pen.strokeStyle = chosen ? view.colors.highlight : view.colors.line; pen.lineWidth = chosen ? 3 : 1;
        pen.beginPath(); pen.arc(x, y, r, 0, 7); pen.stroke();
        hand(query()[axis], view.colors.muted, 1.5);
        hand(key()[axis], view.colors[NAMES[axis]], 3);
        pen.fillStyle = view.colors[NAMES[axis]];
        pen.fillText(NAMES[axis], x, y + r + 1);
      });
    },
  });

  view.canvas({
    name: () => `score ${score(key()).toFixed(3)}: what the planes of each axis add to it`,
    size: () => [300, 84],
    draw(pen) {
      pen.textBaseline = "middle";
      NAMES.forEach((name, axis) => {
        const value = part(axis, key()[axis]), most = part(axis, query()[axis]), y = 4 + axis * 28;
        pen.strokeStyle = view.colors.line; pen.strokeRect(110, y, 170 * most, 20);  // where it is not turned at all
        pen.fillStyle = view.colors[name];
        pen.fillRect(value < 0 ? 110 + 170 * value : 110, y, 170 * Math.abs(value), 20);
        pen.fillText(`${name}: ${value.toFixed(3)}`, 4, y + 10);
      });
    },
  });

  view.readout(() => {
    const plane = view.item, axis = axes()[plane], [a, b] = [query()[axis], key()[axis]];
    const angle = position => Math.atan2(turn("sin", plane, position), turn("cos", plane, position)).toFixed(2);
    return `plane ${plane} turns with ${NAMES[axis]}\nquery at ${a}: ${angle(a)} rad, key at ${b}: ${angle(b)} rad`;
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
