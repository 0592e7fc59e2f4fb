// What the page says about the record: questions that fit the input, and one sentence for each chapter. S: the state.
import { CELLS, gridOf } from "./layout.js";
import { COLORS, PLACES, SHAPES, placeOf } from "./pixels.js";
import { SWITCHES, nameOfPlace } from "./state.js";

// ---------------------------------------------------------------- questions

// every question that the menu offers
export function questions(S) {
  const unique = list => [...new Set(list)];
  const shapes = unique(S.things.map(t => t.shape)), colors = unique(S.things.map(t => t.color));
  const counted = "How many objects are there?";
  if (S.kind === "photo") return ["What is in the picture?", "What color is the circle?", counted];
  if (S.kind === "clip") return [
    ...shapes.map(s => `Which way does the ${s} move?`), "What moves?",
    ...shapes.map(s => `What color is the ${s}?`), "What is in the clip?",
  ];
  const absent = SHAPES.find(s => !shapes.includes(s)) || "star";
  return [
    ...[...shapes, absent].map(s => `Where is the ${s}?`), ...colors.map(c => `Where is the ${c} object?`),
    ...[...shapes, absent].map(s => `What color is the ${s}?`), ...colors.map(c => `What shape is the ${c} object?`),
    ...unique([...S.things.map(t => PLACES[placeOf(t)]), "picture"]).map(p => `What is in the ${p}?`),
    ...shapes.map(s => `Which row is the ${s} in?`), counted,
  ];
}

// the few beside the image, about the chosen shape
export function offered(S) {
  const t = S.kind === "clip" ? S.things[0] : S.things[S.sel] || S.things[0];
  if (S.kind === "photo") return questions(S).slice(0, 2);
  if (!t) return ["How many objects are there?", "Where is the circle?"];
  if (S.kind === "clip") {
    const [way, color] = [`Which way does the ${t.shape} move?`, `What color is the ${t.shape}?`];
    return [way, "What moves?", color, "What is in the clip?"];
  }
  const isOnly = part => S.things.filter(u => u[part] === t[part]).length === 1;
  const named = isOnly("shape") || !isOnly("color") ? t.shape : `${t.color} object`;
  return [
    `Where is the ${named}?`, `What color is the ${t.shape}?`, `What is in the ${PLACES[placeOf(t)]}?`,
    "How many objects are there?",
  ];
}

export function firstQuestion(S) {
  const [first] = S.things;
  if (S.kind === "photo") return "What is in the picture?";
  if (!first) return "How many objects are there?";
  return S.kind === "clip" ? `Which way does the ${first.shape} move?` : `Where is the ${first.shape}?`;
}

// ---------------------------------------------------------------- sentences

const share = v => v > 0.9995 ? "≈ 100 %" : v < 0.0005 ? "≈ 0 %" : `${(100 * v).toFixed(1)} %`;
const medium = S => S.kind === "clip" ? "video" : "image";
const frames = pair => `frames ${2 * pair + 1} and ${2 * pair + 2}`;

export function brokenWords(S) {
  const out = S.drop.size, names = Object.keys(SWITCHES).filter(name => S.breaks[name]).map(name => SWITCHES[name].said);
  if (out) names.push(out === S.M ? `no ${medium(S)}` : out === 1 ? "one token removed" : `${out} tokens removed`);
  return names.join(", ") + (S.isWrong ? "" : ": same answer");
}

export function lookWords(S) {
  const name = i => { const [r, c] = gridOf(i); return `line ${r + 1}, column ${c + 1}`; };
  const others = [...S.look.keys()].filter(i => i !== S.patch);
  const best = others.reduce((a, b) => S.look[b] > S.look[a] ? b : a);
  const when = S.T > 1 ? `, ${frames(Math.floor(best / 36))}` : "", anywhere = S.T > 1 ? "any patch of its two frames" : "any patch";
  const isFull = !S.hasWindows || S.block % 2 === 1 || S.breaks.open;
  const where = isFull ? `In this layer, it may attend to ${anywhere}.` : "Its attention stays within its window.";
  return `Apart from itself, the patch in ${name(S.patch)} attends most to ${name(best)}${when} (${share(S.look[best])}). ${where}`;
}

export function dropWords(S) {
  const out = [...S.drop].map(nameOfPlace);
  if (!out.length) return `With all ${S.M} tokens, the model says “${S.said}”.`;
  const listed = out.length > 4 ? `${out.length} tokens` : out.map(n => `“${n}”`).join(", ");
  const named = out.length === S.M ? "any of the tokens" : listed;
  return `Without ${named}, the model says “${S.said}”${S.isWrong ? `, not “${S.truth}”` : ""}.`;
}

export function mapWords(S) {
  const isWhere = /^(Where|Which row|Which column|Which way)|What is in the (?!picture|clip)/.test(S.q);
  if (S.breaks.swap || S.breaks.one || S.breaks.back) {
    if (S.isWrong) return `“${S.truth}” has become “${S.said}”.`;
    const why = isWhere ? "this answer is its own mirror image" : "the question does not depend on positions";
    return `Still “${S.said}”: ${why}.`;
  }
  return isWhere ? `Now: “${S.said}”. Flip a switch and watch both the stamp and the answer.`
    : `Now: “${S.said}”. This question does not depend on positions: ask where something is.`;
}

export function headWords(S, word) {
  const seen = [...S.share.slice(S.off, S.off + S.M)], best = seen.indexOf(Math.max(...seen));
  const sum = seen.reduce((a, b) => a + b, 0), when = S.T > 1 ? ` of ${frames(Math.floor(best / CELLS))}` : "";
  const [whole, most] = [sum, seen[best]].map(v => Math.round(100 * v));
  return `Before “${word}”, head ${S.head[1] + 1} of layer ${S.head[0] + 1} gives ${whole} % of its attention to the ${medium(S)}, ` +
    `and ${most} % to ${nameOfPlace(best)}${when} alone.`;
}

// parts of a sentence, [text, axis or ""]
export function positionWords(S, label) {
  const at = [0, 1, 2].map(axis => S.res.positions[axis][S.col]), isSeen = S.col >= S.off && S.col < S.off + S.M;
  const name = isSeen ? nameOfPlace(S.col - S.off) : label(S.ids[S.col]).replace("⏎", "line break");
  return [
    [isSeen ? `The ${medium(S)} token at ` : "The token "], [name, "name"], [" has "], [`t ${at[0]}`, "t"], [", "], [`h ${at[1]}`, "h"],
    [", "], [`w ${at[2]}`, "w"], [`. After the ${medium(S)}, text continues at ${S.res.positions[0][S.off + S.M]}.`],
  ];
}

export function inputWords(S) {
  const things = S.things.map(t => `${t.color} ${t.shape}, ${PLACES[placeOf(t)]}`).join("; ") || "empty";
  if (S.kind === "photo") return "A photograph";
  return S.kind === "clip" ? `A video: ${things}; the first shape moves ${S.direction}` : `The image: ${things}`;
}

// ---------------------------------------------------------------- images on buttons

const tip = i => {
  const r = i % 2 ? 5 : 11.5, a = Math.PI * i / 5;
  return `${(14 + r * Math.sin(a)).toFixed(1)} ${(14 - r * Math.cos(a)).toFixed(1)}`;
};
const drawing = content => `<svg viewBox="0 0 28 28" fill="currentColor" aria-hidden="true">${content}</svg>`;
const OUTLINES = {
  circle: '<circle cx="14" cy="14" r="10"/>',
  square: '<rect x="5" y="5" width="18" height="18"/>',
  triangle: '<path d="M14 3L24 22H4Z"/>',
  cross: '<path d="M10.500 4h7v6.500h6.500v7h-6.500v6.500h-7v-6.500h-6.500v-7h6.500z"/>',
  star: `<path d="M${[...Array(10).keys()].map(tip).join("L")}Z"/>`,
};
export const shapeIcon = shape => drawing(OUTLINES[shape]);
export const colorIcon = (color, hasEdge) => drawing(
  `<circle cx="14" cy="14" r="11" fill="rgb(${COLORS[color]})" stroke="var(--line)" stroke-width="${hasEdge ? 1.5 : 0}"/>`);
export const arrowIcon = ([dx, dy]) => drawing(
  `<g transform="rotate(${Math.atan2(dy, dx) * 180 / Math.PI} 14 14)" fill="none" stroke="currentColor" stroke-width="2" ` +
  'stroke-linecap="round" stroke-linejoin="round"><path d="M5 14H23M16 7l7 7-7 7"/></g>');
