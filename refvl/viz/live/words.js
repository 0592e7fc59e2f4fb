// What the page says: the questions that fit an input, what would be right, and one sentence for each result.
import { BREAKS } from "./breaks.js";
import { CELLS, finder, lookOf, percent, sureOf, surety, towerLook } from "./change.js";
import { COLORS, PLACES, SHAPES } from "./pixels.js";
import { MOST_TOKENS } from "./state.js";

export const H = '<i class="h">h</i>', W = '<i class="w">w</i>', T = '<i class="t">t</i>';
export const marked = text => text.replace("%h", H).replace("%w", W).replace("%t", T);
export const esc = text => String(text).replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);
const COUNTS = ["", "one", "two", "three", "four"], HOW_MANY = "How many objects are there?";

// ---------------------------------------------------------------- questions and what would be right

// every question that the page offers about things [{shape, color, place}]
export function questionsOf(kind, things, isBoxedIn = false) {
  const unique = list => [...new Set(list)], shapes = unique(things.map(t => t.shape)), colors = unique(things.map(t => t.color));
  if (kind === "photo") return ["What is in the picture?", "What color is the circle?", HOW_MANY];
  const color = shapes.map(s => `What color is the ${s}?`);
  if (kind === "clip") {
    const moves = isBoxedIn || !things.length ? [] : [`Which way does the ${things[0].shape} move?`, "What moves?"];
    return [...moves, ...color, "What is in the clip?"];
  }
  const absent = SHAPES.find(s => !shapes.includes(s));
  return [
    ...shapes.map(s => `Where is the ${s}?`), ...color, ...colors.map(c => `What shape is the ${c} object?`),
    ...unique(things.map(t => PLACES[t.place])).map(p => `What is in the ${p}?`),
    ...shapes.map(s => `Which row is the ${s} in?`), HOW_MANY, `Where is the ${absent}?`,
  ];
}

// the right answer to one of these questions; undefined where it is not known, or not one
export function truthOf(kind, things, direction, q) {
  if (kind === "photo") return undefined;
  const [, asks, word] = q.match(/^(Where is|What color is|What shape is|Which row is|Which way does) the (\w+)/) || [];
  const key = SHAPES.includes(word) ? "shape" : Object.hasOwn(COLORS, word || "") ? "color" : "";
  const found = things.filter(t => t[key] === word), [one] = found;
  if (q === HOW_MANY) return COUNTS[things.length] || undefined;
  if (q === "What moves?" && things.length) return `the ${things[0].color} ${things[0].shape}`;
  const there = things.find(t => q === `What is in the ${PLACES[t.place]}?`);
  if (there) return `a ${there.color} ${there.shape}`;
  if (!key || found.length > 1) return undefined;
  if (!one) return `There is no ${word}${key === "color" ? " object" : ""}.`;
  if (asks === "Which way does") return one === things[0] ? direction : undefined;
  return { "Where is": PLACES[one.place], "What color is": one.color, "What shape is": one.shape,
    "Which row is": ["top", "middle", "bottom"][Math.floor(one.place / 3)] }[asks];
}

// ---------------------------------------------------------------- why an answer survived, from the two records

// [a name of the reason, the sentence]. S: the state with both records
export function why(S) {
  const { A, B, broken, off, q, change, heads } = S, asked = S.asked(), says = S.said(A);
  const place = asked?.place, isPosition = BREAKS[broken].stage === "positions", isWhere = /^(Where|Which row|What is in the (?!pic|clip))/.test(q);
  const same = ["pixels", "deepstack", "prompt", "positions"].every(stage => !change[stage]);
  if (same) return ["unchanged", "No number that the language model reads has changed."];
  if (isPosition && !asked && says.startsWith("There is no")) return ["absent", "It is not in the image, so it has no place that could be lost."];
  if (broken === "swap" && isWhere && asked) {
    const [h, w] = [1, 2].map(axis => A.positions[axis][off + place]);
    if (h === w) return ["diagonal", `The ${asked.shape} has h ${h} and w ${w}: exchanged, they stay the same.`];
    if (q.startsWith("Which row")) return ["row", `The ${asked.shape} moved from h ${h} to h ${w}, and the model still names the row.`];
  }
  if (broken === "one" && isWhere && place === 0) return ["corner", `Every token is now at the top left, where the ${asked.shape} already was.`];
  if (broken === "one" && /^Which row/.test(q) && place < 3) return ["corner", `Every token is now in the top row, where the ${asked.shape} already was.`];
  if (isPosition && !isWhere && S.kind === "picture") {
    const { head, token, share } = finder(A, 0, off, heads), now = lookOf(B, 0, head, heads)[off + token];
    if (now > 0.3) return ["found", `The question does not ask for a place: a head still finds ${PLACES[token % CELLS]} by its content ` +
      `(${percent(now)} of its attention, ${percent(share)} intact).`];
  }
  const lead = R => (R.steps[0].top[0][2] - R.steps[0].top[1][2]).toFixed(1);
  const [most, size] = Object.entries(change).reduce((a, b) => b[1] > a[1] ? b : a);
  return ["lead", `The ${most} changed by ${percent(size)}, but the word's lead over the runner-up only went from ${lead(A)} to ${lead(B)}.`];
}

// ---------------------------------------------------------------- the headline and the line below it

const TITLES = {
  pixels: "What the model receives.", patches: "The image as a list: each column of four becomes one token.",
  windows: "Which patches may look at each other.", deepstack: "Features of earlier blocks skip ahead to the first layers.",
  tokens: "Four patches become one token.", prompt: "The image becomes part of the sentence, as tokens.",
  word: "How sure it is, on a logarithmic scale.",
};
const TODO = {                                            // one thing to do in each box
  pixels: "Exchange red and blue.", patches: "Read the patches line by line.", windows: "Remove the windows.",
  tower: "Choose a patch, then a head.", tokens: "Drag a shape and watch its token.", deepstack: "Leave DeepStack out.",
  prompt: "Leave one place out.", positions: "Drag a shape, or choose a token.", attention: "Choose a head, or a word of the answer.",
  word: "Ask another question.",
};
const quote = text => `“${esc(text)}”`;

// {head, line}: HTML; S: the state with both records
export function sentences(S) {
  const speak = { "": opening, positions, attention, tower }[S.stage] || other, { head, line } = speak(S);
  const isHere = S.on && BREAKS[S.broken].stage === S.stage;
  const todo = S.stage ? ` <span class="todo">${isHere ? "Flip the switch and compare." : TODO[S.stage]}</span>` : "";
  return { head, line: line + todo };
}

function opening(S) {
  const { A, B } = S, [a, b] = [A, B].map(S.said), truth = truthOf(S.kind, S.things, S.direction, S.q), p = sureOf(B);
  const warned = edge(S);
  if (!S.on) return { head: "The same model twice: nothing is exchanged.",
    line: warned || (truth !== undefined && truth !== a ? `It is wrong anyway: the correct answer is ${quote(truth)}.`
      : S.kind === "photo" ? "Flip the switch to exchange one thing." : "Flip the switch to exchange one thing, or drag a shape.") };
  if (a === b) return { head: `Broken, and yet still ${quote(cut(B, b))}.`, line: warned || esc(why(S)[1]) };
  const sure = p > 0.99 && sureOf(A) > 0.99 ? "just as sure" : `${surety(p)} sure`;
  const how = truth === undefined ? `A different answer, and ${sure}` : truth === a ? `Wrong, and ${sure}`
    : truth === b ? "Right by accident: the intact model is wrong here" : "Wrong, but so is the intact model";
  const known = S.broken === "swap" && truth === a ? "positions are how it knows where" : "";
  const note = S.note || known;
  return { head: `Same ${S.kind === "clip" ? "video" : "picture"}, same weights; ${marked(BREAKS[S.broken].only)}.`,
    line: `<b class="bad">${how}</b>${note ? `: ${note}.` : "."}${warned ? ` ${warned}` : ""}` };
}
// inputs unlike those of training
function edge(S) {
  if (S.isLost) return "This link was made with someone's own photo, which a link cannot contain, so here is another.";
  if (S.kind === "picture" && !S.things.length) return "It was never trained on an empty scene: no answer here means anything.";
  if (S.isBoxedIn()) return "The first shape is boxed in, so nothing moves: it was never trained on such a video.";
  if (S.kind === "photo" && S.photo === "own") return "It knows painted scenes and four photos, not yours: watch the stages, not the answer.";
  return "";
}
export const cut = (R, text) => R.out.length === MOST_TOKENS ? `${text} … (cut after ${MOST_TOKENS} tokens)` : text;

function positions(S) {
  const m = S.spot(), at = R => [0, 1, 2].map(axis => R.positions[axis][S.off + m]), there = S.at(m % CELLS);
  const [one, two] = [S.A, S.B].map(at), owner = there && S.kind !== "photo" ? `The ${there.shape}` : `The token at ${PLACES[m % CELLS]}`;
  const say = ([t, h, w]) => `${S.T > 1 ? `<b class="t">t ${t}</b>, ` : ""}<b class="h">h ${h}</b>, <b class="w">w ${w}</b>`;
  const head = S.T > 1 ? `Every token says when and where it was: ${T}, ${H} down, ${W} across.`
    : `Every image token says where it was: ${H} down, ${W} across.`;
  if (!S.on || !S.change.positions) return { head, line: `${owner}: ${say(one)}${S.on ? "; this break leaves positions alone" : ""}.` };
  if (S.broken === "drop" || S.broken === "evs") return { head, line: "The tokens that stay keep their positions: the gap stays open." };
  if (S.broken === "one") return { head, line: `All ${S.M} tokens now say ${say(two)}: one pile in the corner.` };
  if (one.join() === two.join()) return { head, line: `${owner}: ${say(one)}; exchanged, it stays where it was.` };
  const told = S.broken === "swap" ? "the model is told about a mirrored picture" : "the last frames now come first";
  return { head, line: `${owner}: ${say(one)} became ${say(two)}; ${told}.` };
}

const peak = list => list.reduce((best, v, i) => v > list[best] ? i : best, 0);
function attention(S) {
  const word = S.label(S.A.steps[Math.min(S.step, S.A.steps.length - 1)].top[0][0]), h = S.headNow();
  const shares = R => [...lookOf(R, S.step, h, S.heads).slice(S.off, S.off + S.M)], [one, two] = [S.A, S.B].map(shares);
  const [i, j] = [one, two].map(peak), on = S.kind === "picture" && S.at(i), name = `Head ${Math.floor(h / S.perLayer) + 1}·${h % S.perLayer + 1}`;
  const place = m => PLACES[m % CELLS] + (S.T > 1 ? ` of frames ${2 * Math.floor(m / CELLS) + 1} and ${2 * Math.floor(m / CELLS) + 2}` : "");
  const head = one[i] < 0.15 ? `Before ${quote(word)}, this head reads the text.`
    : `Before ${quote(word)}, this head looks at ${on ? `the ${on.shape}` : place(i)}.`;
  if (!S.on) return { head, line: `${name} gives ${percent(one[i])} of its attention to ${place(i)}.` };
  if (i === j && S.said(S.A) !== S.said(S.B) && one[i] >= 0.15 && two[j] > 0.3) {
    const told = { positions: `it finds the thing, and is told the wrong ${S.broken === "back" ? "time" : "place"}`, prompt: "what is missing was elsewhere" };
    return { head, line: `Broken, it still does (${percent(two[j])}): ${told[BREAKS[S.broken].stage] || "the place is right, but what is there is wrong"}.` };
  }
  if (i !== j && one[i] > 0.15 && two[j] > 0.15) return { head,
    line: `Broken, it looks at ${place(j)} instead (${percent(two[j])}; intact, ${percent(one[i])} at ${place(i)}).` };
  return { head, line: `${name} gives ${place(i)} ${percent(one[i])} of its attention, and broken ${percent(two[i])}.` };
}

function tower(S) {
  const h = S.towerHead, block = Math.floor(h / S.perBlock), R = S.on ? S.B : S.A, seat = S.seat();
  const { look } = towerLook(R, block, h % S.perBlock, seat), others = [...look].map((v, i) => i === seat ? 0 : v), best = peak(others);
  const isFull = !S.config.vision.fullatt_block_indexes || S.config.vision.fullatt_block_indexes.includes(block) || (S.on && S.broken === "open");
  return { head: `In block ${block + 1}, a patch may look at ${isFull ? "its whole frame" : "its own window"}.`,
    line: `Head ${h % S.perBlock + 1} of this patch reads ${percent(others[best])} from line ${Math.floor(best % 36 / 6) + 1}, column ${best % 6 + 1}` +
      `${S.on ? `; after the last block, the values differ by ${percent(S.change.tower)}` : ""}.` };
}

function other(S) {
  const c = S.change[S.stage], source = BREAKS[S.broken].stage, asked = S.asked(), head = TITLES[S.stage];
  if (!S.on) return { head, line: `Nothing is exchanged, so both sides are the same.${asked ? ` Follow the ${asked.shape}.` : ""}` };
  if (source === S.stage) return { head, line: `The fault is here: the values differ by ${percent(c)}.` };
  if (c >= 0.0005) return { head, line: `The fault shows here: the values differ by ${percent(c)}.` };
  return { head, line: S.stages.indexOf(S.stage) < S.stages.indexOf(source) ? "The fault comes later: nothing has changed here." : "The fault does not pass through this stage: nothing has changed." };
}
