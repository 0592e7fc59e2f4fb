// Three rows of positions along the prompt, another convention dashed over them, and what stands at a token.
import { explorer } from "./shared.js";

export default explorer(view => {
  const WIDTH = 720, HEIGHT = 260, LEFT = 34, BOTTOM = 18, TOP = 8;
  const count = () => view.row.kinds.length;
  const kinds = ["text", "image", "video"], widths = [5.5, 3.2, 1.5];
  const highest = () => Math.max(...view.row.positions, ...(view.row.other ?? []));
  const x = token => LEFT + (token + 0.5) * (WIDTH - LEFT) / count();
  const y = position => HEIGHT - BOTTOM - position * (HEIGHT - BOTTOM - TOP) / (highest() + 1);
  const at = (table, axis, token) => table[axis * count() + token];
  const place = token => Array.from(view.row.places.slice(3 * token, 3 * token + 3));
  const extent = token => Array.from(view.row.extents.slice(3 * token, 3 * token + 3));
  const word = token => view.shared.words[view.row.words[token]];

  function line(pen, table, axis, shift) {
    const half = (WIDTH - LEFT) / count() / 2;
    pen.beginPath();
    for (let token = 0; token < count(); token++) {
      const height = y(at(table, axis, token)) + shift;
      pen.lineTo(x(token) - half, height); pen.lineTo(x(token) + half, height);
    }
    pen.stroke();
  }
  view.canvas({
    name: () => `t, h, w of ${count()} prompt tokens: delta ${view.row.delta}` +
      (view.row.other ? `; dashed, ${view.option("convention")}: delta ${view.row.other_delta}` : ""),
    size: () => [WIDTH, HEIGHT],
    at: px => Math.floor((px - LEFT) * count() / (WIDTH - LEFT)),
    step: (item, dx, dy) => item + dx - 10 * dy,
    draw(pen) {
      const step = (WIDTH - LEFT) / count();
      for (let token = 0; token < count(); token++) {
        pen.fillStyle = view.colors[kinds[view.row.kinds[token]]];
        pen.fillRect(x(token) - step / 2, HEIGHT - BOTTOM + 2, step + 0.5, 8);
      }
      pen.fillStyle = view.colors.muted; pen.textAlign = "right"; pen.textBaseline = "middle";
      const tick = 10 ** Math.floor(Math.log10(highest() + 1)) / (highest() < 30 ? 2 : 1);
      for (let position = 0; position <= highest(); position += tick) pen.fillText(position, LEFT - 6, y(position));
      ["t", "h", "w"].forEach((axis, i) => {
        pen.strokeStyle = view.colors[axis]; pen.lineWidth = widths[i]; line(pen, view.row.positions, i, 0);
      });
      if (view.row.other) {
        pen.strokeStyle = view.colors.ink; pen.lineWidth = 1.2; pen.setLineDash([4, 3]);
        [0, 1, 2].forEach(axis => line(pen, view.row.other, axis, 0));
        pen.setLineDash([]);
      }
      pen.textAlign = "left"; pen.textBaseline = "top";
      ["t", "h", "w"].forEach((axis, i) => {
        pen.fillStyle = view.colors[axis]; pen.fillRect(LEFT + 8, TOP + 6 + 16 * i, 18, widths[i]);
        pen.fillText(["t: time", "h: height", "w: width"][i], LEFT + 32, TOP + 16 * i);
      });
      kinds.forEach((kind, i) => {
        pen.fillStyle = view.colors[kind]; pen.fillRect(LEFT + 110, TOP + 4 + 16 * i, 18, 8);
        pen.fillStyle = view.colors.ink; pen.fillText(kind, LEFT + 134, TOP + 16 * i);
      });
      if (view.item < 0) return;
      pen.fillStyle = view.colors.highlight;
      pen.fillRect(x(view.item) - Math.max(1, step / 2), TOP, Math.max(2, step), HEIGHT - TOP - BOTTOM + 12);
    },
  });

  view.canvas({
    name: () => "what stands at the token",
    size: () => [240, 180],
    draw(pen, width, height) {
      pen.textAlign = "center"; pen.textBaseline = "middle";
      if (view.item < 0) {
        pen.fillStyle = view.colors.muted; pen.fillText("point at a token", width / 2, height / 2);
        return;
      }
      const kind = view.row.kinds[view.item];
      if (kind === 0) {
        pen.fillStyle = view.colors.ink; pen.font = "18px system-ui, sans-serif";
        pen.fillText(JSON.stringify(word(view.item)), width / 2, height / 2, width - 8);
        return;
      }
      const [step, row, column] = place(view.item), [steps, rows, columns] = extent(view.item), { frames } = view.shared;
      const picture = kind === 1 ? view.shared.image : frames[Math.floor(step * frames.length / steps)];
      const cell = Math.min(width / columns, (height - 4) / rows);
      const [w, h] = [columns * cell, rows * cell], scale = Math.max(w / picture.width, h / picture.height);
      const [cut, rest] = [w / scale, h / scale];  // the middle of the picture, as `ImageOps.fit` takes it
      pen.drawImage(picture, (picture.width - cut) / 2, (picture.height - rest) / 2, cut, rest, 0, 0, w, h);
      pen.strokeStyle = "#ffffffb0"; pen.lineWidth = 1;
      for (let i = 1; i < columns; i++) { pen.beginPath(); pen.moveTo(i * cell, 0); pen.lineTo(i * cell, h); pen.stroke(); }
      for (let i = 1; i < rows; i++) { pen.beginPath(); pen.moveTo(0, i * cell); pen.lineTo(w, i * cell); pen.stroke(); }
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 4;
      pen.strokeRect(column * cell + 2, row * cell + 2, cell - 4, cell - 4);
    },
  });

  view.readout(() => {
    const token = view.item, kind = view.row.kinds[token], [step, row, column] = place(token);
    const what = ["text " + JSON.stringify(word(token)), `image, row ${row}, column ${column}`,
      `video, step ${step} of ${extent(token)[0]}, row ${row}, column ${column}`][kind];
    const three = table => [0, 1, 2].map(axis => at(table, axis, token)).join(", ");
    const other = view.row.other && three(view.row.other) !== three(view.row.positions)
      ? `; ${view.option("convention")}: ${three(view.row.other)}` : "";
    return `token ${token}: ${what}\nt, h, w = ${three(view.row.positions)}${other}`;
  });
  return { count };
});
