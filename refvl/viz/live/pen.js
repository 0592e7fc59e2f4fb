// Drawing tools on a canvas: colours of the theme, text that is never below 11 px, rings that show on any colour.

export const clamp = (x, low = 0, high = 1) => x < low ? low : x > high ? high : x;
export const mix = (a, b, f) => a + (b - a) * f;
export const smooth = f => f * f * (3 - 2 * f);

const FONTS = {
  sans: '-apple-system,"Segoe UI",Inter,"Helvetica Neue","Liberation Sans",Roboto,Arial,sans-serif',
  serif: '"Iowan Old Style",Charter,"Palatino Linotype",Palatino,"Source Serif 4","Liberation Serif",Georgia,serif',
  mono: 'ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace',
};
const NAMES = ["paper", "raised", "ink", "muted", "line", "hair", "empty", "t", "h", "w", "wt", "broken"];

export function makePen(canvas) {
  const g = canvas.getContext("2d"), colors = {}, pen = { g, colors, W: 0, H: 0 };
  let density = 1, isDark = false;

  pen.isDark = () => isDark;
  pen.theme = () => {
    const css = getComputedStyle(document.documentElement);
    for (const name of NAMES) colors[name] = css.getPropertyValue("--" + name).trim();
    isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  };
  pen.axis = axis => colors["thw"[axis]];
  pen.axisText = axis => axis === 2 ? colors.wt : colors["thw"[axis]];
  pen.size = () => {
    const box = canvas.getBoundingClientRect();
    density = Math.min(2, devicePixelRatio || 1);
    [pen.W, pen.H] = [box.width, box.height];
    canvas.width = Math.round(pen.W * density);
    canvas.height = Math.round(pen.H * density);
  };
  pen.clear = () => { g.setTransform(density, 0, 0, density, 0, 0); g.clearRect(0, 0, pen.W,
    pen.H); g.globalAlpha = 1; };
  const font = (size, family, weight) => `${weight} ${Math.max(11, size)}px ${FONTS[family]}`;
  pen.measure = (text, size, family = "sans",
    weight = "") => { g.font = font(size, family, weight); return g.measureText(text).width; };
  pen.text = (text, x, y, { size = 13, color = colors.muted, align = "left", family = "sans", weight = "" } = {}) => {
    g.font = font(size, family, weight);
    g.fillStyle = color;
    g.textAlign = align;
    g.textBaseline = "middle";
    g.fillText(text, x, y);
  };
  pen.rounded = (x, y, w, h, r = 4) => { g.beginPath(); g.roundRect(x, y, w, h, r); };
  pen.stroke = (color, width = 1, dash = []) => { g.strokeStyle = color; g.lineWidth = width; g.setLineDash(dash); g.stroke(); g.setLineDash([]); };
  pen.fill = color => { g.fillStyle = color; g.fill(); };
  pen.lines = (points, color, width = 1, dash = []) => {
    g.beginPath();
    for (const [x0, y0, x1, y1] of points) { g.moveTo(x0, y0); g.lineTo(x1, y1); }
    pen.stroke(color, width, dash);
  };
  pen.dot = (x, y, r, color) => { g.beginPath(); g.arc(x, y, r, 0, 7); pen.fill(color); };
  // dark, and doubled with light in the dark theme
  pen.ring = (x, y, w, h, r = 2, width = 2.5) => {
    if (isDark) { pen.rounded(x - 2, y - 2, w + 4, h + 4, r + 2); pen.stroke(colors.ink, width + 1.5); }
    pen.rounded(x, y, w, h, r);
    pen.stroke("#1c1c1c", width);
  };
  pen.fade = (alpha, draw) => {
    if (alpha < 0.01) return;
    g.save();
    g.globalAlpha *= alpha;
    draw();
    g.restore();
  };
  return pen;
}
