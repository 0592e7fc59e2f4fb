// The stage: one canvas and one set of things on it. Patches and the words of the prompt have a place in every chapter
// (`layout.js`); between two chapters each is on its way. Nothing is cut, nothing is swapped for something else.
import { CELLS, FRAME, GRID, gridOf, makeLayout, rasterOf, tokenRank } from "./layout.js";
import { CHAPTERS } from "./chapters.js";
import { clamp, makePen, mix, smooth } from "./pen.js";

export function makeStage(canvas, S, { label, isStill }) {
  const pen = makePen(canvas), { g, fade, ring } = pen;
  const sources = { coarse: [], fine: [], swapped: [], row: document.createElement("canvas"),
    stripes: document.createElement("canvas") };
  const eased = {};                                       // every eased number on the stage, by name
  let hits = [], isBusy = false, last = 0, elapsed = 0.016, L = null, layoutKey = "";

  // move the number `name` towards `to`; at once the first time, and where motion is not wanted
  function ease(name, to, speed = 9) {
    if (!(name in eased) || isStill()) return eased[name] = to;
    const rest = to - eased[name];
    if (Math.abs(rest) < 0.002) return eased[name] = to;
    isBusy = true;
    return eased[name] += rest * (1 - Math.exp(-elapsed * speed));
  }

  // ---------------------------------------------------------------- pixels

  function put(list, f, side, rgb) {
    const at = list[f] ||= document.createElement("canvas"), c = at.getContext("2d");
    if (at.width !== side) at.width = at.height = side;
    const image = c.createImageData(side, side);
    for (let i = 0; i < side * side; i++) {
      for (let k = 0; k < 3; k++) image.data[4 * i + k] = rgb[3 * i + k];
      image.data[4 * i + 3] = 255;
    }
    c.putImageData(image, 0, 0);
  }
  // coarse: what the model reads, one image per frame pair; fine: what is painted, one per frame
  function pixels(coarse, fine) {
    coarse.forEach((rgb, f) => {
      const side = Math.sqrt(rgb.length / 3), other = rgb.slice();
      for (let i = 0; i < rgb.length; i += 3) { other[i] = rgb[i + 2]; other[i + 2] = rgb[i]; }
      put(sources.coarse, f, side, rgb);
      put(sources.swapped, f, side, other);
    });
    fine.forEach((rgb, f) => put(sources.fine, f, Math.sqrt(rgb.length / 3), rgb));
    sources.coarse.length = sources.swapped.length = coarse.length;
    sources.fine.length = fine.length;
    tableFor = "";
  }
  let tableFor = "";
  // the chosen patch row as six lines of numbers, and the values of every token as stripes
  function drawTables() {
    const key = [S.patch, S.version, pen.colors.ink].join();
    if (tableFor === key || !S.res) return;
    tableFor = key;
    const values = S.res.rows.length / S.res.at.length, at = slotOf(S.patch) * values;
    stripe(sources.row, values / 6, 6, i => clamp((S.res.rows[at + i] + 1.8) / 4), [0, 0, 0], true);
    const most = S.res.tokens.reduce((a, b) => Math.max(a, Math.abs(b)), 0) * 0.6, ink = pen.isDark() ? 232 : 28;
    const width = S.res.tokens.length / S.M;
    stripe(sources.stripes, width, S.M, i => clamp(0.5 + 0.5 * S.res.tokens[i] / most), [ink, ink, ink], false);
  }
  function stripe(at, width, height, level, [r, gr, b], isGrey) {
    at.width = width; at.height = height;
    const c = at.getContext("2d"), image = c.createImageData(width, height);
    for (let i = 0; i < width * height; i++) {
      const v = level(i) * 255;
      image.data.set(isGrey ? [v, v, v, 255] : [r, gr, b, 20 + v * 235 / 255], 4 * i);
    }
    c.putImageData(image, 0, 0);
  }
  // a patch, as fine as the chapter allows
  function piece(i, x, y, side, fineness, alpha = 1) {
    const f = Math.floor(i / FRAME), [row, column] = gridOf(i), u = side + (side > 8 ? 0.6 : 0), base = g.globalAlpha;
    const image = (source, a) => {
      if (!source || a <= 0) return;
      const c = source.width / GRID;
      g.globalAlpha = base * alpha * a;
      g.drawImage(source, column * c, row * c, c, c, x - u / 2, y - u / 2, u, u);
    };
    g.imageSmoothingEnabled = false;
    if (fineness < 1) image(sources.coarse[f], 1);
    image(sources.swapped[f], eased.bgr || 0);
    g.imageSmoothingEnabled = true;
    if (fineness > 0) image(sources.fine[sources.fine.length > 1 ? S.frame : 0], fineness * (1 - (eased.bgr || 0)));
    g.globalAlpha = base;
  }

  // ---------------------------------------------------------------- which entry, which token, which position

  const slotOf = i => S.breaks.lines ? rasterOf(i) : i;
  const rankOf = slot => S.res ? 4 * S.res.order.indexOf(slot >> 2) + (slot & 3) : slot;
  const tokenOf = i => { const token = slotOf(i) >> 2; return S.breaks.unsortedBack ? tokenRank(token) : token; };
  const position = (axis, j) => eased[`${axis}.${j}`] ?? (S.res ? S.res.positions[axis][j] : j);
  const standing = j => [position(1, j), position(2, j), position(0, j)];  // h, w, t

  // the places with shapes lie on top
  const depthOf = token => {
    const place = token % CELLS, isBusy = S.busy.includes(place),
      before = [...Array(place).keys()].filter(p => S.busy.includes(p)).length;
    return isBusy ? CELLS - S.busy.length + before : place - before;
  };

  // a patch's place; what is broken moves it from the right place to the wrong one
  function placed(chapter, i) {
    const out = [0, 0, 0], lines = chapter >= 2 ? eased.lines || 0 : 0;
    const back = chapter >= 4 ? eased.back || 0 : 0, unsorted = chapter === 3 ? eased.unsorted || 0 : 0;
    for (const [a, slot] of [[1 - lines, i], [lines, rasterOf(i)]]) {
      const sorted = S.hasWindows ? 4 * tokenRank(slot >> 2) + (slot & 3) : slot;
      const targets = chapter === 3 ? [[1 - unsorted, sorted], [unsorted, slot]] : [[1 - back, slot >> 2],
        [back, tokenRank(slot >> 2)]];
      for (const [b, target] of targets) {
        if (!a || !b) continue;
        const token = chapter === 3 ? slot >> 2 : target;
        const p = L.patchAt(chapter, i, chapter === 3 ? target : slot, token, standing(S.off + token));
        for (let n = 0; n < 3; n++) out[n] += a * b * p[n];
      }
    }
    if (chapter === 7 && eased.pile) {                    // tokens on one spot, as a pile that can be counted
      const shift = eased.pile * (depthOf(tokenOf(i)) - 4) * L.map.unit * 0.085;
      out[0] += shift;
      out[1] += shift;
    }
    return out;
  }

  // ---------------------------------------------------------------- drawing

  function size() { pen.size(); layoutKey = ""; }
  function layout() {
    const key = [pen.W, pen.H, S.T, S.q, S.ids.length, S.off].join();
    if (key === layoutKey) return;
    layoutKey = key;
    const widthOf = (j, px) => pen.measure(label(S.ids[j]), px, "mono");
    L = makeLayout({ W: pen.W, H: pen.H, T: S.T, hasWindows: S.hasWindows, timeStep: S.pixels.timeStep, off: S.off,
      fold: S.fold, length: S.ids.length, widthOf });
  }
  const near = (p, chapter) => smooth(clamp(1 - Math.abs(p - chapter) / 0.42));
  const hit = (x, y, w, h, kind, id,
    pad = 0) => hits.push({ x: x - pad, y: y - pad, w: w + 2 * pad, h: h + 2 * pad, kind, id });

  function draw(p, now) {
    if (!S.ids || !pen.W) return false;
    elapsed = Math.min(0.05, (now - last) / 1000 || 0.016);
    last = now;
    isBusy = false;
    hits = [];
    layout();
    const { lines, unsortedBack, bgr, unsorted } = S.breaks;
    ease("lines", lines ? 1 : 0, 6); ease("back", unsortedBack ? 1 : 0, 6); ease("bgr", bgr ? 1 : 0, 7);
    ease("unsorted", unsorted ? 1 : 0, 6); ease("pile", S.breaks.one ? 1 : 0, 6);
    if (S.res) S.res.positions.forEach((list, a) => list.forEach((v, j) => ease(`${a}.${j}`, v, 5)));
    drawTables();
    pen.clear();

    const view = { S, L, p, pen, ease, eased, near, hit, piece, placed, slotOf, rankOf, tokenOf, position, standing,
      sources, label };
    view.drops = Array.from({ length: S.M }, (_, m) => ease("drop" + m, S.drop.has(m) && p > 4.4 ? 1 : 0, 8));
    const most = S.share ? Math.max(...S.share.slice(S.off, S.off + S.M), 0.02) : 1;
    view.shares = Array.from({ length: S.M },
      (_, m) => ease("share" + m, S.share ? clamp(S.share[S.off + m] / most) : 1, 10));
    for (const chapter of CHAPTERS) chapter.below?.(view);
    patches(view);
    for (const chapter of CHAPTERS) chapter.above?.(view);
    return isBusy;
  }

  function patches(view) {
    const { p } = view, chapter = Math.min(8, Math.floor(p)), f = p - chapter,
      fineness = 1 - smooth(clamp((p - 0.02) / 0.35));
    const dim = near(p, 8), stagger = chapter ? 0.7 : 0, N = S.T * FRAME, seats = view.seats = Array(N);
    const shown = S.kind === "clip" ? S.frame >> 1 : 0;
    for (const i of drawOrder()) {
      const inFrame = i % FRAME, late = lateness(chapter, i, N);
      const step = smooth(clamp(f * (1 + stagger) - stagger * late));
      const a = placed(chapter, i), b = step ? placed(Math.min(9, chapter + 1), i) : a;
      const [x, y, side] = seats[i] = a.map((v, n) => mix(v, b[n], step)), token = tokenOf(i);
      seats[i][1] += 16 * view.drops[token] * near(p, 5);  // what is taken out drops
      let alpha = p > 3.5 ? 1 - 0.86 * view.drops[token] : 1;
      if (dim) alpha *= mix(1, 0.2 + 0.8 * Math.sqrt(view.shares[token]), dim);
      if (p < 1 && S.kind === "clip" && i - inFrame !== shown * FRAME) alpha *= smooth(clamp(p * 2.5));
      piece(i, x, seats[i][1], side, fineness, alpha);
      if (p > 0.5 && p < 3.5) hit(x - side / 2, y - side / 2, side, side, "patch", i, p < 1.5 ? 3 : L.isPhone ? 4 : 1);
    }
    if (p > 0.45 && p < 3.6) {
      const [x, y, side] = seats[S.patch];
      fade(smooth(clamp((p - 0.45) / 0.4)) * (1 - smooth(clamp((p - 3.2) / 0.4))),
        () => ring(x - side / 2 - 1, y - side / 2 - 1, side + 2, side + 2));
    }
  }
  // when a patch sets off, 0 to 1: mixed, in order of the list, and once it belongs to a token, with all of the token
  function lateness(chapter, i, N) {
    if (chapter >= 4) return tokenOf(i) / S.M;
    return chapter ? i / (N - 1) : (i % FRAME) * 7 % FRAME / FRAME;
  }
  // shapes on top of empty places
  function drawOrder() {
    const key = [S.T, S.version, S.kind].join() + S.busy;
    if (drawOrder.key !== key) {
      const isBusyPlace = i => S.busy.includes((i % FRAME) >> 2);
      drawOrder.list = [...Array(S.T * FRAME).keys()].sort((a, b) => isBusyPlace(a) - isBusyPlace(b) || a - b);
      drawOrder.key = key;
    }
    return drawOrder.list;
  }

  const at = (x, y) => hits.findLast(h => x >= h.x && x <= h.x + h.w && y >= h.y && y <= h.y + h.h) ?? null;
  const rescan = () => {
    for (const name in eased) if (name.startsWith("scan")) delete eased[name];
    eased["scan" + S.patch] = 0;
  };
  const theme = () => { pen.theme(); tableFor = ""; };
  const box = () => { layout(); return L.boxes[0][0]; };
  return { draw, size, theme, pixels, at, box, rescan, slotOf, rankOf, sources };
}
