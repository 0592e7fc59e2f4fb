// Where everything lies on the stage in each chapter: patches, merged tokens, words. Pure geometry, in CSS pixels.
//
//   0 paint  1 patch rows  2 list  3 windows  4 merge  5 prompt  6 positions  7 map  8 attention  9 word
//
// A stage has T frames of 36 patches; patch i of all lies in frame floor(i / 36). A place is [x, y, side], its centre
// first. `slot`: which entry of the list a patch fills, i itself unless something is broken.

export const GRID = 6, FRAME = GRID * GRID, CELLS = 9;
export const WINDOWED = [0, 1, 3, 4, 2, 5, 6, 7, 8];      // a frame's tokens, window by window
export const WINDOW_ENDS = [0, 16, 24, 32, 36];           // in patches

// row and column of a patch of one frame: the four of a merge block together
export const gridOf = i => {
  const block = Math.floor((i % FRAME) / 4), s = i % 4;
  return [2 * Math.floor(block / 3) + (s >> 1), 2 * (block % 3) + (s & 1)];
};
export const rasterOf = i => { const [row, column] = gridOf(i); return i - i % FRAME + row * GRID + column; };
export const patchAtGrid = (frame, row, column) =>
  frame * FRAME + 4 * (3 * (row >> 1) + (column >> 1)) + 2 * (row & 1) + (column & 1);
export const windowOf = rank => WINDOW_ENDS.findIndex(end => rank % FRAME < end) - 1;
export const tokenRank = token => token - token % CELLS + WINDOWED.indexOf(token % CELLS);

const clampTo = (v, low, high) => Math.min(high, Math.max(low, v));

export function makeLayout({ W, H, T, hasWindows, timeStep, off, fold, length, widthOf }) {
  const isPhone = W < 560, M = T * CELLS;

  // T squares in a row, or in a column, inside a box around (x, y)
  function squares(x, y, w, h, { inColumn = false, gap = 0.07 } = {}) {
    const along = inColumn ? h : w, across = inColumn ? w : h, side = Math.min(across, along / (T + (T - 1) * gap));
    const step = side * (1 + gap), start = -((T - 1) * step) / 2;
    return Array.from({ length: T }, (_, f) => {
      const shift = start + f * step;
      return [x + (inColumn ? 0 : shift) - side / 2, y + (inColumn ? shift : 0) - side / 2, side];
    });
  }

  // the main squares of a chapter, [left, top, side] for each frame
  const one = Math.min(W * 0.86, H * 0.86, 680);
  const boxes = {
    0: Array(T).fill([(W - one) / 2, (H - one) / 2, one]),
    1: squares(isPhone ? W * 0.29 : W * 0.29, H / 2, Math.min(W * (isPhone ? 0.5 : 0.48), 520),
      H * (T > 1 ? 0.9 : 0.72), { inColumn: true }),
    2: squares(W / 2, isPhone ? H * 0.3 : H * 0.3, W * (T > 1 ? 0.86 : 0.52), H * (isPhone ? 0.5 : 0.48),
      { gap: 0.14 }),
    4: squares(W / 2, H / 2 - 8, W * (T > 1 ? 0.94 : 0.74), Math.min(H * 0.76, 600), { gap: 0.12 }),
    8: squares(isPhone ? W * 0.27 : W * 0.3, (isPhone ? 0.33 : 0.38) * H, Math.min(W * 0.48, 500),
      H * (isPhone ? 0.56 : 0.6), { inColumn: true }),
    9: squares(isPhone ? 16 + 42 * T : W * 0.06 + 75 * T, H * 0.15 + 40, (isPhone ? 84 : 150) * T,
      isPhone ? 84 : Math.min(150, H * 0.2)),
  };

  // ---------------------------------------------------------------- the list of rows

  const perLine = isPhone ? 18 : 36;
  const cell = isPhone ? (W - 28) / 18 : Math.min(T > 1 ? 24 : 30, (W - 40 - 3 * 16) / 36);
  const pitch = isPhone ? cell + (T > 1 ? 7 : 16) : cell + 22;
  const listTop = isPhone ? H * (T > 1 ? 0.58 : 0.76) : H * (T > 1 ? 0.66 : 0.8);
  function listed(slot) {
    const x = isPhone ? 14 : (W - 36 * cell) / 2;
    return [x + (slot % perLine + 0.5) * cell, listTop + Math.floor(slot / perLine) * pitch,
      cell - (isPhone ? 1.5 : 2)];
  }
  // the same with a gap before each window; a frame's windows are one line, on phones two
  function windowed(rank) {
    if (!hasWindows) return listed(rank);
    const inFrame = rank % FRAME, w = windowOf(inFrame), frame = Math.floor(rank / FRAME);
    if (!isPhone) return [(W - 36 * cell - 48) / 2 + (inFrame + 0.5) * cell + w * 16, listTop + frame * pitch,
      cell - 2];
    const c = (W - 28 - 24) / 20, line = 2 * frame + (w ? 1 : 0), x = w ? inFrame - 16 : inFrame;
    return [14 + (x + 0.5) * c + (w ? (w - 1) * 12 : 0), listTop + line * (c + (T > 1 ? 6 : 22)), c - 1.5];
  }

  // ---------------------------------------------------------------- the prompt as running text

  const flows = {};
  function flow(chapter) {
    if (flows[chapter]) return flows[chapter];
    const isMain = chapter === 5, size = isMain && !isPhone ? 15 : isPhone ? 12 : 12.5;
    const tile = isMain ? (isPhone ? (T > 1 ? 30 : 34) : Math.min(T > 1 ? 46 : 64,
      H * 0.085)) : isPhone ? (T > 1 ? 8 : 12) : T > 1 ? 13 : 18;
    const pad = isMain && !isPhone ? 9 : 5, gap = isMain && !isPhone ? 8 : 4;
    const lineHeight = isMain ? (isPhone ? 31 : 46) : isPhone ? 21 : 28;
    const left = isPhone ? 12 : Math.max(20, W * 0.05), right = W - left, seats = [];
    let x = left, row = 0, extra = 0;
    for (let j = 0; j < length; j++) {
      const isTile = j >= off && j < off + M, w = isTile ? tile : Math.max(widthOf(j, size) + 2 * pad, size + 6);
      const begins = isMain && (j === off + M || j === fold && fold > 0), tilesBegin = isMain && j === off;
      const frameBegins = isMain && isTile && j > off && (j - off) % CELLS === 0;
      if (begins) extra += isPhone ? 24 : 46;
      if (tilesBegin) extra += (tile - lineHeight) / 2 + (isPhone ? 6 : 10);
      if (frameBegins) extra += tile + 8 - lineHeight;
      if (x + w > right || begins || tilesBegin || frameBegins) { x = left; row++; }
      seats.push({ x: x + w / 2, row: row + extra / lineHeight, w });
      x += w + (isTile ? gap * 0.8 : gap);
      if (isMain && j === off + M - 1) extra += (tile - lineHeight) / 2 + 2;
    }
    const rows = row + 1 + extra / lineHeight;
    const top = chapter === 5 ? (H - rows * lineHeight) / 2 + lineHeight / 2 + (isPhone ? 10 : 20)
      : H - rows * lineHeight - (isPhone ? 2 : 26) + lineHeight / 2;
    for (const seat of seats) seat.y = top + seat.row * lineHeight;
    return flows[chapter] = { seats, size, tile, top, rows, lineHeight };
  }

  // ---------------------------------------------------------------- positions: columns, and the map of h and w

  // only a few words around the item, to show its t, h and w large
  const first = Math.max(fold, off - 4), beyond = Math.min(length, off + M + 7), count = beyond - first,
    left = isPhone ? 30 : Math.max(54, W * 0.06);
  const column = Math.min(46, (W - left - (isPhone ? 10 : Math.max(28, W * 0.03))) / count);
  const columnsLeft = left + (W - left - 10 - count * column) * 0.25;
  const columnAt = j => [columnsLeft + (j - first + 0.5) * column, H * (isPhone ? 0.66 : 0.635), column];
  const chart = isPhone ? [H * 0.12, H * 0.56] : [H * 0.1, H * 0.555];
  const highest = beyond - M + (T > 1 ? 5 : 3);
  const levelOf = v => chart[1] + (v - first) / (highest - 1 - first) * (chart[0] - chart[1]);

  const low = Math.max(0, off - (isPhone ? 3 : 4)), high = low + (isPhone ? 8 : 10);
  const mapSide = Math.min(W - (isPhone ? 56 : 150), H - (isPhone ? 40 : 90)), unit = mapSide / (high - low + 1);
  const map = { low, high, unit, side: mapSide, x: (W - mapSide) / 2 + (isPhone ? 10 : 0),
    y: (H - mapSide) / 2 + (isPhone ? 10 : 16) };
  // the location of a token by its h and w; a video's tokens in the same cell are next to each other, by t
  const onMap = (h, w, t = -1) => {
    const beside = T > 1 && t >= 0 ? ((t - off) / timeStep - (T - 1) / 2) * unit * 0.32 : 0;
    return [map.x + (w - low + 0.5) * unit + beside, map.y + (h - low + 0.5) * unit];
  };

  // ---------------------------------------------------------------- tokens and patches

  // a merged token in chapters 4 to 9; `at`: its h, w and t on the map
  function tileAt(chapter, token, at) {
    const frame = Math.floor(token / CELLS), place = token % CELLS, x = place % 3, y = Math.floor(place / 3);
    if (chapter === 5) { const { seats, tile } = flow(5), seat = seats[off + token]; return [seat.x, seat.y, tile]; }
    if (chapter === 6) { const [cx, cy, c] = columnAt(off + token); return [cx, cy, Math.min(c * 0.92, 34)]; }
    if (chapter === 7) return [...onMap(...at), unit * (T > 1 ? 0.3 : 0.96)];
    const [left, top, side] = boxes[chapter][frame];
    if (chapter === 4) {
      const gap = side * 0.075, c = (side - 2 * gap) / 3;
      return [left + c / 2 + x * (c + gap), top + c * 0.44 + y * (c + gap), c * 0.86];
    }
    return [left + side / 3 * (x + 0.5), top + side / 3 * (y + 0.5), side / 3 - (chapter === 8 ? (T > 1 ? 3 : 6) : 2)];
  }

  // patch i in a chapter, where it fills `slot` of the list and stands in `token`
  function patchAt(chapter, i, slot, token, at) {
    const frame = Math.floor(i / FRAME), [row, col] = gridOf(i);
    if (chapter < 2) {
      const [left, top, side] = boxes[chapter][frame], gap = chapter ? side * 0.02 : 0, u = (side - 5 * gap) / 6;
      return [left + u / 2 + col * (u + gap), top + u / 2 + row * (u + gap), u];
    }
    if (chapter === 2) return listed(slot);
    if (chapter === 3) return windowed(slot);
    const [x, y, side] = tileAt(chapter, token, at), quarter = side / 4 + (chapter === 4 ? 1 : 0), s = slot % 4;
    return [x + (s & 1 ? quarter : -quarter), y + (s >> 1 ? quarter : -quarter), side / 2 - (chapter === 4 ? 1 : 0)];
  }

  // a word: [x, y, alpha, rotation, size]; `at`: its h and w on the map
  function wordAt(chapter, j, at) {
    if (chapter <= 5) { const { seats, size } = flow(5); return [seats[j].x, seats[j].y + (chapter < 5 ? 26 : 0),
      chapter < 5 ? 0 : 1, 0, size]; }
    if (chapter === 6) {
      const [x, y] = columnAt(clampTo(j, first, beyond - 1));
      return [x, y, j < first || j >= beyond ? 0 : 1, Math.PI / 2, isPhone || T > 1 ? 11 : 12.5];
    }
    if (chapter === 7) {
      const [x, y] = onMap(at[0], at[1]), isOut = at[1] < low || at[1] > high;
      return [x, y, isOut ? 0 : 1, 0, isPhone ? 11 : 13];
    }
    const { seats, size } = flow(8);
    return [seats[j].x, seats[j].y + (chapter === 9 ? 20 : 0), chapter === 9 ? 0 : 1, 0, size];
  }

  return {
    W, H, T, M, off, fold, first, beyond, length, isPhone, boxes, cell, pitch, listTop, listed, windowed, flow, columnAt, columnsLeft,
    chart, levelOf, map, onMap, tileAt, patchAt, wordAt,
  };
}
