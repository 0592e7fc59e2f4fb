// Four measures as curves over the size of an image or the length of a video, and the costs of each family at one size.
import { explorer } from "./shared.js";

export default explorer(view => {
  const H = () => (view.big ? 320 : 230), LEFT = 8, BOTTOM = 20, HEAD = 24, TOP = HEAD + 8, GAP = 24, SAMPLE = 40, NAME = 146;
  const thick = i => 1.5 + 1.25 * (names.length - 1 - i);  // lines drawn later are thinner
  const wide = () => view.fit(1100), narrow = () => wide() < 700, LINE = () => (narrow() ? 54 : view.big ? 44 : 36);
  const W = () => (narrow() ? Math.min(340, wide()) : view.big ? (wide() - 3 * GAP) / 4 - 1 : (wide() - GAP) / 2 - 1);
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
  const DASHES = [[], [12, 4], [3, 3], [9, 3, 2, 3], []];  // if lines coincide, one shows through the gaps of the other
  const here = () => view.row.families;
  const three = n => (n < 999.5 ? n.toPrecision(3) : Math.round(n).toLocaleString("en"));
  const units = { bytes: n => (n < 2 ** 30 ? `${three(n / 2 ** 20)} MiB` : `${three(n / 2 ** 30)} GiB`),
    seconds: s => (s < 1 ? `${three(1000 * s)} ms` : `${three(s)} s`) };
  const shown = (measure, value) => (units[measure] ?? (n => n.toLocaleString("en")))(value);

  // coordinates on a logarithmic scale from the smallest to the largest value that is drawn
  const along = (value, low, high, length) => length * Math.log(value / low) / Math.log(high / low);
  const x = size => LEFT + along(size, curve()[0].size, curve().at(-1).size, W() - 2 * LEFT);
  function limits(measure) {
    const values = curve().flatMap(row => Object.values(row.families).map(costs => costs[measure]));
    return [Math.min(...values), Math.max(...values)];
  }

  view.title(() => {
    const sorted = Object.entries(here()).sort((a, b) => a[1].tokens - b[1].tokens), [few, many] = [sorted[0], sorted.at(-1)];
    return `${view.option("kind") === "image" ? "A square image" : "A video"} of ${view.option("size")} becomes ${shown("tokens", few[1].tokens)} tokens in ${few[0]} and ${shown("tokens", many[1].tokens)} in ${many[0]}`;
  });
  const most = measure => Math.max(...Object.values(here()).map(costs => costs[measure]));
  const COLUMNS = ["patches", ...Object.keys(measures)], TITLES = { bytes: "memory", seconds: "time" };
  const left = () => (narrow() ? 0 : NAME), cell = () => (narrow() ? wide() / COLUMNS.length : Math.min(150, (wide() - NAME) / COLUMNS.length));
  view.canvas({
    name: () => `costs of ${view.option("kind") === "image" ? "a square image" : `a video of ${clip} px`}, ${view.option("size")}, in each family`,
    caption: () => view.option("kind") === "image"
      ? "The costs of one square image; each bar is relative to the longest in its column. All models have their released sizes, in bfloat16. Memory: the key-value cache and the tower's activations"
      : `The costs of a video of ${clip} px, sampled by each family's rule; each bar is relative to the longest in its column. Step3-VL does not accept videos`,
    size: () => [left() + COLUMNS.length * cell(), (names.length + 1) * LINE()],
    at: (px, py) => Math.floor(py / LINE()) - 1,
    step: (i, dx, dy) => i + dy,
    draw(pen, width) {
      pen.font = narrow() ? "12px sans-serif" : "14px sans-serif";
      pen.textBaseline = "middle"; pen.textAlign = "right"; pen.fillStyle = view.colors.muted;
      COLUMNS.forEach((measure, c) => pen.fillText(TITLES[measure] ?? measure, left() + (c + 1) * cell() - 8, LINE() - 12));
      names.forEach((name, i) => {
        const y = (i + 1) * LINE(), costs = here()[name];
        if (i) { pen.fillStyle = view.colors.empty; pen.fillRect(0, y, width, 1); }
        if (i === view.item) { pen.fillStyle = view.colors.empty; pen.fillRect(0, y, width, LINE()); }
        const high = y + (narrow() ? 13 : LINE() / 2);
        pen.strokeStyle = color(name); pen.lineWidth = thick(i); pen.setLineDash(DASHES[i]);
        pen.beginPath(); pen.moveTo(0, high); pen.lineTo(SAMPLE, high); pen.stroke(); pen.setLineDash([]);
        mark(pen, name, SAMPLE / 2, high, 6);
        pen.textAlign = "left"; pen.fillStyle = view.colors.ink; pen.fillText(name, SAMPLE + 6, high);
        COLUMNS.forEach((measure, c) => {
          const from = left() + c * cell() + 8, wide = cell() - 16, part = costs ? costs[measure] / most(measure) : 0;
          pen.fillStyle = view.colors.empty; pen.fillRect(from, y + LINE() - 10, wide, 6);
          pen.fillStyle = color(name); pen.fillRect(from, y + LINE() - 10, wide * view.ease(`bar ${i} ${c}`, part), 6);
          pen.fillStyle = view.colors.ink; pen.textAlign = "right";
          pen.fillText(costs ? shown(measure, costs[measure]) : "-", from + wide, y + LINE() - (narrow() ? 20 : 24));
        });
      });
    },
  });

  Object.entries(measures).forEach(([measure, label]) => view.canvas({
    name: () => `${label} against the ${view.option("kind") === "image" ? "side of the image" : "length of the video"}`,
    caption: () => ({ tokens: "Drag across any chart. All axes are logarithmic", positions: `How far the ${view.option("kind")} shifts the positions of the text after it`, seconds: `A lower bound, computed for an ${device}` })[measure] ?? "",
    size: () => [W(), H()],
    drag(px) {
      const sizes = curve().map(row => x(row.size));
      const nearest = sizes.reduce((best, at, i) => (Math.abs(at - px) < Math.abs(sizes[best] - px) ? i : best), 0);
      const { states } = view.table, first = states.findIndex(state => state[0] === view.place("kind"));
      view.choose("size", states[first + nearest][1]);
    },
    draw(pen, width, height) {
      const [low, high] = limits(measure), y = value => height - BOTTOM - along(value, low, high, height - BOTTOM - TOP);
      pen.fillStyle = view.colors.ink; pen.font = "bold 13px sans-serif"; pen.textBaseline = "top";
      pen.fillText(label, 0, 2); pen.font = "12px sans-serif";
      pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.strokeRect(0.5, HEAD + 0.5, width - 1, height - BOTTOM - HEAD);
      const unit = { bytes: 2 ** 20, seconds: 0.001 }[measure] ?? 1, ticks = [];
      for (let power = Math.ceil(Math.log10(low / unit)); unit * 10 ** power < high; power++) ticks.push([10 ** power, y(unit * 10 ** power)]);
      pen.globalAlpha = 0.4; ticks.forEach(([, at]) => pen.strokeRect(0, at, width, 0)); pen.globalAlpha = 1;
      pen.fillStyle = view.colors.muted; pen.textBaseline = "bottom";
      pen.fillText(`${curve()[0].size}`, 0, height); pen.textAlign = "right";
      pen.fillText(`${curve().at(-1).size} ${view.option("kind") === "image" ? "px" : "s"}`, width, height);
      pen.textAlign = "left"; pen.textBaseline = "top"; pen.fillText(shown(measure, high), 5, HEAD + 4);
      pen.textBaseline = "bottom"; pen.textAlign = "right"; pen.fillText(shown(measure, low), width - 4, height - BOTTOM - 2);
      const number = ([value, at]) => {  // over the lines
        if (Math.min(at - HEAD, height - BOTTOM - at) < 28) return;
        const text = `${value.toLocaleString("en")}${{ bytes: " MiB", seconds: " ms" }[measure] ?? ""}`;
        pen.textAlign = "left"; pen.textBaseline = "bottom"; pen.strokeStyle = view.colors.surface; pen.lineWidth = 4;
        pen.strokeText(text, 5, at - 1); pen.fillStyle = view.colors.muted; pen.fillText(text, 5, at - 1);
      };
      pen.setLineDash([4, 3]); pen.beginPath();
      const now = view.ease("size", x(view.row.size)); pen.moveTo(now, HEAD); pen.lineTo(now, height - BOTTOM); pen.stroke(); pen.setLineDash([]);
      names.forEach((name, i) => {
        const points = curve().filter(row => row.families[name]).map(row => [x(row.size), y(row.families[name][measure])]);
        const more = i === view.item ? 3 : 0;
        pen.strokeStyle = color(name); pen.lineWidth = thick(i) + more; pen.setLineDash(DASHES[i]);
        pen.beginPath(); points.forEach(([px, py]) => pen.lineTo(px, py)); pen.stroke(); pen.setLineDash([]);
        if (here()[name]) mark(pen, name, now, view.ease(`${measure} ${name}`, y(here()[name][measure])), 4 + thick(i) / 2 + more);
      });
      ticks.forEach(number);
    },
  }));

  view.readout(() => {
    const name = names[view.item], costs = here()[name];
    if (!costs) return `${name} does not accept videos`;
    const folded = (costs.patches / costs.tokens).toPrecision(3);
    return `${name}: one token for every ${folded} patches`;
  }, () => {
    const costs = here()[names[view.item]];
    return costs && `${shown("tokens", costs.tokens)} tokens use ${shown("positions", costs.positions)} positions and ${shown("bytes", costs.cache)} of key-value cache`;
  });
  return { count: () => names.length };
});
