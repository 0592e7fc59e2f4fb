// Every frame of a video as a line, those that each rule samples as joined pairs above, and the timestamp of each pair.
import { explorer } from "./shared.js";

export default explorer(view => {
  const SIDE = 12, CELL = 48, HIGH = 44;
  const LINE = () => (view.big ? 104 : 66), TALL = () => LINE() - 36;
  const W = () => view.fit(1120), COLUMNS = () => Math.floor(W() / CELL);
  const { rules } = view.shared, sampled = () => view.row.sampled;
  const steps = line => sampled()[line].timestamps.length;
  const most = () => Math.max(...rules.map((_, line) => steps(line)));
  const x = frame => SIDE + (W() - 2 * SIDE) * (frame / Math.max(1, view.row.frames - 1));
  const frames = (line, step) => [0, 1].map(k => sampled()[line].indices[2 * step + k]);
  const middle = (line, step) => frames(line, step).reduce((sum, frame) => sum + x(frame) / 2, 0);
  const item = (line, step) => step * rules.length + line;
  const lineOf = i => Math.max(0, i) % rules.length;
  const stepOf = i => Math.min(Math.floor(i / rules.length), steps(lineOf(i)) - 1);
  const chosen = (line, step) => view.item >= 0 && line === lineOf(view.item) && step === stepOf(view.item);
  const color = (line, step) => chosen(line, step) ? view.colors.highlight : view.colors.video;
  const along = (line, i) => (i >= 0 && i < steps(line) ? item(line, i) : -1);
  const nearest = (line, px) => {
    let best = 0;
    for (let i = 1; i < steps(line); i++) if (Math.abs(middle(line, i) - px) < Math.abs(middle(line, best) - px)) best = i;
    return item(line, best);
  };

  view.canvas({
    name: () => `frames that three rules sample from ${view.row.frames.toLocaleString("en")}`,
    caption: () => `The lowest line: all ${view.row.frames.toLocaleString("en")} frames of the video. Above: the frames that each ` +
      "release samples, two by two",
    size: () => [W(), rules.length * LINE() + 36],
    at: (px, py) => nearest(Math.min(rules.length - 1, Math.floor(py / LINE())), px),
    step(i, dx, dy) {
      const line = lineOf(i), to = line + dy;
      return dy ? (rules[to] ? nearest(to, middle(line, stepOf(i))) : -1) : along(line, stepOf(i) + dx);
    },
    draw(pen, width, height) {
      pen.textBaseline = "top";
      rules.forEach((rule, line) => {
        const top = line * LINE();
        pen.fillStyle = view.colors.ink;
        pen.font = "bold 13px sans-serif"; pen.fillText(rule, 0, top);
        const after = pen.measureText(`${rule} `).width; pen.font = "13px sans-serif";
        pen.fillText(`samples ${new Set(sampled()[line].indices).size} frames in ${steps(line)} pairs`, after, top);
        for (let i = 0; i < steps(line); i++) {
          pen.fillStyle = color(line, i);
          const high = chosen(line, i) ? 6 : 0;
          const [left, right] = frames(line, i).map((frame, k) => view.ease(`${line} ${i} ${k}`, x(frame)));
          for (const at of [left, right]) pen.fillRect(at - 1, top + 24 - high, 2, TALL() + high);
          pen.fillRect(left - 1, top + 22 + TALL(), right - left + 2, 3);
        }
      });
      const bottom = rules.length * LINE(), every = Math.ceil(view.row.frames / (W() - 2 * SIDE));
      pen.strokeStyle = view.colors.line; pen.lineWidth = 0.5; pen.beginPath();
      for (let f = 0; f < view.row.frames; f += every) { pen.moveTo(x(f), bottom); pen.lineTo(x(f), bottom + 14); }
      pen.stroke();
      pen.fillStyle = view.colors.muted; pen.textBaseline = "bottom"; pen.fillText("0 s", 0, height);
      pen.textAlign = "right"; pen.fillText(`${view.option("duration")} s`, width, height);
    },
  });

  const shown = () => lineOf(view.item);
  view.canvas({
    name: () => `the prompt's ${steps(shown())} pairs by the rule of ${rules[shown()]}, each followed by its timestamp`,
    caption: () => `The prompt of ${rules[shown()]}: the tokens of a pair, then its timestamp in seconds`,
    size: () => [COLUMNS() * CELL, Math.ceil(most() / COLUMNS()) * HIGH],
    at: (px, py) => along(shown(), Math.floor(py / HIGH) * COLUMNS() + Math.floor(px / CELL)),
    step: (i, dx, dy) => along(lineOf(i), stepOf(i) + dx + dy * COLUMNS()),
    draw(pen) {
      const line = shown();
      pen.textAlign = "center"; pen.textBaseline = "bottom";
      sampled()[line].timestamps.forEach((second, i) => {
        const left = (i % COLUMNS()) * CELL, top = Math.floor(i / COLUMNS()) * HIGH;
        pen.fillStyle = color(line, i); pen.fillRect(left, top, CELL - 4, 18);
        pen.fillStyle = view.colors.ink; pen.fillText(second, left + (CELL - 4) / 2, top + HIGH - 4);
      });
    },
  });

  view.readout(() => {
    const line = lineOf(view.item), step = stepOf(view.item), [first, second] = frames(line, step);
    const at = frame => `${frame} (${(frame / view.option("fps")).toFixed(2)} s)`;
    const pair = first === second ? `frame ${at(first)}, used twice` : `frames ${at(first)} and ${at(second)}`;
    return `${rules[line]}, pair ${step + 1}: ${pair}; the prompt says ${sampled()[line].timestamps[step]}`;
  });
  return { count: () => rules.length * most() };
});
