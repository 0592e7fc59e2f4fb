// A stage in one square, from the values of a run: for the map, and large when its box is open.
import { CELLS, FRAME, GRID, lookOf, patchIn, slotsOf, towerOf, windowOf } from "./change.js";

export const SERIF = '"Iowan Old Style",Charter,"Palatino Linotype",Palatino,"Liberation Serif",Georgia,serif';
export const SANS = '-apple-system,"Segoe UI","Liberation Sans",Roboto,Arial,sans-serif';
const MONO = "ui-monospace,Menlo,Consolas,monospace", BIG = 150;   // px; a square that is larger is an open box

// the image as the rows hold it: one small picture for each slot of the list, side by side
export function patchTiles(R, { patch: P, mean, std }) {
  const N = R.at.length, sheet = new OffscreenCanvas(P * N, P), g = sheet.getContext("2d"), image = g.createImageData(P * N, P);
  for (let slot = 0; slot < N; slot++) for (let c = 0; c < 3; c++) for (let k = 0; k < P * P; k++) {
    const i = 4 * (Math.floor(k / P) * P * N + slot * P + k % P);
    image.data[i + c] = 255 * (R.rows[(slot * 3 + c) * 2 * P * P + k] * std[c] + mean[c]);   // clamped
    image.data[i + 3] = 255;
  }
  g.putImageData(image, 0, 0);
  return sheet;
}
const put = (g, V, slot, x, y, s) => {
  const P = V.pixels.patch;
  g.drawImage(V.sheet, slot * P, 0, P, P, x, y, s, s);
};
// where a frame lies in a square of side s: all of it, or a third, side by side
export const boxOf = (t, s, { T }) => {
  if (T === 1) return [0, 0, s];
  const w = s / T - s * 0.015;
  return [t * (s / T) + s * 0.0075, (s - w) / 2, w];
};
const patchBox = (seat, s, V) => {
  const [x, y, w] = boxOf(Math.floor(seat / FRAME), s, V), i = seat % FRAME;
  return [x + (i % GRID) * w / GRID, y + Math.floor(i / GRID) * w / GRID, w / GRID];
};
const tokenBox = (m, s, V) => {
  const [x, y, w] = boxOf(Math.floor(m / CELLS), s, V), i = m % CELLS;
  return [x + (i % 3) * w / 3, y + Math.floor(i / 3) * w / 3, w / 3];
};

// numbers as a texture: n x n of them in a cell
function texture(g, values, from, n, x, y, s, scale, C) {
  const u = s / n;
  g.fillStyle = C.ink;
  for (let k = 0; k < n * n; k++) {
    const v = Math.min(1, values[from + k] / scale);
    g.globalAlpha = v > 0 ? 0.06 + 0.94 * v : 0.06;
    g.fillRect(x + (k % n) * u, y + Math.floor(k / n) * u, u + 0.3, u + 0.3);
  }
  g.globalAlpha = 1;
}
// how far each of n rows is from their mean, darker where farther
function heat(g, values, n, place, C) {
  const d = values.length / n, mean = new Float32Array(d);
  for (let i = 0; i < n * d; i++) mean[i % d] += values[i] / n;
  const far = Array.from({ length: n }, (_, r) => {
    let sum = 0;
    for (let k = 0; k < d; k++) sum += (values[r * d + k] - mean[k]) ** 2;
    return Math.sqrt(sum);
  });
  const low = Math.min(...far), most = Math.max(...far);
  g.fillStyle = C.ink;
  far.forEach((v, r) => {
    const [x, y, s] = place(r), gap = Math.min(0.6, s * 0.06);
    g.globalAlpha = 0.07 + 0.9 * (v - low) / (most - low || 1);
    g.fillRect(x + gap, y + gap, s - 2 * gap, s - 2 * gap);
  });
  g.globalAlpha = 1;
}
const scaleOf = values => 2.2 * Math.sqrt(values.reduce((sum, v) => sum + v * v, 0) / values.length);
function tokenNumbers(g, s, V, rows) {
  if (s < BIG) return heat(g, rows, V.M, m => tokenBox(m, s, V), V.C);
  const D = rows.length / V.M, scale = scaleOf(rows);
  for (let m = 0; m < V.M; m++) {
    const [x, y, w] = tokenBox(m, s, V), gap = w * 0.06;
    texture(g, rows, m * D, 8, x + gap, y + gap, w - 2 * gap, scale, V.C);
  }
}

// V: what a side shows, see `view` in app.js. s: the side of the square; wide: its width, where it has more room
export const MINIS = {
  pixels(g, s, V) {
    for (let slot = 0; slot < V.T * FRAME; slot++) {
      const [t, y, x] = patchIn(slot, V.broken), [left, top, u] = patchBox(t * FRAME + y * GRID + x, s, V);
      put(g, V, slot, left, top, u + 0.5);
    }
  },
  patches(g, s, V, wide = s) {                            // nine columns of four, for each frame pair
    const u = Math.min(wide / 9, s / (4 * V.T + 0.4 * (V.T - 1))), gap = u * 0.06, left = (wide - 9 * u) / 2;
    const high = (4 * V.T + 0.4 * (V.T - 1)) * u;
    for (let slot = 0; slot < V.T * FRAME; slot++) {
      const t = Math.floor(slot / FRAME), column = (slot % FRAME) >> 2;
      const x = left + column * u + 2 * gap, y = (s - high) / 2 + (slot % 4 + 4.4 * t) * u + gap / 2;
      put(g, V, slot, x, y, u - 3 * gap);
    }
  },
  windows(g, s, V) {
    const window = windowOf(V.R, V.broken), gap = Math.max(0.3, s * 0.006 / V.T);
    for (let slot = 0; slot < V.T * FRAME; slot++) {
      const [t, y, x] = patchIn(slot, V.broken), [left, top, u] = patchBox(t * FRAME + y * GRID + x, s, V);
      put(g, V, slot, left + gap, top + gap, u - 2 * gap);
    }
    g.beginPath();
    window.forEach((w, i) => {
      const [x, y, u] = patchBox(i, s, V), isLast = [i % GRID === 5, i % FRAME >= 30];
      if (!isLast[0] && w !== window[i + 1]) { g.moveTo(x + u, y); g.lineTo(x + u, y + u); }
      if (!isLast[1] && w !== window[i + GRID]) { g.moveTo(x, y + u); g.lineTo(x + u, y + u); }
    });
    for (let t = 0; t < V.T; t++) { const [x, y, w] = boxOf(t, s, V); g.rect(x + 0.8, y + 0.8, w - 1.6, w - 1.6); }
    for (const [color, times] of [[V.C.raised, 2.6], [V.C.ink, 1]]) {
      g.strokeStyle = color;
      g.lineWidth = Math.max(1.2, s * 0.011 / V.T) * times;
      g.stroke();
    }
  },
  tower(g, s, V) { heat(g, towerOf(V.R), V.T * FRAME, seat => patchBox(seat, s, V), V.C); },
  tokens(g, s, V) { tokenNumbers(g, s, V, V.R.tokens); },
  deepstack(g, s, V) {                                    // one grid below the other, on a small step to the right
    const n = V.R.deeper.length, each = s / n;
    V.R.deeper.forEach((rows, i) => {
      g.save();
      g.translate(i * (s - each) / Math.max(1, n - 1), i * each);
      if (V.broken === "deep") { g.strokeStyle = V.C.line; g.strokeRect(3, 3, each - 6, each - 6); }
      else tokenNumbers(g, each - 3, V, rows);
      g.restore();
    });
  },
  prompt(g, s, V, wide = s) {
    const isBig = s > BIG, lines = (isBig ? 11 : wide > s ? 5 : 7) + (V.T > 1 ? 2 : 0), h = s / lines, size = Math.max(11, h * 0.42);
    const kept = new Set(V.R.keep);
    let x = 0, y = 0, isDry = true;
    const pass = () => V.ids.forEach((id, j) => {
      const m = j - V.off, isSeen = m >= 0 && m < V.M, text = V.label(id);
      g.font = `${size}px ${MONO}`;
      const w = isSeen ? h * 0.86 : isBig ? g.measureText(text).width + 8 : s * 0.035 * Math.min(7, text.length + 1);
      if (x + w > wide) { x = 0; y += h; }
      if (!isDry) piece(g, V, { text, m, isSeen, isBig, isGone: !kept.has(j) }, x, y, w, h);
      x += w + (isBig ? 4 : s * 0.03);
    });
    pass();                                               // once to know its height
    [x, y, isDry] = [0, Math.max(0, (s - y - h) / 2), false];
    pass();
  },
  positions(g, s, V) {
    const { T, C } = V, [t, h, w] = V.R.positions, step = T > 1 ? V.pixels.timeStep : 1, n = T > 1 ? 3 * T + 1 : 5, u = s / n;
    const at = j => T > 1 ? [((t[j] - V.off) / step * 3.5 + w[j] - V.off) * u, s / 2 + (h[j] - V.off - 1.5) * u]
      : [(w[j] - V.off + 1) * u, (h[j] - V.off + 1) * u];
    g.fillStyle = C.line;
    for (const j of T > 1 ? [] : [V.off - 1, V.off + V.M]) {
      const [x, y] = at(j);
      g.beginPath();
      g.arc(x + u / 2, y + u / 2, Math.max(2, u * 0.18), 0, 7);
      g.fill();
    }
    for (let m = 0; m < V.M; m++) { const [x, y] = at(V.off + m); token(g, V, m, x + 0.5, y + 0.5, u - 1); }
  },
  attention(g, s, V) {
    const a = s * 0.72, look = lookOf(V.R, V.step, V.head, V.heads);
    const box = m => { const [x, y, u] = tokenBox(m, V.T > 1 ? s : a, V); return [x + (V.T > 1 ? 0 : (s - a) / 2), y - (V.T > 1 ? s * 0.2 : 0), u]; };
    for (let m = 0; m < V.M; m++) { const [x, y, u] = box(m); token(g, V, m, x + 0.5, y + 0.5, u - 1); }
    g.strokeStyle = g.fillStyle = V.isWrong ? V.C.broken : V.C.ink;
    for (let m = 0; m < V.M; m++) { const [x, y, u] = box(m); arc(g, s / 2, s * 0.97, x + u / 2, y + u / 2, look[V.off + m], s * 0.08); }
    g.beginPath();
    g.arc(s / 2, s * 0.96, s * 0.045, 0, 7);
    g.fill();
  },
  word(g, s, V, wide = s) {
    if (s < BIG) return answerOf(g, s, V, wide);
    const rows = 5, steps = V.R.steps.slice(0, Math.max(1, Math.min(s < 260 ? 1 : 2, V.R.out.length)));   // one word on phones
    const gap = s * 0.07, full = (s - gap * (steps.length - 1)) / steps.length, h = s / rows, size = Math.max(12, s * 0.04);
    steps.forEach(({ top }, k) => top.slice(0, rows).forEach(([id, p], i) => {
      const x = k * (full + gap), length = Math.max(0.02, 1 + Math.log10(Math.max(p, 1e-8)) / 8);
      const bar = (color, w) => { g.fillStyle = color; g.fillRect(x, i * h + h * 0.58, w, h * 0.11); };
      bar(V.C.empty, full);
      bar(i ? V.C.line : V.isWrong ? V.C.broken : V.C.ink, full * length);
      g.font = `${i ? 400 : 600} ${size}px ${SANS}`;
      g.fillStyle = i ? V.C.muted : V.C.ink;
      g.textBaseline = "alphabetic";
      g.textAlign = "left";
      g.fillText(V.labelAmong(id, top.map(([other]) => other)).replace("<|im_end|>", "(end)"), x, i * h + h * 0.45);
      g.textAlign = "right";
      const odds = p > 0.001 ? `${(100 * p).toFixed(p > 0.99 ? 2 : 1)} %` : `1 in ${Number((1 / p).toPrecision(2)).toLocaleString("en")}`;
      g.fillText(odds, x + full, i * h + h * 0.45);
    }));
  },
};
// one token of the prompt: a word, or a token of the item
function piece(g, V, { text, m, isSeen, isBig, isGone }, x, y, w, h) {
  g.save();
  if (isGone) {
    g.strokeStyle = V.C.broken;
    g.setLineDash([3, 3]);
    g.strokeRect(x + 1, y + h * 0.1, h * 0.8, h * 0.8);
  } else if (isSeen) token(g, V, m, x, y + h * 0.07, h * 0.86);
  else if (isBig) {
    g.fillStyle = V.C.empty;
    g.beginPath();
    g.roundRect(x, y + 3, w, h - 6, 4);
    g.fill();
    g.fillStyle = V.C.ink;
    g.textBaseline = "middle";
    g.textAlign = "left";
    g.fillText(text, x + 4, y + h / 2);
  } else {
    g.fillStyle = V.C.line;
    g.globalAlpha = 0.6;
    g.fillRect(x, y + h * 0.3, w, h * 0.4);
  }
  g.restore();
}
function answerOf(g, s, V, wide) {                        // two words, a bar of their probability under each
  const said = V.R.out.slice(0, 2), size = said.length > 1 ? s * 0.3 : s * 0.36, full = wide * 0.8;
  g.textAlign = "center";
  g.textBaseline = "alphabetic";
  said.forEach((id, i) => {
    const y = s * (said.length > 1 ? 0.36 + 0.5 * i : 0.56), p = V.R.steps[i].top[0][1];
    g.font = `500 ${size}px ${SERIF}`;
    g.fillStyle = V.isWrong ? V.C.text : V.C.ink;
    g.fillText(V.label(id), wide / 2, y, wide);
    g.fillStyle = V.C.hair;
    g.fillRect((wide - full) / 2, y + s * 0.08, full, s * 0.045);
    g.fillStyle = V.isWrong ? V.C.broken : V.C.ink;
    g.fillRect((wide - full) / 2, y + s * 0.08, full * p, s * 0.045);
  });
}
// the patches that a token was made of, four quarters
export function token(g, V, m, x, y, s) {
  slotsOf(m, V.R, V.broken).forEach((slot, k) => put(g, V, slot, x + (k & 1) * s / 2, y + (k >> 1) * s / 2, s / 2 + 0.3));
}
export function arc(g, x0, y0, x1, y1, share, most) {
  if (share < 0.01) return;
  g.save();
  g.globalAlpha *= 0.2 + 0.8 * Math.min(1, share * 1.3);
  g.lineWidth = Math.max(0.8, share * most);
  g.lineCap = "round";
  g.beginPath();
  g.moveTo(x0, y0);
  g.bezierCurveTo(x0, y0 + (y1 - y0) * 0.45, x1, y1 + (y0 - y1) * 0.45, x1, y1);
  g.stroke();
  g.restore();
}
// one head in a small square: cells, darker where it looks. n: cells along a side; rest: what the text gets, if it does
export function headPicture(g, w, h, look, { n, T, C, isWrong, target, rest }) {
  const color = isWrong ? C.broken : C.ink, each = (w - 6) / T, u = each / n, top = T > 1 ? (w - each) / 2 : 3;
  g.clearRect(0, 0, w, h);
  g.fillStyle = C.raised;
  g.fillRect(0, 0, w, h);
  const corner = i => [3 + Math.floor(i / n / n) * each + (i % n) * u, top + Math.floor(i % (n * n) / n) * u];
  look.forEach((share, i) => {
    const [x, y] = corner(i), gap = Math.min(0.7, u * 0.08);
    g.fillStyle = C.empty;
    g.fillRect(x + gap, y + gap, u - 2 * gap, u - 2 * gap);
    g.fillStyle = color;
    g.globalAlpha = Math.min(1, share);
    g.fillRect(x + gap, y + gap, u - 2 * gap, u - 2 * gap);
    g.globalAlpha = 1;
    if (i === target) { g.strokeStyle = C.line; g.lineWidth = 1; g.strokeRect(x + 1, y + 1, u - 2, u - 2); }
  });
  if (rest === undefined) return;
  g.fillStyle = C.line;
  g.globalAlpha = 0.55;
  g.fillRect(3, h - 6.5, (w - 6) / 2 * rest, 3);
  g.globalAlpha = 1;
  g.strokeStyle = g.fillStyle = color;
  look.forEach((share, i) => {
    const [x, y] = corner(i);
    arc(g, w / 2, h - 5, x + u / 2, y + u / 2, share > 0.05 ? share : 0, 4);
  });
  g.beginPath();
  g.arc(w / 2, h - 5, 2.6, 0, 7);
  g.fill();
}
