// The numbers behind each box: rows of [what it is, a formula with the values of this input], computed from one record.
import { CELLS, FRAME, GRID, lookOf, patchIn, percent, seatsOf, slotsOf } from "./change.js";
import { PLACES } from "./pixels.js";

const two = v => v.toFixed(2).replace("-", "−"), few = list => [...list].map(two).join("  ");
const rootMeanSquare = list => Math.sqrt(list.reduce((s, v) => s + v * v, 0) / list.length);
const inner = (a, b) => a.reduce((s, v, i) => s + v * b[i], 0);
const slotOf = V => [...Array(V.T * FRAME).keys()].find(slot => {
  const [t, y, x] = patchIn(slot, V.broken);
  return t * FRAME + y * GRID + x === V.seat;
});

// V: what a side shows, see `view` in app.js
export const NUMBERS = {
  pixels(V) {
    const slot = slotOf(V), size = V.R.rows.length / (V.T * FRAME), row = V.R.rows.subarray(slot * size, (slot + 1) * size);
    return [
      ["each value", V.broken === "raw" ? "x / 255" : "(x / 255 − mean) / std"], ["first values of the chosen patch", few(row.subarray(0, 6))],
      ["its row", `3 colours × 2 frames × ${V.pixels.patch} × ${V.pixels.patch} = ${row.length}`],
      ["minimum, maximum", `${two(Math.min(...row))}, ${two(Math.max(...row))}`],
    ];
  },
  patches(V) {
    const i = V.seat % FRAME, [y, x] = [Math.floor(i / GRID), i % GRID], f = Math.floor(V.seat / FRAME), lead = V.T > 1 ? `36·${f} + ` : "";
    const isLines = V.broken === "lines", rule = (a, b) => isLines ? `6·${a} + ${b}` : `4·(3·⌊${a}/2⌋ + ⌊${b}/2⌋) + 2·(${a} mod 2) + (${b} mod 2)`;
    return [["the chosen patch", `line y = ${y}, column x = ${x}, counted from 0`], ["its index in the list", rule("y", "x")],
      ["with these numbers", `${lead}${rule(y, x)} = ${slotOf(V)}`]];
  },
  windows(V) {
    const sizes = V.R.cuts.slice(1).map((end, i) => end - V.R.cuts[i]), all = V.T * FRAME;
    return [["patches in each window", sizes.join(", ")], ["where each begins (cu_seqlens)", V.R.cuts.join(", ")],
      ["pairs in a block with windows", `${sizes.map(n => `${n}²`).join(" + ")} = ${sizes.reduce((s, n) => s + n * n, 0)}`],
      ["pairs without", `${all / V.T}²${V.T > 1 ? ` · ${V.T}` : ""} = ${all * all / V.T}`]];
  },
  tower(V) {
    const { states, queries, attention: shared } = V.R, N = V.R.at.length, E = states[0].length / N, H = V.perBlock, K = E / H;
    const block = Math.floor(V.towerHead / H), head = V.towerHead % H, me = seatsOf(V.R).indexOf(V.seat);
    const shares = shared[block].subarray((head * N + me) * N, (head * N + me + 1) * N), qkv = queries[block];
    const best = shares.reduce((b, v, j) => j !== me && v > shares[b === me ? j : b] ? j : b, me ? 0 : 1);
    const q = qkv.subarray(me * 3 * E + head * K, me * 3 * E + head * K + K);
    const k = qkv.subarray(best * 3 * E + E + head * K, best * 3 * E + E + head * K + K);
    const state = states[block].subarray(me * E, (me + 1) * E), product = inner(q, k);
    return [
      ["the patch’s state", `${few(state.subarray(0, 5))} … ${E} numbers`],
      [`q, head ${head + 1}`, `${few(q.subarray(0, 5))} … ${K} numbers, rotated by line and column`],
      ["k of the patch it attends to most", `${few(k.subarray(0, 5))} …`],
      ["score", `q·k / √${K} = ${two(product)} / ${two(Math.sqrt(K))} = ${two(product / Math.sqrt(K))}`],
      ["share", `exp(score) / Σ exp = ${percent(shares[best])}`],
    ];
  },
  tokens(V) {
    const D = V.R.tokens.length / V.M, E = V.R.states[0].length / V.R.at.length, values = V.R.tokens.subarray(V.spot * D, (V.spot + 1) * D);
    return [["slots of its four patches", slotsOf(V.spot, V.R, V.broken).join(", ")],
      ["the merger", `W₂ · GELU(W₁ · [a, b, c, d]), 4 × ${E} = ${4 * E} → ${4 * E} → ${D}`],
      [`the token “${PLACES[V.spot % CELLS]}”`, `${few(values.subarray(0, 6))} …`]];
  },
  deepstack(V) {
    return V.R.deeper.map((rows, i) => {
      const D = rows.length / V.M;
      return [`added after layer ${i + 1}`, V.broken === "deep" ? "nothing" : `${few(rows.subarray(V.spot * D, V.spot * D + 6))} …`];
    });
  },
  prompt(V) {
    const D = V.R.embeds.length / V.R.keep.length, shown = [V.off - 1, V.off, V.off + V.M, V.off + V.M + 1];
    return [["tokens", `${V.ids.length}, of which ${V.M} are of the input${V.R.keep.length < V.ids.length ? `; ${V.ids.length - V.R.keep.length} are gone` : ""}`],
      ...shown.filter(j => V.R.keep.includes(j)).map(j => {
        const at = V.R.keep.indexOf(j), isSeen = j >= V.off && j < V.off + V.M;
        return [isSeen ? `entry ${j}, an image token` : `entry ${j}, “${V.label(V.ids[j])}” = id ${V.ids[j]}`, `${few(V.R.embeds.subarray(at * D, at * D + 5))} …`];
      })];
  },
  positions(V) {
    const { axes, frequencies } = V.model, at = V.R.positions.map(p => p[V.off + V.spot]), last = V.ids.length - 1;
    const pairs = [...new Set([0, axes.indexOf(1), axes.indexOf(2), axes.length - 1])];
    return [["t, h, w", at.join(", ")], ["text continues at", `${V.R.positions[0][V.off + V.M]}`],
      ["from the last token: Δt, Δh, Δw", V.R.positions.map((p, a) => p[last] - at[a]).join(", ")],
      ["a pair (u, v) becomes", "(u cos α − v sin α, v cos α + u sin α)"],
      ...pairs.map(j => {
        const angle = at[axes[j]] * frequencies[j];
        return [`pair ${j + 1}, rotated by ${"thw"[axes[j]]}`, `α = ${at[axes[j]]} · 5^(−${j}/${axes.length}) = ${two(angle)} rad`];
      })];
  },
  attention(V) {
    const l = Math.floor(V.head / V.perLayer), h = V.head % V.perLayer, at = V.R.keep.indexOf(V.off + V.spot);
    if (at < 0 || V.step) return [["choose", V.step ? "the first word, to see its query and key" : "a token that is not left out"]];
    const K = V.R.lastQueries[l].length / V.perLayer, q = V.R.lastQueries[l].subarray(h * K, h * K + K);
    const groups = V.R.keys[l].length / V.R.keep.length / K, from = (at * groups + Math.floor(h / (V.perLayer / groups))) * K;
    const k = V.R.keys[l].subarray(from, from + K), product = inner(q, k);
    return [
      [`q of the last token, layer ${l + 1}, head ${h + 1}`, `${few(q.subarray(0, 5))} … ${K} numbers`],
      [`k of “${PLACES[V.spot % CELLS]}”`, `${few(k.subarray(0, 5))} …`],
      ["score", `q·k / √${K} = ${two(product)} / ${two(Math.sqrt(K))} = ${two(product / Math.sqrt(K))}`],
      ["share", `exp(score) / Σ exp = ${percent(lookOf(V.R, 0, V.head, V.heads)[V.off + V.spot])}`],
    ];
  },
  word(V) {
    const { top } = V.R.steps[0];
    return [
      ["root mean square of the last token’s state", `${few(V.R.lastStates.map(rootMeanSquare))}, after each layer`],
      ["probability", `exp(z) / Σ exp(z), over ${V.R.logits.length.toLocaleString("en")} scores z`],
      ["the lead over the runner-up", two(top[0][2] - top[1][2])],
      ...top.slice(0, 3).map(([id, share, logit]) => [`z of “${V.labelAmong(id, top.map(([other]) => other))}”`,
        `${two(logit)}, so ${share > 0.0005 ? percent(share) : share.toExponential(1)}`]),
    ];
  },
};
