// Chapters 0 to 3: the image as pixels, as patch rows, as a list, and in windows.
import { FRAME, WINDOW_ENDS, gridOf, rasterOf, windowOf } from "./layout.js";
import { clamp, smooth } from "./pen.js";
import { DIRECTIONS, SIDE, placeOf } from "./pixels.js";

export const PAINT = { above(view) { if (view.p < 1) view.pen.fade(1 - clamp(view.p * 3), () => paintMarks(view)); } };

function paintMarks({ S, L, pen, ease }) {
  const [x, y, side] = L.boxes[0][0], c = side / 3, u = side / SIDE, dark = "#1c1c1c", { g } = pen;
  if (S.kind === "photo") return;
  const thirds = [1, 2].flatMap(n => [[x + n * c, y + 10, x + n * c, y + side - 10],
    [x + 10, y + n * c, x + side - 10, y + n * c]]);
  pen.fade(ease("grid", S.painting ? 0.28 : 0.1), () => pen.lines(thirds, dark));
  const chosen = S.things[S.sel], r = 13.2 * u;
  if (chosen && S.kind === "picture") {
    pen.rounded(x + chosen.x * u - r, y + chosen.y * u - r, 2 * r, 2 * r, 10);
    g.lineCap = "round";
    pen.stroke(dark, 1.6, [2, 5]);
  }
  if (S.kind === "clip" && S.things.length) path(S, pen, x, y, u);
  const isFree = S.cell >= 0 && !S.painting && !S.things.some(t => placeOf(t) === S.cell) && S.things.length < 4;
  if (isFree) {
    const cx = x + c * (S.cell % 3 + 0.5), cy = y + c * (Math.floor(S.cell / 3) + 0.5);
    pen.fade(0.6, () => pen.lines([[cx - 9, cy, cx + 9, cy], [cx, cy - 9, cx, cy + 9]], dark, 2));
  }
}

// where the moving shape goes, as a dashed arrow
function path(S, pen, left, top, u) {
  const { x, y } = S.things[0], [dx, dy] = DIRECTIONS[S.direction], far = S.distance;
  const [x1, y1] = [left + (x + dx * far) * u, top + (y + dy * far) * u], [x0, y0] = [left + x * u, top + y * u];
  pen.lines([[x0, y0, x1, y1]], "#1c1c1c", 2, [3, 6]);
  pen.lines([1, -1].map(s => [x1, y1, x1 - 12 * dx + s * 7 * dy, y1 - 12 * dy + s * 7 * dx]), "#1c1c1c", 2);
}

// ---------------------------------------------------------------- 1: the row of one patch

export const ROW = { above(view) { view.pen.fade(view.near(view.p, 1), () => opened(view)); } };

function opened({ S, L, pen, ease, eased, hit, seats, slotOf, sources }) {
  if (!S.res || !seats?.[S.patch]) return;
  const { g, colors: C } = pen, { W, H, isPhone, boxes } = L, frame = Math.floor(S.patch / FRAME),
    [row, column] = gridOf(S.patch);
  const right = Math.max(...boxes[1].map(([x, , side]) => x + side)),
    x = right + (isPhone ? 22 : Math.max(36, W * 0.05));
  const width = W - x - (isPhone ? 12 : 36), q = Math.min(width, H * 0.4, 300),
    top = Math.max(isPhone ? 24 : 30, H / 2 - (q + 200) / 2);
  const P = sources.coarse[0].width / 6, size = P * P, unit = q / P;
  if (!(("scan" + S.patch) in eased)) eased["scan" + S.patch] = 0;
  const scan = ease("scan" + S.patch, 1, 2.2), [sx, sy, side] = seats[S.patch];
  g.beginPath();
  g.moveTo(sx + side / 2 + 2, sy);
  g.bezierCurveTo(x - 24, sy, x - 24, top + q / 2, x - 2, top + q / 2);
  pen.stroke(C.line);
  g.imageSmoothingEnabled = false;
  g.drawImage((eased.bgr > 0.5 ? sources.swapped : sources.coarse)[frame], column * P, row * P, P, P, x, top, q, q);
  const mesh = Array.from({ length: P - 1 }, (_, n) => (n + 1) * unit);
  pen.lines(mesh.flatMap(d => [[x + d, top, x + d, top + q], [x, top + d, x + q, top + d]]), "rgba(0,0,0,.13)");
  const read = Math.min(size - 1, Math.floor(scan * size)), px = scan < 0.99 ? read : Math.min(S.px ?? 0, size - 1);
  g.strokeStyle = "#1c1c1c";
  g.lineWidth = 2;
  g.strokeRect(x + (px % P) * unit, top + Math.floor(px / P) * unit, unit, unit);
  for (let n = 0; n < size; n++) hit(x + (n % P) * unit, top + Math.floor(n / P) * unit, unit, unit, "px", n);

  const y = top + q + (isPhone ? 16 : 34), pitch = isPhone ? 9 : 15;
  const title = isPhone ? `patch ${row + 1}/${column + 1}` : `the patch in line ${row + 1}, column ${column + 1}, written out`;
  pen.text(title, x, y - (isPhone ? 2 : 12), { color: C.ink });
  for (let n = 0; n < 6; n++) {
    const at = y + 10 + n * pitch + Math.floor(n / 2) * 5;
    g.drawImage(sources.row, 0, n, size * scan, 1, x + 14, at, (width - 14) * scan, pitch - 2);
    if (n % 2 === 0) pen.text("RGB"[n / 2], x, at + pitch - 1, { size: 12 });
  }
  const mark = x + 14 + (width - 14) * (px + 0.5) / size, end = y + 20 + 6 * pitch;
  pen.lines([[mark, y + 8, mark, end]], C.ink, 1.5);
  pen.dot(mark, end, 2.5, C.ink);
  const value = S.res.rows[slotOf(S.patch) * 6 * size + px], { mean, std } = S.pixels;
  const level = Math.round(S.breaks.raw ? value * 255 : (value * std[0] + mean[0]) * 255), at = y + 40 + 6 * pitch;
  const normed = `(${level} / 255 − ${mean[0].toFixed(3)}) / ${std[0].toFixed(3)} = ${value.toFixed(2)}`;
  const formula = S.breaks.raw ? `${level} / 255 = ${value.toFixed(2)}` : normed;
  if (isPhone) { pen.text(`red ${level} becomes ${value.toFixed(2)}`, x, at - 4, { size: 12, color: C.ink }); return; }
  pen.text(formula, x, at + 2, { size: 13.5, color: C.ink, family: "mono" });
  const twice = S.T > 1 ? "from both frames" : "each colour twice";
  pen.text(`this pixel's red, then ${(6 * size - 1).toLocaleString("en")} more values, ${twice}`, x, at + 26);
}

// ---------------------------------------------------------------- 2 and 3: the list, with the frames it came from

export const LIST = {
  below(view) {
    const { p, pen, near, L } = view, { g, colors: C } = pen;
    if (p > 1.3 && p < 4) origin(view, smooth(clamp((p - 1.3) / 0.5)));
    pen.fade(near(p, 2) * 0.9, () => {
      threads(view);
      if (L.isPhone) return;
      const [x0, y0] = L.listed(0), y = L.listed(L.T * FRAME - 1)[1] + 30, count = L.T * FRAME;
      pen.text("first", x0 - L.cell / 2, y);
      pen.text(`${count} rows of ${view.S.rowLength.toLocaleString("en")} numbers`, L.W / 2, y, { align: "center" });
      pen.text("last", x0 + 35.5 * L.cell, y, { align: "right" });
    });
  },
};

function threads({ S, L, pen, placed }) {
  const { g, colors: C } = pen;
  for (let i = 0; i < S.T * FRAME; i++) {
    const isOn = (i >> 2) === (S.patch >> 2);
    if (!isOn && (L.isPhone || S.T > 1)) continue;
    const [x, y, side] = L.boxes[2][Math.floor(i / FRAME)], u = side / 6, [row, column] = gridOf(i),
      [bx, by, bs] = placed(2, i);
    const x0 = x + (column + 0.5) * u, y0 = isOn ? y + (row + 0.5) * u : y + side, bend = (y + side + by) / 2;
    g.beginPath();
    g.moveTo(x0, y0);
    g.bezierCurveTo(x0, bend, bx, bend, bx, by - bs / 2 - 2);
    pen.stroke(isOn ? C.ink : C.hair, isOn ? 1.6 : 1);
  }
}

// the frames above the list; in chapter 3 the windows part, and attention dims
function origin({ S, L, p, pen, ease, piece, hit }, alpha) {
  const inWindows = clamp(p - 2), part = S.hasWindows ? smooth(clamp((inWindows - 0.3) / 0.6)) : 0;
  const out = smooth(clamp((p - 3.05) / 0.3)), look = S.look && inWindows > 0.5 ? S.look : null;
  const most = look ? Math.max(...look) : 1, { g, colors: C } = pen;
  pen.fade(alpha * (1 - out), () => {
    for (let i = 0; i < S.T * FRAME; i++) {
      const [cx, cy, u] = spread(L, i, part),
        share = ease("origin" + i, look ? 0.3 + 0.7 * Math.sqrt(look[i] / most) : p < 2.5 ? 0.45 : 0.5, 12);
      piece(i, cx, cy, u - 0.6, 0, share);
      hit(cx - u / 2, cy - u / 2, u, u, "patch", i);
    }
    pen.fade(part, () => {
      for (let f = 0; f < S.T; f++) for (const [row, column, h, w] of [[0, 0, 4, 4], [0, 4, 4, 2], [4, 0, 2, 4],
        [4, 4, 2, 2]]) {
        const [cx, cy, u] = spread(L, f * FRAME + 4 * (3 * (row >> 1) + (column >> 1)), part);
        g.strokeStyle = C.line;
        g.lineWidth = 1.2;
        g.strokeRect(cx - u / 2, cy - u / 2, w * u, h * u);
      }
    });
    const [cx, cy, u] = spread(L, S.patch, part);
    pen.ring(cx - u / 2, cy - u / 2, u, u);
  });
}
function spread(L, i, part) {
  const [x, y, side] = L.boxes[2][Math.floor(i / FRAME)], u = side / 6, [row, column] = gridOf(i),
    shift = part * u * 0.5;
  return [x + (column + 0.5) * u + (column > 3 ? shift : 0) - shift / 2,
    y + (row + 0.5) * u + (row > 3 ? shift : 0) - shift / 2, u];
}

export const WINDOWS = { below(view) { if (view.p > 2.5 && view.p < 3.9) view.pen.fade(view.near(view.p, 3), () => arcs(view)); } };

const MOST_ARCS = 5;                                      // on a phone

function arcs({ S, L, pen, ease, placed }) {
  if (!S.look) return;
  const { g, colors: C } = pen, { isPhone } = L, [mx, my, ms] = placed(3, S.patch), most = Math.max(...S.look);
  const ranked = [...S.look.keys()].filter(i => i !== S.patch).sort((a, b) => S.look[b] - S.look[a]);
  for (const i of ranked.slice(0, isPhone ? MOST_ARCS : undefined)) {
    const v = ease("arc" + i, S.look[i], 9);
    if (v < 0.006) continue;
    const [bx, by, bs] = placed(3, i), far = Math.abs(bx - mx), isOtherLine = Math.abs(by - my) > 4;
    const up = isPhone ? 16 + far * 0.2 : Math.min(34 + far * 0.5, L.H * (S.T > 1 ? 0.08 : 0.26));
    const y0 = my - ms / 2 - 4, y1 = by - bs / 2 - 4, peak = Math.min(y0, y1) - (isOtherLine ? 10 : up);
    g.lineCap = "round";
    g.beginPath();
    g.moveTo(mx, y0);
    g.bezierCurveTo(mx, peak, bx, peak, bx, y1);
    pen.fade(0.16 + 0.84 * Math.sqrt(v / most), () => pen.stroke(C.ink, 1 + 18 * v));
  }
  if (S.hasWindows) for (let f = 0; f < S.T; f++) brackets(L, pen, f * FRAME);
}

function brackets(L, pen, from) {
  const C = pen.colors, { isPhone } = L;
  for (let n = 0; n < 4; n++) {
    const [x0, y0, side] = L.windowed(from + WINDOW_ENDS[n]), [x1] = L.windowed(from + WINDOW_ENDS[n + 1] - 1),
      y = y0 + side / 2 + 6;
    const left = x0 - side / 2, right = x1 + side / 2;
    pen.lines([[left, y - 2, left, y + 2], [left, y + 2, right, y + 2], [right, y + 2, right, y - 2]], C.line, 1.2);
    if (!isPhone && L.T === 1) pen.text(`window ${n + 1}`, (left + right) / 2, y + 18, { size: 12.5, align: "center" });
  }
  if (isPhone || L.T > 1) return;
  const [x0, y0, side] = L.windowed(0), y = y0 + side / 2 + 52, left = x0 - side / 2;
  pen.text("cuts", left, y, { size: 12.5 });
  WINDOW_ENDS.forEach((v, n) => {
    const x = n === 0 ? left + 44 : n === 4 ? L.windowed(35)[0] + side / 2 : L.windowed(v)[0] - side / 2 - 8;
    pen.text(String(v), x, y, { color: C.ink, align: n === 4 ? "right" : "center", family: "mono" });
  });
}
