// Two tokens at their positions, the score that is left by the distance on each axis, and the angle between query and key in one rotary pair and in all.
import { explorer } from "./shared.js";

export default explorer(view => {
  const MARGIN = 24, NAMES = ["t", "h", "w"];
  const CELL = () => Math.floor((view.fit(340) - MARGIN) / 13);
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

  const apart_on = () => NAMES.filter((_, axis) => key()[axis] !== query()[axis]);
  view.title(() => apart_on().length
    ? `Query and key are equal vectors, but differ in ${apart_on().join(" and ")}: these pairs are rotated apart, and the score is ${score(key()).toFixed(2)} instead of 1`
    : "Query and key are equal vectors at the same position: no pair is rotated apart, and the score is 1");
  view.column();
  view.canvas({
    name: () => `the positions of two tokens: query ○ at t, h, w = ${query().join(", ")}, key ✕ at ${key().join(", ")}; drag the key`,
    caption: () => "Two tokens on the grid of positions h (down) and w (across). Lines: how far the key ✕ is from the query ○. Drag the key",
    size: () => [MARGIN + sizes()[2] * CELL(), MARGIN + sizes()[1] * CELL() + 2],
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
    draw(pen) {
      const [, rows, columns] = sizes(), c = CELL(), middle = v => (v + 0.5) * c, [t, h, w] = key();
      pen.translate(MARGIN, MARGIN);
      pen.fillStyle = view.colors.empty;
      for (let i = 0; i < rows * columns; i++) pen.fillRect((i % columns) * c, Math.floor(i / columns) * c, c - 1, c - 1);
      pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillStyle = words(2);
      for (let j = 0; j < columns; j += 3) pen.fillText(j ? j : "w 0", middle(j), -10);
      pen.fillStyle = words(1);
      for (let i = 0; i < rows; i += 3) pen.fillText(i ? i : "h 0", -12, middle(i));
      const [y, x] = [view.ease("h", h), view.ease("w", w)].map(middle), [from_y, from_x] = [query()[1], query()[2]].map(middle);
      const label = (axis, text, left, top) => {
        pen.font = "bold 13px sans-serif"; pen.lineWidth = 4; pen.strokeStyle = view.colors.surface; pen.strokeText(text, left, top);
        pen.fillStyle = words(axis); pen.fillText(text, left, top);
      };
      const far = axis => `${NAMES[axis]} ${key()[axis] > query()[axis] ? "+" : "−"}${Math.abs(key()[axis] - query()[axis])}`;
      [[2, from_x, from_y, x, from_y], [1, x, from_y, x, y]].forEach(([axis, ...line]) => {
        if (key()[axis] === query()[axis]) return;
        pen.strokeStyle = view.colors[NAMES[axis]]; pen.lineWidth = 4; pen.beginPath(); pen.moveTo(line[0], line[1]); pen.lineTo(line[2], line[3]); pen.stroke();
        label(axis, far(axis), (line[0] + line[2]) / 2 + (axis === 1 ? (x < columns * c / 2 ? 24 : -24) : 0), (line[1] + line[3]) / 2 + (axis === 2 ? (h > query()[1] ? -14 : 14) : 0));
      });
      if (t !== query()[0]) label(0, far(0), x, y + (y > rows * c / 2 ? -22 : 22));
      for (const [at_x, at_y, sign] of [[from_x, from_y, "○"], [x, y, "✕"]]) {
        pen.fillStyle = view.colors.surface; pen.strokeStyle = view.colors.ink; pen.lineWidth = 2;
        pen.beginPath(); pen.arc(at_x, at_y, 10, 0, 7); pen.fill(); pen.stroke();
        pen.fillStyle = view.colors.ink; pen.font = "bold 13px sans-serif"; pen.fillText(sign, at_x, at_y + 1);
      }
    },
  });

  view.canvas({
    name: () => `score ${score(key()).toFixed(3)}: the contribution of each axis`,
    caption: () => `The score of query and key is ${score(key()).toFixed(3)}, the sum of the three bars. Outline: the contribution of an axis if query and key have the same position; the outlines add up to 1`,
    size: () => [MARGIN + sizes()[2] * CELL(), 88],
    draw(pen, width) {
      pen.textBaseline = "middle";
      NAMES.forEach((name, axis) => {
        const value = view.ease(`part ${axis}`, part(axis, key()[axis])), most = part(axis, query()[axis]), y = 4 + axis * 28;
        const left = 35 + width / 2, wide = 2 * (width - left) - 2;  // no axis adds or takes half of the score
        pen.strokeStyle = view.colors.line; pen.strokeRect(left, y, wide * most, 20);
        pen.fillStyle = view.colors[name];
        pen.fillRect(value < 0 ? left + wide * value : left, y, wide * Math.abs(value), 20);
        pen.fillStyle = words(axis); pen.fillText(`${name}: ${part(axis, key()[axis]).toFixed(3)}`, 2, y + 10);
      });
    },
  });

  // One pair, large: query and key as the hands of a dial.
  const angle = (plane, position) => Math.atan2(turn("sin", plane, position), turn("cos", plane, position));
  const apart = (from, to) => Math.atan2(Math.sin(to - from), Math.cos(to - from));
  const degrees = radians => `${Math.round(radians * 180 / Math.PI)}°`;
  function dial(pen, plane, x, y, r, thick) {
    const axis = axes()[plane], color = view.colors[NAMES[axis]], from = angle(plane, query()[axis]);
    const far = view.ease(plane, apart(from, angle(plane, key()[axis]))), moved = query()[axis] !== key()[axis];
    pen.fillStyle = color; pen.globalAlpha = 0.45; pen.beginPath(); pen.moveTo(x, y);
    pen.arc(x, y, r, -from, -from - far, far > 0); pen.fill(); pen.globalAlpha = 1;
    pen.strokeStyle = plane === view.item ? view.colors.ink : view.colors.line; pen.lineWidth = plane === view.item ? 3 : 1;
    pen.beginPath(); pen.arc(x, y, r, 0, 7); pen.stroke();
    for (const [at, style, line] of [[from + far, moved ? color : view.colors.muted, thick], [from, view.colors.ink, thick / 2]]) {
      pen.strokeStyle = style; pen.lineWidth = line; pen.beginPath(); pen.moveTo(x, y);
      pen.lineTo(x + r * Math.cos(at), y - r * Math.sin(at)); pen.stroke();
    }
    return [from, from + far];
  }
  view.column();
  view.canvas({
    name: () => (view.item < 0 ? "choose a rotary pair below" : `rotary pair ${view.item}: the angles of query and key`),
    caption: () => "One rotary pair. Thin line: its angle in the query. Thick line: its angle in the key. Wedge: the difference. Choose a different pair below",
    size: () => [wide(), wide() < 560 ? 150 : 180],
    draw(pen, width, BIG) {
      if (view.item < 0) return;
      const plane = view.item, axis = axes()[plane], name = NAMES[axis], [q, k] = [query()[axis], key()[axis]], left = BIG + (wide() < 560 ? 10 : 24);
      const [from, to] = dial(pen, plane, BIG / 2, BIG / 2, BIG / 2 - 22, 6), diff = Math.abs(apart(angle(plane, q), angle(plane, k)));
      pen.font = "bold 15px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillStyle = view.colors.ink;
      const end = (at, text) => pen.fillText(text, BIG / 2 + (BIG / 2 - 10) * Math.cos(at), BIG / 2 - (BIG / 2 - 10) * Math.sin(at));
      end(from, "○"); if (q !== k) end(to, "✕");
      pen.textAlign = "left"; pen.fillStyle = words(axis); pen.fillText(`pair ${plane}, rotated by ${name}`, left, 22);
      pen.font = "14px sans-serif"; pen.fillStyle = view.colors.ink;
      [`○ query at ${name} ${q}: ${degrees(angle(plane, q))}`, `✕ key at ${name} ${k}: ${degrees(angle(plane, k))}`,
        `difference: ${degrees(diff)}`, `adds cos ${degrees(diff)} / ${axes().length} = ${(Math.cos(diff) / axes().length).toFixed(4)}${wide() < 560 ? "" : " to the score"}`]
        .forEach((text, i) => pen.fillText(text, left, 54 + 28 * i, width - left));
    },
  });

  // All pairs, two lines for each axis, fastest first: those that are fast enough to be seen are large
  const pairs = () => NAMES.map((_, axis) => Array.from(axes().keys()).filter(plane => axes()[plane] === axis));
  const LARGE = 8, SMALL = 16, HEAD = 24, wide = () => (view.fit(1000) > 700 ? Math.min(610, view.fit(1000) - 364) : view.fit(610));
  const DIAL = () => Math.floor(wide() / LARGE), SLOW = () => Math.floor(wide() / SMALL), LINE = () => HEAD + DIAL() + SLOW() + 8;
  const spot = plane => {  // [x, y, radius]
    const axis = axes()[plane], i = pairs()[axis].indexOf(plane), top = axis * LINE() + HEAD;
    if (i < LARGE) return [(i + 0.5) * DIAL(), top + DIAL() / 2, DIAL() / 2 - 3];
    return [(i - LARGE + 0.5) * SLOW(), top + DIAL() + SLOW() / 2, SLOW() / 2 - 3];
  };
  function dial_at(x, y) {
    return axes().findIndex((_, plane) => { const [left, top, r] = spot(plane); return Math.abs(x - left) <= r + 2 && Math.abs(y - top) <= Math.max(r, 8) + 2; });
  }
  view.canvas({
    name: () => `the ${axes().length} rotary pairs by the axis that rotates them, fastest first; the wedge is the angle from the query to the key`,
    caption: () => `All ${axes().length} rotary pairs by axis, from the fastest to the slowest. The score depends only on the wedges. ` +
      "A larger distance does not always lower the score, because fast pairs wrap around",
    size: () => [wide(), 3 * LINE()],
    at: dial_at,
    step(item, dx, dy) {
      const axis = axes()[item], i = pairs()[axis].indexOf(item);
      if (dx) return pairs()[axis][i + dx] ?? -1;
      const other = pairs()[axis + dy];
      return other ? other[Math.min(i, other.length - 1)] : -1;
    },
    draw(pen) {
      pen.textBaseline = "top"; pen.font = "bold 13px sans-serif"; pen.textAlign = "left";
      NAMES.forEach((name, axis) => {
        const far = key()[axis] - query()[axis];
        pen.fillStyle = words(axis);
        pen.fillText(`${name}: ${far ? `${Math.abs(far)} apart, so the angles differ` : "same position, so the angles are equal"}`, 2, axis * LINE() + 4);
      });
      axes().forEach((_, plane) => { const [x, y, r] = spot(plane); dial(pen, plane, x, y, r, r > 20 ? 4 : 2); });
    },
  });

  view.readout(() => {
    const plane = view.item, axis = axes()[plane], far = Math.abs(apart(angle(plane, query()[axis]), angle(plane, key()[axis])));
    return `rotary pair ${plane}, rotated by ${NAMES[axis]}: ${degrees(far)} between query and key`;
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
