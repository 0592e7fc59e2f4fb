// Arrivals above, one bar per replay below: which images share it, and how much of it is padding.
import { explorer } from "./shared.js";

export default explorer(view => {
  const ROW = () => (view.big ? 56 : 26), SIDE = () => (view.big ? 84 : 52), TEXT = 250;
  const narrow = () => view.fit(700) < 700, W = () => (narrow() ? view.fit(700) : view.fit(1120) - TEXT);
  const LINE = () => ROW() + (narrow() ? 24 : view.big ? 12 : 6);  // on a phone, the text of a replay is below its bar
  const tokens = () => view.row.tokens;
  const largest = () => view.shared.largest[view.place("arrivals")];
  const scale = () => W() / Math.max(view.shared.widest, largest());
  const color = i => view.colors.sequence(i / Math.max(1, view.shared.most - 1));
  const replayOf = item => view.row.replays.findIndex(r => r.items.includes(item));
  const percent = share => `${Math.round(100 * share)} %`, several = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;

  // [left, top, width] of every item in the bars below
  const places = () => view.row.replays.flatMap((replay, line) => {
    let left = 0;
    return replay.items.map(item => {
      const box = { item, x: left * scale(), y: line * LINE(), width: tokens()[item] * scale() };
      left += tokens()[item];
      return box;
    });
  });

  function item(pen, i, x, y, width, height) {
    pen.fillStyle = color(i);
    pen.fillRect(x, y, width, height);
    const chosen = i === view.item;
    pen.strokeStyle = chosen ? view.colors.highlight : view.colors.surface;
    pen.lineWidth = chosen ? 4 : 1;
    pen.strokeRect(x + pen.lineWidth / 2, y + pen.lineWidth / 2, Math.max(1, width - pen.lineWidth), height - pen.lineWidth);
    if (width < 16) return;
    pen.font = "bold 12px sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.strokeStyle = "#000"; pen.lineWidth = 3; pen.strokeText(i + 1, x + width / 2, y + height / 2);
    pen.fillStyle = "#fff"; pen.fillText(i + 1, x + width / 2, y + height / 2);
  }

  function hatch(pen, x, y, width, height) {
    pen.save();
    pen.beginPath(); pen.rect(x, y, width, height); pen.clip();
    pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.beginPath();
    for (let k = -height; k < width; k += 7) { pen.moveTo(x + k, y + height); pen.lineTo(x + k + height, y); }
    pen.stroke(); pen.restore();
  }

  view.title(() => {
    const replays = view.row.replays.filter(r => r.budget).length, eager = view.row.replays.length - replays;
    return `${several(tokens().length, "image")} share ${several(replays, "replay")}${eager ? `, and ${eager} ran without a graph` : ""}; ${percent(view.row.wastes[view.row.budgets.length - 1])} of the computation is padding`;
  });
  const across = () => Math.min(view.shared.most, Math.floor(view.fit(1120) / (SIDE() + 8)));
  const side = i => SIDE() * Math.sqrt(tokens()[i] / largest());
  view.canvas({
    name: () => `${several(tokens().length, "image")} in order of arrival; number and area: the tokens of each`,
    size: () => [across() * (SIDE() + 8), Math.ceil(view.shared.most / across()) * (SIDE() + 18)],
    at: (x, y) => Math.floor(y / (SIDE() + 18)) * across() + Math.floor(x / (SIDE() + 8)),
    step: (i, dx, dy) => i + dx + dy * across(),
    draw(pen) {
      for (let i = 0; i < view.shared.most; i++) {
        const x = (i % across()) * (SIDE() + 8), y = Math.floor(i / across()) * (SIDE() + 18);
        if (i < tokens().length) item(pen, i, x, y + SIDE() - side(i), side(i), side(i));
        pen.font = "12px sans-serif"; pen.textAlign = "left"; pen.textBaseline = "bottom";
        pen.fillStyle = view.colors.muted; if (i < tokens().length) pen.fillText(`${i + 1}: ${tokens()[i]}`, x, y + SIDE() + 16);
      }
    },
  });

  view.canvas({
    name: () => `${several(view.row.replays.length, "replay")}, as long as the budgets; hatched: padding`,
    caption: () => `Each bar is a replay, as long as the token budget of its graph; hatched: padding. Dotted lines: the captured graphs, with budgets of ` +
      `${view.row.budgets.join(", ")} tokens. An image too large for any graph runs eagerly; its bar is dashed`,
    size: () => [narrow() ? W() : W() + TEXT, Math.max(narrow() ? 0 : 5, view.row.replays.length) * LINE() + 18],
    at(x, y) {
      const hit = places().find(p => x >= p.x && x < p.x + p.width && y >= p.y && y < p.y + ROW());
      return hit ? hit.item : -1;
    },
    step(i, dx, dy) {  // along a replay, and from one to the next
      const replays = view.row.replays, line = replayOf(i), place = replays[line].items.indexOf(i);
      const target = replays[line + dy]?.items;
      return (dy ? target?.[Math.min(place, target.length - 1)] : replays[line].items[place + dx]) ?? -1;
    },
    draw(pen, width, height) {
      pen.font = "12px sans-serif"; pen.textAlign = "right"; pen.textBaseline = "bottom";
      view.row.budgets.forEach(budget => {  // a ruler for every graph, used or not
        const x = budget * scale();
        pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.setLineDash([2, 3]);
        pen.beginPath(); pen.moveTo(x - 0.5, 0); pen.lineTo(x - 0.5, height - 16); pen.stroke(); pen.setLineDash([]);
        pen.fillStyle = view.colors.muted; pen.fillText(budget, x, height);
      });
      pen.textBaseline = "middle";
      view.row.replays.forEach((replay, line) => {
        const y = line * LINE(), total = replay.tokens, end = Math.max(total, replay.budget) * scale();
        if (replay.budget > total) hatch(pen, total * scale(), y, (replay.budget - total) * scale(), ROW());
        pen.strokeStyle = view.colors.ink; pen.lineWidth = 1.5; pen.setLineDash(replay.budget ? [] : [5, 4]);
        pen.strokeRect(0.75, y + 0.75, end - 1.5, ROW() - 1.5);
        pen.setLineDash([]);
        pen.fillStyle = view.colors.ink; pen.textAlign = "left"; pen.font = "12px sans-serif";
        const says = replay.budget
          ? `graph of ${replay.budget}: ${total} tokens, ${percent(1 - total / replay.budget)} padding`
          : `${total} tokens: no graph is large enough`;
        const [at, high] = narrow() ? [0, y + ROW() + 10] : [end + 8, y + ROW() / 2];
        pen.strokeStyle = view.colors.surface; pen.lineWidth = 10; pen.strokeText(says, at, high); pen.fillText(says, at, high);
      });
      places().forEach(p => item(pen, p.item, view.ease(`x ${p.item}`, p.x) + 1.5, view.ease(`y ${p.item}`, p.y) + 1.5, Math.max(2, p.width - 3), ROW() - 3));
    },
  });

  view.canvas({
    name: () => `padding with ${view.row.wastes.map((share, i) => `${several(i + 1, "captured graph")}: ${percent(share)}`).join(", ")}`,
    caption: () => "The computation of all replays, by the number of captured graphs; hatched: the share of padding",
    size: () => [Math.min(W(), 560), view.row.wastes.length * 24],
    draw(pen, width) {
      const left = 76, long = width - left - 96;
      pen.textBaseline = "middle";
      view.row.wastes.forEach((share, i) => {
        const top = 24 * i + 2, waste = view.ease(`waste ${i}`, share), now = i + 1 === view.row.budgets.length;
        pen.globalAlpha = now ? 1 : 0.5;
        pen.fillStyle = view.colors.kept; pen.fillRect(left, top, long * (1 - waste), 18);
        hatch(pen, left + long * (1 - waste), top, long * waste, 18);
        pen.strokeStyle = view.colors.ink; pen.lineWidth = 1; pen.strokeRect(left + 0.5, top + 0.5, long - 1, 17);
        pen.globalAlpha = 1; pen.fillStyle = view.colors.ink; pen.font = `${now ? "bold " : ""}12px sans-serif`;
        pen.textAlign = "right"; pen.fillText(several(i + 1, "graph"), left - 8, top + 9);
        pen.textAlign = "left"; pen.fillText(`${percent(share)} padding`, left + long + 8, top + 9);
      });
    },
  });

  view.readout(() => {
    const replay = view.row.replays[replayOf(view.item)], others = replay.items.filter(i => i !== view.item);
    const where = replay.budget ? `runs in the graph of ${replay.budget} tokens` : "is too large for any graph and runs eagerly";
    return `image ${view.item + 1} (${tokens()[view.item]} tokens) ${where}` +
      (others.length ? `, together with image${others.length > 1 ? "s" : ""} ${others.map(i => i + 1).join(", ")}` : ", alone");
  });
  return { count: () => tokens().length };
});
