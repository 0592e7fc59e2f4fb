// The state of the page: what is painted, asked, broken and chosen. The address keeps all of it.
import { CELLS } from "./layout.js";
import { CELL, COLORS, DIRECTIONS, PLACES, SHAPES, centre, placeOf } from "./pixels.js";

export const thing = (shape, color, place) => { const [x, y] = centre(place); return { shape, color, x, y }; };

// where a break belongs, what its switch says, what it does, what the bar says, and for what it is offered
export const SWITCHES = {
  bgr: { chapter: 1, name: "Swap red and blue", what: "the channels arrive in the wrong order",
    said: "red and blue swapped" },
  raw: { chapter: 1, name: "Skip the normalisation", what: "values from 0 to 1 are used as they are",
    said: "not normalised" },
  stale: { chapter: 1, name: "Forget to refill a buffer", what: "it still holds the rows of the previous scene",
    said: "a stale buffer", only: "picture" },
  lines: { chapter: 2, name: "Read line by line", what: "patches from left to right, no blocks",
    said: "read line by line" },
  unsorted: { chapter: 3, name: "Cut without sorting", what: "windows hold whichever patches come next",
    said: "windows not sorted", only: "windows" },
  open: { chapter: 3, name: "Let every patch look at all others", what: "no windows in any layer", said: "no windows",
    only: "windows" },
  unsortedBack: { chapter: 4, name: "Forget to restore the order", what: "the tokens stay in window order",
    said: "order not restored", only: "windows" },
  deep: { chapter: 4, name: "Leave DeepStack out", what: "layers 1 and 2 get no features from earlier blocks",
    said: "without DeepStack", only: "deepstack" },
  swap: { chapter: 7, name: "Swap h and w", what: "h and w of each token trade places", said: "h and w swapped" },
  one: { chapter: 7, name: "One position for all", what: "all tokens of the image in the same place", said: "one position for all" },
  back: { chapter: 7, name: "Reverse t", what: "the last frame gets the first t", said: "t reversed", only: "clip" },
};

export function makeState(data, tokenizer) {
  const { config, prompts } = data, S = {
    kind: "picture", things: [thing("circle", "red", 2), thing("square", "blue", 3), thing("star", "yellow", 7)],
    old: [thing("star", "purple", 1), thing("circle", "green", 6)], sel: 0, shape: "triangle", color: "green", cell: -1,
    painting: false, direction: "left", distance: 56, frame: 0, photo: "coffee",
    q: "Where is the circle?", breaks: {}, drop: new Set(), patch: 10, token: 2, col: 0, block: 0, towerHead: -1,
    head: [1, 3], step: 0, chosen: false,
    res: null, look: null, share: null, said: "", truth: "", isWrong: false, version: 0, ms: 0, busy: [],
    pixels: config.pixels, rowLength: 6 * config.pixels.patch ** 2, hasWindows: Boolean(config.vision.fullatt_block_indexes),
    isInterleaved: Boolean(config.text.rope_parameters.mrope_interleaved), axes: [], frequencies: [], isSpecial: tokenizer.isSpecial,
  };
  S.isBroken = () => Object.values(S.breaks).some(Boolean) || S.drop.size > 0;
  const offers = { picture: () => S.kind === "picture", clip: () => S.kind === "clip", windows: () => S.hasWindows,
    deepstack: () => Boolean(config.vision.deepstack_visual_indexes?.length) };
  S.offers = name => { const { only } = SWITCHES[name]; return !only || offers[only](); };

  // the prompt of the question now: its ids, and the positions of the item's tokens
  S.readPrompt = () => {
    const { before, pad, count, between, after } = prompts[S.kind === "clip" ? "clip" : "picture"];
    S.T = S.kind === "clip" ? 3 : 1;
    if (S.M !== count) { S.res = null; S.drop.clear(); }  // they are of another kind of input
    S.M = count;
    S.off = before.length;
    const end = before.indexOf(config.tokens.eos[0]);
    S.fold = end < 0 ? 0 : end + 2;                       // the system's message
    S.ids = [...before, ...Array(count).fill(pad), ...between, ...tokenizer.encode(S.q), ...after];
    S.busy = S.kind === "photo" ? [] : (S.breaks.stale ? S.old : S.things).map(placeOf);
    S.patch = Math.min(S.patch, S.T * 36 - 1);
    S.token = Math.min(S.token, S.M - 1);
    S.col = Math.max(S.fold, Math.min(S.col, S.ids.length - 1));
  };
  S.choose = token => { S.token = token; S.col = S.off + token; };
  // the place the question is about
  S.target = () => {
    const asked = S.things.find(t => S.q.includes(t.shape) || S.q.includes(t.color)) || S.things[0];
    return asked && S.kind !== "photo" ? placeOf(asked) : 4;
  };
  // how far the first thing can go each way: to the edge, or to what is in its way
  S.roomTo = direction => {
    const [first] = S.things;
    if (!first) return 0;
    const [dx, dy] = DIRECTIONS[direction], from = placeOf(first), others = S.things.slice(1).map(placeOf);
    let steps = 0;
    for (let x = from % 3 + dx, y = Math.floor(from / 3) + dy; x >= 0 && x < 3 && y >= 0 && y < 3; x += dx, y += dy) {
      if (others.includes(y * 3 + x)) break;
      steps++;
    }
    return steps * CELL;
  };
  S.aim = () => {
    const free = Object.keys(DIRECTIONS).filter(S.roomTo);
    if (!free.includes(S.direction) && free.length) S.direction = free[0];
    S.distance = S.roomTo(S.direction);
  };

  // ---------------------------------------------------------------- the address

  const written = things => things.map(t => [t.shape, t.color, placeOf(t)].join(".")).join("_");
  const readThings = text => (text || "").split("_").map(part => part.split("."))
    .filter(([shape, color, place]) => SHAPES.includes(shape) && COLORS[color] && place >= 0 && place < CELLS)
    .slice(0, 4).map(([shape, color, place]) => thing(shape, color, Number(place)));
  S.written = () => written(S.things);
  S.toHash = chapter => {
    const parts = { c: chapter, s: written(S.things), q: S.q };
    if (S.kind !== "picture") parts.k = S.kind;
    if (S.kind === "clip") parts.m = S.direction;
    if (S.kind === "photo") parts.f = S.photo;
    const broken = Object.keys(S.breaks).filter(name => S.breaks[name]);
    if (broken.length) parts.b = broken.join(".");
    if (S.breaks.stale) parts.o = written(S.old);
    if (S.drop.size) parts.d = [...S.drop].join(".");
    Object.assign(parts, { p: S.patch, j: S.col, l: S.block, a: S.head.join("."), w: S.step });
    return new URLSearchParams(parts).toString();
  };
  // returns the chapter
  S.fromHash = hash => {
    const parts = new URLSearchParams(hash.replace(/^#/, "")), get = (name, most) => {
      const value = Number(parts.get(name));
      return parts.has(name) && Number.isInteger(value) && value >= 0 && value <= most ? value : null;
    };
    const things = readThings(parts.get("s")), old = readThings(parts.get("o"));
    if (parts.has("s")) S.things = things;
    if (old.length) S.old = old;
    const kind = parts.get("k") || "picture";
    S.kind = kind === "photo" || kind === "clip" && prompts.clip ? kind : "picture";
    if (DIRECTIONS[parts.get("m")]) S.direction = parts.get("m");
    if (data.photos[parts.get("f")]) S.photo = parts.get("f");
    if (parts.get("q")) S.q = parts.get("q").slice(0, 200);
    S.breaks = Object.fromEntries((parts.get("b") || "").split(".").filter(name => SWITCHES[name] && S.offers(name)).map(name => [name, true]));
    S.readPrompt();
    S.drop = new Set((parts.get("d") || "").split(".").filter(Boolean).map(Number).filter(m => m >= 0 && m < S.M));
    const target = S.target();
    S.choose(get("j", S.ids.length - 1) === null ? target : S.token);
    S.patch = get("p", S.T * 36 - 1) ?? 4 * target + 3;
    S.col = get("j", S.ids.length - 1) ?? S.col;
    if (S.col >= S.off && S.col < S.off + S.M) S.token = S.col - S.off;
    S.block = get("l", config.vision.depth - 1) ?? S.block;
    S.step = get("w", 15) ?? 0;
    const head = (parts.get("a") || "").split(".").map(Number);
    if (head.length === 2 && head[0] >= 0 && head[0] < 3 && head[1] >= 0 && head[1] < 4) { S.head = head; S.chosen = true; }
    return get("c", 9) ?? 0;
  };
  return S;
}

export const nameOfPlace = token => PLACES[token % CELLS];
