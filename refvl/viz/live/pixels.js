// Pixels: scenes as the models were trained on them, frames of a video, and the resize of Pillow.

export const SIDE = 84, CELL = 28, RADIUS = 10.5, PAPER = [226, 224, 219];
export const COLORS = {
  red: [215, 40, 40], green: [40, 165, 60], blue: [45, 80, 215],
  yellow: [235, 205, 40], purple: [145, 50, 185], black: [35, 35, 40],
};
export const SHAPES = ["circle", "square", "triangle", "cross", "star"];
export const PLACES = [
  "top left", "top center", "top right", "middle left", "center", "middle right",
  "bottom left", "bottom center", "bottom right",
];
export const DIRECTIONS = { left: [-1, 0], right: [1, 0], up: [0, -1], down: [0, 1] };
export const PROGRESS = [0, 0, 0.25, 0.5, 0.75, 1];     // of the moving shape in each of six frames

export const centre = place => [CELL * (place % 3 + 0.5), CELL * (Math.floor(place / 3) + 0.5)];

// about the distance in px to a shape's outline, negative inside: `signed_distance` of data/training/scenes.py
function distance(shape, x, y, r) {
  const ax = Math.abs(x), ay = Math.abs(y);
  if (shape === "circle") return Math.hypot(x, y) - r;
  if (shape === "square") return Math.max(ax, ay) - 0.88 * r;
  if (shape === "triangle") return Math.max(0.894 * ax - 0.447 * (y + r), y - 0.8 * r);
  if (shape === "cross") return Math.min(Math.max(ax - r, ay - r / 3), Math.max(ay - r, ax - r / 3));
  const outer = 1.15 * r, inner = 0.5 * r, step = Math.PI / 5, turn = Math.atan2(x, -y) + step;
  const fromTip = Math.abs(turn - 2 * step * Math.floor(turn / (2 * step)) - step), d = Math.hypot(x, y);
  const along = d * Math.cos(fromTip), across = d * Math.sin(fromTip);
  const ex = inner * Math.cos(step) - outer, ey = inner * Math.sin(step);
  return (ey * (along - outer) - ex * across) / Math.hypot(ex, ey);
}

// RGB bytes of things [{shape, color, x, y}], x and y in px of the 84 px image; scale > 1 paints the same scene finer
export function paint(things, scale = 1) {
  const S = SIDE * scale, canvas = new Float32Array(S * S * 3), reach = RADIUS * 1.5 + 2;
  for (let i = 0; i < canvas.length; i++) canvas[i] = PAPER[i % 3];
  for (const { shape, color, x, y } of things) {
    const from = v => Math.max(0, Math.floor((v - reach) * scale)),
      to = v => Math.min(S, Math.ceil((v + reach) * scale));
    for (let row = from(y); row < to(y); row++) for (let column = from(x); column < to(x); column++) {
      const d = distance(shape, (column + 0.5) / scale - x, (row + 0.5) / scale - y, RADIUS);
      const covered = Math.min(1, Math.max(0, 0.5 - scale * d)), at = 3 * (row * S + column);
      for (let c = 0; covered && c < 3; c++) canvas[at + c] += covered * (COLORS[color][c] - canvas[at + c]);
    }
  }
  return Uint8Array.from(canvas, v => Math.max(0, Math.min(255, v + 0.5)));
}

// the six frames of a video: the first thing waits for two frames, then goes `distance` px in `direction`
export function frameThings(things, { direction, distance }, frame) {
  const [dx, dy] = DIRECTIONS[direction], far = distance * PROGRESS[frame];
  return things.map((t, i) => i ? t : { ...t, x: t.x + dx * far, y: t.y + dy * far });
}

// things [{place, dx, dy}] with the x and y of their centres
export const placed = things => things.map(t => {
  const [x, y] = centre(t.place);
  return { ...t, x: x + (t.dx || 0), y: y + (t.dy || 0) };
});
// the painted frames of an input {kind, things, direction, distance}: one, or those of a video
export const framesOf = input => input.kind !== "clip" ? [paint(placed(input.things))]
  : PROGRESS.map((_, f) => paint(input.things.length ? frameThings(placed(input.things), input, f) : []));

// ---------------------------------------------------------------- Pillow's bicubic resize of 8-bit pixels, bit for bit

const bicubic = v => {
  const a = -0.5, x = Math.abs(v);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
};
const BITS = 22;                                          // of the fixed point, as in Pillow's Resample.c

// for each output pixel: the first input pixel, and the weights of those that follow, as integers
function weights(before, after) {
  const scale = before / after, stretch = Math.max(scale, 1), support = 2 * stretch;
  return Array.from({ length: after }, (_, i) => {
    const middle = (i + 0.5) * scale;
    const from = Math.max(0, Math.trunc(middle - support + 0.5));
    const to = Math.min(before, Math.trunc(middle + support + 0.5));
    const raw = Array.from({ length: to - from }, (_, k) => bicubic((k + from - middle + 0.5) * (1 / stretch)));
    const sum = raw.reduce((a, b) => a + b, 0);
    return [from, raw.map(w => w / sum).map(w => Math.trunc((w < 0 ? -0.5 : 0.5) + w * 2 ** BITS))];
  });
}

const clip8 = sum => Math.max(0, Math.min(255, Math.floor(sum / 2 ** BITS)));

// RGB bytes (height, width, 3) -> (newHeight, newWidth, 3): rows first, then columns, rounded to bytes in between
export function resize(rgb, height, width, newHeight, newWidth) {
  let pixels = rgb;
  if (newWidth !== width) {
    const taps = weights(width, newWidth), out = new Uint8Array(height * newWidth * 3);
    for (let y = 0; y < height; y++) for (let x = 0; x < newWidth; x++) for (let c = 0; c < 3; c++) {
      const [from, w] = taps[x];
      let sum = 2 ** (BITS - 1);
      for (let k = 0; k < w.length; k++) sum += pixels[(y * width + from + k) * 3 + c] * w[k];
      out[(y * newWidth + x) * 3 + c] = clip8(sum);
    }
    pixels = out;
  }
  if (newHeight !== height) {
    const taps = weights(height, newHeight), out = new Uint8Array(newHeight * newWidth * 3);
    for (let y = 0; y < newHeight; y++) for (let i = 0; i < newWidth * 3; i++) {
      const [from, w] = taps[y];
      let sum = 2 ** (BITS - 1);
      for (let k = 0; k < w.length; k++) sum += pixels[(from + k) * newWidth * 3 + i] * w[k];
      out[y * newWidth * 3 + i] = clip8(sum);
    }
    pixels = out;
  }
  return pixels;
}
