// The key's position, the score at every other position, and the angle between query and key in every rotary pair.
import { explorer } from "./shared.js";

export default explorer(view => {
  const MARGIN = 24, LEGEND = 44, NAMES = ["t", "h", "w"];
  const narrow = () => view.fit(960) < 960, CELL = () => Math.floor((view.fit(400) - MARGIN) / 13);
  const DIAL = () => Math.floor(Math.min(narrow() ? 48 : 56, (view.fit(narrow() ? 700 : 996) - (narrow() ? 0 : 13 * CELL() + 60)) / ACROSS()));
  const ACROSS = () => (view.fit(700) < 700 ? 8 : 10);
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
    caption: () => `The score of the query ○ with a key ✕ at every h (down) and w (across), at t = ${key()[0]}. ` +
      `The query stays at t, h, w = ${query().join(", ")}; drag the key. Colours span only ${scores().low.toFixed(2)} to ${scores().high.toFixed(2)}`,
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
      const [mh, mw] = [view.ease("h", h), view.ease("w", w)];
      const mark = (row, column, draw) => [["#000", 6], ["#fff", 3]].forEach(([style, thick]) => {
        pen.strokeStyle = style; pen.lineWidth = thick; pen.beginPath();
        draw((column + 0.5) * c, (row + 0.5) * c); pen.stroke();
      });
      mark(query()[1], query()[2], (x, y) => pen.arc(x, y, 7, 0, 7));
      mark(mh, mw, (x, y) => {
        pen.moveTo(x - 6, y - 6); pen.lineTo(x + 6, y + 6); pen.moveTo(x + 6, y - 6); pen.lineTo(x - 6, y + 6);
      });
    },
  });

  // the pairs of each axis, fastest first, and how many lines of dials they take
  const pairs = () => NAMES.map((_, axis) => Array.from(axes().keys()).filter(plane => axes()[plane] === axis));
  const lines = axis => Math.ceil(pairs()[axis].length / ACROSS());
  const HEAD = 24, top = axis => [0, 1, 2].slice(0, axis).reduce((sum, a) => sum + HEAD + lines(a) * DIAL() + 8, 0);
  const spot = plane => {
    const axis = axes()[plane], i = pairs()[axis].indexOf(plane);
    return [(i % ACROSS() + 0.5) * DIAL(), top(axis) + HEAD + (Math.floor(i / ACROSS()) + 0.5) * DIAL()];
  };
  function dial_at(x, y) {
    const axis = [2, 1, 0].find(a => y >= top(a)), line = Math.floor((y - top(axis) - HEAD) / DIAL());
    return line < 0 || x < 0 || x >= ACROSS() * DIAL() ? -1 : pairs()[axis][line * ACROSS() + Math.floor(x / DIAL())] ?? -1;
  }
  view.canvas({
    name: () => `the ${axes().length} rotary pairs by the axis that rotates them, fastest first; the wedge is the angle from the query to the key`,
    caption: () => `The ${axes().length} rotary pairs of a head, grouped by axis, fastest first. Thin line: the query. Thick line: the key. ` +
      "The score depends only on the wedges between them",
    size: () => [ACROSS() * DIAL(), top(2) + HEAD + lines(2) * DIAL()],
    at: dial_at,
    step(item, dx, dy) {
      if (dx) return pairs()[axes()[item]][pairs()[axes()[item]].indexOf(item) + dx] ?? -1;
      const [x, y] = spot(item);
      for (let far = DIAL(); far < 3 * DIAL(); far += DIAL() / 2) {
        const to = dial_at(x, y + dy * far);
        if (to >= 0 && to !== item) return to;
      }
      return -1;
    },
    draw(pen) {
      pen.textBaseline = "top"; pen.font = "bold 13px sans-serif";
      NAMES.forEach((name, axis) => {
        const far = key()[axis] - query()[axis];
        pen.fillStyle = words(axis);
        pen.fillText(`${name}: ${far ? `${Math.abs(far)} apart, so its pairs differ in angle` : "same position, so its pairs have the same angle"}`, 2, top(axis) + 4);
      });
      axes().forEach((axis, plane) => {
        const [x, y] = spot(plane), r = DIAL() / 2 - 3;
        const angle = position => Math.atan2(turn("sin", plane, position), turn("cos", plane, position));
        const [from, to] = [angle(query()[axis]), angle(key()[axis])], far = view.ease(plane, Math.atan2(Math.sin(to - from), Math.cos(to - from)));
        const chosen = plane === view.item, moved = query()[axis] !== key()[axis], color = view.colors[NAMES[axis]];
        pen.fillStyle = color; pen.globalAlpha = 0.45; pen.beginPath(); pen.moveTo(x, y);
        pen.arc(x, y, r, -from, -from - far, far > 0); pen.fill(); pen.globalAlpha = 1;
        pen.strokeStyle = chosen ? view.colors.ink : view.colors.line; pen.lineWidth = chosen ? 3 : 1;
        pen.beginPath(); pen.arc(x, y, r, 0, 7); pen.stroke();
        for (const [at, style, thick] of [[from, view.colors.muted, 1.5], [from + far, moved ? color : view.colors.muted, moved ? 3 : 1.5]]) {
          pen.strokeStyle = style; pen.lineWidth = thick; pen.beginPath(); pen.moveTo(x, y);
          pen.lineTo(x + r * Math.cos(at), y - r * Math.sin(at)); pen.stroke();
        }
      });
    },
  });

  view.canvas({
    name: () => `score ${score(key()).toFixed(3)}: what the pairs of each axis add to it`,
    caption: () => `Score ${score(key()).toFixed(3)}, as the sum of the three axes. Outline: what the axis adds if query and key have the same position`,
    size: () => [MARGIN + sizes()[2] * CELL(), 84],
    draw(pen, width) {
      pen.textBaseline = "middle";
      NAMES.forEach((name, axis) => {
        const value = view.ease(`part ${axis}`, part(axis, key()[axis])), most = part(axis, query()[axis]), y = 4 + axis * 28;
        const left = MARGIN + 60, wide = 2 * (width - left) - 2;  // no axis adds half of the score
        pen.strokeStyle = view.colors.line; pen.strokeRect(left, y, wide * most, 20);
        pen.fillStyle = view.colors[name];
        pen.fillRect(value < 0 ? left + wide * value : left, y, wide * Math.abs(value), 20);
        pen.fillStyle = words(axis); pen.fillText(`${name}: ${part(axis, key()[axis]).toFixed(3)}`, 2, y + 10);
      });
    },
  });

  view.readout(() => {
    const plane = view.item, axis = axes()[plane], [a, b] = [query()[axis], key()[axis]];
    const angle = position => Math.atan2(turn("sin", plane, position), turn("cos", plane, position)).toFixed(2);
    return `rotary pair ${plane} is rotated by ${NAMES[axis]}\nQuery at ${a}: ${angle(a)} rad, key at ${b}: ${angle(b)} rad`;
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
