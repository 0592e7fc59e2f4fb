// Every frame of a video as a line, those that each rule samples as joined pairs below, and the timestamp of each pair.
import { explorer } from "./shared.js";

export default explorer(view => {
  const SIDE = 12, CELL = 48, HIGH = 44;
  const LINE = () => (view.big ? 142 : 84), TALL = () => LINE() - 58, FILM = 56;
  const W = () => view.fit(1120), COLUMNS = () => Math.floor(W() / CELL);
  const { rules } = view.shared, sampled = () => view.row.sampled;
  const steps = line => sampled()[line].tenths.length;
  const most = () => Math.max(...rules.map((_, line) => steps(line)));
  const x = frame => SIDE + (W() - 2 * SIDE) * (frame / Math.max(1, view.row.frames - 1));
  const frames = (line, step) => [0, 1].map(k => sampled()[line].indices[2 * step + k]);
  const written = (line, step) => (sampled()[line].tenths[step] / 10).toFixed(view.shared.decimals[line]);
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

  const kept = line => new Set(sampled()[line].indices).size;
  view.title(() => `Of the ${view.row.frames.toLocaleString("en")} frames of a video of ${view.option("duration")} s, ` +
    rules.map((rule, line) => `${rule} keeps ${kept(line)}`).join(", "));
  view.canvas({
    name: () => `the frames that three rules sample from ${view.row.frames.toLocaleString("en")}`,
    caption: () => "Each bracket joins two frames that the model sees. The number below is the timestamp of the pair in the prompt, in seconds: GLM-4.1V and 4.5V write whole seconds, so neighbouring pairs can have the same timestamp",
    size: () => [W(), FILM + rules.length * LINE()],
    at: (px, py) => nearest(Math.max(0, Math.min(rules.length - 1, Math.floor((py - FILM) / LINE()))), px),
    step(i, dx, dy) {
      const line = lineOf(i), to = line + dy;
      return dy ? (rules[to] ? nearest(to, middle(line, stepOf(i))) : -1) : along(line, stepOf(i) + dx);
    },
    draw(pen, width) {
      pen.textBaseline = "top";
      rules.forEach((rule, line) => {
        const top = FILM + line * LINE();
        pen.textAlign = "left"; pen.fillStyle = view.colors.ink; pen.font = "14px sans-serif"; pen.fillText(`${rule} keeps `, 0, top);
        const after = pen.measureText(`${rule} keeps `).width;
        const number = `${kept(line)} frame${kept(line) === 1 ? "" : "s"}`, words = `: ${view.shared.words[line]}`;
        pen.font = "bold 14px sans-serif"; pen.fillText(number, after, top);
        const end = after + pen.measureText(number).width;
        pen.font = "14px sans-serif"; pen.fillStyle = view.colors.muted;
        if (end + pen.measureText(words).width <= width) pen.fillText(words, end, top);
        pen.font = "12px sans-serif"; pen.textAlign = "center";
        let free = -Infinity;  // where the next timestamp has room
        for (let i = 0; i < steps(line); i++) {
          pen.fillStyle = color(line, i);
          const high = chosen(line, i) ? 6 : 0;
          const [left, right] = frames(line, i).map((frame, k) => view.ease(`${line} ${i} ${k}`, x(frame)));
          pen.globalAlpha = 0.2; pen.fillRect(left, top + 24, right - left, TALL()); pen.globalAlpha = 1;  // a pair is one box
          for (const at of [left, right]) pen.fillRect(at - 1, top + 24 - high, 2, TALL() + high);
          pen.fillRect(left - 1, top + 22 + TALL(), right - left + 2, 3);
          const text = written(line, i), half = pen.measureText(text).width / 2, at = Math.min(width - half, Math.max(half, (left + right) / 2));
          if (at - half < free) continue;
          pen.fillStyle = view.colors[chosen(line, i) ? "highlight_text" : "muted"]; pen.fillText(text, at, top + 30 + TALL());
          free = at + half + 4;
        }
      });
      pen.font = "14px sans-serif"; pen.fillStyle = view.colors.ink; pen.textAlign = "left"; pen.fillText("The video has ", 0, 0);
      const after = pen.measureText("The video has ").width;
      pen.font = "bold 14px sans-serif"; pen.fillText(`${view.row.frames.toLocaleString("en")} frame${view.row.frames === 1 ? "" : "s"}`, after, 0);
      pen.font = "12px sans-serif"; pen.fillStyle = view.colors.muted; pen.textAlign = "right"; pen.fillText(`${view.option("duration")} s`, width, 2);
      const apart = (W() - 2 * SIDE) / view.row.frames;  // frames too close to be told apart are one strip
      pen.fillStyle = view.colors.text;
      if (apart < 5) pen.fillRect(x(0), 22, x(view.row.frames - 1) - x(0), 20);
      else for (let f = 0; f < view.row.frames; f++) pen.fillRect(x(f) - 1, 22, 2, 20);
    },
  });

  const shown = () => lineOf(view.item);
  view.canvas({
    name: () => `the prompt's ${steps(shown())} frame pairs by the rule of ${rules[shown()]}, each followed by its timestamp`,
    caption: () => `The prompt of ${rules[shown()]}: the tokens of each pair, then its timestamp`,
    size: () => [COLUMNS() * CELL, Math.ceil(most() / COLUMNS()) * HIGH],
    at: (px, py) => along(shown(), Math.floor(py / HIGH) * COLUMNS() + Math.floor(px / CELL)),
    step: (i, dx, dy) => along(lineOf(i), stepOf(i) + dx + dy * COLUMNS()),
    draw(pen) {
      const line = shown();
      pen.textAlign = "center"; pen.textBaseline = "bottom";
      sampled()[line].tenths.forEach((_, i) => {
        const left = (i % COLUMNS()) * CELL, top = Math.floor(i / COLUMNS()) * HIGH;
        pen.fillStyle = color(line, i); pen.fillRect(left, top, CELL - 4, 18);
        pen.fillStyle = view.colors.ink; pen.fillText(written(line, i), left + (CELL - 4) / 2, top + HIGH - 4);
      });
    },
  });

  view.readout(() => {
    const line = lineOf(view.item), step = stepOf(view.item), [first, second] = frames(line, step);
    const at = frame => `${frame} (${(frame / view.option("fps")).toFixed(2)} s)`;
    const pair = first === second ? `frame ${at(first)}, used twice` : `frames ${at(first)} and ${at(second)}`;
    return `${rules[line]}, pair ${step + 1}: ${pair}; the timestamp in the prompt is ${written(line, step)}`;
  });
  return { count: () => rules.length * most() };
});
