// A patch's pixels, the patches with similar states after every block, and the token that it becomes part of.
import { explorer } from "./shared.js";

export default explorer(view => {
  const W = () => (view.fit(700) < 700 ? view.fit(342) : Math.min(268, (view.fit(996) - TILE - 72) / 3)), TILE = 80, GAP = 14, TEXT = 18;
  const shown = () => view.shared.pictures[view.place("picture")];
  const merge = () => view.shared.merge, stage = () => view.place("stage");
  const stages = () => shown().near.shape[0], count = () => shown().patches.length / 2;
  const at_stage = (array, s) => array.subarray(s * array.length / stages(), (s + 1) * array.length / stages());
  const grid = () => shown().grid, unit = () => 1 / Math.max(...grid());
  const size = () => [W() * grid()[1] * unit(), W() * grid()[0] * unit()];
  const place = patch => [shown().patches[2 * patch + 1], shown().patches[2 * patch]];
  const token_of = patch => Math.floor(patch / merge() ** 2);  // rows are in merge-block order
  const near = (s, patch) => shown().near[s * count() + patch];
  const said = patch => `the patch in row ${place(patch)[1]}, column ${place(patch)[0]}`;

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
    pen.strokeStyle = "#fff"; pen.lineWidth = 5; pen.strokeRect(x, y, side, side);
    pen.strokeStyle = "#000"; pen.lineWidth = 2.5; pen.strokeRect(x, y, side, side);
  }
  function dim(pen, x, y, side, share) {  // the cell with the largest share is not faded
    view.fade(pen, x, y, side, side, 0.88 * (1 - share));
  }
  function lines(pen, wide, every, thickness) {
    pen.beginPath(); pen.strokeStyle = "#ffffffb0"; pen.lineWidth = thickness;
    for (let x = every; x < grid()[1] * wide * unit() - 1; x += every) { pen.moveTo(x, 0); pen.lineTo(x, grid()[0] * wide * unit()); }
    for (let y = every; y < grid()[0] * wide * unit() - 1; y += every) { pen.moveTo(0, y); pen.lineTo(grid()[1] * wide * unit(), y); }
    pen.stroke();
  }
  // the image, faded by how little each state after stage s resembles that of the chosen patch; windows apart
  function map(pen, s, left, top, wide, key) {
    const c = wide * unit(), alike = at_stage(shown().alike, s), segments = at_stage(shown().segments, s);
    pen.drawImage(shown().photo, left, top, wide * unit() * grid()[1], wide * unit() * grid()[0]);
    for (let i = 0; i < count(); i++) {
      const [column, row] = place(i), share = view.item < 0 ? 1 : Math.sqrt(alike[view.item * count() + i] / 255);
      dim(pen, left + column * c, top + row * c, c + 0.5, view.ease(`${key} ${i}`, share));
    }
    pen.beginPath();
    for (let i = 0; i < count(); i++) {
      const [column, row] = place(i), x = left + column * c, y = top + row * c, right = step(i, 1, 0), below = step(i, 0, 1);
      if (right >= 0 && segments[right] !== segments[i]) { pen.moveTo(x + c, y); pen.lineTo(x + c, y + c); }
      if (below >= 0 && segments[below] !== segments[i]) { pen.moveTo(x, y + c); pen.lineTo(x + c, y + c); }
    }
    for (const [color, thickness] of [["#000", 5], ["#fff", 3]]) {
      pen.strokeStyle = color; pen.lineWidth = wide > 150 ? thickness : thickness - 1.5; pen.stroke();
    }
    if (view.item >= 0) { const [column, row] = place(view.item); frame(pen, left + column * c, top + row * c, c); }
  }

  view.canvas({
    name: () => `1. The image in ${count()} patches of ${shown().pixels.shape[2]} x ${shown().pixels.shape[2]} px; choose one`,
    size, at, step,
    draw(pen, width, height) {
      const c = W() * unit();
      pen.drawImage(shown().photo, 0, 0, width, height);
      lines(pen, W(), c, 0.5); lines(pen, W(), merge() * c, 1.5);
      if (view.item >= 0) frame(pen, place(view.item)[0] * c, place(view.item)[1] * c, c);
    },
  });

  const upright = () => view.fit(700) >= 700;  // red, green and blue one below the other
  view.canvas({
    name: () => `2. The ${shown().values} pixel values of the patch`,
    size: () => (upright() ? [TILE, 3 * TILE + 2 * GAP] : [3 * TILE + 2 * GAP, TILE]),
    draw(pen) {
      if (view.item < 0) return;
      const side = shown().pixels.shape[2], dot = TILE / side;
      for (let channel = 0; channel < 3; channel++) for (let i = 0; i < side * side; i++) {
        const value = shown().pixels[(view.item * 3 + channel) * side * side + i], black = [0, 0, 0], along = channel * (TILE + GAP);
        black[channel] = value;
        pen.fillStyle = `rgb(${black.join(" ")})`;
        pen.fillRect((upright() ? 0 : along) + (i % side) * dot, (upright() ? along : 0) + Math.floor(i / side) * dot, dot + 0.3, dot + 0.3);
      }
    },
  });

  view.canvas({
    name: () => `3. After ${view.option("stage")}: the less a patch is faded, the more similar its state is to that of the chosen patch`,
    size, at, step,
    draw(pen) { map(pen, stage(), 0, 0, W(), "large"); },
  });

  view.canvas({
    name: () => `4. The tokens, each made of ${merge() ** 2} patches: the less a token is faded, the more the answer "${shown().word}" attends to it`,
    size, at, step,
    draw(pen, width, height) {
      const c = W() * unit() * merge(), columns = grid()[1] / merge(), { looked } = shown(), most = Math.max(...looked);
      pen.drawImage(shown().photo, 0, 0, width, height);
      looked.forEach((share, t) => dim(pen, (t % columns) * c, Math.floor(t / columns) * c, c + 0.5, share / most));
      lines(pen, W(), c, 1.5);
      pen.font = "bold 12px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
      if (c >= 40) looked.forEach((share, t) => {
        const x = (t % columns + 0.5) * c, y = (Math.floor(t / columns) + 0.5) * c, text = `${Math.round(share / 655.35)} %`;
        pen.strokeStyle = view.colors.surface; pen.lineWidth = 3; pen.strokeText(text, x, y); pen.fillStyle = view.colors.ink; pen.fillText(text, x, y);
      });
      if (view.item < 0) return;
      const t = token_of(view.item);
      frame(pen, (t % columns) * c + 2, Math.floor(t / columns) * c + 2, c - 4);
    },
  });

  const WIDE = () => Math.min(view.fit(996), 3 * W() + (upright() ? TILE + 72 : 48)), small = () => Math.min(120, (WIDE() - GAP * (stages() - 1)) / stages());
  const apart = () => (WIDE() - small()) / (stages() - 1);
  view.canvas({
    name: () => "every block: the same maps, and the similarity of the chosen patch to the rest of its token",
    caption: () => "Map 3 after every block; drag to choose a block. Lines: the mean similarity of the chosen patch to the other three patches of its token (orange) and to all other patches (gray). " +
      `1: alike; 0: unrelated; below 0: opposed. For ${shown().closer} of the ${count()} patches, the orange line gains on the gray one`,
    size: () => [WIDE(), TEXT + small() * size()[1] / W() + (view.big ? 190 : 120)],
    drag: x => view.choose("stage", Math.max(0, Math.min(stages() - 1, Math.round((x - small() / 2) / apart())))),
    draw(pen, width, height) {
      const top = TEXT, bottom = height - 22, roof = top + small() * size()[1] / W() + 30;
      const of = (which, s) => shown()[which][s * count() + Math.max(0, view.item)], LINES = [["far", "line"], ["near", "highlight"]];
      const all = LINES.flatMap(([which]) => Array.from({ length: stages() }, (_, s) => of(which, s))), low = Math.min(...all), high = Math.max(...all);
      const y = value => bottom - (value - low) / (high - low || 1) * (bottom - roof), x = s => s * apart() + small() / 2;
      pen.font = "12px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
      for (let s = 0; s < stages(); s++) {
        map(pen, s, x(s) - small() / 2, top, small(), `small ${s}`);
        pen.fillStyle = view.colors[s === stage() ? "ink" : "muted"];
        pen.fillText(s ? `block ${s - 1}` : "patches", x(s), TEXT / 2 - 1);
      }
      pen.strokeStyle = view.colors.highlight; pen.lineWidth = 3;
      pen.strokeRect(view.ease("frame", x(stage())) - small() / 2, top, small(), small() * size()[1] / W());
      if (view.item < 0) return;
      const ways = LINES.map(([which]) => Array.from({ length: stages() }, (_, s) => [x(s), view.ease(`${which} ${s}`, y(of(which, s)))]));
      pen.fillStyle = view.colors.empty; pen.beginPath();  // what lies between the lines grows
      [...ways[0], ...ways[1].toReversed()].forEach(([px, py]) => pen.lineTo(px, py)); pen.fill();
      for (const [which, color] of LINES) {
        pen.strokeStyle = view.colors[color]; pen.lineWidth = 3; pen.beginPath();
        ways[LINES.findIndex(([name]) => name === which)].forEach(([px, py]) => pen.lineTo(px, py));
        pen.stroke();
      }
      pen.textAlign = "left"; pen.font = "bold 12px sans-serif"; pen.strokeStyle = view.colors.surface; pen.lineWidth = 4;
      if (apart() > 180) [["near", "highlight_text", "the rest of its token"], ["far", "muted", "all other patches"]].forEach(([which, color, words]) => {
        const last = stages() - 1, above = of("near", last) > of("far", last) === (which === "near");
        const high = (y(of(which, last - 1)) + y(of(which, last))) / 2 + (above ? -14 : 14), from = x(last - 1) + 24;
        pen.fillStyle = view.colors[color]; pen.strokeText(words, from, high); pen.fillText(words, from, high);
      });
      pen.font = "12px sans-serif"; pen.textAlign = "center"; pen.fillStyle = view.colors.ink;
      for (let s = 0; s < stages(); s++) for (const [which] of LINES) {
        const other = of(which === "near" ? "far" : "near", s), above = of(which, s) > other || (of(which, s) === other && which === "near");
        pen.textBaseline = above ? "bottom" : "top";
        const text = of(which, s).toFixed(2), high = y(of(which, s)) + (above ? -6 : 6);
        pen.strokeText(text, x(s), high); pen.fillText(text, x(s), high);
      }
    },
  });

  view.readout(() => `${said(view.item)}: after ${view.option("stage")}, its similarity to the rest of its token is ${near(stage(), view.item).toFixed(2)}`, () => {
    const t = token_of(view.item), s = stage();
    const inside = at_stage(shown().segments, s), own = inside.filter(n => n === inside[view.item]).length;
    return `${said(view.item)}: ${s ? `${view.option("stage")} lets it attend to ${own} of ${count()} patches` : "no block has run yet, so it depends on its own pixels only"}. ` +
      `With ${merge() ** 2 - 1} other patches, it becomes token ${shown().offset + t} of the prompt, which gets ` +
      `${Math.round(shown().looked[t] / 655.35)} % of the last layer's attention when the model says "${shown().word}".`;
  });
  return {
    count,
    read: () => ({
      picture: view.place("picture"), stage: stage(), alike: at_stage(shown().alike, stage()),
      near: at_stage(shown().near, stage()), far: at_stage(shown().far, stage()), segments: at_stage(shown().segments, stage()),
    }),
  };
});
