// A tiny Qwen2.5-VL or Qwen3-VL, forward pass with a record of every stage. It runs in a worker, in the page and in node.
//
//   frames -> rows (N, C*2*P*P) -> [window order] -> blocks (N, E) -> merger -> tokens (M, D)
//   ids (L) -> embeddings, tokens over the placeholders -> t, h, w (3, L) -> layers (L, D) -> logits (V) -> words
//
// `breaks` changes one thing on the way, and everything after it is computed again. An image is a video of two
// equal frames. N patches, M merged tokens, L prompt tokens, E tower width, D language width, H heads, K head dimension.
import { add, attend, linear, normalize, rotate, swiglu, twoLayers } from "./math.js";

// int8 rows with a scale each, or float32 vectors, as page.py packs them -> {name: {w, out, inn}}
export function unpackWeights(bytes, meta) {
  const tensors = {};
  for (const [name, [at, isQuantized, out, inn]] of Object.entries(meta)) {
    if (!isQuantized) { tensors[name] = { w: new Float32Array(bytes, at, out * inn), out, inn }; continue; }
    const scales = new Float32Array(bytes, at, out), levels = new Int8Array(bytes, at + 4 * out, out * inn);
    const w = new Float32Array(out * inn);
    for (let i = 0; i < w.length; i++) w[i] = levels[i] * scales[Math.floor(i / inn)];
    tensors[name] = { w, out, inn };
  }
  return tensors;
}

export function makeVLM(tensors, { vision, text, pixels, tokens: special }) {
  const { side, patch: P, merge: m } = pixels, G = side / P, C = G / m;      // patches and tokens along a side
  const E = vision.hidden_size, H = vision.num_heads, K = E / H;
  const D = text.hidden_size, heads = text.num_attention_heads, groups = text.num_key_value_heads, TK = text.head_dim;
  const fullBlocks = vision.fullatt_block_indexes, hasWindows = Boolean(fullBlocks);

  const matrix = name => ({ ...tensors[name + ".weight"], b: tensors[name + ".bias"]?.w });
  const norm = (name, eps = 1e-6) => ({ ...matrix(name), eps });
  const mlp = name => tensors[name + ".gate_proj.weight"]
    ? { gate: matrix(name + ".gate_proj"), up: matrix(name + ".up_proj"), down: matrix(name + ".down_proj") }
    : { fc1: matrix(name + ".linear_fc1"), fc2: matrix(name + ".linear_fc2"), tanh: true };
  const feedForward = (x, n, parts) => parts.gate ? swiglu(x, n, parts) : twoLayers(x, n, parts);

  // ---------------------------------------------------------------- pixels to rows

  // the value of a byte of a channel; videos are rounded in a different order, see `level_table` in refvl/pixels/patches.py
  const round = Math.fround;
  function levels(channel, isClip) {
    const mean = round(pixels.mean[channel]), std = round(pixels.std[channel]), table = new Float32Array(256);
    for (let v = 0; v < 256; v++) {
      table[v] = isClip ? round(round(v - round(mean * 255)) / round(std * 255)) : round(round(v / 255) - mean) / std;
    }
    return table;
  }

  // (frame pair, patch row, patch column) of every row, the patches of a merge block together
  function blockOrder(T) {
    const at = [];
    for (let t = 0; t < T; t++) for (let y = 0; y < C; y++) for (let x = 0; x < C; x++) {
      for (let s = 0; s < m * m; s++) at.push([t, m * y + Math.floor(s / m), m * x + s % m]);
    }
    return at;
  }

  // frames: RGB bytes (side, side, 3) each, one for an image or two for every frame pair
  function rowsOf(frames, breaks) {
    const isClip = frames.length > 1, T = Math.ceil(frames.length / 2), at = blockOrder(T), size = P * P;
    if (breaks.lines) at.sort((a, b) => a[0] - b[0] || a[1] - b[1]);         // as a plain reshape would give them
    const raw = Float32Array.from({ length: 256 }, (_, v) => v / 255), rows = new Float32Array(at.length * 6 * size);
    const tables = [0, 1, 2].map(channel => breaks.raw ? raw : levels(channel, isClip));
    at.forEach(([t, py, px], r) => {
      for (let channel = 0; channel < 3; channel++) for (let half = 0; half < 2; half++) {
        const frame = frames[isClip ? 2 * t + half : 0], from = breaks.bgr ? 2 - channel : channel;
        for (let y = 0; y < P; y++) for (let x = 0; x < P; x++) {
          const byte = frame[((py * P + y) * side + px * P + x) * 3 + from];
          rows[((r * 3 + channel) * 2 + half) * size + y * P + x] = tables[channel][byte];
        }
      }
    });
    return { rows, T };
  }

  // ---------------------------------------------------------------- the tower

  // tokens in window order, and where in rows each window begins; without windows, reading order and whole frames
  function windowsOf(T, breaks) {
    if (!hasWindows) return { order: [...Array(T * C * C).keys()],
      cuts: Array.from({ length: T + 1 }, (_, t) => t * G * G) };
    const size = vision.window_size / P / m, order = [], cuts = [0];
    for (let t = 0; t < T; t++) for (let wy = 0; wy < C; wy += size) for (let wx = 0; wx < C; wx += size) {
      for (let y = wy; y < Math.min(C, wy + size); y++) for (let x = wx; x < Math.min(C, wx + size); x++) {
        order.push((t * C + y) * C + x);
      }
      cuts.push(order.length * m * m);
    }
    if (breaks.unsorted) order.sort((a, b) => a - b);                        // cut, but never sorted
    return { order, cuts };
  }

  // cos and sin of each row's angles: its patch row turns the first half of the planes, its column the second
  function towerAngles(at) {
    const quarter = K / 4, cos = new Float32Array(at.length * K / 2), sin = cos.slice();
    at.forEach(([, y, x], r) => {
      for (let k = 0; k < quarter; k++) for (const [shift, v] of [[0, y], [quarter, x]]) {
        const angle = v * 10000 ** (-k / quarter), i = r * K / 2 + shift + k;
        cos[i] = Math.cos(angle);
        sin[i] = Math.sin(angle);
      }
    });
    return { cos, sin };
  }

  // Qwen3-VL: a learned table of S x S positions, its corners at the image's corners, sampled bilinearly
  function tablePlaces(at) {
    const { w: table } = tensors["visual.pos_embed.weight"], S = Math.sqrt(vision.num_position_embeddings);
    const out = new Float32Array(at.length * E);
    at.forEach(([, py, px], r) => {
      const y = py / (G - 1) * (S - 1), x = px / (G - 1) * (S - 1), y0 = Math.floor(y), x0 = Math.floor(x);
      for (const [ty, wy] of [[y0, 1 - y + y0], [y0 + 1, y - y0]]) for (const [tx, wx] of [[x0, 1 - x + x0],
        [x0 + 1, x - x0]]) {
        if (wy * wx > 0) for (let k = 0; k < E; k++) out[r * E + k] += wy * wx * table[(ty * S + tx) * E + k];
      }
    });
    return out;
  }

  const blocks = Array.from({ length: vision.depth }, (_, i) => {
    const name = `visual.blocks.${i}`;
    return {
      norm1: norm(name + ".norm1"), qkv: matrix(name + ".attn.qkv"), proj: matrix(name + ".attn.proj"),
      norm2: norm(name + ".norm2"), mlp: mlp(name + ".mlp"),
    };
  });

  // (N, E) -> (M, D); `whole`: the norm takes a merge block at once, as in DeepStack's mergers
  function merger(x, N, name, whole = false) {
    const isQwen3 = Boolean(tensors[name + ".linear_fc1.weight"]), M = N / (m * m);
    const normed = norm(name + (isQwen3 ? ".norm" : ".ln_q"));
    const folded = whole ? normalize(x, M, E * m * m, normed) : normalize(x, N, E, normed);
    const layers = isQwen3 ? [".linear_fc1", ".linear_fc2"] : [".mlp.0", ".mlp.2"];
    return twoLayers(folded, M, { fc1: matrix(name + layers[0]), fc2: matrix(name + layers[1]) });
  }

  function tower(frames, breaks) {
    const { rows, T } = rowsOf(frames, breaks), N = T * G * G, M = N / (m * m), four = m * m;
    const { order, cuts } = windowsOf(T, breaks), places = blockOrder(T);
    const at = order.flatMap(token => places.slice(token * four, token * four + four));
    const { cos, sin } = towerAngles(at);
    const embedded = linear(rows, N, matrix("visual.patch_embed.proj"));
    const x = new Float32Array(N * E);
    order.forEach((token, r) => x.set(embedded.subarray(token * four * E, (token + 1) * four * E), r * four * E));
    if (!hasWindows) add(x, tablePlaces(at));

    // [begin, end) of the rows that a row may look at: its window, or its frame
    const inWindows = spans(cuts, N), inFrames = spans(Array.from({ length: T + 1 }, (_, t) => t * G * G), N);
    const record = { attention: [], queries: [], states: [x.slice()] }, deeper = [];
    blocks.forEach((block, i) => {
      const isFull = !hasWindows || fullBlocks.includes(i) || breaks.open, span = isFull ? inFrames : inWindows;
      const qkv = linear(normalize(x, N, E, block.norm1), N, block.qkv), mixed = new Float32Array(N * E);
      const shares = new Float32Array(H * N * N);
      for (let r = 0; r < N; r++) for (let h = 0; h < 2 * H; h++) rotate(qkv, r * 3 * E + h * K, K, cos, sin,
        r * K / 2);
      for (let h = 0; h < H; h++) {
        const k = qkv.subarray(E + h * K), v = qkv.subarray(2 * E + h * K);
        for (let r = 0; r < N; r++) {
          const [from, to] = span[r], mine = shares.subarray((h * N + r) * N, (h * N + r + 1) * N);
          attend(qkv, r * 3 * E + h * K, k, v, 3 * E, from, to, K, mixed, r * E + h * K, mine);
        }
      }
      add(x, linear(mixed, N, block.proj));
      add(x, feedForward(normalize(x, N, E, block.norm2), N, block.mlp));
      record.attention.push(shares);
      record.queries.push(qkv);
      record.states.push(x.slice());
      const depth = vision.deepstack_visual_indexes?.indexOf(i) ?? -1;
      if (depth >= 0) deeper.push(merger(x, N, `visual.deepstack_merger_list.${depth}`, true));
    });
    const back = merged => {                                                 // out of window order
      const tokens = new Float32Array(M * D);
      order.forEach((token, r) => tokens.set(merged.subarray(r * D, (r + 1) * D),
        (breaks.unsortedBack ? r : token) * D));
      return tokens;
    };
    return { rows, T, order, cuts, at, ...record, tokens: back(merger(x, N, "visual.merger")),
      deeper: deeper.map(back) };
  }

  function spans(cuts, N) {
    const out = Array(N);
    for (let c = 0; c + 1 < cuts.length; c++) out.fill([cuts[c], cuts[c + 1]], cuts[c], cuts[c + 1]);
    return out;
  }

  // ---------------------------------------------------------------- positions

  // t, h, w of every prompt token; the item's T * C * C tokens begin at `off`
  function positionsOf(L, off, T, breaks) {
    const step = T > 1 ? pixels.timeStep : 1, M = T ? T * C * C : 0, out = [0, 1, 2].map(() => new Float32Array(L));
    const extent = T ? Math.max((T - 1) * step + 1, C) : 0;
    for (let i = 0; i < L; i++) {
      const j = i - off, isText = j < 0 || j >= M, text = j < 0 ? i : i - M + extent;
      let t = Math.floor(j / (C * C)), h = Math.floor(j / C) % C, w = j % C;
      if (breaks.back) t = T - 1 - t;
      if (breaks.swap) [h, w] = [w, h];
      if (breaks.one) t = h = w = 0;
      const place = isText ? [text, text, text] : [off + t * step, off + h, off + w];
      for (let a = 0; a < 3; a++) out[a][i] = place[a];
    }
    return out;
  }

  // the axis of each rotary pair: contiguous, or interleaved
  const sections = text.rope_parameters.mrope_section;
  const axes = text.rope_parameters.mrope_interleaved
    ? Array.from({ length: TK / 2 }, (_, j) => j % 3 && j < 3 * sections[j % 3] ? j % 3 : 0)
    : sections.flatMap((count, axis) => Array(count).fill(axis));
  const frequencies = axes.map((_, j) => text.rope_parameters.rope_theta ** (-j / axes.length));

  // ---------------------------------------------------------------- the language model

  const layers = Array.from({ length: text.num_hidden_layers }, (_, i) => {
    const name = `model.layers.${i}`, attention = part => matrix(`${name}.self_attn.${part}`);
    return {
      before: norm(name + ".input_layernorm"), after: norm(name + ".post_attention_layernorm"), mlp: mlp(name + ".mlp"),
      q: attention("q_proj"), k: attention("k_proj"), v: attention("v_proj"), o: attention("o_proj"),
      qNorm: tensors[`${name}.self_attn.q_norm.weight`] && norm(`${name}.self_attn.q_norm`),
      kNorm: tensors[`${name}.self_attn.k_norm.weight`] && norm(`${name}.self_attn.k_norm`),
    };
  });
  const embedding = tensors["model.embed_tokens.weight"], last = norm("model.norm"), head = matrix("lm_head");

  // x (L, D) after `cache.n` tokens -> the logits of the last; `added`: DeepStack features (L, D), one for a layer
  function decode(x, L, positions, cache, added = []) {
    const half = TK / 2, all = cache.n + L, width = heads * TK, keyWidth = groups * TK;
    const cos = new Float32Array(L * half), sin = new Float32Array(L * half);
    for (let i = 0; i < L; i++) for (let j = 0; j < half; j++) {
      const angle = positions[axes[j]][i] * frequencies[j];
      cos[i * half + j] = Math.cos(angle);
      sin[i * half + j] = Math.sin(angle);
    }
    const look = new Float32Array(layers.length * heads * all), queries = [], states = [x.slice((L - 1) * D)];
    layers.forEach((layer, l) => {
      const h = normalize(x, L, D, layer.before), v = linear(h, L, layer.v);
      let q = linear(h, L, layer.q), k = linear(h, L, layer.k);
      if (layer.qNorm) q = normalize(q, L * heads, TK, layer.qNorm);
      if (layer.kNorm) k = normalize(k, L * groups, TK, layer.kNorm);
      for (let i = 0; i < L; i++) {
        for (let g = 0; g < heads; g++) rotate(q, i * width + g * TK, TK, cos, sin, i * half);
        for (let g = 0; g < groups; g++) rotate(k, i * keyWidth + g * TK, TK, cos, sin, i * half);
      }
      cache.k[l].set(k, cache.n * keyWidth);
      cache.v[l].set(v, cache.n * keyWidth);
      const mixed = new Float32Array(L * width);
      for (let g = 0; g < heads; g++) {
        const from = Math.floor(g / (heads / groups)) * TK, keys = cache.k[l].subarray(from),
          values = cache.v[l].subarray(from);
        for (let i = 0; i < L; i++) {
          const shares = i === L - 1 ? look.subarray((l * heads + g) * all) : null;
          attend(q, i * width + g * TK, keys, values, keyWidth, 0, cache.n + i + 1, TK, mixed, i * width + g * TK,
            shares);
        }
      }
      add(x, linear(mixed, L, layer.o));
      add(x, feedForward(normalize(x, L, D, layer.after), L, layer.mlp));
      if (added[l]) add(x, added[l]);
      queries.push(q.slice((L - 1) * width));
      states.push(x.slice((L - 1) * D));
    });
    cache.n = all;
    const normed = normalize(x.subarray((L - 1) * D), 1, D, last);
    return { logits: linear(normed, 1, head), look, queries, states };
  }

  // ids and shares of the n largest logits: [id, probability, logit]
  function largest(logits, n) {
    const most = logits.reduce((a, b) => Math.max(a, b), -Infinity),
      sum = logits.reduce((s, v) => s + Math.exp(v - most), 0);
    const ids = [...logits.keys()].sort((a, b) => logits[b] - logits[a]).slice(0, n);
    return ids.map(id => [id, Math.exp(logits[id] - most) / sum, logits[id]]);
  }

  // tells apart what the tower has seen (FNV-1a)
  function digest(frames) {
    let hash = 2166136261;
    for (const frame of frames) for (const byte of frame) hash = Math.imul(hash ^ byte, 16777619);
    return `${frames.length}:${hash}:`;
  }
  let kept = {};                                          // the tower runs again only if what it sees has changed
  const TOWER_BREAKS = ["bgr", "raw", "lines", "unsorted", "unsortedBack", "open"];

  // ids: the prompt with placeholders from `off` on. drop: media tokens to remove. most: maximum number of new tokens
  function run({ frames, ids, off, breaks = {}, drop = [], most = 16 }) {
    const key = digest(frames) + TOWER_BREAKS.map(name => Number(Boolean(breaks[name])));
    if (kept.key !== key) kept = { key,
      seen: frames.length ? tower(frames, breaks) : { T: 0, tokens: new Float32Array(0), deeper: [] } };
    const seen = kept.seen, M = seen.tokens.length / D, gone = new Set(drop.map(j => j + off));
    const positions = positionsOf(ids.length, off, seen.T, breaks),
      keep = ids.map((_, i) => i).filter(i => !gone.has(i));
    const L = keep.length, x = new Float32Array(L * D), deeper = breaks.deep ? [] : seen.deeper;
    const added = deeper.map(() => new Float32Array(L * D));
    keep.forEach((i, r) => {
      const j = i - off, isSeen = j >= 0 && j < M;
      x.set(isSeen ? seen.tokens.subarray(j * D, (j + 1) * D) : embedding.w.subarray(ids[i] * D, (ids[i] + 1) * D),
        r * D);
      if (isSeen) added.forEach((rows, k) => rows.set(deeper[k].subarray(j * D, (j + 1) * D), r * D));
    });
    const embeds = x.slice(), room = (L + most) * groups * TK, empty = () => layers.map(() => new Float32Array(room));
    const cache = { n: 0, k: empty(), v: empty() };
    let step = decode(x, L, positions.map(p => Float32Array.from(keep, i => p[i])), cache, added);
    const first = step, out = [], steps = [], keys = cache.k.map(k => k.slice(0, L * groups * TK));
    let next = 1 + Math.max(...positions.map(p => p.reduce((a, b) => Math.max(a, b), 0)));
    for (let s = 0; s < most; s++) {
      const top = largest(step.logits, 6), id = top[0][0];
      steps.push({ top, look: step.look });
      if (special.eos.includes(id)) break;
      out.push(id);
      if (s + 1 < most) step = decode(embedding.w.slice(id * D, (id + 1) * D), 1, [[next], [next], [next]], cache);
      next++;
    }
    const { logits, queries, states } = first;
    return { ...seen, keep, positions, embeds, logits, out, steps, lastQueries: queries, lastStates: states, keys };
  }
  return { run, axes, frequencies };
}
