// Four measures as curves over the size of an image or the length of a video, and the costs of each family at one size.
import { explorer } from "./shared.js";

export default explorer(view => {
  const H = 190, LEFT = 8, BOTTOM = 20, TOP = 8, GAP = 24, NAME = 120;
  const wide = () => view.fit(1100), narrow = () => wide() < 700, LINE = () => (narrow() ? 48 : 26);
  const W = () => (narrow() ? Math.min(340, wide()) : (wide() - 3 * GAP) / 4 - 1);
  const { families, measures, curves, device, clip } = view.shared;
  const names = Object.keys(families);
  const curve = () => curves[view.option("kind")];
  const color = name => view.colors[families[name][0]];
  const CORNERS = { o: [32, 0], D: [4, 0], s: [4, 45], "^": [3, -90], v: [3, 90] };  // number of corners, angle of the first
  function mark(pen, name, px, py, radius) {
    const [corners, first] = CORNERS[families[name][1]];
    pen.fillStyle = color(name); pen.beginPath();
    for (let i = 0; i < corners; i++) {
      const angle = (first + 360 * i / corners) * Math.PI / 180;
      pen.lineTo(px + radius * Math.cos(angle), py + radius * Math.sin(angle));
    }
    pen.fill();
  }
  const here = () => view.row.families;
  const units = { bytes: n => (n < 2 ** 30 ? `${(n / 2 ** 20).toPrecision(3)} MiB` : `${(n / 2 ** 30).toPrecision(3)} GiB`),
    seconds: s => (s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`) };
  const shown = (measure, value) => (units[measure] ?? (n => n.toLocaleString("en")))(value);

  // coordinates on a logarithmic scale from the smallest to the largest value that is drawn
  const along = (value, low, high, length) => length * Math.log(value / low) / Math.log(high / low);
  const x = size => LEFT + along(size, curve()[0].size, curve().at(-1).size, W() - 2 * LEFT);
  function limits(measure) {
    const values = curve().flatMap(row => Object.values(row.families).map(costs => costs[measure]));
    return [Math.min(...values), Math.max(...values)];
  }

  Object.entries(measures).forEach(([measure, label]) => view.canvas({
    name: () => `${label} over the ${view.option("kind") === "image" ? "side of the image" : "length of the video"}`,
    caption: () => `${label}, both scales logarithmic` + (measure === "seconds" ? `; no run can be faster on an ${device}` : ""),
    size: () => [W(), H],
    drag(px) {
      const sizes = curve().map(row => x(row.size));
      const nearest = sizes.reduce((best, at, i) => (Math.abs(at - px) < Math.abs(sizes[best] - px) ? i : best), 0);
      const { states } = view.table, first = states.findIndex(state => state[0] === view.place("kind"));
      view.choose("size", states[first + nearest][1]);
    },
    draw(pen, width, height) {
      const [low, high] = limits(measure), y = value => height - BOTTOM - along(value, low, high, height - BOTTOM - TOP);
      pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.strokeRect(0.5, 0.5, width - 1, height - BOTTOM);
      pen.fillStyle = view.colors.muted; pen.textBaseline = "bottom";
      pen.fillText(`${curve()[0].size}`, 0, height); pen.textAlign = "right";
      pen.fillText(`${curve().at(-1).size} ${view.option("kind") === "image" ? "px" : "s"}`, width, height);
      pen.textAlign = "left"; pen.textBaseline = "top"; pen.fillText(shown(measure, high), 4, 4);
      pen.textBaseline = "bottom"; pen.textAlign = "right"; pen.fillText(shown(measure, low), width - 4, height - BOTTOM - 2);
      pen.setLineDash([4, 3]); pen.beginPath();
      pen.moveTo(x(view.row.size), 0); pen.lineTo(x(view.row.size), height - BOTTOM); pen.stroke(); pen.setLineDash([]);
      names.forEach((name, i) => {
        const points = curve().filter(row => row.families[name]).map(row => [x(row.size), y(row.families[name][measure])]);
        // later lines are thinner, so both are visible where two coincide
        const fine = names.length - 1 - i, more = i === view.item ? 3 : 0;
        pen.strokeStyle = color(name); pen.lineWidth = 1.5 + 0.75 * fine + more;
        pen.beginPath(); points.forEach(([px, py]) => pen.lineTo(px, py)); pen.stroke();
        points.forEach(([px, py]) => mark(pen, name, px, py, 2.5 + 0.75 * fine + more));
        if (here()[name]) mark(pen, name, x(view.row.size), y(here()[name][measure]), 5 + fine + more);
      });
    },
  }));

  const COLUMNS = ["patches", ...Object.keys(measures)], TITLES = { bytes: "memory", seconds: "time" };
  const left = () => (narrow() ? 0 : NAME), cell = () => (narrow() ? wide() / COLUMNS.length : 110);
  view.canvas({
    name: () => `costs in each family of ${view.option("kind") === "image" ? "a square image" : `a video of ${clip} px`}, ${view.option("size")}`,
    caption: () => view.option("kind") === "image"
      ? "bfloat16, released sizes; memory: key-value cache and the tower's activations"
      : `a video of ${clip} px, sampled by each family's rule; Step3-VL accepts none`,
    size: () => [left() + COLUMNS.length * cell(), (names.length + 1) * LINE()],
    at: (px, py) => Math.floor(py / LINE()) - 1,
    step: (i, dx, dy) => i + dy,
    draw(pen, width) {
      pen.textBaseline = "middle"; pen.textAlign = "right"; pen.fillStyle = view.colors.muted;
      COLUMNS.forEach((measure, c) => pen.fillText(TITLES[measure] ?? measure, left() + (c + 1) * cell() - 8, 13));
      names.forEach((name, i) => {
        const y = (i + 1) * LINE(), costs = here()[name];
        if (i === view.item) { pen.fillStyle = view.colors.empty; pen.fillRect(0, y, width, LINE()); }
        mark(pen, name, 10, y + 13, 8);
        pen.textAlign = "left"; pen.fillStyle = view.colors.ink; pen.fillText(name, 22, y + 13);
        pen.textAlign = "right";
        COLUMNS.forEach((measure, c) =>
          pen.fillText(costs ? shown(measure, costs[measure]) : "-", left() + (c + 1) * cell() - 8, y + LINE() - 13));
      });
    },
  });

  view.readout(() => {
    const name = names[view.item], costs = here()[name];
    if (!costs) return `${name} accepts no videos`;
    const folded = (costs.patches / costs.tokens).toPrecision(3);
    return `${name}: ${folded} patches become a token; ${shown("tokens", costs.tokens)} tokens use ` +
      `${shown("positions", costs.positions)} positions, ` +
      `and ${shown("bytes", costs.cache)} of key-value cache`;
  });
  return { count: () => names.length };
});
