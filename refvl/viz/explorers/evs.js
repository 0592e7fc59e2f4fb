// The frames of a video with pruned tokens covered, the positions of the kept tokens, and the model's answer.
import { explorer } from "./shared.js";

export default explorer(view => {
  const GAP = 8, WIDE = () => (view.fit(1120) >= 760 ? (view.fit(1120) - 24) / 2 : view.fit(520)), CHART = () => (view.big ? 270 : 190), LEFT = 40, RIGHT = 118;
  const clip = () => view.shared.clips[view.row.clip], thw = () => clip().thw;
  const per_frame = () => thw()[1] * thw()[2], count = () => thw()[0] * per_frame();
  const columns = () => Math.min(view.fit(760) < 600 ? 3 : 5, thw()[0]), lines = () => Math.ceil(thw()[0] / columns());
  const frame_width = () => Math.min(view.big ? 230 : 180, (view.fit(view.big && columns() < 5 ? 996 : 760) - GAP * columns()) / columns());
  const cell = () => { const [first] = clip().frames, w = frame_width(); return [w / thw()[2], w * first.height / first.width / thw()[1]]; };
  const corner = token => {
    const step = Math.floor(token / per_frame()), [w, h] = cell(), inside = token % per_frame();
    return [(step % columns()) * (frame_width() + GAP) + (inside % thw()[2]) * w,
      Math.floor(step / columns()) * (thw()[1] * h + GAP + 14) + 14 + Math.floor(inside / thw()[2]) * h];
  };
  const place = token => { let seen = -1; return clip().is_clip.findIndex(yes => yes && ++seen === token); };  // index in the prompt
  const percent = x => `${Math.round(100 * x)} %`;
  const sum = values => values.reduce((a, b) => a + b, 0);

  function at(x, y) {
    for (let token = 0; token < count(); token++) {
      const [left, top] = corner(token), [w, h] = cell();
      if (x >= left && x < left + w && y >= top && y < top + h) return token;
    }
    return -1;
  }
  view.title(() => `${percent(1 - sum(view.row.keep) / count())} of the video's tokens are dropped` +
    (clip().words.length ? `, and the model answers "${view.row.answer.length > 40 ? `${view.row.answer.slice(0, 38)} ...` : view.row.answer}"` : ""));
  view.canvas({
    name: () => `${clip().prompt || "A video."} At q = ${view.option("q")}, EVS keeps ${sum(view.row.keep)} of ${count()} tokens; the others are faded`,
    size: () => [columns() * (frame_width() + GAP), lines() * (thw()[1] * cell()[1] + GAP + 14)],
    at,
    step: (item, dx, dy) => {
      const step = Math.floor(item / per_frame()), inside = item % per_frame(), x = inside % thw()[2] + dx;
      if (x >= 0 && x < thw()[2]) {
        const next = inside + dx + dy * thw()[2];
        return next >= 0 && next < per_frame() ? step * per_frame() + next : -1;
      }
      return item + dx * (per_frame() - thw()[2] + 1);  // to the next frame, same row
    },
    draw(pen) {
      const [w, h] = cell();
      for (let step = 0; step < thw()[0]; step++) {
        const [x, y] = corner(step * per_frame()), kept = view.row.keep.subarray(step * per_frame(), (step + 1) * per_frame());
        pen.drawImage(clip().frames[step], x, y, frame_width(), thw()[1] * h);
        pen.font = "11px sans-serif"; pen.textAlign = "left"; pen.textBaseline = "bottom";
        pen.fillStyle = view.colors.muted; pen.fillText(`step ${step}: ${sum(kept)} kept`, x, y - 1);
      }
      view.row.keep.forEach((keep, token) => {
        const [x, y] = corner(token);
        if (keep) { view.ease(token, 0); pen.strokeStyle = view.colors.kept; pen.lineWidth = 2; pen.strokeRect(x + 1.5, y + 1.5, w - 3, h - 3); return; }
        pen.globalAlpha = view.ease(token, 0.86); pen.fillStyle = view.colors.empty; pen.fillRect(x, y, w, h); pen.globalAlpha = 1;
      });
      if (view.item < 0) return;
      const [x, y] = corner(view.item);
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 4; pen.strokeRect(x + 1, y + 1, w - 2, h - 2);
    },
  });

  const length = () => clip().is_clip.length, most = () => Math.max(...clip().positions);
  view.canvas({
    name: () => "what is left: the tokens of the video, the tokens of the prompt, and the pairs of tokens that attention compares",
    size: () => [240, 132],
    draw(pen, width) {
      const full = length(), left = view.row.tokens;
      [["video", sum(view.row.keep), count()], ["prompt", left, full], ["pairs", left * (left + 1) / 2, full * (full + 1) / 2]]
        .forEach(([name, now, before], i) => {
          const y = 44 * i;
          pen.font = "13px sans-serif"; pen.textBaseline = "top"; pen.fillStyle = view.colors.ink;
          pen.textAlign = "left"; pen.fillText(name, 0, y);
          pen.font = "bold 13px sans-serif"; pen.textAlign = "right"; pen.fillText(`${now} of ${before}`, width, y);
          pen.fillStyle = view.colors.empty; pen.fillRect(0, y + 18, width, 14);
          pen.fillStyle = view.colors.kept; pen.fillRect(0, y + 18, width * view.ease(name, now / before), 14);
        });
    },
  });

  const last_rate = () => clip().rates.at(-1), per_rate = () => (WIDE() - LEFT - RIGHT) / last_rate();
  const STROKES = [["ink", []], ["muted", [7, 3]], ["ink", [2, 3]], ["muted", [1, 4]]];  // line styles of the words, because colours have other meanings
  view.canvas({
    name: () => clip().words.length
      ? `the model says "${view.row.answer}". Curves: the probabilities of the first word at every q. Now: ${clip().words.map((w, i) => `${w} ${percent(view.row.chances[i])}`).join(", ")}` +
        (clip().words.includes("Ask") ? '. "Ask me about ...": the model declines to answer' : "")
      : "no answer: pass a model to viz.explore_evs",
    size: () => [WIDE(), clip().words.length ? CHART() : 1],
    drag(x) {
      const wanted = (x - LEFT) / per_rate(), far = k => Math.abs(clip().rates[k] - wanted);
      const near = clip().rates.reduce((best, _, k) => (far(k) < far(best) ? k : best), 0);
      view.choose("q", view.options("q").indexOf(clip().rates[near]));
    },
    draw(pen, width, height) {
      if (!clip().words.length) return;
      const across = q => LEFT + q * per_rate(), high = p => height - 24 - p * (height - 36);
      pen.font = "11px sans-serif"; pen.fillStyle = view.colors.muted; pen.strokeStyle = view.colors.line;
      pen.textBaseline = "middle"; pen.textAlign = "right"; pen.lineWidth = 1;
      for (const p of [0, 0.5, 1]) {
        pen.fillText(percent(p), LEFT - 4, high(p));
        pen.beginPath(); pen.moveTo(LEFT, high(p)); pen.lineTo(across(last_rate()), high(p)); pen.stroke();
      }
      pen.textAlign = "center"; pen.textBaseline = "bottom";
      for (const q of [0, 0.2, 0.4, 0.6, 0.8]) if (q <= last_rate()) pen.fillText(`q = ${q}`, across(q), height - 4);
      const here = view.ease("q", across(view.option("q")));
      pen.strokeStyle = view.colors.ink; pen.lineWidth = 2; pen.setLineDash([4, 3]);
      pen.beginPath(); pen.moveTo(here, high(1)); pen.lineTo(here, high(0)); pen.stroke(); pen.setLineDash([]);
      clip().words.forEach((word, i) => {
        const [color, dashes] = STROKES[i];
        pen.strokeStyle = pen.fillStyle = view.colors[color]; pen.lineWidth = 2.5; pen.setLineDash(dashes); pen.beginPath();
        clip().rates.forEach((q, k) => pen.lineTo(across(q), high(clip().curves[k][i])));
        pen.stroke(); pen.setLineDash([]);
        pen.beginPath(); pen.arc(here, high(view.row.chances[i]), 4.5, 0, 7); pen.fill();
      });
      pen.textAlign = "left"; pen.textBaseline = "middle"; pen.font = "bold 12px sans-serif";
      let lowest = -Infinity;  // names are at the ends of their lines and never overlap
      const ends = clip().words.map((word, i) => [high(clip().curves.at(-1)[i]), word, STROKES[i][0], clip().curves.at(-1)[i]]).sort((a, b) => a[0] - b[0]);
      ends.forEach(([y, word, color, part], i) => {  // and a thin gray line leads to each
        lowest = Math.min(Math.max(y, lowest + 17), height - 24 - 17 * (ends.length - 1 - i));
        const from = across(last_rate());
        pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.fillStyle = view.colors[color];
        pen.beginPath(); pen.moveTo(from + 3, y); pen.lineTo(from + 14, lowest); pen.stroke();
        pen.fillText(`${word.slice(0, 10)} ${percent(part)}`, from + 18, lowest);
      });
      const first = clip().curves[0].indexOf(Math.max(...clip().curves[0]));  // and the name of the answer's line is at its start, too
      pen.fillStyle = view.colors[STROKES[first][0]]; pen.fillText(`the answer "${clip().words[first]}"`, LEFT + 6, high(clip().curves[0][first]) + 14);
    },
  });

  view.canvas({
    name: () => `the ${view.row.tokens} of ${length()} prompt tokens that are left, from left to right, and their positions t (time), h (height) and w (width), upward. Each token keeps its position`,
    size: () => [WIDE(), CHART()],
    at: x => {
      const i = Math.floor((x - LEFT) / (WIDE() - LEFT) * length());
      return clip().is_clip[i] ? sum(clip().is_clip.subarray(0, i)) : -1;
    },
    draw(pen, width, height) {
      const wide = (width - LEFT - 4) / length(), high = value => height - 40 - value / Math.max(1, most()) * (height - 62);
      pen.font = "11px sans-serif"; pen.textBaseline = "middle"; pen.textAlign = "right"; pen.fillStyle = view.colors.muted;
      const tick = most() < 20 ? 5 : 10;
      for (let value = 0; value <= most(); value += tick) {
        pen.fillText(value, LEFT - 5, high(value));
        pen.globalAlpha = 0.4; pen.fillRect(LEFT, high(value), width - LEFT, 1); pen.globalAlpha = 1;
      }
      view.row.kept.forEach((kept, token) => {  // the prompt below: text, video, and gaps
        pen.fillStyle = view.colors[kept ? (clip().is_clip[token] ? "video" : "text") : "empty"];
        pen.fillRect(LEFT + token * wide, height - 32, wide - 0.5, 12);
      });
      pen.textBaseline = "top"; pen.font = "12px sans-serif";
      let from = 0;
      for (let token = 1; token <= length(); token++) {
        if (token < length() && clip().is_clip[token] === clip().is_clip[from]) continue;
        const name = clip().is_clip[from] ? "video" : "text";
        pen.textAlign = "center"; pen.fillStyle = view.colors.ink;
        if ((token - from) * wide > pen.measureText(name).width) pen.fillText(name, LEFT + (from + token) / 2 * wide, height - 16);
        from = token;
      }
      pen.textAlign = "left"; pen.font = "bold 12px sans-serif";
      ["t", "h", "w"].forEach((axis, i) => {
        pen.fillStyle = view.colors[`${axis}_text`] ?? view.colors[axis]; pen.fillText(["t: time", "h: height", "w: width"][i], LEFT + 8 + 66 * i, 2);
        pen.fillStyle = view.colors[axis];
        view.row.kept.forEach((kept, token) => {
          if (!kept) return;
          const side = Math.min(1.6 * wide, 10) - 2.5 * i;  // if axes agree, the later one is drawn on top
          pen.fillRect(LEFT + (token + 0.5) * wide - side / 2, high(clip().positions[i * length() + token]) - side / 2, side, side);
        });
      });
      if (view.item < 0) return;
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 2;
      pen.strokeRect(LEFT + place(view.item) * wide - 1, 20, wide + 2, height - 39);
    },
  });

  view.readout(() => {
    const step = Math.floor(view.item / per_frame()), inside = view.item % per_frame();
    return `step ${step}, row ${Math.floor(inside / thw()[2])}, column ${inside % thw()[2]} of the video: ${view.row.keep[view.item] ? "kept" : "pruned"} at q = ${view.option("q")}`;
  }, () => {
    const i = place(view.item), [t, h, w] = [0, 1, 2].map(axis => clip().positions[axis * length() + i]);
    return `token ${view.item} of the video is token ${i} of the full prompt` +
      (view.row.keep[view.item] ? `, now number ${sum(view.row.kept.subarray(0, i))}` : "") + `. ${view.row.keep[view.item] ? "It keeps its position" : "Its position was"} t, h, w = ${t}, ${h}, ${w}. All numbers start at 0`;
  });
  return { count };
});
