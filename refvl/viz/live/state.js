// What the reader chose: an input, a question, what is exchanged, and what is open. The address holds all of it.
import { BREAKS, appliesTo, stagesOf } from "./breaks.js";
import { CELLS, FRAME } from "./change.js";
import { CELL, COLORS, DIRECTIONS, PLACES, SHAPES } from "./pixels.js";

export const MOST_THINGS = 4, MOST_TOKENS = 24;           // as in training; of an answer
export const thing = (shape, color, place) => ({ shape, color, place });

export function makeState(data, tokenizer) {
  const { config, prompts, photos } = data, stages = stagesOf(config);
  const S = {
    kind: "picture", things: [thing("circle", "red", 2), thing("square", "blue", 3), thing("star", "yellow", 7)],
    old: [thing("star", "purple", 1), thing("circle", "green", 6), thing("cross", "black", 5)], direction: "left",
    photo: "coffee", q: "Where is the circle?", broken: "swap", on: true, stage: "", head: null, towerHead: 4, patch: null,
    step: 0, focus: null, note: "", ghost: null, A: null, B: null, change: {}, model: null, ms: 0,
    config, stages, heads: config.text.num_hidden_layers * config.text.num_attention_heads,
    perLayer: config.text.num_attention_heads, perBlock: config.vision.num_heads,
    towerHeads: config.vision.depth * config.vision.num_heads,
    label: tokenizer.label,
  };
  S.said = R => tokenizer.decode(R.out).trim();
  S.offers = name => Object.hasOwn(BREAKS, name) && appliesTo(name, config, S.kind);

  // the prompt of the question now: its ids, and where the item's tokens are
  S.readPrompt = () => {
    const { before, pad, count, between, after } = prompts[S.kind === "clip" ? "clip" : "picture"];
    Object.assign(S, { T: count / CELLS, M: count, off: before.length });
    S.ids = [...before, ...Array(count).fill(pad), ...between, ...tokenizer.encode(S.q), ...after];
    if (!S.offers(S.broken)) S.broken = "swap";
  };

  // ---------------------------------------------------------------- the scene

  S.at = place => S.things.find(t => t.place === place);
  const named = word => t => new RegExp(`\\b${word}\\b`).test(S.q);
  // the thing that the question is about, if it is there
  S.asked = (things = S.things) => S.kind === "photo" ? undefined
    : things.find(t => named(t.shape)()) || things.find(t => named(t.color)()) || S.asksAt(things);
  S.asksAt = things => things.find(t => S.q.endsWith(` ${PLACES[t.place]}?`));
  // the token that is drawn in front: the reader's choice, or the place that is asked about, in the first frames
  S.spot = () => Math.min(S.focus ?? S.asked()?.place ?? 4, S.M - 1);
  S.seat = () => {
    const place = S.spot() % CELLS, frame = Math.floor(S.spot() / CELLS);
    const corner = frame * FRAME + (2 * Math.floor(place / 3) + 1) * 6 + 2 * (place % 3) + 1;
    return Math.min(S.patch ?? corner, S.T * FRAME - 1);
  };
  // how far the first thing of a video can go each way: to the edge, or to what is in its way
  S.roomTo = direction => {
    const [first, ...others] = S.things;
    if (!first) return 0;
    const [dx, dy] = DIRECTIONS[direction];
    let steps = 0;
    for (let x = first.place % 3 + dx, y = Math.floor(first.place / 3) + dy;
      x >= 0 && x < 3 && y >= 0 && y < 3 && !others.some(t => t.place === y * 3 + x); x += dx, y += dy) steps++;
    return steps * CELL;
  };
  S.aim = () => {
    const free = Object.keys(DIRECTIONS).filter(S.roomTo);
    if (!free.includes(S.direction) && free.length) S.direction = free[0];
    S.distance = S.roomTo(S.direction);
  };
  S.isBoxedIn = () => S.kind === "clip" && !S.distance;

  // ---------------------------------------------------------------- the address

  const written = things => things.map(t => [t.shape, t.color, t.place, ...(t.dx || t.dy ? [t.dx || 0, t.dy || 0] : [])].join("."))
    .join("_");
  const readThings = text => text.split("_").map(part => part.split("."))
    .filter(([shape, color, place]) => SHAPES.includes(shape) && Object.hasOwn(COLORS, color) && /^[0-8]$/.test(place))
    .map(([shape, color, place, ...off]) => ({ ...thing(shape, color, Number(place)),
      ...(off.length === 2 && off.every(v => /^-?\d$/.test(v)) ? { dx: Number(off[0]), dy: Number(off[1]) } : {}) }))
    .filter((t, i, list) => list.findIndex(u => u.place === t.place) === i).slice(0, MOST_THINGS);
  S.toHash = () => {
    const parts = { s: written(S.things), q: S.q, b: S.broken, on: Number(S.on) };
    if (S.kind !== "picture") parts.k = S.kind;
    if (S.kind === "clip") parts.m = S.direction;
    if (S.kind === "photo") parts.f = S.photo;
    if (S.stage) parts.v = S.stage;
    if (S.head !== null) parts.a = S.head;
    if (S.step) parts.w = S.step;
    if (S.focus !== null) parts.j = S.focus;
    if (S.broken === "stale") parts.o = written(S.old);
    return "#" + new URLSearchParams(parts);
  };
  S.fromHash = hash => {
    const parts = new URLSearchParams(hash.replace(/^#/, "")), get = name => parts.get(name) || "";
    const number = (name, most) => /^\d+$/.test(get(name)) && Number(get(name)) <= most ? Number(get(name)) : null;
    if (parts.has("s")) S.things = readThings(get("s"));
    if (readThings(get("o")).length) S.old = readThings(get("o"));
    S.kind = get("k") === "photo" || get("k") === "clip" && prompts.clip ? get("k") : "picture";
    if (Object.hasOwn(DIRECTIONS, get("m"))) S.direction = get("m");
    if (Object.hasOwn(photos, get("f"))) S.photo = get("f");
    S.isLost = get("f") === "own" && S.kind === "photo" && S.photo !== "own";
    if (get("q")) S.q = get("q").slice(0, 200);
    if (S.offers(get("b"))) S.broken = get("b");
    if (parts.has("on")) S.on = get("on") === "1";
    S.stage = stages.includes(get("v")) ? get("v") : "";
    S.head = number("a", S.heads - 1);
    S.step = number("w", MOST_TOKENS - 1) ?? 0;
    S.aim();
    S.readPrompt();
    S.focus = number("j", S.M - 1);
  };
  S.aim();
  S.readPrompt();
  return S;
}
