// The arithmetic of both families, on Float32Arrays, row after row. n, d: rows of x, and how many values each has.

// (n, inn) times the rows of w (out, inn), plus b (out). Four rows of x and two of w at a time share what is read;
// `out` is even, and `inn` a multiple of four.
export function linear(x, n, { w, b, out, inn }) {
  const y = new Float32Array(n * out);
  let i = 0;
  for (; i + 3 < n; i += 4) {
    const r0 = i * inn, r1 = r0 + inn, r2 = r1 + inn, r3 = r2 + inn;
    for (let o = 0; o < out; o += 2) {
      const row = o * inn, next = row + inn, start = b ? b[o] : 0, other = b ? b[o + 1] : 0;
      let s0 = start, s1 = start, s2 = start, s3 = start, t0 = other, t1 = other, t2 = other, t3 = other;
      for (let k = 0; k < inn; k++) {
        const u = w[row + k], v = w[next + k], x0 = x[r0 + k], x1 = x[r1 + k], x2 = x[r2 + k], x3 = x[r3 + k];
        s0 += x0 * u; s1 += x1 * u; s2 += x2 * u; s3 += x3 * u;
        t0 += x0 * v; t1 += x1 * v; t2 += x2 * v; t3 += x3 * v;
      }
      const at = i * out + o, below = at + out, third = below + out, fourth = third + out;
      y[at] = s0; y[below] = s1; y[third] = s2; y[fourth] = s3;
      y[at + 1] = t0; y[below + 1] = t1; y[third + 1] = t2; y[fourth + 1] = t3;
    }
  }
  for (; i < n; i++) for (let o = 0; o < out; o++) {
    const row = o * inn, r = i * inn;
    let s0 = b ? b[o] : 0, s1 = 0, s2 = 0, s3 = 0;
    for (let k = 0; k < inn; k += 4) {
      s0 += x[r + k] * w[row + k]; s1 += x[r + k + 1] * w[row + k + 1];
      s2 += x[r + k + 2] * w[row + k + 2]; s3 += x[r + k + 3] * w[row + k + 3];
    }
    y[i * out + o] = s0 + s1 + s2 + s3;
  }
  return y;
}

// x / sqrt(mean(x^2) + eps) * w
export function rmsNorm(x, n, d, { w, eps }) {
  const y = new Float32Array(n * d);
  for (let i = 0; i < n; i++) {
    let square = 0;
    for (let k = 0; k < d; k++) square += x[i * d + k] ** 2;
    const scale = 1 / Math.sqrt(square / d + eps);
    for (let k = 0; k < d; k++) y[i * d + k] = x[i * d + k] * scale * w[k];
  }
  return y;
}

// (x - mean) / sqrt(variance + eps) * w + b
export function layerNorm(x, n, d, { w, b, eps }) {
  const y = new Float32Array(n * d);
  for (let i = 0; i < n; i++) {
    let mean = 0, square = 0;
    for (let k = 0; k < d; k++) mean += x[i * d + k] / d;
    for (let k = 0; k < d; k++) square += (x[i * d + k] - mean) ** 2;
    const scale = 1 / Math.sqrt(square / d + eps);
    for (let k = 0; k < d; k++) y[i * d + k] = (x[i * d + k] - mean) * scale * w[k] + b[k];
  }
  return y;
}

export const normalize = (x, n, d, norm) => (norm.b ? layerNorm : rmsNorm)(x, n, d, norm);

// x += y, in place
export function add(x, y) {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
  return x;
}

const silu = v => v / (1 + Math.exp(-v));
const geluTanh = v => 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3)));
const gelu = v => 0.5 * v * (1 + erf(v / Math.SQRT2));

// by Abramowitz and Stegun 7.1.26, wrong by 1.5e-7 at most
function erf(v) {
  const t = 1 / (1 + 0.3275911 * Math.abs(v));
  const sum = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return Math.sign(v) * (1 - sum * Math.exp(-v * v));
}

// down(silu(gate(x)) * up(x))
export function swiglu(x, n, { gate, up, down }) {
  const a = linear(x, n, gate), b = linear(x, n, up);
  for (let i = 0; i < a.length; i++) a[i] = silu(a[i]) * b[i];
  return linear(a, n, down);
}

// fc2(gelu(fc1(x))), the GELU exact or by its tanh formula
export function twoLayers(x, n, { fc1, fc2, tanh }) {
  const a = linear(x, n, fc1).map(tanh ? geluTanh : gelu);
  return linear(a, n, fc2);
}

// rotate the pairs (k, k + K/2) of one head at `at` by K/2 angles, in place
export function rotate(q, at, K, cos, sin, angle) {
  const half = K / 2;
  for (let k = 0; k < half; k++) {
    const c = cos[angle + k], s = sin[angle + k], u = q[at + k], v = q[at + k + half];
    q[at + k] = u * c - v * s;
    q[at + k + half] = v * c + u * s;
  }
}

const scores = new Float32Array(4096);

// One query over the keys [from, to): softmax(q k / sqrt(K)) v is added to `out` at `at`; shares[j] is what key j got
export function attend(q, queryAt, k, v, stride, from, to, K, out, at, shares) {
  const scale = 1 / Math.sqrt(K);
  let most = -Infinity, sum = 0;
  for (let j = from; j < to; j++) {
    let s = 0;
    for (let c = 0; c < K; c++) s += q[queryAt + c] * k[j * stride + c];
    scores[j] = s * scale;
    if (scores[j] > most) most = scores[j];
  }
  for (let j = from; j < to; j++) sum += scores[j] = Math.exp(scores[j] - most);
  for (let j = from; j < to; j++) {
    const share = scores[j] / sum;
    if (shares) shares[j] = share;
    for (let c = 0; c < K; c++) out[at + c] += share * v[j * stride + c];
  }
}
