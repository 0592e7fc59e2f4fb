// The prompt and the image under a new token's attention, every layer and head at once, and a patch's attention in
// the tower with the borders of its windows.
import { explorer } from "./shared.js";

export default explorer(view => {
  const W = () => (view.fit(700) < 700 ? view.fit(342) : (view.fit(1100) - 48) / 3), BARS = () => (view.big ? 110 : 60), ROOF = 18;
  const asked = () => view.shared.questions[view.place("question")];
  const token = () => view.place("token"), merge = () => view.shared.merge;
  const cell = () => W() / Math.max(...asked().grid);
  const size = () => [asked().grid[1] * cell(), asked().grid[0] * cell()];
  const columns = () => asked().grid[1] / merge();
  const percent = share => `${Math.round(100 * share)} %`;
  const FULL = 65535, BYTE = 255;  // the resolution of shares of the prompt, and of a patch's attention
  const slice = (array, ...place) => {  // an array at `place` of its first axes
    const length = array.shape.slice(place.length).reduce((a, b) => a * b, 1);
    const start = place.reduce((sum, index, axis) => sum * array.shape[axis] + index, 0) * length;
    return array.subarray(start, start + length);
  };
  const language = (layer, head) => slice(asked().language, token(), layer, head).subarray(0, asked().length + token());
  const weights = () => language(view.place("layer"), view.place("head"));
  const picture = all => all.subarray(asked().span[0], asked().span[0] + asked().span[1]);
  const tower = patch => slice(asked().tower, view.place("block"), view.place("tower_head"), patch);
  const segments = () => slice(asked().segments, view.place("block"));
  const corner = patch => [asked().patches[2 * patch + 1] * cell(), asked().patches[2 * patch] * cell()];
  const token_of = patch => Math.floor(patch / merge() ** 2);  // rows are in merge-block order
  const named = control => (view.option(control) === "mean" ? "the average head" : `head ${view.option(control)}`);
  const windowed = () => segments().some(s => s !== segments()[0]);
  const sum = values => values.reduce((a, b) => a + b, 0);

  const found = new WeakMap();  // per question, the patch at each cell of the grid
  function patch_at(column, row) {
    const { patches, grid } = asked();
    if (!found.has(patches)) {
      const places = new Int32Array(grid[0] * grid[1]);
      for (let i = 0; i < places.length; i++) places[patches[2 * i] * grid[1] + patches[2 * i + 1]] = i;
      found.set(patches, places);
    }
    return column < 0 || row < 0 || column >= grid[1] || row >= grid[0] ? -1 : found.get(patches)[row * grid[1] + column];
  }
  const at = (x, y) => patch_at(Math.floor(x / cell()), Math.floor(y / cell()));
  const step = (item, dx, dy) => patch_at(asked().patches[2 * item + 1] + dx, asked().patches[2 * item] + dy);
  function dim(pen, key, x, y, side, part, most) {  // the cell with the most attention is not faded; colours stay true
    view.fade(pen, x, y, side, side, 0.85 * (1 - view.ease(key, part / Math.max(1, most))));
  }
  function label(pen, text, x, y) {
    pen.font = "bold 12px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.strokeStyle = view.colors.surface; pen.lineWidth = 3; pen.strokeText(text, x, y);
    pen.fillStyle = view.colors.ink; pen.fillText(text, x, y);
  }
  function frame(pen, patch, side, color) {
    const [x, y] = corner(patch);
    pen.strokeStyle = "#fff"; pen.lineWidth = 5; pen.strokeRect(x, y, side, side);
    pen.strokeStyle = color; pen.lineWidth = 2.5; pen.strokeRect(x, y, side, side);
  }

  view.column("1. From the answer to the image");
  view.canvas({
    name: () => `"${asked().prompt}" When the model chose "${asked().answer[token()]}" (${Math.round(100 * asked().chances[token()])} %), ` +
      `${named("head")} of layer ${view.option("layer")} gave ${percent(sum(picture(weights())) / FULL)} of its attention to the image. The less a token is faded, the more attention it gets`,
    size, at, step,
    draw(pen, width, height) {
      pen.drawImage(asked().photo, 0, 0, width, height);
      const looked = picture(weights()), most = Math.max(...looked), side = merge() * cell();
      looked.forEach((part, t) => dim(pen, `token ${t}`, (t % columns()) * side, Math.floor(t / columns()) * side, side, part, most));
      if (side >= 40) looked.forEach((part, t) =>
        label(pen, percent(part / FULL), (t % columns() + 0.5) * side, (Math.floor(t / columns()) + 0.5) * side));
      if (view.item >= 0) frame(pen, token_of(view.item) * merge() ** 2, side, view.colors.highlight);
    },
  });

  const seeing = { name: () => {
      return `Before there are tokens, patches attend to each other in the tower (the image encoder). Block ${view.option("block")} ` +
        `(${windowed() ? "windows" : "full attention"}), ${named("tower_head")}: ` +
        (view.item < 0 ? "point at a patch" : "the framed patch attends to the patches that are not faded") + (windowed() ? ". Thick lines: window borders" : "");
    },
    size, at, step,
    draw(pen, width, height) {
      pen.drawImage(asked().photo, 0, 0, width, height);
      const c = cell(), seen = view.item < 0 ? [] : tower(view.item), most = Math.max(...seen);
      seen.forEach((part, patch) => dim(pen, `patch ${patch}`, ...corner(patch), c, part, most));
      pen.beginPath(); pen.strokeStyle = view.colors.line; pen.lineWidth = 0.5;
      for (let x = c; x < width - 1; x += c) { pen.moveTo(x, 0); pen.lineTo(x, height); }
      for (let y = c; y < height - 1; y += c) { pen.moveTo(0, y); pen.lineTo(width, y); }
      pen.stroke();
      const windows = segments();
      for (const [color, thickness] of [["#000", 5], ["#fff", 3]]) {  // borders between windows
        pen.beginPath(); pen.strokeStyle = color; pen.lineWidth = thickness;
        windows.forEach((segment, patch) => {
          const [x, y] = corner(patch), right = step(patch, 1, 0), below = step(patch, 0, 1);
          if (right >= 0 && windows[right] !== segment) { pen.moveTo(x + c, y); pen.lineTo(x + c, y + c); }
          if (below >= 0 && windows[below] !== segment) { pen.moveTo(x, y + c); pen.lineTo(x + c, y + c); }
        });
        pen.stroke();
      }
      if (view.item >= 0) frame(pen, view.item, c, "#000");
    },
  };

  const LEFT = 46, TOP = 18, GAP = 4;
  const shape = () => asked().language.shape, small = () => (W() - LEFT) / shape()[2];
  view.column("2. All layers and heads");
  view.canvas({
    name: () => `The more an image token stands out, the more attention it gets when the model chooses "${asked().answer[token()]}". If nothing stands out in a map, the head attends to the text. Choose a map`,
    size: () => [W(), TOP + shape()[1] * small() * size()[1] / size()[0]],
    drag(x, y) {
      const head = Math.floor((x - LEFT) / small()), layer = Math.floor((y - TOP) / (small() * size()[1] / size()[0]));
      if (head < 0 || head >= shape()[2] || layer < 0 || layer >= shape()[1]) return;
      view.choose("layer", layer); view.choose("head", head);
    },
    draw(pen) {
      const high = small() * size()[1] / size()[0], rows = asked().grid[0] / merge();
      pen.fillStyle = view.colors.muted; pen.font = "11px sans-serif"; pen.textBaseline = "middle";
      for (let head = 0; head < shape()[2]; head++) {
        pen.textAlign = "center"; pen.fillStyle = view.colors.muted;
        pen.fillText(head ? head - 1 : "mean", LEFT + (head + 0.5) * small(), TOP / 2);
        for (let layer = 0; layer < shape()[1]; layer++) {
          const x = LEFT + head * small(), y = TOP + layer * high, looked = picture(language(layer, head));
          const wide = (small() - GAP) / columns(), tall = (high - GAP) / rows;
          pen.fillStyle = view.colors.empty; pen.fillRect(x, y, small() - GAP, high - GAP);
          looked.forEach((part, t) => {
            pen.globalAlpha = part / FULL; pen.fillStyle = view.colors.ink;
            pen.fillRect(x + (t % columns()) * wide, y + Math.floor(t / columns()) * tall, wide, tall);
          });
          pen.globalAlpha = 1;
          if (layer === view.place("layer") && head === view.place("head")) {
            pen.strokeStyle = view.colors.highlight; pen.lineWidth = 3; pen.strokeRect(x, y, small() - GAP, high - GAP);
          }
          if (!head) {
            pen.textAlign = "left"; pen.fillStyle = view.colors.muted;
            pen.fillText(`layer ${layer}`, 0, y + high / 2);
          }
        }
      }
    },
  });

  view.column("3. Before that: inside the image encoder (tower)");
  view.canvas(seeing);

  view.column();
  view.canvas({
    name: () => `attention over the whole prompt: ${asked().words.filter(Boolean).slice(0, asked().length).join(" ")}`,
    caption: () => "Attention over the whole prompt: text tokens and image tokens",
    size: () => [view.fit(3 * W() + 48), ROOF + BARS() + 84],
    draw(pen, width) {
      const all = weights(), wide = width / all.length, [first, count] = asked().span, most = Math.max(...all);
      all.forEach((part, i) => {
        const inside = i >= first && i < first + count;
        pen.fillStyle = view.item >= 0 && i === first + token_of(view.item) ? view.colors.highlight
          : view.colors[inside ? "image" : "text"];
        const high = view.ease(`bar ${i}`, BARS() * part / Math.max(1, most));
        pen.fillRect(i * wide + 1, ROOF + BARS() - high, Math.max(1, wide - 2), high);
        pen.fillRect(i * wide + 1, ROOF + BARS(), Math.max(1, wide - 2), 2);
        if (part === most) {
          const half = pen.measureText(percent(part / FULL)).width / 2 + 2;
          pen.fillStyle = view.colors.ink; pen.textAlign = "center"; pen.textBaseline = "top";
          pen.fillText(percent(part / FULL), Math.max(half, Math.min(width - half, (i + 0.5) * wide)), 0);
        }
        if (wide < 9) return;
        pen.save(); pen.translate((i + 0.5) * wide, ROOF + BARS() + 6); pen.rotate(Math.PI / 2);
        pen.font = "11px sans-serif"; pen.textAlign = "left"; pen.textBaseline = "middle";
        pen.fillStyle = view.colors.ink;
        pen.fillText(inside ? i - first : asked().words[i].replace(/^<\|(.*)\|>$/, "$1").slice(0, 12), 0, 0); pen.restore();
      });
    },
  });

  view.readout(() => {
    const t = token_of(view.item), [row, column] = asked().patches.slice(2 * view.item, 2 * view.item + 2);
    return `the patch in row ${row}, column ${column} is part of token ${t}, which gets ${percent(picture(weights())[t] / FULL)} of this head's attention`;
  }, () => {
    const seen = tower(view.item);
    const best = seen.indexOf(Math.max(...seen)), other = asked().patches.slice(2 * best, 2 * best + 2);
    const own = sum(seen.filter((_, i) => segments()[i] === segments()[view.item]));
    return `Block ${view.option("block")} of the tower: patch ${view.item} attends most to the patch in row ${other[0]}, column ${other[1]} (${percent(seen[best] / BYTE)})` +
      `${windowed() ? `; ${percent(Math.min(1, own / BYTE))} of its attention stays in its own window` : ""}. All numbers start at 0. The answer is "${asked().text}"`;
  });
  return {
    count: () => asked().patches.length / 2,
    read: () => {
      const all = slice(asked().tower, view.place("block"), view.place("tower_head"));
      return {
        question: view.place("question"), token: token(), layer: view.place("layer"), head: view.place("head"),
        weights: weights(), segments: segments(), tower: all,
      };
    },
  };
});
