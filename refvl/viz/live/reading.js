// Chapters 4 to 9: merged tokens, the prompt, t h w, the map of h and w, attention, the word.
import { CELLS } from "./layout.js";
import { clamp, mix, smooth } from "./pen.js";
import { PLACES } from "./pixels.js";

const AXES = ["t", "h", "w"];

// ---------------------------------------------------------------- 4: outlines of tokens, and their numbers

export const TOKENS = {
  above(view) {
    const { S, L, p, pen, near } = view;
    if (p <= 3.4) return;
    const bounds = tokenBounds(view), dim = near(p, 8);
    for (let m = 0; m < S.M; m++) outline(view, m, bounds[m], dim);
    pen.fade(near(p, 4), () => {
      const [x, y, side] = L.boxes[4][0];
      if (!L.isPhone) pen.text(`${S.M} tokens of ${S.res ? S.res.tokens.length / S.M : 128} numbers`, x, y + side + 30);
      if (S.T > 1) L.boxes[4].forEach(([fx, fy, q], f) => pen.text(`frames ${2 * f + 1} and ${2 * f + 2}`, fx + q / 2,
        fy - 20, { align: "center" }));
    });
  },
};

// [left, top, side] of every token, from where its patches are now
function tokenBounds({ S, seats, tokenOf }) {
  const found = Array.from({ length: S.M }, () => [0, 0, 0, 1e9, -1e9]);
  seats.forEach(([x, y, side], i) => {
    const b = found[tokenOf(i)];
    b[0] += x; b[1] += y; b[2]++; b[3] = Math.min(b[3], x - side / 2); b[4] = Math.max(b[4], x + side / 2);
  });
  return found.map(([x, y, n, x0, x1]) => n && [x / n - (x1 - x0) / 2, y / n - (x1 - x0) / 2, x1 - x0]);
}

function outline({ S, L, p, pen, near, hit, eased, drops, shares, standing, sources }, m, bounds, dim) {
  if (!bounds) return;
  const [left, top, side] = bounds, { g, colors: C } = pen, show = smooth(clamp((p - 3.72) / 0.26)), share = shares[m];
  const isOn = S.token === m && (p < 5.6 || p > 6.5 || S.col === S.off + m), isMap = near(p, 7);
  pen.fade(show * (1 - isMap * (0.6 + 0.4 * (eased.pile || 0))) * (dim ? mix(1, 0.35 + 0.65 * share, dim) : 1), () => {
    pen.rounded(left - 1, top - 1, side + 2, side + 2, 3);
    pen.stroke(C.line, 1.2);
  });
  if (dim > 0.02) pen.fade(dim * clamp(share * 1.2 - 0.1),
    () => pen.ring(left - 2, top - 2, side + 4, side + 4, 3, 1 + 3.5 * share));
  if (isOn && !dim) pen.fade(show * (1 - smooth(clamp((p - 8.6) / 0.3))),
    () => pen.ring(left - 2, top - 2, side + 4, side + 4, 3));
  if (drops[m] > 0.02) {
    const [x, y, q] = L.tileAt(clamp(Math.round(p), 4, 9), m, standing(S.off + m));
    pen.fade(drops[m] * show * (1 - isMap),
      () => { pen.rounded(x - q / 2, y - q / 2, q, q, 3); pen.stroke(C.broken, 1.4, [4, 4]); });
  }
  hit(left, top, side, side, p > 4.5 && p < 5.5 ? "drop" : "token", m, p > 4.5 ? 3 : 0);
  pen.fade(smooth(clamp(1 - Math.abs(p - 4) / 0.26)), () => {
    g.imageSmoothingEnabled = false;
    if (sources.stripes.width > 1) g.drawImage(sources.stripes, 0, m, sources.stripes.width, 1, left, top + side + 5,
      side, Math.max(6, side * 0.1));
  });
  const percent = S.share ? S.share[S.off + m] : 0;
  if (dim > 0.02 && !L.isPhone && S.T === 1 && percent > 0.015) pen.fade(dim, () => {
    const said = `${Math.round(100 * percent)} %`, w = pen.measure(said, 13, "sans", "600") + 12;
    pen.rounded(left + 4, top + 4, w, 22, 5);
    pen.fill(C.paper);
    pen.text(said, left + 4 + w / 2, top + 15.5, { color: C.ink, align: "center", weight: "600" });
  });
}

// ---------------------------------------------------------------- 5: the prompt; its words move through all later chapters

export const PROMPT = {
  above(view) {
    const { S, L, p, pen, near } = view, { g, colors: C } = pen;
    if (p <= 4.3) return;
    const most = S.share ? Math.max(...S.share.filter((_, j) => j < S.off || j >= S.off + S.M)) : 1;
    for (let j = 0; j < S.ids.length; j++) (j >= S.off && j < S.off + S.M ? seat : word)(view, j, most);
    pen.fade(near(p, 5), () => labels(view));
  },
};

function seat({ L, S, p, pen }, j) {
  const [x, y, side] = L.tileAt(5, j - S.off),
    show = smooth(clamp((p - 4.3) / 0.3)) * (1 - smooth(clamp((p - 4.8) / 0.2)));
  pen.fade(show, () => { pen.rounded(x - side / 2 - 3, y - side / 2 - 3, side + 6, side + 6, 4); pen.stroke(pen.colors.line, 1, [3, 3]); });
}

function word({ S, L, p, pen, near, ease, hit, label, standing }, j) {
  const { g, colors: C } = pen, chapter = Math.min(8, Math.floor(p)), f = p - chapter, place = standing(j);
  const a = L.wordAt(chapter, j, place), b = L.wordAt(Math.min(9, chapter + 1), j, place);
  if (p > 5.5 && p < 6.5 && j >= L.first && j < L.beyond) hit(L.columnAt(j)[0] - L.columnAt(j)[2] / 2, L.chart[0],
    L.columnAt(j)[2], L.H * 0.6, "col", j);
  const step = smooth(clamp(f * 1.5 - 0.5 * j / S.ids.length)),
    [x, y, alpha, turn, size] = a.map((v, n) => mix(v, b[n], step));
  if (alpha < 0.02) return;
  const dim = near(p, 8), column = near(p, 6), map = near(p, 7), text = label(S.ids[j]),
    isSpecial = S.isSpecial(S.ids[j]);
  const w = pen.measure(text, size, "mono"), isAfter = j >= S.off + S.M,
    high = size + (L.isPhone ? 9 : 14) * (1 - dim * 0.4);
  const shift = column * (w / 2 - 8) * (turn > 0.8 ? 1 : 0) + map * (isAfter ? -1 : 1) * (w / 2 + 14);
  const share = dim > 0.02 && S.share ? ease("word" + j, S.share[j] || 0, 10) : 0;
  pen.fade(alpha, () => {
    g.save();
    g.translate(x, y);
    g.rotate(turn);
    pen.fade((1 - Math.max(column, map)) * (1 - dim * 0.55),
      () => { pen.rounded(-w / 2 - 6, -high / 2, w + 12, high, 5); pen.fill(C.empty); });
    pen.fade(map, () => pen.dot(0, 0, 4.5, isSpecial ? C.line : C.ink));
    if (share > 0.004) pen.fade(dim * clamp(share * 1.1 + 0.04),
      () => { pen.rounded(-w / 2 - 6, -high / 2, w + 12, high, 5); pen.fill(C.ink); });
    pen.text(text, shift, 0.5, { size,
      color: share * dim > 0.42 ? C.paper : isSpecial && share * dim < 0.12 ? C.muted : C.ink, align: "center", family: "mono" });
    g.restore();
  });
}

function labels({ S, L, pen }) {
  const { seats } = L.flow(5), C = pen.colors, above = L.isPhone ? 23 : 34;
  const put = (j, text) => pen.text(text, seats[j].x - seats[j].w / 2, seats[j].y - above);
  if (S.fold > 0) put(0, "system message");
  put(S.fold, `your ${S.T > 1 ? "video" : "image"}: ${S.M === 9 ? "nine" : S.M} placeholders`);
  put(S.off + S.M, "your question");
  const end = seats.at(-1), x = end.x + end.w / 2 + 14, size = L.isPhone ? 17 : 22;
  const said = S.said.length > 20 ? S.said.slice(0, 18) + "…" : S.said;
  if (said && x + pen.measure(said, size, "serif") < L.W - 8) pen.text(said, x, end.y,
    { size, color: S.isWrong ? C.broken : C.ink, family: "serif" });
}

// ---------------------------------------------------------------- 6: t, h, w along the prompt

export const POSITIONS = {
  below(view) {
    const { p, pen, near, L } = view;
    if (p > 5.4 && p < 6.7) pen.fade(near(p, 6), () => { strands(view); if (!L.isPhone && L.H > 640) dials(view); });
  },
};

function strands({ S, L, pen, position, hit }) {
  const { g, colors: C } = pen, { isPhone, columnAt, levelOf, off, first, beyond, M, T } = L, x = j => columnAt(j)[0],
    c = columnAt(first)[2];
  const extent = T > 1 ? 5 : 3, above = 3.2, end = x(beyond - 1);
  for (const v of [off, off + extent]) {
    pen.lines([[L.columnsLeft - 6, levelOf(v), end + 10, levelOf(v)]], C.hair);
    pen.text(String(v), L.columnsLeft - 12, levelOf(v), { size: 12.5, align: "right", family: "mono" });
  }
  pen.fade(0.6, () => { g.fillStyle = C.empty; g.fillRect(x(off) - c / 2, L.chart[0] - 8, M * c, L.chart[1] - L.chart[0] + 20); });
  const isChosen = S.col >= first && S.col < beyond;
  if (isChosen) pen.lines([[x(S.col), L.chart[0] - 6, x(S.col), columnAt(S.col)[1] - 20]], C.ink, 1, [2, 4]);
  for (let m = 0; m < M; m++) hit(x(off + m) - c / 2, L.chart[0], c, L.H * 0.6, "col", off + m);
  AXES.forEach((_, axis) => {
    const y = j => levelOf(position(axis, j)) + (axis - 1) * above;
    g.beginPath();
    for (let j = first; j < beyond; j++) g[j === first ? "moveTo" : "lineTo"](x(j), y(j));
    g.lineJoin = "round";
    pen.stroke(pen.axis(axis), isPhone ? 2 : 3);
    for (let j = first; j < beyond; j++) {
      const isOn = j === S.col, isSeen = j >= off && j < off + M;
      if (isOn || isSeen) pen.dot(x(j), y(j), isOn ? 6 : isPhone || T > 1 ? 2.6 : 4, pen.axis(axis));
    }
  });
  const said = isPhone ? ["t time", "h height", "w width"] : T > 1
    ? ["t  time: rises with every frame", "h  height: rises with every line", "w  width: rises along every line"]
    : ["t  time: the same for all nine", "h  height: +1 with every line", "w  width: +1 with every column"];
  const lx = Math.min(x(off + M) + (isPhone ? 4 : 34), L.W - (isPhone ? 78 : 260));
  said.forEach((text, axis) => {
    const y = levelOf(off) + (isPhone ? 12 : 18) + axis * (isPhone ? 17 : 26);
    pen.lines([[lx, y, lx + 18, y]], pen.axis(axis), 3);
    pen.text(text, lx + 28, y, { size: 13.5, color: pen.axisText(axis) });
  });
  if (!isChosen) return;
  const w = isPhone ? 96 : 126, y = L.chart[0] - (isPhone ? 24 : 34), left = clamp(x(S.col) - w / 2, 8, L.W - w - 8);
  pen.rounded(left, y - 13, w, 26, 6);
  pen.fill(C.paper);
  pen.stroke(C.hair);
  AXES.forEach((name, axis) => {
    const value = S.res ? S.res.positions[axis][S.col] : 0;
    pen.text(`${name} ${value}`, left + w * (axis + 0.5) / 3, y,
      { size: isPhone ? 11 : 13, color: pen.axisText(axis), align: "center", family: "mono", weight: "600" });
  });
}

// the planes of a head, rotated by t, h and w
function dials({ S, L, pen, ease }) {
  const n = S.axes.length, y = L.H - 58, x0 = L.columnsLeft, w = Math.min(L.W - x0 - 40, n * 46), c = w / n,
    r = Math.min(15, c * 0.36);
  const counts = [0, 1, 2].map(axis => S.axes.filter(a => a === axis).length), C = pen.colors;
  const by = AXES.map((axis, i) => `${counts[i]} by ${axis}`).join(", ");
  pen.text(`The positions rotate ${n} pairs of every query and key, ${by}: the first fastest, the last slowest`, x0, y - 38);
  S.axes.forEach((axis, j) => {
    const value = S.res ? S.res.positions[axis][S.col] : 0, angle = ease("dial" + j, value * S.frequencies[j], 4);
    const x = x0 + (j + 0.5) * c + (S.isInterleaved ? 0 : axis * 8);
    pen.g.beginPath();
    pen.g.arc(x, y, r, 0, 7);
    pen.stroke(C.hair, 1.2);
    pen.g.lineCap = "round";
    pen.lines([[x, y, x + r * Math.cos(angle), y - r * Math.sin(angle)]], pen.axis(axis), 2.4);
    if (S.isInterleaved || S.axes.indexOf(axis) === j) pen.text(AXES[axis], x, y + r + 15,
      { color: pen.axisText(axis), align: "center", weight: "600" });
  });
}

// ---------------------------------------------------------------- 7: every token by its h and w

export const MAP = { below(view) { if (view.p > 6.4 && view.p < 7.7) view.pen.fade(view.near(view.p, 7), () => axes(view)); } };

function axes({ S, L, pen, position }) {
  const { low, high, unit, side, x, y } = L.map, { g, colors: C } = pen, n = high - low + 1, { off } = L;
  pen.lines(Array.from({ length: n + 1 },
    (_, v) => v * unit).flatMap(d => [[x + d, y, x + d, y + side], [x, y + d, x + side, y + d]]), C.hair);
  g.lineCap = "round";
  pen.lines([[x, y, x + side, y + side]], C.line, 1.5, [1, 6]);
  for (let v = low; v <= high; v++) {
    const weight = v >= off && v < off + 3 ? "700" : "", d = (v - low + 0.5) * unit;
    pen.text(String(v), x - 10, y + d, { size: 12.5, color: C.h, align: "right", family: "mono", weight });
    pen.text(String(v), x + d, y - 12, { size: 12.5, color: C.wt, align: "center", family: "mono", weight });
  }
  const corner = (off - low) * unit;
  g.strokeStyle = C.line;
  g.lineWidth = 1.2;
  g.setLineDash([4, 4]);
  g.strokeRect(x + corner, y + corner, 3 * unit, 3 * unit);
  g.setLineDash([]);
  if (L.isPhone) return;
  g.save();
  g.translate(x - 44, y + side / 2);
  g.rotate(-Math.PI / 2);
  pen.text("h, height: down", 0, 0, { size: 14, color: C.h, align: "center", weight: "600" });
  g.restore();
  pen.text("w, width: to the right", x + side / 2, y - 38, { size: 14, color: C.wt, align: "center", weight: "600" });
  const times = [...new Set(Array.from({ length: L.T }, (_, f) => Math.round(position(0, off + f * CELLS))))].sort((a,
    b) => a - b);
  const said = L.T > 1 ? `in a cell, left to right: t = ${times.join(", ")}` : `t = ${times[0]} for all nine`;
  pen.text(said, x + side - 6, y + (off - low + 1.5) * unit, { size: 13.5, color: C.t, align: "right" });
}

// ---------------------------------------------------------------- 8: layers of heads, each a small image of where it looks

export const ATTENTION = {
  above(view) {
    const { p, pen, near } = view;
    if (p > 7.5) pen.fade(near(p, 8), () => { heads(view); prompt(view); });
  },
};

function heads({ S, L, pen, hit }) {
  if (!S.res) return;
  const { isPhone, W, T } = L, C = pen.colors, step = S.res.steps[Math.min(S.step, S.res.steps.length - 1)],
    keys = step.look.length / 12;
  const right = Math.max(...L.boxes[8].map(([x, , side]) => x + side)),
    top0 = Math.min(...L.boxes[8].map(([, y]) => y));
  const x0 = right + (isPhone ? 18 : Math.max(48, W * 0.07)), width = W - x0 - (isPhone ? 10 : Math.max(20, W * 0.05)),
    gap = isPhone ? 6 : 12;
  const q = Math.min((width - 3 * gap - (isPhone ? 0 : 16)) / 4, isPhone ? 44 : 84), pitch = q + (isPhone ? 14 : 34),
    top = top0 + (isPhone ? 0 : 46);
  if (!isPhone) pen.text("12 heads, each with its own attention", x0, top0 + 4, { color: C.ink });
  for (let l = 0; l < 3; l++) for (let h = 0; h < 4; h++) {
    const x = x0 + h * (q + gap), y = top + l * pitch, isOn = S.head[0] === l && S.head[1] === h, u = q / 3;
    const seen = Array(CELLS).fill(0);
    for (let m = 0; m < S.M; m++) {
      const at = S.res.keep.indexOf(S.off + m);
      if (at >= 0) seen[m % CELLS] += step.look[(l * 4 + h) * keys + at];
    }
    seen.forEach((v, m) => {
      pen.rounded(x + (m % 3) * u, y + Math.floor(m / 3) * u, u - 1.5, u - 1.5, 2);
      pen.fill(C.empty);
      pen.fade(clamp(v ** 0.7 * 1.25), () => pen.fill(C.ink));
    });
    if (isOn) { pen.rounded(x - 5, y - 5, q + 8.5, q + 8.5, 6); pen.stroke(C.ink, 2.2); }
    const sum = seen.reduce((a, b) => a + b, 0);
    if (!isPhone) pen.text(`${Math.round(100 * sum)} %`, x + q / 2, y + q + 14,
      { size: 12.5, color: isOn ? C.ink : C.muted, align: "center" });
    hit(x - 4, y - 4, q + 8, q + 8 + (isPhone ? 4 : 22), "head", l * 4 + h);
  }
  if (isPhone) return;
  pen.text(`share of attention on the ${T > 1 ? "video, summed over its frames" : "image"}`, x0,
    top + 3 * pitch + 4, { size: 12.5 });
  for (let l = 0; l < 3; l++) {
    pen.g.save();
    pen.g.translate(x0 - 20, top + l * pitch + q / 2);
    pen.g.rotate(-Math.PI / 2);
    pen.text(`layer ${l + 1}`, 0, 0, { size: 12.5, align: "center" });
    pen.g.restore();
  }
}

function prompt({ S, L, pen, eased }) {
  const flow = L.flow(8), C = pen.colors, most = S.share ? Math.max(...S.share.slice(S.off, S.off + S.M)) : 0;
  for (let m = 0; m < S.M; m++) {
    const seat = flow.seats[S.off + m], q = flow.tile;
    pen.rounded(seat.x - q / 2, seat.y - q / 2, q, q, 3);
    pen.fade(clamp((eased["share" + m] || 0) * most), () => pen.fill(C.ink));
    pen.stroke(C.line);
  }
  if (!L.isPhone) pen.text("the whole prompt: the more a token stands out, the more this head attends to it",
    flow.seats[0].x - flow.seats[0].w / 2, flow.top - 30, { size: 12.5 });
}

// ---------------------------------------------------------------- 9: word after word, the largest of all numbers

export const WORD = { above(view) { if (view.p > 8.5) view.pen.fade(smooth(clamp((view.p - 8.55) / 0.4)), () => verdict(view)); } };

// a probability as a person says it
export function chance(p) {
  if (p > 0.99995) return "> 99.99 %";
  if (p >= 0.1) return `${(100 * p).toFixed(p > 0.99 ? 2 : 1)} %`;
  const n = 1 / Math.max(p, 1e-12), two = v => Number(v.toPrecision(2)).toLocaleString("en");
  return "1 in " + (n >= 1e9 ? two(n / 1e9) + " billion" : n >= 1e6 ? two(n / 1e6) + " million" : two(n));
}

function verdict({ S, L, pen, ease, label }) {
  if (!S.res) return;
  const { isPhone, W, H } = L, C = pen.colors, boxes = L.boxes[9], bottom = Math.max(...boxes.map(([, y, q]) => y + q)),
    [, by, q] = boxes[0];
  const x = Math.max(...boxes.map(([bx, , side]) => bx + side)) + (isPhone ? 18 : 36), isBeside = !(isPhone && L.T > 1);
  const left = isBeside ? x : 16, line = isBeside ? by + (isPhone ? 22 : q * 0.24) : bottom + 18;
  pen.text(S.q, left, line, { size: isPhone ? 15 : 20 });
  const room = W - left - 20, size = clamp(64 * room / pen.measure(S.said, 64, "serif", "500"), isPhone ? 20 : 26,
    isPhone ? 34 : 64);
  pen.text(S.said, left, line + (isPhone ? 34 : q * 0.42),
    { size, color: S.isWrong ? C.broken : C.ink, family: "serif", weight: "500" });
  const n = Math.max(1, Math.min(isPhone ? 2 : 4, S.res.out.length)), x0 = isPhone ? 16 : W * 0.06,
    wide = W - x0 - (isPhone ? 16 : W * 0.05);
  const column = Math.min(290, (wide - (n - 1) * 24) / n), top = (isBeside ? bottom : line + 48) + (isPhone ? 22 : 56);
  const pitch = isPhone ? 30 : Math.min(56, (H - top - 60) / 6), shown = isPhone ? (isBeside ? 4 : 3) : 5;
  for (let s = 0; s < n; s++) {
    const at = x0 + s * (column + 24);
    if (!isPhone) pen.text(s ? "then" : "first word", at, top);
    S.res.steps[s].top.slice(0, shown).forEach(([id, share], r) => {
      const y = top + (isPhone ? 8 : 34) + r * pitch, bar = y + (isPhone ? 9 : 14);
      const long = ease(`bar${s}.${r}`, clamp(1 + Math.log10(Math.max(share, 1e-9)) / 8), 8);
      pen.text(label(id).slice(0, column < 240 ? 9 : 16), at, y,
        { size: isPhone ? 13 : 16, color: r ? C.muted : S.isWrong ? C.broken : C.ink, weight: r ? "" : "600" });
      pen.text(chance(share), at + column, y, { color: r ? C.muted : C.ink, align: "right" });
      pen.rounded(at, bar, column, 5, 2.5);
      pen.fill(C.empty);
      if (long > 0.002) { pen.rounded(at, bar, Math.max(3, column * long), 5,
        2.5); pen.fill(S.isWrong && !r ? C.broken : C.ink); }
    });
  }
  if (isPhone) return;
  const [first, second] = S.res.steps[0].top;
  const lead = `“${label(first[0])}” leads “${label(second[0])}” by ${(first[2] - second[2]).toFixed(1)}`;
  pen.text(`${lead}; the bars are logarithmic, from 1 in 100 million to 1`, x0, top + 34 + 5 * pitch + 6);
}
