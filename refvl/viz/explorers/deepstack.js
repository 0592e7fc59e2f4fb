// The frames, the way from the tower's blocks to the language model's layers, and the answer for every choice of features.
import { explorer } from "./shared.js";

export default explorer(view => {
  const GAP = 8, narrow = () => view.fit(700) < 700;
  const { blocks, depth, layers, questions } = view.shared;
  const asked = () => questions[view.place("question")], thw = () => asked().thw;
  const per_step = () => thw()[1] * thw()[2], count = () => thw()[0] * per_step();
  const wide = () => Math.min(thw()[0] > 1 ? 168 : 240, (view.fit(520) - GAP * (thw()[0] - 1)) / thw()[0]);
  const cell = () => { const [first] = asked().frames; return [wide() / thw()[2], wide() * first.height / first.width / thw()[1]]; };
  const corner = token => {
    const step = Math.floor(token / per_step()), inside = token % per_step(), [w, h] = cell();
    return [step * (wide() + GAP) + (inside % thw()[2]) * w, Math.floor(inside / thw()[2]) * h];
  };
  const kept = i => view.row.kept[i] > 0;
  const wrong = () => view.row.answer !== asked().answers[0];
  const size = (feature, token) => asked().norms[feature * count() + token];
  const percent = share => `${Math.round(100 * share)} %`;

  view.column();
  view.canvas({
    name: () => `${thw()[0] > 1 ? `a video in ${thw()[0]} steps` : "an image"}, ${count()} tokens`,
    caption: () => `${thw()[0] > 1 ? `A video in ${thw()[0]} steps` : "An image"}: ${count()} tokens for the language model. Choose one`,
    size: () => [thw()[0] * (wide() + GAP) - GAP, thw()[1] * cell()[1]],
    at(x, y) {
      const step = Math.floor(x / (wide() + GAP)), [w, h] = cell(), column = Math.floor((x - step * (wide() + GAP)) / w);
      return column < thw()[2] && step < thw()[0] ? step * per_step() + Math.min(thw()[1] - 1, Math.floor(y / h)) * thw()[2] + column : -1;
    },
    step(item, dx, dy) {
      const step = Math.floor(item / per_step()), inside = item % per_step(), x = inside % thw()[2] + dx;
      if (dx && (x < 0 || x >= thw()[2])) return item + dx * (per_step() - thw()[2] + 1);
      const next = inside + dx + dy * thw()[2];
      return next >= 0 && next < per_step() ? step * per_step() + next : -1;
    },
    draw(pen) {
      const [w, h] = cell();
      asked().frames.forEach((frame, step) => pen.drawImage(frame, step * (wide() + GAP), 0, wide(), thw()[1] * h));
      pen.strokeStyle = "#ffffffb0"; pen.lineWidth = 1;
      for (let token = 0; token < count(); token++) pen.strokeRect(...corner(token), w, h);
      if (view.item < 0) return;
      const [x, y] = corner(view.item);
      pen.strokeStyle = "#fff"; pen.lineWidth = 5; pen.strokeRect(x + 2, y + 2, w - 4, h - 4);
      pen.strokeStyle = "#000"; pen.lineWidth = 2.5; pen.strokeRect(x + 2, y + 2, w - 4, h - 4);
    },
  });

  // the way: blocks on the left, layers on the right, both from the bottom up
  const BOX = 40, ROW = narrow() ? 52 : 66, LEFT = () => (narrow() ? 100 : 130), RIGHT = LEFT, rows = Math.max(depth, layers + 1);
  const high = row => (rows - row - 1) * ROW + 10;
  view.canvas({
    name: () => `the tower's blocks, the language model's layers, and the features passed between them: ${view.option("kept")}`,
    caption: () => "Left: the blocks of the tower, from the bottom up. Right: the layers of the language model. Dashed: features that are left out" +
      (view.item < 0 ? "" : ". Numbers: the norm (length) of each vector that the chosen token receives"),
    size: () => [view.fit(520), rows * ROW + 8],
    draw(pen, width) {
      pen.textBaseline = "middle"; pen.textAlign = "center";
      const box = (x, y, wide, text, fill) => {
        pen.fillStyle = fill ?? view.colors.surface; pen.strokeStyle = view.colors.line; pen.lineWidth = 1.5;
        pen.fillRect(x, y, wide, BOX); pen.strokeRect(x + 0.75, y + 0.75, wide - 1.5, BOX - 1.5);
        pen.fillStyle = view.colors.ink; pen.fillText(text, x + wide / 2, y + BOX / 2);
      };
      const arrow = (from, to, feature, on) => {
        const [x0, x1, y0, y1] = [LEFT(), width - RIGHT(), high(from) + BOX / 2, high(to) + BOX / 2];
        pen.strokeStyle = pen.fillStyle = view.colors[on ? (feature ? "kept" : "image") : "highlight"];
        pen.lineWidth = on ? 4 : 2; pen.setLineDash(on ? [] : [5, 5]);
        pen.beginPath(); pen.moveTo(x0, y0); pen.bezierCurveTo((x0 + x1) / 2, y0, (x0 + x1) / 2, y1, x1 - 8, y1); pen.stroke();
        pen.setLineDash([]);
        if (on) { pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x1 - 12, y1 - 6); pen.lineTo(x1 - 12, y1 + 6); pen.fill(); }
        if (view.item < 0) return;
        const text = on ? size(feature, view.item).toFixed(1) : "0", x = x1 - (narrow() ? 32 : 44);
        pen.font = "bold 13px sans-serif"; pen.lineWidth = 5; pen.strokeStyle = view.colors.surface;
        const lift = feature ? -12 : 13;  // the first arrow comes from above
        pen.strokeText(text, x, y1 + lift); pen.fillStyle = view.colors.ink; pen.fillText(text, x, y1 + lift);
        pen.font = "13px sans-serif";
      };
      pen.font = "13px sans-serif";
      arrow(depth - 1, 0, 0, true);
      blocks.forEach((block, i) => arrow(block, i + 1, i + 1, kept(i)));
      for (let block = 0; block < depth; block++) box(0, high(block), LEFT(), `block ${block}`);
      box(width - RIGHT(), high(0), RIGHT(), "embeddings");
      for (let layer = 0; layer < layers; layer++) {
        const gets = layer < blocks.length && kept(layer);
        box(width - RIGHT(), high(layer + 1), RIGHT(), `layer ${layer}${gets ? ` + block ${blocks[layer]}` : ""}`);
      }
    },
  });

  view.column();
  const LINE = 54, W = () => (view.fit(974) > 820 ? view.fit(974) - 544 : view.fit(430));  // next to the diagram, if there is room
  view.canvas({
    name: () => `answers to ${asked().prompt}: ${view.options("kept").map((name, i) => `${name}: ${asked().answers[i]}`).join("; ")}`,
    caption: () => "The answer for each choice of features. Choose a line",
    size: () => [W(), 34 + asked().answers.length * LINE],
    drag: (x, y) => view.choose("kept", Math.max(0, Math.min(asked().answers.length - 1, Math.floor((y - 34) / LINE)))),
    grab: () => false,
    draw(pen, width) {
      pen.textBaseline = "middle"; pen.font = "bold 15px sans-serif"; pen.fillStyle = view.colors.ink;
      pen.fillText(asked().prompt, 0, 14);
      pen.fillStyle = view.colors.empty; pen.fillRect(0, 34 + view.ease("line", view.place("kept")) * LINE, width, LINE);
      asked().answers.forEach((answer, i) => {
        const y = 34 + (i + 0.5) * LINE, same = answer === asked().answers[0];
        pen.font = `${i === view.place("kept") ? "bold " : ""}14px sans-serif`;
        pen.fillStyle = view.colors.ink; pen.textAlign = "left"; pen.fillText(view.options("kept")[i], 10, y);
        pen.fillStyle = view.colors[same ? "ink" : "highlight_text"]; pen.textAlign = "right"; pen.fillText(answer, width - 10, y, width / 2);
        pen.fillStyle = view.colors.line; pen.globalAlpha = 0.4; pen.fillRect(0, y + LINE / 2 - 1, width, 1); pen.globalAlpha = 1;
      });
    },
  });

  view.canvas({
    name: () => `with ${view.option("kept")}, the model says "${view.row.answer}"; probabilities of the first word: ` +
      asked().words.map((word, i) => `${word} ${percent(view.row.chances[i])}`).join(", "),
    caption: () => `Probabilities of the first word with ${view.option("kept")}` + (asked().words.includes("Ask") ? '. "Ask me about ...": the model declines to answer' : ""),
    size: () => [W(), 84 + asked().words.length * 34],
    draw(pen, width) {
      pen.textBaseline = "middle"; pen.font = "bold 28px sans-serif";
      pen.fillStyle = view.colors[wrong() ? "highlight_text" : "ink"]; pen.fillText(view.row.answer, 0, 26, width);
      pen.font = "14px sans-serif"; pen.textAlign = "left"; pen.fillStyle = view.colors.ink;
      pen.fillText(wrong() ? `incorrect; with all features: "${asked().answers[0]}"` : "", 0, 58, width);
      asked().words.forEach((word, i) => {
        const y = 84 + i * 34, part = view.ease(`chance ${i}`, view.row.chances[i]);
        pen.fillStyle = view.colors.ink; pen.textAlign = "left"; pen.fillText(word.slice(0, 10), 0, y + 12);
        pen.fillStyle = view.colors.empty; pen.fillRect(84, y, width - 140, 24);
        pen.fillStyle = view.colors[wrong() ? "highlight" : "kept"]; pen.fillRect(84, y, (width - 140) * part, 24);
        pen.fillStyle = view.colors.ink; pen.textAlign = "right"; pen.fillText(percent(view.row.chances[i]), width, y + 12);
      });
    },
  });

  view.readout(() => {
    const step = Math.floor(view.item / per_step()), inside = view.item % per_step();
    const used = blocks.filter((_, i) => kept(i));
    return `the token in ${thw()[0] > 1 ? `step ${step}, ` : ""}row ${Math.floor(inside / thw()[2])}, column ${inside % thw()[2]} receives ` +
      (used.length ? `its embedding and the features of block${used.length > 1 ? "s" : ""} ${used.join(" and ")}` : "only its embedding");
  }, () => {
    const parts = blocks.map((block, i) => `${size(i + 1, view.item).toFixed(1)} from block ${block}${kept(i) ? "" : " (left out)"}`);
    return `Token ${view.item} has an embedding of norm ${size(0, view.item).toFixed(1)}, and features of norm ${parts.join(" and ")}. Steps, rows and columns are counted from 0.`;
  });
  return { count };
});
