// The numbers behind each chapter: rows of [what it is, a formula with the values of this image], computed from the record.
import { FRAME, gridOf } from "./layout.js";
import { nameOfPlace } from "./state.js";

const two = v => v.toFixed(2).replace("-", "−"), few = list => [...list].map(two).join("  ");
const rootMeanSquare = list => Math.sqrt(list.reduce((s, v) => s + v * v, 0) / list.length);
const inner = (a, b) => a.reduce((s, v, i) => s + v * b[i], 0);
const percent = v => `${(100 * v).toFixed(1)} %`;

// one for each chapter; S: the state, aid: { slotOf, rankOf, label }
export const NUMBERS = [
  null,
  function patchRow(S, { slotOf }) {
    const at = slotOf(S.patch) * S.rowLength, row = S.res.rows.subarray(at, at + S.rowLength);
    const norm = S.breaks.raw ? "x / 255" : "(x / 255 − mean) / std";
    return [
      ["each value", norm], ["first values of the row", few(row.subarray(0, 6))],
      ["length of the row", `3 colours × 2 frames × ${S.pixels.patch} × ${S.pixels.patch} = ${row.length}`],
      ["minimum, maximum", `${two(Math.min(...row))}, ${two(Math.max(...row))}`],
    ];
  },
  function place(S, { slotOf }) {
    const [y, x] = gridOf(S.patch), f = Math.floor(S.patch / FRAME), slot = slotOf(S.patch),
      lead = S.T > 1 ? `36·${f} + ` : "";
    const rule = S.breaks.lines ? "6·y + x" : "4·(3·⌊y/2⌋ + ⌊x/2⌋) + 2·(y mod 2) + (x mod 2)";
    return [
      ["the patch", `line y = ${y}, column x = ${x}, counted from 0`],
      ["its index in the list", rule], ["with these numbers",
        `${lead}${S.breaks.lines ? `6·${y} + ${x}` : `4·(3·${y >> 1} + ${x >> 1}) + 2·${y & 1} + ${x & 1}`} = ${slot}`],
    ];
  },
  function towerHead(S, { slotOf, rankOf }) {
    const { states, queries } = S.res, N = S.res.at.length, E = states[0].length / N,
      H = S.res.attention[0].length / N / N, K = E / H;
    const me = rankOf(slotOf(S.patch)), head = Math.max(0, S.towerHead),
      shares = S.res.attention[S.block].subarray((head * N + me) * N, (head * N + me + 1) * N);
    const best = shares.reduce((b, v, j) => j !== me && v > shares[b === me ? j : b] ? j : b, me ? 0 : 1),
      qkv = queries[S.block];
    const q = qkv.subarray(me * 3 * E + head * K, me * 3 * E + head * K + K),
      k = qkv.subarray(best * 3 * E + E + head * K, best * 3 * E + E + head * K + K);
    const state = states[S.block].subarray(me * E, (me + 1) * E), product = inner(q, k), rms = rootMeanSquare(state);
    return [
      ["the norm before attention", S.hasWindows ? `x / √(mean x² + 10⁻⁶) · w, here x / ${two(rms)}` : `(x − mean) / √(var + 10⁻⁶) · w + b`],
      ["the patch's state", `${few(state.subarray(0, 5))} … ${E} numbers`],
      [`q, head ${head + 1}`, `${few(q.subarray(0, 5))} … ${K} numbers, rotated by line and column`],
      ["k of the patch it attends to most", `${few(k.subarray(0, 5))} …`],
      ["score", `q·k / √${K} = ${two(product)} / ${two(Math.sqrt(K))} = ${two(product / Math.sqrt(K))}`],
      ["share", `exp(score) / Σ exp = ${percent(shares[best])}`],
    ];
  },
  function merger(S) {
    const width = S.res.tokens.length / S.M, N = S.res.at.length, E = S.res.states[0].length / N,
      token = S.res.tokens.subarray(S.token * width, (S.token + 1) * width);
    const rank = S.res.order.indexOf(S.token), last = S.res.states.at(-1),
      lengths = [0, 1, 2, 3].map(s => rootMeanSquare(last.subarray((4 * rank + s) * E, (4 * rank + s + 1) * E)));
    const rows = [
      ["root mean square of the four patches", few(lengths)],
      ["the merger", `W₂ · GELU(W₁ · [a, b, c, d]), 4 × ${E} = ${4 * E} → ${4 * E} → ${width}`],
      [`the token “${nameOfPlace(S.token)}”`, `${few(token.subarray(0, 6))} …`],
    ];
    S.res.deeper.forEach((deep, i) => rows.push([`DeepStack, for layer ${i + 1}`, `${few(deep.subarray(S.token * width, S.token * width + 5))} …`]));
    return rows;
  },
  function embeddings(S, { label }) {
    const width = S.res.tokens.length / S.M, shown = [S.off - 1, S.off, S.off + S.M, S.off + S.M + 1];
    return shown.filter(j => S.res.keep.includes(j)).map(j => {
      const at = S.res.keep.indexOf(j), isSeen = j >= S.off && j < S.off + S.M;
      const name = isSeen ? `entry ${j}, an image token` : `entry ${j}, “${label(S.ids[j])}” = id ${S.ids[j]}`;
      return [name, `${few(S.res.embeds.subarray(at * width, at * width + 5))} …`];
    });
  },
  function rotary(S) {
    const at = [0, 1, 2].map(axis => S.res.positions[axis][S.col]),
      pairs = [0, S.axes.indexOf(1), S.axes.indexOf(2), S.axes.length - 1];
    return [
      ["t, h, w", at.join(", ")], ["a pair (u, v) becomes", "(u cos α − v sin α, v cos α + u sin α)"],
      ...pairs.map(j => {
        const angle = at[S.axes[j]] * S.frequencies[j];
        return [`pair ${j + 1}, rotated by ${"thw"[S.axes[j]]}`,
          `α = ${at[S.axes[j]]} · 5^(−${j}/16) = ${two(angle)} rad, or ${Math.round(angle * 180 / Math.PI) % 360}° modulo 360°`];
      }),
    ];
  },
  function differences(S, { label }) {
    const last = S.ids.length - 1, a = S.off + S.token,
      from = axis => S.res.positions[axis][last] - S.res.positions[axis][a];
    return [
      ["a score depends only on differences", "t_q − t_k,  h_q − h_k,  w_q − w_k"],
      [`from “${label(S.ids[last])}”, the last token, to “${nameOfPlace(S.token)}”`, [0, 1, 2].map(from).join(", ")],
      ["with h and w swapped", [from(0), from(2), from(1)].join(", ")],
    ];
  },
  function head(S) {
    const [l, h] = S.head, at = S.res.keep.indexOf(S.off + S.token);
    if (at < 0 || S.step) return [["choose",
      S.step ? "the first word, to see its query and key" : "a token that has not been removed"]];
    const K = S.res.lastQueries[l].length / 4, q = S.res.lastQueries[l].subarray(h * K, h * K + K),
      from = (at * 2 + (h >> 1)) * K, k = S.res.keys[l].subarray(from, from + K);
    const product = inner(q, k), n = S.res.steps[0].look.length / 12;
    return [
      [`q of the last token, layer ${l + 1}, head ${h + 1}`, `${few(q.subarray(0, 5))} … ${K} numbers`],
      [`k of “${nameOfPlace(S.token)}”`, `${few(k.subarray(0, 5))} …`],
      ["score", `q·k / √${K} = ${two(product)} / ${two(Math.sqrt(K))} = ${two(product / Math.sqrt(K))}`],
      ["share", `exp(score) / Σ exp = ${percent(S.res.steps[0].look[(l * 4 + h) * n + at])}`],
    ];
  },
  function softmax(S, { label }) {
    const top = S.res.steps[0].top, states = S.res.lastStates.map(rootMeanSquare);
    return [
      ["root mean square of the last token's state", `${few(states)}, after each layer`],
      ["probability", `exp(z) / Σ exp(z), over ${S.res.logits.length.toLocaleString("en")} scores z`],
      ...top.slice(0, 3).map(([id, share, logit]) => [`z of “${label(id)}”`,
        `${two(logit)}, so ${share > 0.0005 ? percent(share) : share.toExponential(1)}`]),
    ];
  },
];
