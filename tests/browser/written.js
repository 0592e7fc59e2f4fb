// Keeps every text that a canvas shows in `window.texts`: its size on the screen, its contrast with its outline or with
// the commonest colour under it, and whether it is inside of its canvas. `window.inks` are the colours of everything.
const proto = CanvasRenderingContext2D.prototype, { fillText, strokeText } = proto;
const probe = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const rgb = color => { probe.fillStyle = color; probe.fillRect(0, 0, 1, 1); return [...probe.getImageData(0, 0, 1, 1).data]; };
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => p - q); return (y + 0.05) / (x + 0.05); };
const { getContext } = HTMLCanvasElement.prototype;
HTMLCanvasElement.prototype.getContext = function (kind) { return getContext.call(this, kind, { willReadFrequently: true }); };
let outline = ["", ""];
window.texts = [];
window.inks = new Set();  // every colour that is filled or stroked
for (const [name, style] of [["fill", "fillStyle"], ["fillRect", "fillStyle"], ["stroke", "strokeStyle"], ["strokeRect", "strokeStyle"]]) {
  const draw = proto[name];
  proto[name] = function (...rest) { window.inks.add(this[style]); return draw.apply(this, rest); };
}
window.contrast = (a, b) => contrast(rgb(a), rgb(b));
proto.strokeText = function (text, ...rest) { outline = [text, this.strokeStyle]; return strokeText.call(this, text, ...rest); };
proto.fillText = function (text, x, y, ...rest) {
  window.inks.add(this.fillStyle);
  const seen = this.canvas.getBoundingClientRect().width / this.canvas.width, turn = this.getTransform();
  const box = this.measureText(text), xs = [x - box.actualBoundingBoxLeft, x + box.actualBoundingBoxRight];
  const ys = [y - box.actualBoundingBoxAscent, y + box.actualBoundingBoxDescent];
  const corners = xs.flatMap(px => ys.map(py => turn.transformPoint({ x: px, y: py })));
  const [left, top] = [Math.min(...corners.map(c => c.x)), Math.min(...corners.map(c => c.y))];
  const [right, bottom] = [Math.max(...corners.map(c => c.x)), Math.max(...corners.map(c => c.y))];
  if (String(text).trim() && seen && right - left >= 1 && bottom - top >= 1) {
    const root = this.canvas.closest(".refvl"), counts = new Map();
    let below = rgb(root.style.getPropertyValue("--surface"));
    if (outline[0] === text) below = rgb(outline[1]);
    else {
      const { data } = this.getImageData(left, top, right - left, bottom - top);
      for (let i = 0; i < data.length; i += 16) {
        const key = data[i + 3] < 128 ? "" : data.subarray(i, i + 3).join();
        counts.set(key, (counts.get(key) ?? 0) + 1);
      }
      const [common] = [...counts].sort((a, b) => b[1] - a[1])[0];
      if (common) below = common.split(",").map(Number);
    }
    const size = parseFloat(this.font.match(/([\d.]+)px/)[1]) * Math.hypot(turn.a, turn.b) * seen;
    window.texts.push({ text: String(text), size, contrast: contrast(rgb(this.fillStyle), below),
      inside: left > -3 && right < this.canvas.width + 3 && top > -3 && bottom < this.canvas.height + 3 });
  }
  outline = ["", ""];
  return fillText.call(this, text, x, y, ...rest);
};
