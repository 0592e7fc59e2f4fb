// A prompt's tokens and their three positions, the content of a token, and optionally another convention, dashed.
import { explorer } from "./shared.js";

export default explorer(view => {
  const PANEL = 300, HEIGHT = () => (view.big ? 540 : 280), LEFT = 34, BOTTOM = 34, TOP = 8, AXES = ["t", "h", "w"];
  const WIDTH = () => (view.fit(900) < 700 ? view.fit(700) : view.fit(1120) - PANEL - 24);
  const count = () => view.row.kinds.length;
  const kinds = ["text", "image", "video"], widths = [5.5, 3.2, 1.5];
  const highest = () => Math.max(...view.row.positions, ...(view.row.other ?? []));
  const many = () => view.ease("count", count()), top = () => view.ease("highest", highest() + 1);
  const x = token => LEFT + (token + 0.5) * (WIDTH() - LEFT) / many();
  const y = position => HEIGHT() - BOTTOM - position * (HEIGHT() - BOTTOM - TOP) / top();
  const at = (table, axis, token) => table[axis * count() + token];
  const place = token => Array.from(view.row.places.slice(3 * token, 3 * token + 3));
  const extent = token => Array.from(view.row.extents.slice(3 * token, 3 * token + 3));
  const word = token => view.shared.words[view.row.words[token]];

  const words = axis => view.colors[`${axis}_text`] ?? view.colors[axis];

  view.title(() => view.row.other
    ? `Solid: ${view.option("family")} gives the next text token, number ${count()}, position ${count() + view.row.delta}. Dashed: the other rule gives it position ${count() + view.row.other_delta}`
    : `The prompt has ${count()} tokens, but the next text is at position ${count() + view.row.delta}: the tokens of an image share positions`);

  // the lines up to the token `until`: the part that the model has read so far
  function line(pen, table, axis, until) {
    const half = (WIDTH() - LEFT) / many() / 2;
    pen.beginPath();
    for (let token = 0; token < until; token++) {
      const height = y(table === view.row.other ? at(table, axis, token) : view.ease(`${axis} ${token}`, at(table, axis, token)));
      pen.lineTo(x(token) - half, height); pen.lineTo(x(token) + half, height);
    }
    pen.stroke();
  }
  view.canvas({
    name: () => `t, h, w of ${count()} prompt tokens: delta ${view.row.delta}` +
      (view.row.other ? `; dashed, ${view.option("convention")}: delta ${view.row.other_delta}` : ""),
    caption: () => `The prompt runs from left to right, and the positions of its ${count()} tokens run upward. Faded: not yet read. Tokens, positions, rows and columns are counted from 0` +
      (view.item >= 0 && view.item < count() - 1 ? "" : `. The next token, number ${count()}, is text at position ${count() + view.row.delta}: delta is ${count() + view.row.delta} - ${count()} = ${view.row.delta}`) +
      (view.row.other ? `. Dashed, ${view.option("convention")}: delta ${view.row.other_delta}` : ""),
    size: () => [WIDTH(), HEIGHT()],
    at: px => Math.floor((px - LEFT) * count() / (WIDTH() - LEFT)),
    step: (item, dx, dy) => item + dx - 10 * dy,
    draw(pen, width) {
      const step = (width - LEFT) / many(), read = view.item < 0 ? count() : view.item + 1;
      pen.textBaseline = "top"; pen.textAlign = "center"; pen.font = "bold 12px sans-serif";
      for (let token = 0, first = 0; token < count(); token++) {
        pen.fillStyle = view.colors[kinds[view.row.kinds[token]]]; pen.globalAlpha = token < read ? 1 : 0.3;
        pen.fillRect(x(token) - step / 2, HEIGHT() - BOTTOM + 2, step + 0.5, 12);
        pen.globalAlpha = 1;
        if (token + 1 < count() && view.row.kinds[token + 1] === view.row.kinds[token]) continue;
        const name = kinds[view.row.kinds[token]];
        pen.fillStyle = view.colors.ink;
        if ((token + 1 - first) * step > pen.measureText(name).width + 4) pen.fillText(name, (x(first) + x(token)) / 2, HEIGHT() - 16);
        first = token + 1;
      }
      pen.font = "12px sans-serif";
      pen.fillStyle = view.colors.muted; pen.textAlign = "right"; pen.textBaseline = "middle";
      const tick = 10 ** Math.floor(Math.log10(highest() + 1)) / (highest() < 30 ? 2 : 1);
      for (let position = 0; position <= highest(); position += tick) pen.fillText(position, LEFT - 6, y(position));
      for (const [until, alpha] of [[count(), 0.25], [read, 1]]) AXES.forEach((axis, i) => {
        pen.globalAlpha = alpha; pen.strokeStyle = view.colors[axis]; pen.lineWidth = widths[i];
        line(pen, view.row.positions, i, until);
      });
      pen.globalAlpha = 1;
      if (view.row.other) {
        pen.strokeStyle = view.colors.ink; pen.lineWidth = 1.2; pen.setLineDash([4, 3]);
        AXES.forEach((_, i) => line(pen, view.row.other, i, count()));
        pen.setLineDash([]);
      }
      pen.textAlign = "left"; pen.textBaseline = "top"; pen.font = "bold 12px sans-serif";
      AXES.forEach((axis, i) => {
        const [left, top] = [width - 90, HEIGHT() - BOTTOM - 62 + 18 * i];  // later tokens have later positions, so it is free
        pen.fillStyle = view.colors[axis]; pen.fillRect(left, top + 6, 18, widths[i]);
        pen.fillStyle = words(axis); pen.fillText(["t: time", "h: height", "w: width"][i], left + 24, top);
      });
      if (view.item < 0) return;
      pen.fillStyle = view.colors.ink;
      pen.fillRect(x(view.item) - 1, TOP, 2, HEIGHT() - TOP - BOTTOM + 14);
      AXES.forEach((axis, i) => {
        pen.fillStyle = view.colors[axis]; pen.strokeStyle = view.colors.surface; pen.lineWidth = 2; pen.beginPath();
        pen.arc(x(view.item), y(at(view.row.positions, i, view.item)), 9 - 2.5 * i, 0, 7); pen.fill(); pen.stroke();
      });
    },
  });

  // the image or frame of a token's media item, the size of a cell, and the token at each cell
  function medium(width, height) {
    const kind = view.row.kinds[view.item], [step] = place(view.item), [steps, rows, columns] = extent(view.item);
    const { frames } = view.shared, picture = kind === 1 ? view.shared.image : frames[Math.floor(step * frames.length / steps)];
    return { kind, step, rows, columns, picture, cell: Math.min(width / columns, height / rows) };
  }
  function token_at(row, column) {
    const { kind, step } = medium(1, 1);
    for (let token = 0; token < count(); token++) {
      const [s, r, c] = place(token);
      if (view.row.kinds[token] === kind && s === step && r === row && c === column) return token;
    }
    return -1;
  }
  const SHOWN = () => (view.big ? 260 : 176);
  view.canvas({
    name: () => "the content of the chosen token, and its position",
    size: () => [view.fit(PANEL), SHOWN() + 84],
    at(px, py) {
      if (view.item < 0 || !view.row.kinds[view.item]) return view.item;
      const { cell, rows, columns } = medium(view.fit(PANEL), SHOWN()), row = Math.floor(py / cell), column = Math.floor(px / cell);
      return row < rows && column < columns ? token_at(row, column) : view.item;
    },
    draw(pen, width) {
      pen.textAlign = "center"; pen.textBaseline = "middle";
      if (view.item < 0) {
        pen.fillStyle = view.colors.muted; pen.fillText("point at a token", width / 2, SHOWN() / 2);
        return;
      }
      const [, row, column] = place(view.item), { kind, rows, columns, picture, cell } = medium(width, SHOWN());
      if (kind === 0) {
        pen.fillStyle = view.colors.ink; pen.font = "22px sans-serif";
        pen.fillText(JSON.stringify(word(view.item)), width / 2, SHOWN() / 2, width - 8);
      } else {
        const [w, h] = [columns * cell, rows * cell], scale = Math.max(w / picture.width, h / picture.height);
        const [cut, rest] = [w / scale, h / scale];  // the middle of the image, as in `ImageOps.fit`
        pen.drawImage(picture, (picture.width - cut) / 2, (picture.height - rest) / 2, cut, rest, 0, 0, w, h);
        pen.strokeStyle = "#ffffffb0"; pen.lineWidth = 1;
        for (let i = 1; i < columns; i++) { pen.beginPath(); pen.moveTo(i * cell, 0); pen.lineTo(i * cell, h); pen.stroke(); }
        for (let i = 1; i < rows; i++) { pen.beginPath(); pen.moveTo(0, i * cell); pen.lineTo(w, i * cell); pen.stroke(); }
        for (const [color, thickness] of [["#000", 6], ["#fff", 3]]) {
          pen.strokeStyle = color; pen.lineWidth = thickness; pen.strokeRect(column * cell + 3, row * cell + 3, cell - 6, cell - 6);
        }
      }
      pen.textAlign = "left"; pen.textBaseline = "alphabetic";
      const three = AXES.map((_, axis) => at(view.row.positions, axis, view.item)), start = three[1] - row;
      const why = kind === 0 ? ["text: previous + 1", "same as t", "same as t"]
        : [kind === 1 ? `start ${start}` : `start ${start} + time ${three[0] - start}`, `start ${start} + row ${row}`, `start ${start} + column ${column}`];
      AXES.forEach((axis, i) => {
        const py = SHOWN() + 26 + 26 * i;
        pen.fillStyle = words(axis); pen.font = "bold 20px sans-serif"; pen.fillText(`${axis} ${three[i]}`, 0, py);
        pen.fillStyle = view.colors.ink; pen.font = "14px sans-serif"; pen.fillText(why[i], 84, py);
      });
    },
  });

  view.readout(() => {
    const token = view.item, kind = view.row.kinds[token], [step, row, column] = place(token);
    const what = ["text " + JSON.stringify(word(token)), `image, row ${row}, column ${column}`,
      `video, step ${step} of ${extent(token)[0]}, row ${row}, column ${column}`][kind];
    const three = table => [0, 1, 2].map(axis => at(table, axis, token)).join(", ");
    const other = view.row.other && three(view.row.other) !== three(view.row.positions)
      ? `; ${view.option("convention")}: ${three(view.row.other)}` : "";
    return `token ${token}: ${what}${other ? `; t, h, w = ${three(view.row.positions)}${other}` : ""}`;
  });
  return { count, walk: "token by token" };
});
