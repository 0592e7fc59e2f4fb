// One photo as two families cut it: slices with what a query reads of them, crops, overviews, and both prompts.
import { explorer } from "./shared.js";

export default explorer(view => {
  const SMALL = 110, W = () => view.fit(400), BAR = () => view.fit(780);
  const narrow = () => BAR() < 600, LINE = () => (narrow() ? 54 : 38);
  const { photo, question, queries } = view.shared;
  const shape = () => view.row.size;
  const large = () => fitted(shape(), W()), small = limit => fitted(shape(), limit);
  const squares = () => fitted(view.row.crops.window ? view.row.crops.canvas : shape(), W());  // stretched as Step3-VL does
  const fitted = ([w, h], limit) => [w * limit / Math.max(w, h), h * limit / Math.max(w, h)];

  // Items: the queries, then MiniCPM-V's parts of the image, then Step3-VL's; part 0 is the overview
  const FAMILIES = ["MiniCPM-V", "Step3-VL"], Q = queries || 0;
  const lengths = () => [1 + view.row.slices.grid[0] * view.row.slices.grid[1], 1 + view.row.crops.grid[0] * view.row.crops.grid[1]];
  const item = (family, part) => Q + family * lengths()[0] + part;
  const query = () => (view.item < Q ? view.item : view.selected < Q ? view.selected : -1);  // -1: none
  const inside = (grid, size) => (x, y) => 1 + Math.min(grid[1] - 1, Math.floor(y / size[1])) * grid[0] + Math.min(grid[0] - 1, Math.floor(x / size[0]));
  function frame(pen, family, part, x, y, width, height) {
    const chosen = view.item === item(family, part);
    for (const [color, thickness] of [["#000", chosen ? 9 : 4], [chosen ? view.colors.highlight : "#fff", chosen ? 5 : 2]]) {
      pen.strokeStyle = color; pen.lineWidth = thickness; pen.strokeRect(x, y, width, height);
    }
  }
  function framed(pen, family, parts) {  // the chosen part last, so that its frame is complete
    parts.sort((a, b) => (view.item === item(family, a[0])) - (view.item === item(family, b[0])));
    parts.forEach(([part, ...box]) => frame(pen, family, part, ...box));
  }

  // the middle of the photo in the shape of the state
  function middle(pen, x, y, width, height) {
    const [w, h] = shape(), scale = Math.min(photo.width / w, photo.height / h);
    pen.drawImage(photo, (photo.width - w * scale) / 2, (photo.height - h * scale) / 2, w * scale, h * scale, x, y, width, height);
  }
  function number(pen, n, x, y) {
    pen.font = "bold 13px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.strokeStyle = "#000"; pen.lineWidth = 3; pen.strokeText(n, x, y);
    pen.fillStyle = "#fff"; pen.fillText(n, x, y);
  }
  // what the chosen query takes from each patch of slice k
  function heat(pen, values, k, x, y, width, height) {
    if (query() < 0 || !values.length) return;
    const [, count, rows, columns] = values.shape, first = (k * count + query()) * rows * columns;
    for (let i = 0; i < rows * columns; i++) {
      view.fade(pen, x + (i % columns) * width / columns, y + Math.floor(i / columns) * height / rows,
        width / columns + 0.5, height / rows + 0.5, 0.85 * (1 - Math.sqrt(values[first + i] / 255)));
    }
  }
  const reading = () => (query() >= 0 ? `; not faded: what query q${query()} reads` : "");

  view.column("MiniCPM-V");
  view.canvas({
    name: () => `MiniCPM-V: ${view.row.slices.grid[0] ? view.row.slices.grid.join(" x ") + " slices" : "no slices"}${reading()}`,
    caption: () => {
      const { grid, cell } = view.row.slices;
      return (grid[0] ? `${grid.join(" x ")} slices of ${cell.join(" x ")} px` : "No slices: the overview shows the whole photo")
        + reading();
    },
    size: large,
    at(x, y) {
      const { grid } = view.row.slices, [w, h] = large();
      return item(0, grid[0] ? inside(grid, [w / grid[0], h / grid[1]])(x, y) : 0);
    },
    draw(pen, width, height) {
      middle(pen, 0, 0, width, height);
      const [columns, rows] = view.row.slices.grid, [w, h] = [width / columns, height / rows], boxes = [];
      for (let k = 0; k < columns * rows; k++) {
        const x = (k % columns) * w, y = Math.floor(k / columns) * h;
        heat(pen, view.row.slice_heat ?? [], k, x, y, w, h);
        boxes.push([k + 1, x, y, w, h]);
      }
      framed(pen, 0, boxes);
      boxes.forEach(([k, x, y]) => number(pen, k, x + w / 2, y + h / 2));
    },
  });
  view.canvas({
    name: () => `MiniCPM-V's overview${reading()}`,
    caption: () => `Overview: ${view.row.slices.overview.join(" x ")} px`,
    size: () => small(SMALL),
    at: () => item(0, 0),
    draw(pen, width, height) {
      middle(pen, 0, 0, width, height);
      heat(pen, view.row.overview_heat ?? [], 0, 0, 0, width, height);
      frame(pen, 0, 0, 0, 0, width, height);
      number(pen, 0, width / 2, height / 2);
    },
  });
  view.column("Step3-VL");
  view.canvas({
    name: () => `Step3-VL: ${view.row.crops.window ? view.row.crops.grid.toReversed().join(" x ") + " crops" : "no crops"}`,
    caption: () => {
      const { grid, window, canvas } = view.row.crops;
      return window ? `${grid[1]} x ${grid[0]} squares of ${window} px, cut from ${canvas.join(" x ")} px` : "No crops: the overview shows the whole photo";
    },
    size: squares,
    at(x, y) {
      const { grid, window, canvas } = view.row.crops, [w, h] = squares();
      return item(1, grid[0] ? inside([grid[1], grid[0]], [w * window / canvas[0], h * window / canvas[1]])(x, y) : 0);
    },
    draw(pen, width, height) {
      middle(pen, 0, 0, width, height);
      const { grid: [rows, columns], window, canvas } = view.row.crops, boxes = [];
      const [w, h] = [width * window / canvas[0], height * window / canvas[1]];
      for (let k = 0; k < columns * rows; k++) {
        const x = (k % columns) * w, y = Math.floor(k / columns) * h;
        boxes.push([k + 1, x, y, w, h]);
      }
      framed(pen, 1, boxes);
      boxes.forEach(([k, x, y]) => number(pen, k, x + w / 2, y + Math.min(h, height) / 2));
    },
  });
  view.canvas({
    name: () => "Step3-VL's overview, a square whatever the shape of the photo",
    caption: () => `Overview: squeezed to ${view.shared.overview} x ${view.shared.overview} px`,
    size: () => [SMALL, SMALL],
    at: () => item(1, 0),
    draw(pen, width, height) { middle(pen, 0, 0, width, height); frame(pen, 1, 0, 0, 0, width, height); number(pen, 0, width / 2, height / 2); },
  });

  // The prompt from left to right: [number, tokens] of every part; the overview is number 0
  const sliced = () => Array.from({ length: 1 + view.row.slices.grid[0] * view.row.slices.grid[1] }, (_, k) => [k, view.row.slices.of_slice]);
  const cropped = () => {
    const { grid, of_crop, of_overview } = view.row.crops;
    return [...Array.from({ length: grid[0] * grid[1] }, (_, k) => [k + 1, of_crop]), [0, of_overview]];
  };
  const strip = () => (BAR() - (narrow() ? 4 : 240)) / Math.max(view.row.slices.tokens, view.row.crops.tokens);
  view.column("What each cut costs");
  view.canvas({
    name: () => `prompt lengths: MiniCPM-V ${view.row.slices.tokens} tokens, Step3-VL ${view.row.crops.tokens} tokens`,
    caption: () => "The tokens of the photo in both prompts, drawn to the same scale. 0: the overview. Orange: a newline token. Special: tokens that mark the parts",
    size: () => [BAR(), 2 * LINE()],
    at(x, y) {
      const family = y < LINE() ? 0 : 1, scale = strip();
      let left = narrow() ? 0 : 90;
      for (const [part, length] of [sliced(), cropped()][family]) if (x < (left += length * scale)) return item(family, part);
      return -1;
    },
    draw(pen, width) {
      const left = narrow() ? 0 : 90, top = narrow() ? 20 : 2;
      const scale = strip();
      [["MiniCPM-V", sliced(), view.row.slices.tokens, view.row.slices.grid[0], 1, ""],
        ["Step3-VL", cropped(), view.row.crops.tokens, view.row.crops.grid[1], 0, ` + ${view.row.crops.marks} special`]]
        .forEach(([name, parts, tokens, columns, first, marks], line) => {
          const y = line * LINE() + top - 2;
          let x = left;
          pen.textAlign = "left"; pen.textBaseline = "middle"; pen.font = "12px sans-serif";
          pen.fillStyle = view.colors.ink; pen.fillText(name, 0, narrow() ? y - 6 : y + 15);
          parts.forEach(([k, length], place) => {
            const w = view.ease(`width ${line} ${k}`, length * scale);
            pen.fillStyle = k ? view.colors.sequence(k / parts.length) : view.colors.image;
            pen.fillRect(x, y + 2, Math.max(1, w - 1), 26);
            if (view.item === item(line, k)) {
              pen.strokeStyle = view.colors.ink; pen.lineWidth = 3; pen.strokeRect(x + 1.5, y + 1.5, Math.max(1, w - 4), 27);
            }
            if (w > 15) number(pen, k, x + w / 2, y + 15);
            x += w;
            if (k && k % columns === 0 && place < parts.length - 1 - !first) {
              pen.fillStyle = view.colors.highlight; pen.fillRect(x - 2, y, 3, 30);
            }
          });
          pen.textAlign = "left"; pen.font = "12px sans-serif"; pen.fillStyle = view.colors.ink;
          if (!narrow()) pen.fillText(`${tokens} tokens${marks}`, x + 8, y + 15);
          else { pen.textAlign = "right"; pen.fillText(`${tokens} tokens${marks}`, width, y - 6); }
        });
    },
  });

  if (queries) view.column("What one query reads");
  if (queries) view.canvas({
    name: () => `the ${queries} learned queries`,
    caption: () => `Left: the ${queries} queries of a small MiniCPM-V. Each produces one token per slice; choose one. Right: the model's answer`,
    size: () => [view.fit(400), 108],
    at: (x, y) => (x < 108 ? Math.floor(y / 36) * 3 + Math.floor(x / 36) : -1),
    step: (i, dx, dy) => (i >= Q ? 0 : (i % 3) + dx < 0 || (i % 3) + dx > 2 ? -1 : i + dx + 3 * dy),
    draw(pen, width) {
      for (let i = 0; i < queries; i++) {
        const x = (i % 3) * 36, y = Math.floor(i / 3) * 36;
        pen.fillStyle = i === query() ? view.colors.highlight : view.colors.empty;
        pen.fillRect(x + 1, y + 1, 34, 34);
        if (i === query()) { number(pen, `q${i}`, x + 18, y + 18); continue; }
        pen.font = "bold 13px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillStyle = view.colors.ink;
        pen.fillText(`q${i}`, x + 18, y + 18);
      }
      pen.textAlign = "left"; pen.textBaseline = "top"; pen.font = "12px sans-serif";
      pen.fillStyle = view.colors.muted; pen.fillText(question, 126, 4, width - 126);
      pen.font = "bold 20px sans-serif"; pen.fillStyle = view.colors.kept;
      (view.row.answer.match(/.{1,22}(\s|$)/g) ?? []).forEach((line, i) => pen.fillText(line, 126, 26 + 20 * i, width - 126));
    },
  });

  // a part and its tokens in the prompt
  function told(family, part) {
    const parts = [sliced(), cropped()][family], place = parts.findIndex(([k]) => k === part);
    const first = parts.slice(0, place).reduce((sum, [, length]) => sum + length, 0), length = parts[place][1];
    return `${part ? `${family ? "crop" : "slice"} ${part}` : "the overview"} of ${FAMILIES[family]}: ${length} tokens, ` +
      `${first ? `after ${first} other tokens` : "the first tokens of the image"}`;
  }
  view.readout(() => {
    if (view.item >= Q) return view.item < item(1, 0) ? told(0, view.item - Q) : told(1, view.item - item(1, 0));
    return `query q${view.item} of ${queries} reads the overview and every slice, and produces one token for each of them`;
  }, () => {
    if (view.item >= Q) return "";
    return `The small MiniCPM-V cuts an image into at most ${view.shared.most} slices. Asked "${question}", it answers "${view.row.answer}"`;
  });
  return { count: () => item(1, 0) + lengths()[1] };
});
