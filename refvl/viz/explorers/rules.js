// An image in slices and a video, cut into tokens, and the rows and columns where four position rules put these.
import { explorer } from "./shared.js";

export default explorer(view => {
  const { image, frames, rules, says } = view.shared, GAP = 16, HEAD = 64, FOOT = 24, AXIS = 20;
  const wide = () => view.fit(1120) >= 840;
  const MAPS = () => view.fit(wide() ? 1120 : 700), PROMPT = () => view.fit(wide() ? 1120 : 520);

  // Every token of the media in the order of the prompt: its piece, where it lies on the image or frame, and how large.
  function tokens() {
    const { sizes, grid, frame } = view.row, found = [];
    sizes.forEach(([h, w], piece) => {
      const slice = piece - 1, [columns, rows] = piece ? grid : [1, 1];
      const left = piece ? (slice % columns) / columns : 0, top = piece ? Math.floor(slice / columns) / rows : 0;
      for (let r = 0; r < h; r++) for (let c = 0; c < w; c++)
        found.push({ piece, r, c, of: image, x: left + c / w / columns, y: top + r / h / rows, w: 1 / w / columns, h: 1 / h / rows });
    });
    const count = view.option("frames"), [h, w] = frame;
    for (let f = 0; f < count; f++) for (let r = 0; r < h; r++) for (let c = 0; c < w; c++)
      found.push({ piece: sizes.length + f, r, c, of: frames[f * frames.length / count], x: c / w, y: r / h, w: 1 / w, h: 1 / h });
    return found;
  }
  const called = piece => {
    const slices = view.row.sizes.length;
    return piece === 0 ? "overview" : piece < slices ? `slice ${piece - 1}` : `frame ${piece - slices}`;
  };
  const cut = (pen, { of, x, y, w, h }, left, top, width, height) =>
    pen.drawImage(of, x * of.width, y * of.height, w * of.width, h * of.height, left, top, width, height);
  function ring(pen, x, y, width, height) {
    for (const [color, line] of [["#000", 5], [view.colors.highlight, 3]]) {
      pen.strokeStyle = color; pen.lineWidth = line; pen.strokeRect(x - 1.5, y - 1.5, width + 3, height + 3);
    }
  }

  // the media: overview, slices, frames, each a box [left, top, width, height]
  function boxes() {
    const beside = wide(), width = beside ? Math.min(PROMPT() / 2, 520) - GAP : PROMPT(), { sizes, grid } = view.row;  // the video beside the image
    const count = view.option("frames"), found = [];
    const small = Math.round(width / 4), low = Math.round(small / 1.5);
    found.push([0, 22, small, low]);
    const left = small + GAP, large = width - left, high = Math.round(large / 1.5);
    const [columns, rows] = grid, gap = 5, w = (large - gap * (columns - 1)) / columns, h = (high - gap * (rows - 1)) / rows;
    for (let k = 0; k < columns * rows; k++) found.push([left + (k % columns) * (w + gap), 22 + Math.floor(k / columns) * (h + gap), w, h]);
    const room = beside ? PROMPT() - width - 2 * GAP : width, start = beside ? width + 2 * GAP : 0;
    const top = beside ? 22 : 22 + (columns ? high : low) + 30, each = Math.min((room - gap * (count - 1)) / count, beside ? 300 : 110);
    for (let f = 0; f < count; f++) found.push([start + f * (each + gap), top, each, each / 1.5]);
    return found;
  }
  const cell = ([left, top, width, height], { r, c }, [rows, columns]) =>
    [left + c * width / columns, top + r * height / rows, width / columns, height / rows];
  const extent = piece => view.row.sizes[piece] ?? view.row.frame;
  const tall = () => Math.max(...boxes().map(([, top, , height]) => top + height)) + 4;
  view.canvas({
    name: () => `the image in ${view.row.sizes.length} pieces, and ${view.option("frames")} frames`,
    caption: () => "The image and the video of the prompt, cut into tokens; choose one" + (view.option("pruned") === "half" ? ". Faded: pruned" : ""),
    size: () => [PROMPT(), tall()],
    at: (x, y) => tokens().findIndex(token => {
      const [left, top, width, height] = cell(boxes()[token.piece], token, extent(token.piece));
      return x >= left && x < left + width && y >= top && y < top + height;
    }),
    step(item, dx, dy) {
      const all = tokens(), { piece, r, c } = all[item], near = all.findIndex(o => o.piece === piece && o.r === r + dy && o.c === c + dx);
      return near >= 0 ? near : dx + dy > 0 ? all.findIndex(o => o.piece === piece + 1) : all.findLastIndex(o => o.piece === piece - 1);
    },
    draw(pen) {
      const all = tokens(), places = boxes();
      pen.font = "12px sans-serif"; pen.fillStyle = view.colors.muted; pen.textBaseline = "top";
      pen.fillText("overview", 0, 4);
      if (view.row.grid[0]) pen.fillText(`slices, ${view.row.grid.join(" x ")}`, places[1][0], 4);
      const [from, under] = places.at(-view.option("frames"));
      pen.fillText(`video, ${view.option("frames")} frames`, from, under - 18);
      all.forEach((token, i) => {
        const [x, y, w, h] = cell(places[token.piece], token, extent(token.piece));
        cut(pen, token, x, y, w, h);
        if (!view.row.kept[i]) view.fade(pen, x, y, w, h, 0.8);
        pen.strokeStyle = "#fff9"; pen.lineWidth = 1; pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
      });
      if (view.item >= 0) ring(pen, ...cell(places[all[view.item].piece], all[view.item], extent(all[view.item].piece)));
    },
  });

  // The four maps: w to the right, h down. Frames at one place lie on each other like cards, the later ones on top. Where a
  // slice lies on a token of the overview, a circle stands for that.
  const columns = () => (wide() ? 4 : MAPS() >= 330 ? 2 : 1), side = () => (MAPS() - GAP * (columns() - 1)) / columns() - AXIS;
  const at = (found, axis, i) => found.positions[axis * view.row.kept.length + i];
  const corner = k => [(k % columns()) * (side() + AXIS + GAP) + AXIS, Math.floor(k / columns()) * (side() + HEAD + FOOT)];
  const unit = found => side() / (found.end + 1.5);
  function cards(found) {  // [item, left, top, is covered] of every token that is kept, from the corner of its map
    const seen = {}, step = unit(found), pieces = view.row.sizes.length, all = tokens();
    const place = i => `${at(found, 1, i)} ${at(found, 2, i)}`;
    const slices = new Set(all.flatMap(({ piece }, i) => (piece && piece < pieces ? [place(i)] : [])));
    return all.map(({ piece }, i) => {
      if (!view.row.kept[i]) return null;
      const rank = piece < pieces ? 0 : (seen[place(i)] = (seen[place(i)] ?? -1) + 1);
      const [x, y] = [at(found, 2, i) + 0.25 + 0.35 * rank, at(found, 1, i) + 0.75 - 0.35 * rank];
      return [i, x * step, HEAD + y * step, piece === 0 && slices.has(place(i))];
    }).filter(Boolean);
  }
  view.canvas({
    name: () => rules.map((rule, k) => `${rule}: text continues at ${view.row.rules[k].end}`).join("; "),
    caption: () => "The same tokens at their positions h (down) and w (to the right). Gray: text, whose h and w are equal, so it runs down the diagonal. Circles: tokens of the overview that lie under slices. " +
      "Frames at the same positions are fanned out like cards",
    size: () => [MAPS(), Math.ceil(4 / columns()) * (side() + HEAD + FOOT)],
    at(x, y) {
      for (let k = 0; k < 4; k++) {
        const found = view.row.rules[k], [left, top] = corner(k), step = unit(found);
        const hit = cards(found).findLast(([, cx, cy]) => x - left >= cx && x - left < cx + step && y - top >= cy && y - top < cy + step);
        if (hit) return hit[0];
      }
      return -1;
    },
    draw(pen) {
      const all = tokens();
      view.row.rules.forEach((found, k) => {
        const [left, top] = corner(k), step = unit(found);
        pen.save(); pen.translate(left, top);
        pen.textBaseline = "top"; pen.textAlign = "left"; pen.fillStyle = view.colors.ink;
        pen.font = "bold 14px sans-serif"; pen.fillText(rules[k], -AXIS, 0);
        pen.font = "12px sans-serif"; pen.fillStyle = view.colors.muted;
        wrapped(pen, says[k], side() + AXIS).forEach((line, n) => pen.fillText(line, -AXIS, 17 + 13 * n));
        pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.strokeRect(0.5, HEAD + 0.5, side() - 1, side() - 1);
        pen.font = "12px sans-serif"; pen.fillStyle = view.colors.muted;
        const every = [5, 10, 20, 50].find(n => found.end / n <= 5) ?? 100;
        for (let n = every; n <= found.end; n += every) {
          pen.fillRect((n + 0.75) * step, HEAD - 4, 1, 4); pen.fillRect(-4, HEAD + (n + 1.25) * step, 4, 1);
          pen.textAlign = "center"; pen.textBaseline = "bottom"; pen.fillText(n, (n + 0.75) * step, HEAD - 4);
          pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillText(n, -5, HEAD + (n + 1.25) * step);
        }
        pen.textAlign = "left"; pen.textBaseline = "bottom"; pen.fillText("w →", 0, HEAD - 4);
        pen.textAlign = "right"; pen.textBaseline = "top"; pen.fillText("h ↓", -2, HEAD + 1);
        pen.fillStyle = view.colors.text;
        for (let i = 0; i < found.text.shape[1]; i++) {
          const [h, w] = [1, 2].map(axis => found.text[axis * found.text.shape[1] + i]);
          pen.beginPath(); pen.arc((w + 0.75) * step, HEAD + (h + 1.25) * step, Math.max(1.5, step / 5), 0, 7); pen.fill();
        }
        const laid = cards(found);
        for (let piece = 0; piece <= all.at(-1).piece; piece++) {
          const own = laid.filter(([i, , , covered]) => all[i].piece === piece && !covered);
          pen.fillStyle = piece < view.row.sizes.length ? view.colors.image : view.colors.video;
          for (const [, x, y] of own) pen.fillRect(x - 1.5, y - 1.5, step + 3, step + 3);
          for (const [i, x, y] of own) cut(pen, all[i], x, y, step, step);
        }
        for (const [, x, y] of laid.filter(([, , , covered]) => covered)) {
          for (const [color, line] of [["#000", 4], ["#fff", 2]]) {
            pen.strokeStyle = color; pen.lineWidth = line;
            pen.beginPath(); pen.arc(x + step / 2, y + step / 2, step / 4, 0, 7); pen.stroke();
          }
        }
        pen.fillStyle = view.colors.ink; pen.textAlign = "right"; pen.textBaseline = "top";
        pen.fillText(`${side() < 170 ? "next text" : "text continues at"} ${found.end}`, side(), HEAD + side() + 4);
        const chosen = laid.find(([i]) => i === view.item);
        if (chosen) {
          const [, x, y] = chosen, [h, w] = [at(found, 1, view.item), at(found, 2, view.item)];
          pen.strokeStyle = view.colors.highlight; pen.lineWidth = 1; pen.setLineDash([3, 3]);
          pen.beginPath(); pen.moveTo(x + step / 2, HEAD); pen.lineTo(x + step / 2, y); pen.moveTo(0, y + step / 2); pen.lineTo(x, y + step / 2); pen.stroke();
          pen.setLineDash([]);
          ring(pen, x, y, step, step);
          pen.fillStyle = view.colors.highlight_text; pen.textAlign = "left"; pen.font = "bold 12px sans-serif";
          pen.fillText(`h ${h}, w ${w}`, 3, HEAD + side() + 4);
        }
        pen.restore();
      });
    },
  });
  function wrapped(pen, text, width) {
    const lines = [""];
    for (const word of text.split(" ")) {
      const longer = `${lines.at(-1)} ${word}`.trim();
      if (pen.measureText(longer).width <= width) lines[lines.length - 1] = longer; else lines.push(word);
    }
    return lines;
  }

  view.readout(() => {
    const { piece, r, c } = tokens()[view.item];
    return `${called(piece)}, row ${r}, column ${c}${view.row.kept[view.item] ? "" : ": pruned, so it has no position"}`;
  }, () => {
    if (!view.row.kept[view.item]) return "";
    const where = view.row.rules.map((found, k) => `${rules[k]} (${[0, 1, 2].map(axis => at(found, axis, view.item)).join(", ")})`);
    return `t, h, w under each rule: ${where.join(", ")}. Rows, columns and positions are counted from 0`;
  });
  return { count: () => view.row.kept.length, walk: "token by token" };
});
