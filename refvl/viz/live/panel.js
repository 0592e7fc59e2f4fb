// One side of the twin: the tiles that travel between stages, the rings, and the arcs.
import { CELLS, FRAME, GRID, lookOf, percent, towerLook } from "./change.js";
import { MINIS, SANS, SERIF, boxOf, token } from "./minis.js";
import { COLORS } from "./pixels.js";

const STANDING = ["", "positions", "attention", "tower"];  // stages in which the tiles stand
const SMALL = 260;                                        // px; on phones
const mix = (a, b, f) => a + (b - a) * f;

export function makePanel(canvas, side) {
  const g = canvas.getContext("2d"), tiles = [];
  let P = 0, density = 1, shown = 1, claimKey = "", claimStart = 0;

  function size() {
    density = Math.min(2, devicePixelRatio || 1);
    P = canvas.clientWidth;
    canvas.width = canvas.height = Math.round(P * density);
  }
  const cellIn = ([x, y, s], m, gap = 0) =>
    [x + (m % 3) * s / 3 + gap, y + Math.floor(m / 3) * s / 3 + gap, s / 3 - 2 * gap];

  // the plane of h and w; a video has one for every t
  function plane(V) {
    const isSmall = P < SMALL, left = isSmall ? 17 : 34, top = isSmall ? 17 : 32;
    if (V.T > 1) {
      const u = (P - left) / (3 * V.T + 0.5 * (V.T - 1)), y = P / 2 - 1.5 * u;
      const at = (t, h, w) => [left + ((t - V.off) / V.pixels.timeStep * 3.5 + w - V.off) * u, y + (h - V.off) * u];
      return { left, top: y, u, at };
    }
    const low = V.off - 2, u = (P - left - 2) / 8;
    return { left, top, low, u, at: (t, h, w) => [left + (w - low) * u, top + (h - low) * u] };
  }
  // where a frame stands while attention flows
  const scene = (t, V) => {
    if (V.T > 1) { const [x, y, s] = boxOf(t, P, V); return [x, y - P * 0.12, s]; }
    const s = P * (P < SMALL ? 0.7 : 0.72);
    return [(P - s) / 2, P < SMALL ? 9 : 0, s];
  };
  function target(stage, m, V) {
    const t = Math.floor(m / CELLS), cell = m % CELLS;
    if (stage === "positions" && V.R) {
      const { at, u } = plane(V), [x, y] = at(...V.R.positions.map(p => p[V.off + m]));
      const pile = V.broken === "one" ? (m - V.M / 2) * (V.T > 1 ? 0.4 : 1.3) : 0;
      return [x + 1 + pile, y + 1 + pile, u - 2];
    }
    if (stage === "attention") return cellIn(scene(t, V), cell, V.T > 1 ? 1 : 2);
    return cellIn(["tower", "tokens"].includes(stage) ? boxOf(t, P, V) : [0, 0, P], cell);
  }

  // returns whether something still moves
  function draw(V, stage, time, isStill) {
    if (!P) size();
    g.setTransform(density, 0, 0, density, 0, 0);
    g.clearRect(0, 0, P, P);
    let moves = false;
    tiles.length = Math.min(tiles.length, V.M);
    for (let m = 0; m < V.M; m++) {
      const goal = target(stage, m, V);
      if (!tiles[m] || isStill) tiles[m] = [...goal];
      else for (let k = 0; k < 3; k++) {
        tiles[m][k] = mix(tiles[m][k], goal[k], 0.2);
        if (Math.abs(tiles[m][k] - goal[k]) < 0.25) tiles[m][k] = goal[k]; else moves = true;
      }
    }
    const isStanding = STANDING.includes(stage), goal = isStanding ? 1 : 0;
    shown = isStill ? goal : mix(shown, goal, 0.25);
    if (Math.abs(shown - goal) < 0.01) shown = goal; else moves = true;
    g.save();
    if (!isStanding && V.R) {
      g.globalAlpha = 1 - shown;
      MINIS[stage](g, P, V);
    } else {
      g.globalAlpha = Math.max(0.02, shown);
      if (stage === "positions" && V.R) axesOf(V);
      standing(V, stage, moves);
      if (stage === "" && claim(V, moves, time, isStill)) moves = true;
      if (stage === "positions" && V.R) places(V);
      if (stage === "attention" && V.R) flow(V, time, isStill);
      if (stage === "tower" && V.R) towerFlow(V, time, isStill);
      if (V.ghost && V.ghost.side === side) ghost(V);
    }
    g.restore();
    return moves || ["attention", "tower"].includes(stage) && V.R && !isStill;
  }

  function standing(V, stage, moves) {
    if (stage === "" && !moves) {
      g.imageSmoothingEnabled = true;
      g.drawImage(V.bitmaps[V.frame], 0, 0, P, P);
      g.strokeStyle = "rgb(0 0 0 / .1)";
      g.lineWidth = 1;
      g.beginPath();
      for (const k of [1, 2]) {
        g.moveTo(k * P / 3, 8); g.lineTo(k * P / 3, P - 8);
        g.moveTo(8, k * P / 3); g.lineTo(P - 8, k * P / 3);
      }
      g.stroke();
      return;
    }
    const look = stage === "attention" && V.R ? lookOf(V.R, V.step, V.head, V.heads) : null;
    const order = [...tiles.keys()].sort((a, b) => (a === V.spot) - (b === V.spot));
    for (const m of order) {
      const [x, y, s] = tiles[m], isGone = V.R && !V.R.keep.includes(V.off + m);
      if (isGone) { g.strokeStyle = V.C.broken; g.setLineDash([3, 3]); g.strokeRect(x + 1, y + 1, s - 2, s - 2); g.setLineDash([]); continue; }
      if (V.R && V.isMixed) token(g, V, m, x, y, s); else crop(V, m, x, y, s);
      if (stage === "") continue;
      const veil = look ? 1 - Math.min(1, look[V.off + m] * 1.6) : stage === "tower" ? 0.35 : 0;
      g.save();
      g.globalAlpha *= (V.isDark ? 0.74 : 0.6) * veil;
      g.fillStyle = V.C.paper;
      g.fillRect(x, y, s, s);
      g.restore();
      g.strokeStyle = "rgb(0 0 0 / .18)";
      g.lineWidth = 1;
      g.strokeRect(x + 0.5, y + 0.5, s - 1, s - 1);
    }
  }
  const crop = (V, m, x, y, s) => {
    const bitmap = V.bitmaps[Math.floor(m / CELLS) * (V.bitmaps.length > 1 ? 2 : 0) + (V.bitmaps.length > 1 ? 1 : 0)];
    const u = bitmap.width / 3, cell = m % CELLS;
    g.drawImage(bitmap, (cell % 3) * u, Math.floor(cell / 3) * u, u, u, x, y, s + 0.4, s + 0.4);
  };

  // the place that the answer names; or, if it names none, the thing that was asked about
  function claim(V, moves, time, isStill) {
    if (moves || V.kind !== "picture") return false;
    const isSmall = P < SMALL, u = P / 3, inset = isSmall ? 4 : 8, color = V.isWrong ? V.C.claim : "#1c1c1c";
    const corner = m => [(m % 3) * u, Math.floor(m / 3) * u];
    const ring = (m, width, dash = []) => {
      const [x, y] = corner(m);
      g.beginPath();
      g.roundRect(x + inset, y + inset, u - 2 * inset, u - 2 * inset, 10);
      g.strokeStyle = color;
      g.lineWidth = width;
      g.setLineDash(dash);
      g.stroke();
      g.setLineDash([]);
    };
    if (V.claimed < 0) { if (V.asked >= 0) ring(V.asked, isSmall ? 1.5 : 2); return false; }
    const key = [V.claimed, V.asked, V.isWrong].join();
    if (key !== claimKey) { claimKey = key; claimStart = time; }
    const grown = isStill || !V.isWrong ? 1 : Math.min(1, (time - claimStart) / 420);
    if (V.isWrong && V.asked >= 0 && V.asked !== V.claimed) arrow(corner(V.asked), corner(V.claimed), u, grown * (2 - grown), V.C.claim);
    ring(V.claimed, isSmall ? 2.5 : 3.5, V.isWrong ? [isSmall ? 6 : 10, isSmall ? 5 : 8] : []);
    return grown < 1;
  }
  function arrow(start, end, u, f, color) {
    const isSmall = P < SMALL, [from, to] = [start, end].map(([x, y]) => [x + u / 2, y + u / 2]);
    const d = Math.hypot(to[0] - from[0], to[1] - from[1]), ex = (to[0] - from[0]) / d, ey = (to[1] - from[1]) / d;
    const a = [from[0] + ex * u * 0.42, from[1] + ey * u * 0.42], b = [to[0] - ex * u * 0.28, to[1] - ey * u * 0.28];
    const bend = d * 0.16, c = [(a[0] + b[0]) / 2 - ey * bend, (a[1] + b[1]) / 2 + ex * bend];
    const between = (p, q) => [mix(p[0], q[0], f), mix(p[1], q[1], f)], mid = between(a, c), tip = between(mid, between(c, b));
    const turn = Math.atan2(tip[1] - mid[1], tip[0] - mid[0]), h = isSmall ? 8 : 14;
    g.strokeStyle = g.fillStyle = color;
    g.lineWidth = isSmall ? 2.5 : 4;
    g.lineCap = "round";
    g.beginPath();
    g.moveTo(...a);
    g.quadraticCurveTo(...mid, tip[0] - Math.cos(turn) * h * 0.7, tip[1] - Math.sin(turn) * h * 0.7);
    g.stroke();
    g.beginPath();
    g.moveTo(...tip);
    for (const w of [2.6, -2.6]) g.lineTo(tip[0] + Math.cos(turn + w) * h * 1.25, tip[1] + Math.sin(turn + w) * h * 1.25);
    g.fill();
  }

  // ---------------------------------------------------------------- positions

  function axesOf(V) {
    const { left, top, low, u, at } = plane(V), { C } = V, isSmall = P < SMALL;
    const [t, h, w] = V.R.positions.map(p => p[V.off + V.spot]);
    const write = (text, x, y, on, color, isName = false) => {
      g.font = isName ? `italic 600 ${isSmall ? 12 : 17}px ${SERIF}` : `${on ? 700 : 400} ${isSmall ? 10 : on ? 16 : 13}px ${SANS}`;
      g.fillStyle = on ? color : C.muted;
      g.fillText(text, x, y);
    };
    g.textBaseline = "middle";
    g.textAlign = "center";
    const sheet = (x, y, n) => {
      g.fillStyle = C.raised;
      g.beginPath();
      g.roundRect(x, y, n * u, n * u, 6);
      g.fill();
      g.strokeStyle = C.hair;
      g.lineWidth = 1;
      g.beginPath();
      for (let k = 0; k <= n; k++) { g.moveTo(x + k * u, y); g.lineTo(x + k * u, y + n * u); g.moveTo(x, y + k * u); g.lineTo(x + n * u, y + k * u); }
      g.stroke();
    };
    const above = isSmall ? 8 : 13;
    if (V.T > 1) {
      for (let f = 0; f < V.T; f++) {
        const v = V.off + f * V.pixels.timeStep, [x, y] = at(v, V.off, V.off);
        sheet(x, y, 3);
        write(`t ${v}`, x + 1.5 * u, y - above * 2.6, v === t, C.t);
        for (let k = 0; k < 3; k++) if (!isSmall || v === t) write(V.off + k, x + (k + 0.5) * u, y - above, v === t && V.off + k === w, C.wt);
      }
      for (let k = 0; k < 3; k++) write(V.off + k, left - above, top + (k + 0.5) * u, V.off + k === h, C.h);
    } else {
      sheet(left, top, 8);
      for (let k = 0; k < 8; k++) {
        const v = low + k, isWritten = on => !isSmall || on || k % 2 === 0;
        if (isWritten(v === w)) write(v, left + (k + 0.5) * u, top - above, v === w, C.wt);
        if (isWritten(v === h)) write(v, left - above - 1, top + (k + 0.5) * u, v === h, C.h);
      }
      write("w", left + 8 * u - 4, top - above - 1, true, C.wt, true);
      write("h", left - above - 2, top + 8 * u - 4, true, C.h, true);
    }
  }
  function places(V) {
    const { left, top, low, u, at } = plane(V), { C } = V, isSmall = P < SMALL, [T, H, W] = V.R.positions;
    for (let j = V.T > 1 ? H.length : V.off - 2; j < V.off + V.M + 3; j++) {
      if (j >= V.off && j < V.off + V.M || H[j] === undefined || H[j] - low > 7) continue;
      const [x, y] = at(T[j], H[j], W[j]), isAfter = j >= V.off + V.M;
      g.fillStyle = C.muted;
      g.beginPath();
      g.arc(x + u / 2, y + u / 2, isSmall ? 2.5 : 4.5, 0, 7);
      g.fill();
      if (isSmall) continue;
      g.font = "12.5px ui-monospace,Menlo,Consolas,monospace";
      g.textAlign = isAfter ? "right" : "left";
      g.textBaseline = "middle";
      const text = V.label(V.ids[j]).replace("⏎", "new line").replace(/<\|(\w+)\|>/, (_, name) => name.replace("vision_", "image "));
      g.fillText(text, x + u / 2 + (isAfter ? -10 : 10), y + u / 2);
    }
    const m = V.spot, [x, y, s] = tiles[m], line = (color, x1, y1, x2, y2) => {
      g.strokeStyle = color;
      g.lineWidth = isSmall ? 2.5 : 4;
      g.lineCap = "round";
      g.beginPath();
      g.moveTo(x1, y1);
      g.lineTo(x2, y2);
      g.stroke();
    };
    line(C.w, x + s / 2, top + 2, x + s / 2, y);
    const start = V.T > 1 ? at(T[V.off + m], V.off, V.off)[0] : left;
    line(C.h, start + 2, y + s / 2, x, y + s / 2);
    g.strokeStyle = V.moved ? C.broken : C.ring;
    g.lineWidth = isSmall ? 2 : 3;
    g.beginPath();
    g.roundRect(x - 1.5, y - 1.5, s + 3, s + 3, 3);
    g.stroke();
    if (!V.moved) return;                                 // where it would be
    const frame = Math.floor(m / CELLS) * (V.T > 1 ? V.pixels.timeStep : 1);
    const [gx, gy] = at(V.off + frame, V.off + Math.floor(m % CELLS / 3), V.off + m % 3);
    g.setLineDash([4, 4]);
    g.strokeStyle = C.ring;
    g.lineWidth = 1.8;
    g.beginPath();
    g.roundRect(gx + 2, gy + 2, u - 4, u - 4, 3);
    g.stroke();
    g.setLineDash([]);
  }

  // ---------------------------------------------------------------- attention

  // strands from all over each source into one point, one for every 3 % of a share; what is read there runs along
  function strands(sources, [x0, y0], color, time, isStill) {
    const isSmall = P < SMALL, curves = [];
    for (const [x, y, s, share] of sources) for (let k = 0; k < Math.round(share * 32); k++) {
      const x1 = x + s * (0.14 + 0.72 * (k * 0.618 % 1)), y1 = y + s * (0.62 + 0.3 * ((k * 0.7549 + 0.3) % 1));
      curves.push([x1, y1, x1, mix(y1, y0, 0.45), x0, mix(y0, y1, 0.45), x0, y0]);
    }
    g.strokeStyle = g.fillStyle = color;
    g.lineCap = "round";
    g.lineWidth = isSmall ? 1 : 1.7;
    g.save();
    g.globalAlpha *= 0.42;
    for (const [ax, ay, ...rest] of curves) { g.beginPath(); g.moveTo(ax, ay); g.bezierCurveTo(...rest); g.stroke(); }
    g.restore();
    curves.forEach(([ax, ay, bx, by, cx, cy, dx, dy], k) => {
      const f = isStill ? 0 : (time * 0.00032 + k * 0.382) % 1, e = 1 - f;
      const on = (a, b, c, d) => e ** 3 * a + 3 * e * e * f * b + 3 * e * f * f * c + f ** 3 * d;
      g.beginPath();
      g.arc(on(ax, bx, cx, dx), on(ay, by, cy, dy), isSmall ? 1.7 : 3, 0, 7);
      g.fill();
    });
  }
  function flow(V, time, isStill) {
    const look = lookOf(V.R, V.step, V.head, V.heads), { C } = V, isSmall = P < SMALL, color = V.isOther ? C.broken : C.ink;
    const x0 = P / 2, y0 = P - (isSmall ? 13 : 24), word = V.label(V.R.steps[Math.min(V.step, V.R.steps.length - 1)].top[0][0]);
    const shares = tiles.map((_, m) => look[V.off + m]), rest = 1 - shares.reduce((a, b) => a + b, 0);
    strands(tiles.map((tile, m) => [...tile, shares[m]]), [x0, y0 - (isSmall ? 12 : 20)], color, time, isStill);
    const px = isSmall ? 22 : 56;
    if (rest > 0.01) {
      g.save();
      g.strokeStyle = C.line;
      g.lineWidth = Math.max(0.8, rest * (isSmall ? 6 : 12));
      g.globalAlpha *= 0.3 + 0.5 * rest;
      g.beginPath();
      g.moveTo(px + 20, y0);
      g.lineTo(x0 - 20, y0);
      g.stroke();
      g.restore();
    }
    chip(px, y0, P < 340 ? "text" : `the text ${percent(rest)}`, C.empty, C.muted, isSmall ? 11 : 13.5, SANS, 400);
    chip(x0, y0, word, color, C.paper, isSmall ? 14 : 21, SERIF, 600);
    ringed(tiles, shares, color, C);
  }
  function ringed(boxes, shares, color, C, least = 0.05) {
    const isSmall = P < SMALL;
    boxes.forEach(([x, y, s], m) => {
      if (shares[m] < least) return;
      g.lineWidth = (isSmall ? 1.5 : 2) + 2 * shares[m];
      g.strokeStyle = color;
      g.beginPath();
      g.roundRect(x - 1, y - 1, s + 2, s + 2, 4);
      g.stroke();
      chip(x + (isSmall || s < 60 ? s / 2 : 30), y + (isSmall || s < 60 ? 0 : 18), percent(shares[m]), C.paper, color,
        isSmall ? 10.5 : s < 100 ? 12 : 14, SANS, 650);
    });
  }
  const patchAt = (seat, V) => {
    const [x, y, s] = boxOf(Math.floor(seat / FRAME), P, V), i = seat % FRAME;
    return [x + (i % GRID) * s / GRID, y + Math.floor(i / GRID) * s / GRID, s / GRID];
  };
  function towerFlow(V, time, isStill) {                  // from the patches that one patch reads, into it
    const { look } = towerLook(V.R, Math.floor(V.towerHead / V.perBlock), V.towerHead % V.perBlock, V.seat);
    const boxes = [...look.keys()].map(seat => patchAt(seat, V));
    g.strokeStyle = "rgb(0 0 0 / .1)";
    g.lineWidth = 1;
    for (const box of boxes) g.strokeRect(...box, box[2]);
    const color = V.isOther ? V.C.broken : V.C.ink, [x, y, s] = boxes[V.seat];
    const sources = boxes.map((box, i) => [...box, i === V.seat ? 0 : look[i]]);
    strands(sources, [x + s / 2, y + s / 2], color, time, isStill);
    ringed(boxes, [...look].map((v, i) => i === V.seat ? 0 : v), color, V.C, 0.1);
    g.strokeStyle = V.C.ring;
    g.lineWidth = 3;
    g.strokeRect(x + 1, y + 1, s - 2, s - 2);
  }
  function chip(x, y, text, back, front, size, family, weight) {
    g.font = `${weight} ${size}px ${family}`;
    const w = g.measureText(text).width + size * 0.9, h = size * 1.55;
    const left = Math.max(0, Math.min(P - w, x - w / 2)), top = Math.max(0, y - h / 2);
    g.fillStyle = back;
    g.beginPath();
    g.roundRect(left, top, w, h, Math.min(7, h / 3));
    g.fill();
    g.fillStyle = front;
    g.textAlign = "center";
    g.textBaseline = "middle";
    g.fillText(text, left + w / 2, top + h / 2 + 0.5);
  }
  function ghost({ ghost: { x, y, thing } }) {
    g.save();
    g.globalAlpha = 0.35;
    g.translate(x, y);
    outline(g, thing.shape, tiles[0][2] * 0.375);
    g.fillStyle = `rgb(${COLORS[thing.color]})`;
    g.fill();
    g.restore();
  }
  // the token under a point, -1 beside all tiles; in a video, tiles of all frames lie on each other while it plays
  const tokenAt = (x, y, slack = 0) => {
    let best = -1, near = Infinity;
    tiles.forEach(([tx, ty, s], m) => {
      const d = Math.hypot(Math.max(tx - x, 0, x - tx - s), Math.max(ty - y, 0, y - ty - s));
      if (d <= near) { near = d; best = m; }
    });
    return near <= slack ? best : -1;
  };
  const seatAt = (x, y, V) => {
    for (let seat = 0; seat < V.T * FRAME; seat++) {
      const [left, top, s] = patchAt(seat, V);
      if (x >= left && x < left + s && y >= top && y < top + s) return seat;
    }
    return -1;
  };
  return { draw, size, tokenAt, seatAt, side, tileAt: m => tiles[m], width: () => P };
}

export function outline(g, shape, r) {
  g.beginPath();
  if (shape === "circle") g.arc(0, 0, r, 0, 7);
  else if (shape === "square") g.rect(-0.88 * r, -0.88 * r, 1.76 * r, 1.76 * r);
  else if (shape === "triangle") { g.moveTo(0, -r); g.lineTo(0.9 * r, 0.8 * r); g.lineTo(-0.9 * r, 0.8 * r); g.closePath(); }
  else if (shape === "cross") { g.rect(-r, -r / 3, 2 * r, 2 * r / 3); g.rect(-r / 3, -r, 2 * r / 3, 2 * r); }
  else {
    for (let i = 0; i < 10; i++) {
      const q = (i % 2 ? 0.5 : 1.15) * r, a = Math.PI * i / 5;
      g.lineTo(q * Math.sin(a), -q * Math.cos(a));
    }
    g.closePath();
  }
}
