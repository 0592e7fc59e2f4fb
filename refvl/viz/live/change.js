// How far a fault travels: the values of each stage in two runs, and how much they differ.
// change = |a - b| / sqrt(|a|^2 + |b|^2): 0 if nothing differs, 1 if the two have nothing in common.
import { IN_TOWER } from "./breaks.js";

export const GRID = 6, CELLS = 9, FRAME = 36;             // patches along a side, tokens and patches of a frame
// [frame, row, column] of the patch in a slot of the list
export const patchIn = (slot, broken) => {
  const frame = Math.floor(slot / FRAME), s = slot % FRAME, token = s >> 2;
  if (broken === "lines") return [frame, Math.floor(s / GRID), s % GRID];
  return [frame, 2 * Math.floor(token / 3) + (s >> 1 & 1), 2 * (token % 3) + (s & 1)];
};
const seatIn = ([frame, y, x]) => frame * FRAME + y * GRID + x;
export const seatsOf = R => R.at.map(seatIn);             // the place of each row of the tower in the image
// the four slots of the list that a token was made of
export const slotsOf = (token, R, broken) => {
  const from = broken === "unsortedBack" ? R.order[token] : token;
  return [0, 1, 2, 3].map(k => 4 * from + k);
};
export const windowOf = (R, broken) => {                  // of each patch of the image
  const out = Array(R.at.length).fill(0);
  seatsOf(R).forEach((seat, r) => {
    out[seat] = broken === "open" ? Math.floor(seat / FRAME) : R.cuts.findIndex(end => r < end) - 1;
  });
  return out;
};
export const towerOf = R => {                             // the last block's rows, in the order of the image
  const last = R.states.at(-1), E = last.length / R.at.length, out = new Float32Array(last.length);
  seatsOf(R).forEach((seat, r) => out.set(last.subarray(r * E, (r + 1) * E), seat * E));
  return out;
};
// the share that every prompt token has in one head's attention before one word; what was left out has none
export const lookOf = (R, step, head, heads) => {
  const { look } = R.steps[Math.min(step, R.steps.length - 1)], all = look.length / heads;
  const out = new Float32Array(R.positions[0].length);
  R.keep.forEach((j, k) => { out[j] = look[head * all + k]; });
  return out;
};
// the attention of one patch, all heads of one block or one of them: a share for every patch of the image
export const towerLook = (R, block, head, seat) => {
  const N = R.at.length, shares = R.attention[block], H = shares.length / N / N, seats = seatsOf(R);
  const me = seats.indexOf(seat), out = new Float32Array(N);
  for (let r = 0; r < N; r++) out[seats[r]] = shares[(head * N + me) * N + r];
  return { look: out, heads: H };
};

export function difference(a, b) {
  let apart = 0, size = 0;
  for (let i = 0; i < Math.max(a.length, b.length); i++) {
    const u = a[i] || 0, v = b[i] || 0;
    apart += (u - v) ** 2;
    size += u * u + v * v;
  }
  return size ? Math.sqrt(apart / size) : 0;
}
function pixels(R, broken) {                              // in the order of the image, whatever that of the list is
  const N = R.at.length, size = R.rows.length / N, out = new Float32Array(R.rows.length);
  for (let r = 0; r < N; r++) out.set(R.rows.subarray(r * size, (r + 1) * size), seatIn(patchIn(r, broken)) * size);
  return out;
}
function pairs(R, broken) {                               // 1 where a patch may look at another
  const window = windowOf(R, broken);
  return Float32Array.from({ length: window.length ** 2 },
    (_, i) => Number(window[Math.floor(i / window.length)] === window[i % window.length]));
}
// what queries and keys are rotated by; a token that was left out has nothing
const angles = (R, { axes, frequencies }) => {
  const out = new Float32Array(R.positions[0].length * axes.length * 2);
  for (const i of R.keep) axes.forEach((axis, j) => {
    const angle = R.positions[axis][i] * frequencies[j], at = (i * axes.length + j) * 2;
    [out[at], out[at + 1]] = [Math.cos(angle), Math.sin(angle)];
  });
  return out;
};
const spread = (values, R) => {                           // rows of the kept tokens, at their places in the prompt
  const D = values.length / R.keep.length, out = new Float32Array(R.positions[0].length * D);
  R.keep.forEach((j, k) => out.set(values.subarray(k * D, (k + 1) * D), j * D));
  return out;
};
const looks = (R, steps, heads) => Array.from({ length: steps * heads },
  (_, i) => [...lookOf(R, Math.floor(i / heads), i % heads, heads)]).flat();
// the candidates of every word, by their probabilities
function words(A, B) {
  const p = [], q = [];
  for (let s = 0; s < Math.max(A.steps.length, B.steps.length); s++) {
    const [one, two] = [A, B].map(R => new Map((R.steps[s]?.top || []).map(([id, share]) => [id, share])));
    for (const id of new Set([...one.keys(), ...two.keys()])) { p.push(one.get(id) || 0); q.push(two.get(id) || 0); }
  }
  return difference(p, q);
}

// {stage: change}; A is intact, B has `broken`. model: {axes, frequencies, heads}
export function changes(A, B, broken, stages, model) {
  if (A === B || !broken) return Object.fromEntries(stages.map(stage => [stage, 0]));
  const steps = Math.min(A.steps.length, B.steps.length), deeper = R => R.deeper.flatMap(rows => [...rows]);
  const found = {
    pixels: () => difference(pixels(A, ""), pixels(B, broken)),
    patches: () => difference(A.rows, B.rows),
    windows: () => Math.max(difference(A.states[0], B.states[0]), difference(pairs(A, ""), pairs(B, broken))),
    tower: () => difference(towerOf(A), towerOf(B)),
    tokens: () => difference(A.tokens, B.tokens),
    deepstack: () => broken === "deep" ? 1 : difference(deeper(A), deeper(B)),
    prompt: () => difference(spread(A.embeds, A), spread(B.embeds, B)),
    positions: () => difference(angles(A, model), angles(B, model)),
    attention: () => difference(looks(A, steps, model.heads), looks(B, steps, model.heads)),
    word: () => words(A, B),
  };
  const isSame = stage => !IN_TOWER.includes(broken) && ["pixels", "patches", "windows", "tower", "tokens"].includes(stage);
  return Object.fromEntries(stages.map(stage => [stage, isSame(stage) ? 0 : found[stage]()]));
}

export const percent = v => v < 0.0005 ? "0 %" : v < 0.01 ? `${(100 * v).toFixed(1)} %` : `${Math.round(100 * v)} %`;
export const surety = p => p > 0.9999 ? "> 99.99 %"
  : p > 0.99 ? `${(Math.floor(p * 1e4) / 100).toFixed(2)} %` : `${(100 * p).toFixed(1)} %`;
// the probability of all words of an answer
export const sureOf = R => R.steps.slice(0, Math.max(1, R.out.length)).reduce((p, step) => p * step.top[0][1], 1);
// the head that looks hardest at one token of the item: {head, token, share}
export function finder(R, step, off, heads) {
  const best = { head: 0, token: 0, share: -1 }, M = R.T * CELLS;
  for (let head = 0; head < heads; head++) {
    const look = lookOf(R, step, head, heads);
    for (let m = 0; m < M; m++) if (look[off + m] > best.share) Object.assign(best, { head, token: m, share: look[off + m] });
  }
  return best;
}
