// One photo as two families cut it: slices with what a query reads of them, crops, overviews, and both prompts.
import { explorer } from "./shared.js";

export default explorer(view => {
  const W = 380, SMALL = 110, BAR = 780;
  const { photo, question, queries } = view.shared;
  const shape = () => view.row.size;
  const large = () => fitted(shape(), W), small = limit => fitted(shape(), limit);
  const fitted = ([w, h], limit) => [w * limit / Math.max(w, h), h * limit / Math.max(w, h)];

  // the middle of the photo in the shape of the state
  function middle(pen, x, y, width, height) {
    const [w, h] = shape(), scale = Math.min(photo.width / w, photo.height / h);
    pen.drawImage(photo, (photo.width - w * scale) / 2, (photo.height - h * scale) / 2, w * scale, h * scale, x, y, width, height);
  }
  function number(pen, n, x, y) {
    pen.font = "bold 13px system-ui, sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.strokeStyle = "#000"; pen.lineWidth = 3; pen.strokeText(n, x, y);
    pen.fillStyle = "#fff"; pen.fillText(n, x, y);
  }
  // what the chosen query takes from each patch of slice k
  function heat(pen, values, k, x, y, width, height) {
    if (view.item < 0 || !values.length) return;
    const [, Q, rows, columns] = values.shape, first = (k * Q + view.item) * rows * columns;
    for (let i = 0; i < rows * columns; i++) {
      pen.globalAlpha = 0.8 * (1 - Math.sqrt(values[first + i] / 255));
      pen.fillStyle = "#000";
      pen.fillRect(x + (i % columns) * width / columns, y + Math.floor(i / columns) * height / rows,
        width / columns + 0.5, height / rows + 0.5);
    }
    pen.globalAlpha = 1;
  }
  const reading = () => (queries && view.item >= 0 ? `; bright: what query ${view.item} reads` : "");

  view.canvas({
    name: () => `MiniCPM-V: ${view.row.slices.grid[0] ? view.row.slices.grid.join(" x ") + " slices" : "no slices"}${reading()}`,
    caption: () => {
      const { grid, cell } = view.row.slices;
      return (grid[0] ? `MiniCPM-V cuts ${grid.join(" x ")} slices of ${cell.join(" x ")} px` : "MiniCPM-V: the overview holds all")
        + reading();
    },
    size: large,
    draw(pen, width, height) {
      middle(pen, 0, 0, width, height);
      const [columns, rows] = view.row.slices.grid, [w, h] = [width / columns, height / rows];
      for (let k = 0; k < columns * rows; k++) {
        const x = (k % columns) * w, y = Math.floor(k / columns) * h;
        heat(pen, view.row.slice_heat ?? [], k, x, y, w, h);
        pen.strokeStyle = "#000"; pen.lineWidth = 4; pen.strokeRect(x, y, w, h);
        pen.strokeStyle = "#fff"; pen.lineWidth = 2; pen.strokeRect(x, y, w, h);
        number(pen, k + 1, x + w / 2, y + h / 2);
      }
    },
  });
  view.canvas({
    name: () => `MiniCPM-V's overview${reading()}`,
    caption: () => `overview, ${view.row.slices.overview.join(" x ")} px`,
    size: () => small(SMALL),
    draw(pen, width, height) {
      middle(pen, 0, 0, width, height);
      heat(pen, view.row.overview_heat ?? [], 0, 0, 0, width, height);
      number(pen, 0, width / 2, height / 2);
    },
  });
  view.canvas({
    name: () => `Step3-VL: ${view.row.crops.window ? view.row.crops.grid.toReversed().join(" x ") + " crops" : "no crops"}`,
    caption: () => {
      const { grid, window, canvas } = view.row.crops;
      return window ? `Step3-VL cuts ${grid[1]} x ${grid[0]} windows of ${window} px from ${canvas.join(" x ")} px` : "Step3-VL: the overview holds all";
    },
    size: large,
    draw(pen, width, height) {
      middle(pen, 0, 0, width, height);
      const { grid: [rows, columns], window, canvas } = view.row.crops;
      const [w, h] = [width * window / canvas[0], height * window / canvas[1]];
      for (let k = 0; k < columns * rows; k++) {
        const x = (k % columns) * w, y = Math.floor(k / columns) * h;
        pen.strokeStyle = "#000"; pen.lineWidth = 4; pen.strokeRect(x, y, w, h);
        pen.strokeStyle = "#fff"; pen.lineWidth = 2; pen.strokeRect(x, y, w, h);
        number(pen, k + 1, x + w / 2, y + Math.min(h, height) / 2);
      }
    },
  });
  view.canvas({
    name: () => "Step3-VL's overview, a square whatever the shape",
    caption: () => `overview, ${view.shared.overview} x ${view.shared.overview} px`,
    size: () => [SMALL, SMALL],
    draw(pen, width, height) { middle(pen, 0, 0, width, height); number(pen, 0, width / 2, height / 2); },
  });

  // The prompt from left to right: [number, tokens] of every part, the overview being number 0
  const sliced = () => Array.from({ length: 1 + view.row.slices.grid[0] * view.row.slices.grid[1] }, (_, k) => [k, view.row.slices.of_slice]);
  const cropped = () => {
    const { grid, of_crop, of_overview } = view.row.crops;
    return [...Array.from({ length: grid[0] * grid[1] }, (_, k) => [k + 1, of_crop]), [0, of_overview]];
  };
  view.canvas({
    name: () => `the prompts: MiniCPM-V ${view.row.slices.tokens} tokens, Step3-VL ${view.row.crops.tokens}`,
    caption: () => "the image in both prompts, left to right, on one scale; 0 is the overview; orange: a mark for a new line",
    size: () => [BAR, 74],
    draw(pen, width) {
      const scale = (width - 240) / Math.max(view.row.slices.tokens, view.row.crops.tokens);
      [["MiniCPM-V", sliced(), view.row.slices.tokens, view.row.slices.grid[0], 1, ""],
        ["Step3-VL", cropped(), view.row.crops.tokens, view.row.crops.grid[1], 0, ` + ${view.row.crops.marks} marks`]]
        .forEach(([name, parts, tokens, columns, first, marks], line) => {
          const y = line * 38;
          let x = 90;
          pen.textAlign = "left"; pen.textBaseline = "middle"; pen.font = "12px system-ui, sans-serif";
          pen.fillStyle = view.colors.ink; pen.fillText(name, 0, y + 15);
          parts.forEach(([k, length], place) => {
            const w = length * scale;
            pen.fillStyle = k ? view.colors.sequence(k / parts.length) : view.colors.image;
            pen.fillRect(x, y + 2, Math.max(1, w - 1), 26);
            if (w > 15) number(pen, k, x + w / 2, y + 15);
            x += w;
            if (k && k % columns === 0 && place < parts.length - 1 - !first) {
              pen.fillStyle = view.colors.highlight; pen.fillRect(x - 2, y, 3, 30);
            }
          });
          pen.textAlign = "left"; pen.font = "12px system-ui, sans-serif"; pen.fillStyle = view.colors.ink;
          pen.fillText(`${tokens} tokens${marks}`, x + 8, y + 15);
        });
    },
  });

  if (queries) view.canvas({
    name: () => `the ${queries} learned queries`,
    caption: () => "the queries of a small MiniCPM-V that sees the photo cut alike; choose one. And what that model says",
    size: () => [400, 108],
    at: (x, y) => (x < 108 ? Math.floor(y / 36) * 3 + Math.floor(x / 36) : -1),
    step: (i, dx, dy) => ((i % 3) + dx < 0 || (i % 3) + dx > 2 ? -1 : i + dx + 3 * dy),
    draw(pen, width) {
      for (let i = 0; i < queries; i++) {
        const x = (i % 3) * 36, y = Math.floor(i / 3) * 36;
        pen.fillStyle = i === view.item ? view.colors.highlight : view.colors.empty;
        pen.fillRect(x + 1, y + 1, 34, 34);
        number(pen, i, x + 18, y + 18);
      }
      pen.textAlign = "left"; pen.textBaseline = "top"; pen.font = "12px system-ui, sans-serif";
      pen.fillStyle = view.colors.muted; pen.fillText(question, 126, 4, width - 126);
      pen.font = "bold 20px system-ui, sans-serif"; pen.fillStyle = view.colors.kept;
      pen.fillText(view.row.answer, 126, 26, width - 126);
    },
  });

  view.readout(() => `query ${view.item} of ${queries}: the same query reads the overview and every slice, ` +
    `and becomes one token of each\nasked "${question}", the small MiniCPM-V, which cuts at most ${view.shared.most}, says "${view.row.answer}"`);
  return { count: () => queries };
});
