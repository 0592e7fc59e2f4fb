// A patch's pixels, its colour and norm after every block, and the token that its merge block becomes.
import { explorer } from "./shared.js";

export default explorer(view => {
  const W = () => (view.fit(700) < 700 ? view.fit(342) : 300), TILE = 76, GAP = 8, TEXT = 18;
  const shown = () => view.shared.pictures[view.place("picture")];
  const merge = () => view.shared.merge, stage = () => view.place("stage");
  const stages = () => shown().colors.shape[0], count = () => shown().patches.length / 2;
  const at_stage = (array, s) => array.subarray(s * array.length / stages(), (s + 1) * array.length / stages());
  const grid = () => shown().grid, unit = () => 1 / Math.max(...grid());
  const size = () => [W() * grid()[1] * unit(), W() * grid()[0] * unit()];
  const place = patch => [shown().patches[2 * patch + 1], shown().patches[2 * patch]];
  const token_of = patch => Math.floor(patch / merge() ** 2);  // rows are in merge-block order
  const rgb = (colors, i) => `rgb(${colors[3 * i]} ${colors[3 * i + 1]} ${colors[3 * i + 2]})`;
  const norm = (s, patch) => shown().norms[s * count() + patch];

  const found = new WeakMap();  // per image, the patch at each cell of the grid
  function patch_at(column, row) {
    const { patches, grid } = shown();
    if (!found.has(patches)) {
      const places = new Int32Array(grid[0] * grid[1]);
      for (let i = 0; i < places.length; i++) places[patches[2 * i] * grid[1] + patches[2 * i + 1]] = i;
      found.set(patches, places);
    }
    return column < 0 || row < 0 || column >= grid[1] || row >= grid[0] ? -1 : found.get(patches)[row * grid[1] + column];
  }
  const at = (x, y) => patch_at(Math.floor(x / (W() * unit())), Math.floor(y / (W() * unit())));
  const step = (item, dx, dy) => patch_at(place(item)[0] + dx, place(item)[1] + dy);
  function frame(pen, x, y, side) {
    pen.strokeStyle = "#000"; pen.lineWidth = 5; pen.strokeRect(x, y, side, side);
    pen.strokeStyle = "#fff"; pen.lineWidth = 2; pen.strokeRect(x, y, side, side);
  }
  // the colours of all patches after stage s, `wide` pixels across, with the selected patch framed and windows
  // separated
  function map(pen, s, left, top, wide) {
    const c = wide * unit(), colors = at_stage(shown().colors, s), segments = at_stage(shown().segments, s);
    for (let i = 0; i < count(); i++) {
      const [column, row] = place(i);
      pen.fillStyle = rgb(colors, i); pen.fillRect(left + column * c, top + row * c, c + 0.5, c + 0.5);
    }
    pen.beginPath(); pen.strokeStyle = view.colors.surface; pen.lineWidth = wide > 150 ? 4 : 2;
    for (let i = 0; i < count(); i++) {
      const [column, row] = place(i), x = left + column * c, y = top + row * c, right = step(i, 1, 0), below = step(i, 0, 1);
      if (right >= 0 && segments[right] !== segments[i]) { pen.moveTo(x + c, y); pen.lineTo(x + c, y + c); }
      if (below >= 0 && segments[below] !== segments[i]) { pen.moveTo(x, y + c); pen.lineTo(x + c, y + c); }
    }
    pen.stroke();
    if (view.item >= 0) { const [column, row] = place(view.item); frame(pen, left + column * c, top + row * c, c); }
  }

  view.canvas({
    name: () => `1. the image in ${count()} patches; "${shown().prompt}" ${shown().answer}`,
    size, at, step,
    draw(pen, width, height) {
      pen.drawImage(shown().photo, 0, 0, width, height);
      const c = W() * unit(), m = merge();
      for (const [every, thickness] of [[c, 0.4], [m * c, 1.5]]) {
        pen.beginPath(); pen.strokeStyle = "#ffffffb0"; pen.lineWidth = thickness;
        for (let x = every; x < width - 1; x += every) { pen.moveTo(x, 0); pen.lineTo(x, height); }
        for (let y = every; y < height - 1; y += every) { pen.moveTo(0, y); pen.lineTo(width, y); }
        pen.stroke();
      }
      if (view.item < 0) return;
      const [column, row] = place(view.item);
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 3;
      pen.strokeRect((column - column % m) * c, (row - row % m) * c, m * c, m * c);
      frame(pen, column * c, row * c, c);
    },
  });

  view.canvas({
    name: () => view.item < 0 ? "2. a patch's pixels: point at a patch"
      : `2. patch ${view.item} as red, green and blue: row ${view.item} of the input, ${shown().values} numbers`,
    size: () => [3 * TILE + 2 * GAP, TILE],
    draw(pen) {
      if (view.item < 0) return;
      const side = shown().pixels.shape[2], dot = TILE / side;
      for (let channel = 0; channel < 3; channel++) for (let i = 0; i < side * side; i++) {
        const value = shown().pixels[(view.item * 3 + channel) * side * side + i], black = [0, 0, 0];
        black[channel] = value;
        pen.fillStyle = `rgb(${black.join(" ")})`;
        pen.fillRect(channel * (TILE + GAP) + (i % side) * dot, Math.floor(i / side) * dot, dot + 0.3, dot + 0.3);
      }
    },
  });

  view.canvas({
    name: () => `3. all patches after ${view.option("stage")}: colours are directions of their states`,
    size, at, step,
    draw(pen) { map(pen, stage(), 0, 0, W()); },
  });

  const small = () => (view.fit(2 * W()) - GAP * (stages() - 1)) / stages();
  view.canvas({
    name: () => "every state, from the patch embedding to the last block; below, the norm of each patch's state",
    size: () => [view.fit(2 * W()), TEXT + small() * size()[1] / W() + 110],
    drag: x => view.choose("stage", Math.max(0, Math.min(stages() - 1, Math.floor(x / (small() + GAP))))),
    draw(pen, width, height) {
      const top = TEXT, bottom = height - 8, roof = top + small() * size()[1] / W() + 14;
      const most = Math.max(...shown().norms), high = value => bottom - value / most * (bottom - roof);
      const middle = s => s * (small() + GAP) + small() / 2;
      const line = patch => {
        pen.beginPath();
        for (let s = 0; s < stages(); s++) pen.lineTo(middle(s), high(norm(s, patch)));
        pen.stroke();
      };
      pen.font = "11px system-ui, sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
      for (let s = 0; s < stages(); s++) {
        map(pen, s, s * (small() + GAP), top, small());
        pen.fillStyle = view.colors[s === stage() ? "ink" : "muted"];
        pen.fillText(s ? `block ${s - 1}` : "patches", middle(s), TEXT / 2);
      }
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 3;
      pen.strokeRect(stage() * (small() + GAP), top, small(), small() * size()[1] / W());
      pen.strokeStyle = view.colors.line; pen.lineWidth = 0.5;
      for (let patch = 0; patch < count(); patch++) line(patch);
      if (view.item < 0) return;
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 3; line(view.item);
      pen.fillStyle = view.colors.ink; pen.textBaseline = "bottom";
      for (let s = 0; s < stages(); s++) pen.fillText(norm(s, view.item).toFixed(1), middle(s), high(norm(s, view.item)) - 5);
    },
  });

  view.canvas({
    name: () => "4. the merger: each merge block becomes one token; a longer bar means more attention from the answer",
    size: () => [W(), size()[1] * 0.6 + TEXT],
    at: (x, y) => at(x / 0.6, y / 0.6),
    draw(pen) {
      const c = 0.6 * W() * unit() * merge(), columns = grid()[1] / merge(), { tokens, looked } = shown();
      looked.forEach((byte, t) => {
        const x = (t % columns) * c, y = Math.floor(t / columns) * c;
        pen.fillStyle = rgb(tokens, t); pen.fillRect(x, y, c - 2, c - 2);
        if (view.item >= 0 && t === token_of(view.item)) frame(pen, x + 2, y + 2, c - 6);
      });
      const left = 0.6 * size()[0] + GAP, wide = W() - left, most = Math.max(...looked), tall = 0.6 * size()[1] / looked.length;
      looked.forEach((byte, t) => {
        pen.fillStyle = view.colors[view.item >= 0 && t === token_of(view.item) ? "highlight" : "image"];
        pen.fillRect(left, t * tall + 1, Math.max(1, wide * byte / most), tall - 2);
      });
      pen.fillStyle = view.colors.muted; pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "left"; pen.textBaseline = "top";
      pen.fillText(`attention of "${shown().word.slice(0, 6)}"`, left, 0.6 * size()[1] + 3);
    },
  });

  view.readout(() => {
    const t = token_of(view.item), [column, row] = place(view.item), s = stage();
    const inside = at_stage(shown().segments, s), own = inside.filter(n => n === inside[view.item]).length;
    return `patch ${view.item} at (${row}, ${column}); after ${view.option("stage")} the norm of its state is ` +
      `${norm(s, view.item).toFixed(2)}${s ? `, and it attended to ${own} of ${count()} patches in that block` : ""}\n` +
      `with ${merge() ** 2 - 1} others it becomes token ${t} of the image, token ${shown().offset + t} of the prompt, which gets ` +
      `${Math.round(shown().looked[t] / 655.35)} % of the last layer's attention when "${shown().word}" is chosen`;
  });
  return {
    count,
    read: () => ({
      picture: view.place("picture"), stage: stage(), colors: at_stage(shown().colors, stage()),
      norms: at_stage(shown().norms, stage()), segments: at_stage(shown().segments, stage()),
    }),
  };
});
