// The recording, one line per part of the tower; the buffers of an operation; the effect of a stale buffer on tokens.
import { explorer } from "./shared.js";

export default explorer(view => {
  const NAME = 92, LINE = () => (view.big ? 38 : 24), CELL = () => LINE() - 10, CHIP = () => (view.big ? 42 : 24), SIDE = () => (view.big ? 230 : 160);
  const BUFFERS = () => (view.big ? 270 : 230);
  const { groups, parts, kinds, shapes, reads, buffers, photos } = view.shared;
  const longest = Math.max(...groups.map(g => g.count));
  const cell = () => (Math.min(NAME + longest * 11.5, view.big ? view.fit(1120) - BUFFERS() - 24 : view.fit(960)) - NAME) / longest;
  const starts = groups.map((_, k) => groups.slice(0, k).reduce((sum, g) => sum + g.count, 0));
  const first = groups.findIndex(g => g.name.startsWith("blocks.")), top = line => line * LINE() + (line < first ? 0 : 16);  // heads need room
  const lineOf = i => starts.findLastIndex(start => start <= i);
  const reader = (i, b) => reads[i * buffers.length + b] > 0;
  const stale = () => view.place("stale") - 1;
  const label = (name, line) => ({ "": line < groups.length / 2 ? "tower, start" : "tower, end", patch_embed: "patch embed" })[name] ?? name.replace("blocks.", "block ");
  const bar = level => 4 + (CELL() - 4) * level / 255;  // the height of an error
  const percent = share => `${(100 * share).toFixed(share > 0.9 && share < 1 ? 1 : 0)} %`;
  const wrong = () => view.row.operations.findIndex(v => v > 0);

  view.title(() => {
    const { answer } = view.row, { right } = view.shared, bad = view.row.operations.filter(v => v > 0).length;
    if (stale() < 0) return `${kinds.length} operations were recorded, and every buffer holds the current image's data: "${answer}" is correct`;
    return `The buffer ${buffers[stale()].name} still holds the previous image's data: ${bad} of ${kinds.length} operations have incorrect results, and the model says ` +
      (answer === right ? `"${answer}" all the same` : `"${answer}" instead of "${right}"`);
  });

  // the parts of a block, above the first one
  function heads(pen) {
    pen.fillStyle = view.colors.muted; pen.textAlign = "center"; pen.textBaseline = "bottom";
    parts.reduce((start, { name, count }) => {
      const left = NAME + start * cell(), wide = count * cell() - 2;
      if (wide > 24) { pen.fillRect(left, top(first), wide, 1); pen.fillText(name, left + wide / 2, top(first) - 2, wide); }
      return start + count;
    }, 0);
    pen.textAlign = "left";
  }
  // the axis of the errors, next to the short last lines: a bar for each power of ten
  function scale(pen) {
    const above = top(groups.length - 2), bottom = above + LINE() + 2 + CELL();
    const left = NAME + 16 * cell(), step = Math.min(74, (longest * cell() - 16 * cell()) / 6);
    pen.fillStyle = view.colors.muted; pen.textAlign = "left"; pen.textBaseline = "bottom";
    pen.fillText(step < 60 ? "error, log scale" : "bar height: error of the result (log scale)", left, above + LINE() - 4);
    ["0.1 %", "1 %", "10 %", "100 %", "1000 %"].forEach((text, power) => {
      if (step < 60 && power % 2) return;
      pen.fillStyle = view.colors.empty; pen.fillRect(left + power * step, bottom - CELL(), 8, CELL());
      const high = bar(1 + 254 * power / 4);
      pen.fillStyle = view.colors.highlight; pen.fillRect(left + power * step, bottom - high, 8, high);
      pen.fillStyle = view.colors.muted; pen.fillText(text, left + power * step + 11, bottom);
    });
  }
  view.canvas({
    name: () => `${kinds.length} recorded operations, a line per part of the tower`,
    caption: () => stale() < 0
      ? "The operations of the image encoder, from left to right; a block has norms, attention and an MLP. Green marks: the operation reads a buffer. Every result is correct"
      : `The operations of the image encoder, from left to right. Gray: a correct result, because no stale data has reached it. Orange: an incorrect result; the taller the bar, the larger the error. ` +
        `Marks below: the operation reads ${buffers[stale()].name} (orange) or a different buffer (green). The first error is in operation ${wrong()}`,
    size: () => [NAME + longest * cell(), top(groups.length)],
    at(x, y) {
      const line = groups.findIndex((_, k) => y < top(k + 1)), place = Math.floor((x - NAME) / cell());
      return place >= 0 && line >= 0 && place < groups[line].count ? starts[line] + place : -1;
    },
    step(i, dx, dy) {
      const line = lineOf(i) + dy;
      if (!dy) return i + dx;
      return line < 0 || line >= groups.length ? -1 : starts[line] + Math.min(i - starts[lineOf(i)], groups[line].count - 1);
    },
    draw(pen) {
      pen.textBaseline = "middle";
      groups.forEach((group, line) => {
        const y = top(line);
        pen.fillStyle = view.colors.ink; pen.fillText(label(group.name, line), 0, y + CELL() / 2 + 2);
        for (let k = 0; k < group.count; k++) {
          const i = starts[line] + k, x = NAME + k * cell(), error = view.row.operations[i];
          pen.fillStyle = view.colors.empty; pen.fillRect(x, y + 2, cell() - 1, CELL());
          const high = view.ease(`error ${i}`, error ? bar(error) : 0);
          pen.fillStyle = view.colors.highlight; pen.fillRect(x, y + 2 + CELL() - high, cell() - 1, high);
          for (let b = 0; b < buffers.length; b++) if (reader(i, b)) {
            pen.fillStyle = b === stale() ? view.colors.highlight : view.colors.kept;
            pen.fillRect(x, y + CELL() + 3, cell() - 1, b === stale() ? 5 : 3);
          }
        }
      });
      heads(pen);
      if (stale() >= 0) scale(pen);
      if (view.item < 0) return;
      const line = lineOf(view.item);
      pen.strokeStyle = view.colors.ink; pen.lineWidth = 2;
      pen.strokeRect(NAME + (view.item - starts[line]) * cell() - 1, top(line) + 1, cell() + 1, CELL() + 2);
    },
  });

  view.canvas({
    name: () => "the static buffers; filled: read by the framed operation",
    caption: () => "The buffers of the graph, with their sizes. Filled: read by the framed operation. Dashed: not refilled",
    size: () => [BUFFERS(), buffers.length * CHIP()],
    draw(pen) {
      pen.textBaseline = "middle";
      buffers.forEach(({ name, shape }, b) => {
        const y = b * CHIP(), lit = view.item >= 0 && reader(view.item, b);
        pen.fillStyle = lit ? (b === stale() ? view.colors.highlight_text : view.colors.kept) : view.colors.surface;
        pen.fillRect(1, y + 2, BUFFERS() - 2, CHIP() - 5);
        pen.strokeStyle = b === stale() ? view.colors.highlight : view.colors.line;
        pen.lineWidth = b === stale() ? 2.5 : 1; pen.setLineDash(b === stale() ? [5, 3] : []);
        pen.strokeRect(1.5, y + 2.5, BUFFERS() - 3, CHIP() - 6); pen.setLineDash([]);
        pen.fillStyle = lit ? view.colors.surface : view.colors.ink;
        pen.font = `${b === stale() ? "bold " : ""}12px sans-serif`;
        pen.fillText(name, 8, y + CHIP() / 2); pen.textAlign = "right";
        pen.fillText(shape.join(" x "), BUFFERS() - 8, y + CHIP() / 2); pen.textAlign = "left";
      });
    },
  });

  const picture = (title, which, over) => view.canvas({
    name: title,
    size: () => [SIDE(), (SIDE() * photos[which].height) / photos[which].width],
    draw(pen, width, height) { pen.drawImage(photos[which], 0, 0, width, height); over?.(pen, width, height); },
  });
  picture(() => "the previous image: a stale buffer still contains its data", "before");
  picture(() => "the current image, with the relative error of each token. At 100 %, an embedding is no better than zeros", "image", (pen, width, height) => {
    const [rows, columns] = view.row.tokens.shape, [w, h] = [width / columns, height / rows];
    pen.textAlign = "center"; pen.textBaseline = "middle"; pen.font = "bold 12px sans-serif";
    view.row.tokens.forEach((error, t) => {
      const x = (t % columns) * w, y = Math.floor(t / columns) * h;
      pen.globalAlpha = 0.75 * Math.min(1, view.ease(t, error) * 2); pen.fillStyle = view.colors.highlight;
      pen.fillRect(x, y, w, h); pen.globalAlpha = 1;
      pen.strokeStyle = "#fff"; pen.lineWidth = 1; pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
      if (stale() < 0) return;
      pen.strokeStyle = "#000"; pen.lineWidth = 3; pen.strokeText(percent(error), x + w / 2, y + h / 2);
      pen.fillStyle = "#fff"; pen.fillText(percent(error), x + w / 2, y + h / 2);
    });
  });

  view.canvas({
    name: () => `${view.shared.question} ${view.row.answer}, ${percent(view.row.probability)}`,
    caption: () => "The model's answer with these embeddings, and the probability of its first token",
    size: () => [view.fit(380), 150],
    draw(pen, width) {
      const changed = view.row.answer !== view.shared.right;
      pen.textBaseline = "top"; pen.fillStyle = view.colors.muted; pen.fillText(view.shared.question, 0, 4, width);
      pen.font = "bold 28px sans-serif"; pen.fillStyle = changed ? view.colors.highlight_text : view.colors.kept;
      pen.fillText(view.row.answer, 0, 26, width);
      pen.font = "13px sans-serif"; pen.fillStyle = view.colors.ink;
      const line = (text, share, color, y) => {
        pen.fillStyle = view.colors.ink; pen.textAlign = "left"; pen.fillText(text, 0, y);
        pen.textAlign = "right"; pen.fillText(percent(share), width, y);
        pen.fillStyle = view.colors.empty; pen.fillRect(0, y + 18, width, 12);
        pen.fillStyle = view.colors[color]; pen.fillRect(0, y + 18, width * view.ease(`bar ${y}`, share), 12);
      };
      line(changed ? "incorrect" : "correct", view.row.probability, changed ? "highlight" : "kept", 64);
      if (stale() >= 0) line(`every buffer refilled: "${view.shared.right}"`, view.shared.sure, "kept", 108);
    },
  });

  view.readout(() => {
    const i = view.item, read = buffers.filter((_, b) => reader(i, b)).map(b => b.name);
    const error = view.row.operations[i] ? "its result is incorrect" : "its result is correct";
    return `operation ${i}, in ${label(groups[lineOf(i)].name, lineOf(i))}, reads ${read.length ? read.join(", ") : "no buffer"}; ${error}`;
  }, () => `Operation ${view.item} of ${kinds.length} (counted from 0) is ${kinds[view.item]}; its result has the shape ${shapes[view.item]}`);
  return { count: () => kinds.length };
});
