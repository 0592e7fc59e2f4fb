// The image and the prompt under a new token's attention, every layer and head at once, and one patch through the tower:
// its attention in every block, with the borders of windows.
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
  const blocks = () => asked().tower.shape[0], tower = (block, patch) => slice(asked().tower, block, patch);
  const segments = block => slice(asked().segments, block), windowed = block => segments(block).some(s => s !== segments(block)[0]);
  const corner = (patch, c = cell()) => [asked().patches[2 * patch + 1] * c, asked().patches[2 * patch] * c];
  const token_of = patch => Math.floor(patch / merge() ** 2);  // rows are in merge-block order
  const named = control => (view.option(control) === "mean" ? "the average head" : `head ${view.option(control)}`);
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
  function frame(pen, [x, y], side, color) {
    pen.strokeStyle = "#fff"; pen.lineWidth = 5; pen.strokeRect(x, y, side, side);
    pen.strokeStyle = color; pen.lineWidth = 2.5; pen.strokeRect(x, y, side, side);
  }

  view.title(() => {
    const looked = picture(weights()), all = sum(looked) / FULL, most = Math.max(...looked) / FULL;
    return `To say "${asked().answer[token()]}", ${named("head")} of layer ${view.option("layer")} gives ` +
      (all < 0.1 ? `${percent(1 - all)} of its attention to the text` : `${percent(all)} of its attention to the image, ${percent(most)} to one token`);
  });
  view.column("1. From the answer to the image");
  view.canvas({
    name: () => `"${asked().prompt}" When the model chose "${asked().answer[token()]}" (${Math.round(100 * asked().chances[token()])} %), ` +
      `${named("head")} of layer ${view.option("layer")} gave ${percent(sum(picture(weights())) / FULL)} of its attention to the image. The less faded a token is, the more attention it gets`,
    size, at, step,
    draw(pen, width, height) {
      pen.drawImage(asked().photo, 0, 0, width, height);
      const looked = picture(weights()), most = Math.max(...looked), side = merge() * cell();
      looked.forEach((part, t) => dim(pen, `token ${t}`, (t % columns()) * side, Math.floor(t / columns()) * side, side, part, most));
      if (side >= 40) looked.forEach((part, t) =>
        label(pen, percent(part / FULL), (t % columns() + 0.5) * side, (Math.floor(t / columns()) + 0.5) * side));
      if (view.item >= 0) frame(pen, corner(token_of(view.item) * merge() ** 2), side, view.colors.highlight);
    },
  });

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

  // a patch in every block of the tower, two or four maps in a line
  const across = () => (blocks() > 4 ? 4 : 2), MAP = () => (W() - 14 * (across() - 1)) / across(), HEAD = 20;
  const tall = () => MAP() * size()[1] / size()[0] + HEAD + 8, tiny = () => cell() * MAP() / W();
  const spot = block => [(block % across()) * (MAP() + 14), Math.floor(block / across()) * tall() + HEAD];
  view.column("3. Before that: a patch in the encoder");
  view.canvas({
    name: () => `Before there are tokens, patches attend to each other in the ${blocks()} blocks of the encoder. The framed patch attends ` +
      "to the patches that are not faded, and never across a thick line, the border of a window. Choose a different patch",
    size: () => [W(), Math.ceil(blocks() / across()) * tall()],
    at: (x, y) => patch_at(Math.floor((x % (MAP() + 14)) / tiny()), Math.floor((y % tall() - HEAD) / tiny())),
    step,
    draw(pen) {
      const c = tiny(), lines = (color, thickness, add) => {
        pen.beginPath(); pen.strokeStyle = color; pen.lineWidth = thickness; add((x, y, dx, dy) => { pen.moveTo(x, y); pen.lineTo(x + dx, y + dy); }); pen.stroke();
      };
      for (let block = 0; block < blocks(); block++) {
        const windows = segments(block), seen = view.item < 0 ? [] : tower(block, view.item), most = Math.max(...seen);
        pen.save(); pen.translate(...spot(block));
        pen.fillStyle = view.colors.ink; pen.font = "12px sans-serif"; pen.textBaseline = "bottom"; pen.textAlign = "left";
        pen.fillText(`block ${block}: ${windowed(block) ? "windows" : "full"}`, 0, -4, MAP());
        pen.drawImage(asked().photo, 0, 0, MAP(), MAP() * size()[1] / size()[0]);
        seen.forEach((part, patch) => dim(pen, `patch ${block} ${patch}`, ...corner(patch, c), c + 0.5, part, most));
        for (const [color, thickness] of [["#000", 4], ["#fff", 2]]) lines(color, thickness, line => windows.forEach((segment, patch) => {
          const [x, y] = corner(patch, c), right = step(patch, 1, 0), below = step(patch, 0, 1);
          if (right >= 0 && windows[right] !== segment) line(x + c, y, 0, c);
          if (below >= 0 && windows[below] !== segment) line(x, y + c, c, 0);
        }));
        if (view.item >= 0) frame(pen, corner(view.item, c), c, "#000");
        pen.restore();
      }
    },
  });

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
    const best = Array.from({ length: blocks() }, (_, block) => {
      const seen = tower(block, view.item), most = Math.max(...seen), at = seen.indexOf(most);
      return `row ${asked().patches[2 * at]}, column ${asked().patches[2 * at + 1]} in block ${block} (${percent(most / BYTE)})`;
    });
    return `This patch attends most to the following patches: ${best.join("; ")}. All numbers start at 0. The answer is "${asked().text}"`;
  });
  return {
    count: () => asked().patches.length / 2,
    read: () => ({
      question: view.place("question"), token: token(), layer: view.place("layer"), head: view.place("head"),
      weights: weights(), segments: asked().segments, tower: asked().tower,
    }),
  };
});
