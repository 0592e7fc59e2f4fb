// The page: the worker that runs the model, the controls, and the scroll that moves the stage.
import { unchanged } from "./evs.js";
import { CELLS, GRID, gridOf, patchAtGrid } from "./layout.js";
import { NUMBERS } from "./numbers.js";
import { clamp, mix, smooth } from "./pen.js";
import { COLORS, DIRECTIONS, PLACES, PROGRESS, SHAPES, SIDE, frameThings, paint, placeOf, centre,
  resize } from "./pixels.js";
import { chance } from "./reading.js";
import { makeStage } from "./stage.js";
import { SWITCHES, makeState, thing } from "./state.js";
import { makeTokenizer } from "./tokenizer.js";
import {
  arrowIcon, brokenWords, colorIcon, dropWords, firstQuestion, headWords, inputWords, lookWords, mapWords, offered,
  positionWords, questions, shapeIcon,
} from "./words.js";

const $ = id => document.getElementById(id), all = query => [...document.querySelectorAll(query)];
const DATA = JSON.parse($("data").textContent), tokenizer = makeTokenizer(DATA.tokenizer), { label } = tokenizer;
const still = matchMedia("(prefers-reduced-motion: reduce)"), dark = matchMedia("(prefers-color-scheme: dark)");
const S = makeState(DATA, tokenizer), stage = makeStage($("stage"), S, { label, isStill: () => still.matches });
const aid = { slotOf: stage.slotOf, rankOf: stage.rankOf, label };

// ---------------------------------------------------------------- the model, in a worker made of this page's own text

let worker, isReady = false, jobs = 0, wanted = null, flying = null, later = [], waiting = [];

async function boot() {
  const packed = Uint8Array.from(atob($("weights").textContent), c => c.charCodeAt(0)), text = $("model").textContent;
  $("weights").remove();
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(inflated).arrayBuffer();
  const weights = { meta: DATA.meta, config: DATA.config, bytes };
  try {
    worker = new Worker(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    worker.onmessage = event => landed(event.data);
    worker.onerror = event => { $("said").textContent = `The model stopped: ${event.message}`; };
    worker.postMessage(weights, [bytes]);
  } catch {                                               // where a frame may have no worker
    const tag = document.createElement("script");
    tag.textContent = `(() => { ${text}\nwindow.receive = receive; })()`;
    document.head.append(tag);
    worker = { postMessage: message => setTimeout(() => landed(window.receive(message))) };
    worker.postMessage(weights);
  }
}
function pump() {
  if (!isReady || flying) return;
  flying = wanted || later.shift() || null;
  if (flying === wanted) wanted = null;
  if (!flying) return;
  flying.id = ++jobs;
  worker.postMessage({ id: flying.id, job: flying.job });
}
function landed(message) {
  if (message.ready) {
    isReady = true;
    S.axes = message.axes;
    S.frequencies = message.frequencies;
  } else {
    const { done } = flying;
    flying = null;
    done(message.record, message.ms);
  }
  pump();
}

// the frames of what is shown, RGB bytes of 84 x 84 each
let photo = null;                                         // { coarse, fine }
function framesOf(isStale, scale = 1) {
  if (S.kind === "photo") return [scale > 1 ? photo?.fine : photo?.coarse].map(rgb => rgb || paint([], scale));
  const things = isStale ? S.old : S.things;
  if (S.kind === "picture") return [paint(things, scale)];
  return PROGRESS.map((_, frame) => paint(things.length ? frameThings(things, S, frame) : [], scale));
}
const toModel = frames => frames.map(rgb => resize(rgb, SIDE, SIDE, S.pixels.side, S.pixels.side));
const job = (breaks, drop, done) => ({ done, job: {
  frames: toModel(framesOf(breaks.stale)), ids: S.ids, off: S.off, breaks: { ...breaks }, drop: [...drop], most: 24,
} });

// ask the model about what is shown; everything on the page follows from its record
function think() {
  const { q, kind } = S;
  S.readPrompt();
  wanted = job(S.breaks, S.drop, (record, ms) => {
    if (q !== S.q || kind !== S.kind) return;
    Object.assign(S, { res: record, ms, said: tokenizer.decode(record.out).trim() });
    S.version++;
    if (!S.isBroken()) S.truth = S.said;
    S.isWrong = Boolean(S.isBroken() && S.truth && S.said !== S.truth);
    derive(true);
    sentences();
    wake();
    if (!wanted) waiting.splice(0).forEach(done => done());
  });
  later = [];
  S.truth = "";
  if (S.isBroken()) later.push(job({}, [], record => {
    S.truth = tokenizer.decode(record.out).trim();
    S.isWrong = S.said !== S.truth;
    sentences();
    wake();
  }));
  if (shown >= 8) table();
  pump();
  save();
  wake();
}

// what the chosen patch and the chosen head look at
function derive(isFresh) {
  const R = S.res;
  if (!R) return;
  const N = R.at.length, shares = R.attention[S.block], H = shares.length / N / N,
    me = stage.rankOf(stage.slotOf(S.patch));
  const heads = S.towerHead < 0 ? [...Array(H).keys()] : [S.towerHead];
  S.look = Float32Array.from({ length: N }, (_, i) => {
    const rank = stage.rankOf(stage.slotOf(i));
    return heads.reduce((sum, h) => sum + shares[(h * N + me) * N + rank] / heads.length, 0);
  });
  S.step = Math.min(S.step, R.steps.length - 1);
  const { look } = R.steps[S.step], keys = look.length / 12,
    seen = R.keep.map((j, k) => [j, k]).filter(([j]) => j >= S.off && j < S.off + S.M);
  if (isFresh && !S.chosen) {                             // the head that looks hardest at one token of the image
    let most = -1;
    for (let k = 0; k < 12; k++) for (const [, at] of seen) if (look[k * keys + at] > most) {
      most = look[k * keys + at];
      S.head = [k >> 2, k & 3];
    }
  }
  S.share = new Float32Array(S.ids.length);
  R.keep.forEach((j, k) => { S.share[j] = look[(S.head[0] * 4 + S.head[1]) * keys + k]; });
}

// ---------------------------------------------------------------- what can be asked

function askControls() {
  const list = questions(S), select = $("ask").firstChild || $("ask").appendChild(el("select"));
  if (!list.includes(S.q)) list.unshift(S.q);
  select.setAttribute("aria-label", "Your question");
  select.replaceChildren(...list.map(q => new Option(q, q)));
  select.value = S.q;
  select.onchange = () => setQuestion(select.value);
  if (document.activeElement !== $("free")) $("free").value = "";
  $("question").replaceChildren(...offered(S).map(q => {
    const button = el("button", { textContent: q, onclick: () => setQuestion(q) });
    button.setAttribute("aria-pressed", q === S.q);
    return button;
  }));
}
function setQuestion(q) {
  Object.assign(S, { q: q.slice(0, 200), step: 0, chosen: false, res: null });
  S.readPrompt();
  follow();
  askControls();
  think();
}
$("free").onkeydown = event => {
  const asked = $("free").value.trim();
  if (event.key !== "Enter" || !asked) return;
  event.preventDefault();
  setQuestion(asked);
};

// ---------------------------------------------------------------- words around the stage

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}
function sentences() {
  const R = S.res;
  if (!R) return;
  const top = R.steps[0].top, said = $("said");
  said.replaceChildren(...(S.isWrong ? [el("s", { textContent: S.truth })] : []),
    el("span", { className: S.isWrong ? "bad" : "", textContent: S.said }));
  if (innerWidth > 700) said.append(el("small",
    { textContent: S.isBroken() ? brokenWords(S) : `${Math.round(S.ms)} ms` }));
  $("mend").hidden = !S.isBroken();
  const runner = el("p", { className: "next" }, `runner-up: “${label(top[1][0])}”, ${chance(top[1][1])}`);
  const margin = `margin ${(top[0][2] - top[1][2]).toFixed(1)}`;
  runner.append(el("span", { textContent: margin, title: "how far the first word's score is ahead of the runner-up's" }));
  $("answer").replaceChildren(el("p",
    { className: `word${S.isWrong ? " bad" : ""}${S.said.length > 30 ? " long" : ""}`, textContent: S.said }), runner);
  $("lookline").textContent = lookWords(S);
  $("dropline").textContent = dropWords(S);
  $("mapline").textContent = mapWords(S);
  const part = ([text, axis]) => axis ? el("b", { textContent: text, className: axis }) : text;
  $("posline").replaceChildren(...positionWords(S, label).map(part));
  const word = i => label(R.steps[i].top[0][0]), first4 = R.steps.slice(0, Math.min(4, R.out.length)).map((_, i) => word(i));
  $("headline").textContent = headWords(S, word(S.step));
  radios("steps", first4, S.step, i => { S.step = i; S.chosen = false; derive(true); sentences(); save(); wake(); });
  all(".count").forEach(node => { node.textContent = S.ids.length; });
  all(".tokens").forEach(node => { node.textContent = S.M === 9 ? "nine" : S.M; });
  all(".patches").forEach(node => { node.textContent = S.T * 36; });
  all(".switch button").forEach(b => b.setAttribute("aria-checked", Boolean(S.breaks[b.dataset.name])));
  const thumb = $("thumb").getContext("2d");
  if (stage.sources.coarse[0]) thumb.drawImage(stage.sources.coarse[0], 0, 0, 84, 84);
  numbers();
  $("stage").setAttribute("aria-label", described());
}
function described() {
  const more = { 1: "lookline", 3: "lookline", 5: "dropline", 6: "posline", 7: "mapline", 8: "headline" }[shown];
  const name = sections[Math.max(0, shown)].dataset.name, live = more ? $(more).textContent : "";
  return `Chapter ${shown + 1} of 10, ${name}. ${inputWords(S)}. ${S.q} ${S.said}. ${live}`;
}
function numbers() {
  for (const box of all("details.numbers")) {
    if (!box.open || !S.res) continue;
    const rows = NUMBERS[box.dataset.chapter](S, aid);
    const pair = ([what, formula]) => [el("dt", { textContent: what }), el("dd", { textContent: formula })];
    box.lastChild.replaceChildren(...rows.flatMap(pair));
  }
}

// what each break does to this answer; asked only on the last page
let tableFor = "";
function table() {
  const key = [S.written(), S.kind, S.photo, S.direction, S.q].join();
  if (tableFor === key && $("table").children.length) return marks(), undefined;
  tableFor = key;
  const names = Object.keys(SWITCHES).filter(S.offers), one = S.target(), everything = [...Array(S.M).keys()];
  const rows = [["Unmodified model", {}, []], ...names.map(name => [SWITCHES[name].name, { [name]: true }, []]),
    [`Without the token “${PLACES[one]}”`, {},
      everything.filter(m => m % CELLS === one)], [`Without any token of the ${S.kind === "clip" ? "video" : "image"}`, {}, everything]];
  const nodes = rows.map(([name, breaks, drop]) => {
    const node = el("button", {}, el("span", { textContent: name }), el("span", { textContent: "…" }));
    node.onclick = () => { S.breaks = { ...breaks }; S.drop = new Set(drop); show(); think(); };
    node.dataset.key = JSON.stringify([breaks, drop]);
    return node;
  });
  $("table").replaceChildren(...nodes);
  const wrong = [];
  let built = null;
  rows.forEach(([, breaks, drop], i) => later.push(job(breaks, drop, record => {
    const said = tokenizer.decode(record.out).trim(), cell = nodes[i].lastChild;
    built ??= said;
    cell.textContent = said.length > 24 ? said.slice(0, 22) + "…" : said;
    if (said !== built) { cell.className = "bad"; wrong.push(record.steps[0].top[0][1]); }
    if (i === rows.length - 1) $("sure").textContent = wrong.length
      ? `${wrong.length} of ${rows.length - 1} changes alter${wrong.length > 1 ? "" : "s"} this answer. ` +
        `The first word of a wrong answer always had a probability of at least ${chance(Math.min(...wrong)).replace("> ", "")}.`
      : "No change alters this answer. Ask where something is.";
  })));
  marks();
  pump();
}
function marks() {
  const now = JSON.stringify([Object.fromEntries(Object.entries(S.breaks).filter(([, on]) => on)), [...S.drop]]);
  for (const node of $("table").children) node.setAttribute("aria-pressed", node.dataset.key === now);
}

// ---------------------------------------------------------------- controls

// buttons of which one is chosen; contents: text, or SVG with a name
function radios(id, contents, chosen, act, names) {
  const key = contents.join() + chosen + dark.matches;
  if ($(id).dataset.key === key) return;
  $(id).dataset.key = key;
  const had = $(id).contains(document.activeElement);
  $(id).replaceChildren(...contents.map((content, i) => {
    const button = el("button", { onclick: () => act(i) });
    if (names) { button.innerHTML = content; button.title = names[i]; button.setAttribute("aria-label",
      names[i]); } else button.textContent = content;
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", i === chosen);
    button.tabIndex = i === Math.max(0, chosen) ? 0 : -1;
    return button;
  }));
  if (had) $(id).children[Math.max(0, chosen)]?.focus();
  $(id).onkeydown = event => {
    const go = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!go) return;
    event.preventDefault();
    act((Math.max(0, chosen) + go + contents.length) % contents.length);
  };
}
const icon = color => colorIcon(color, dark.matches && color === "black");
function palette() {
  const t = S.things[S.kind === "clip" ? 0 : S.sel], shape = t ? t.shape : S.shape, color = t ? t.color : S.color,
    colors = Object.keys(COLORS);
  const set = (part, value) => { S[part] = value; if (t) t[part] = value; changed(); };
  radios("shapes", SHAPES.map(shapeIcon), SHAPES.indexOf(shape), i => set("shape", SHAPES[i]), SHAPES);
  radios("colors", colors.map(icon), colors.indexOf(color), i => set("color", colors[i]), colors);
  const ways = Object.keys(DIRECTIONS);
  radios("ways", ways.map(w => arrowIcon(DIRECTIONS[w])), ways.indexOf(S.direction),
    i => { if (S.roomTo(ways[i])) { S.direction = ways[i]; changed(); } }, ways.map(w => `Move ${w}`));
  ways.forEach((w, i) => { $("ways").children[i].disabled = !S.roomTo(w); });
  const kinds = ["picture", ...(DATA.prompts.clip ? ["clip"] : []), "photo"],
    said = { picture: "Scene", clip: "Video", photo: "Photo" };
  radios("kinds", kinds.map(k => said[k]), kinds.indexOf(S.kind), i => setKind(kinds[i]));
  const photos = Object.keys(DATA.photos);
  radios("photos", photos.map(name => `<img src="${DATA.photos[name].src}" alt="">`), photos.indexOf(S.photo),
    i => choosePhoto(photos[i]), photos.map(name => DATA.photos[name].what));
  $("recolor").replaceChildren(...colors.map(c => {
    const button = el("button", { innerHTML: icon(c), title: c, onclick: () => recolor(c) });
    button.setAttribute("aria-label", c);
    return button;
  }));
  document.body.dataset.kind = S.kind;
}
function recolor(color) {
  const i = S.things.findIndex(t => placeOf(t) === S.token % CELLS);
  if (i >= 0) { S.things[i].color = color; S.sel = i; }
  else if (S.things.length < 4) S.sel = S.things.push(thing(S.shape, color, S.token % CELLS)) - 1;
  changed();
}
function setKind(kind) {
  if (kind === S.kind) return;
  S.kind = kind;
  S.drop.clear();
  for (const name of Object.keys(S.breaks)) if (!S.offers(name)) delete S.breaks[name];
  if (kind === "clip" && !S.things.length) S.things = [thing("circle", "red", 2)];
  S.aim();
  S.q = firstQuestion(S);
  S.res = null;
  S.readPrompt();
  if (kind === "photo") return choosePhoto(S.photo);
  S.choose(S.target());
  changed();
}

// a photograph as bytes: its middle square, shrunk to 84 x 84 as refvl would, and as fine as the stage shows it
function choosePhoto(name, source = DATA.photos[name]?.src) {
  if (!source) return Promise.resolve();
  return new Promise(done => {
    const image = new Image();
    image.onload = () => {
      const side = Math.min(image.width, image.height), small = Math.min(side, 512);
      const bytes = size => {
        const canvas = document.createElement("canvas"), c = canvas.getContext("2d");
        canvas.width = canvas.height = size;
        c.imageSmoothingQuality = "high";
        c.drawImage(image, (image.width - side) / 2, (image.height - side) / 2, side, side, 0, 0, size, size);
        return c.getImageData(0, 0, size, size).data.filter((_, i) => i % 4 < 3);
      };
      photo = { coarse: resize(bytes(small), small, small, SIDE, SIDE), fine: new Uint8Array(bytes(336)) };
      Object.assign(S, { photo: name, kind: "photo" });
      changed();
      done();
    };
    image.onerror = () => { document.querySelector(".own .note").textContent = "This file is not an image that the browser can read."; done(); };
    image.src = source;
  });
}
$("own").onchange = () => {
  const reader = new FileReader();
  reader.onload = () => choosePhoto("own", reader.result);
  if ($("own").files[0]) reader.readAsDataURL($("own").files[0]);
};

let settled = S.written();
function show() {
  S.aim();
  S.readPrompt();
  stage.pixels(pairs(toModel(framesOf(S.breaks.stale))), framesOf(false, S.kind === "clip" ? 2 : 4));
}
// one image for two frames: their mean, so that motion shows
const pairs = frames => frames.length === 1 ? frames : [0, 2,
  4].map(f => frames[f].map((v, i) => (v + frames[f + 1][i]) >> 1));

// what is chosen on the stage is what the question is about
function follow() {
  const place = S.target();
  S.choose(place);
  S.patch = 4 * place + 3;
  stage.rescan();
}
function changed(isLive = false) {
  show();
  if (shown === 0 && !isLive) follow();
  if (!isLive) {
    if (S.written() !== settled && !S.breaks.stale) {
      const before = new URLSearchParams({ s: settled }).toString();
      if (settled) S.old = makeOld(settled);
      settled = S.written();
    }
    palette();
    stage.rescan();
    askControls();
  }
  think();
}
const makeOld = text => text.split("_").map(part => part.split(".")).map(([shape, color, place]) => thing(shape, color,
  Number(place)));

const put = (t, cell) => { [t.x, t.y] = centre(cell); };
// to the middle of the nearest free place
function settle(t) {
  const taken = S.things.filter(u => u !== t).map(placeOf),
    free = PLACES.map((_, c) => c).filter(c => !taken.includes(c));
  const far = c => Math.hypot(centre(c)[0] - t.x, centre(c)[1] - t.y),
    best = free.reduce((a, b) => far(b) < far(a) ? b : a);
  const { x, y } = t, [x1, y1] = centre(best), start = performance.now();
  if (still.matches) { put(t, best); return changed(); }
  const step = now => {
    const f = smooth(clamp((now - start) / 180));
    [t.x, t.y] = [mix(x, x1, f), mix(y, y1, f)];
    if (f >= 1) return changed();
    show();
    wake();
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}
function addThing(cell) {
  if (S.things.length >= 4) return;
  S.sel = S.things.push(thing(S.shape, S.color, cell)) - 1;
  S.shape = SHAPES.find(s => !S.things.some(t => t.shape === s)) || S.shape;
  S.color = Object.keys(COLORS).find(c => !S.things.some(t => t.color === c)) || S.color;
}
// in a video, the chosen shape is the one that moves
function choose(i) {
  S.sel = i;
  if (S.kind !== "clip" || i <= 0) return;
  S.things.unshift(...S.things.splice(i, 1));
  S.sel = 0;
  S.q = `Which way does the ${S.things[0].shape} move?`;
}
const remove = i => { S.things.splice(i, 1); S.sel = S.things.length - 1; changed(); };

const pad = $("pad");
let drag = null, cursor = 4;
const onPad = event => { const box = pad.getBoundingClientRect(); return [(event.clientX - box.left) / box.width * SIDE,
  (event.clientY - box.top) / box.height * SIDE]; };
const under = (x, y) => S.things.findLastIndex(t => Math.hypot(t.x - x, t.y - y) < 13);
pad.onpointerdown = event => {
  if (S.kind === "photo") return;
  const [x, y] = onPad(event), i = under(x, y), cell = Math.floor(y / 28) * 3 + Math.floor(x / 28);
  if (i >= 0) {
    choose(i);
    const t = S.things[S.sel];
    drag = { dx: t.x - x, dy: t.y - y, x, y };
    pad.setPointerCapture(event.pointerId);
    changed();
  } else if (cell >= 0 && cell < CELLS && S.things.length < 4) { addThing(cell); changed(); }
  else { S.sel = -1; palette(); wake(); }
};
pad.onpointermove = event => {
  const [x, y] = onPad(event);
  if (drag) {
    const t = S.things[S.sel];
    if (Math.hypot(x - drag.x, y - drag.y) > 1.5) S.painting = true;
    [t.x, t.y] = [x + drag.dx, y + drag.dy];
    return changed(true);
  }
  S.cell = placeOf({ x: clamp(x, 0, 83), y: clamp(y, 0, 83) });
  pad.style.cursor = S.kind === "photo" ? "default" : under(x,
    y) >= 0 ? "grab" : S.things.length < 4 ? "copy" : "default";
  wake();
};
pad.onpointerup = pad.onpointercancel = () => {
  if (!drag) return;
  const t = S.things[S.sel], isOut = [t.x, t.y].some(v => v < -8 || v > 92);
  drag = null;
  S.painting = false;
  if (isOut) remove(S.sel); else settle(t);
};
pad.onpointerleave = () => { S.cell = -1; wake(); };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
pad.onkeydown = event => {
  const t = S.things[S.sel], go = ARROWS[event.key];
  if (S.kind === "photo") return;
  if (go) {
    const from = t ? placeOf(t) : cursor,
      to = clamp(Math.floor(from / 3) + go[1], 0, 2) * 3 + clamp(from % 3 + go[0], 0, 2);
    event.preventDefault();
    if (!t) { cursor = S.cell = to; return wake(); }
    const other = S.things.find(u => u !== t && placeOf(u) === to);
    if (other) put(other, from);
    put(t, to);
    return changed();
  }
  if (event.key === "Enter") {
    event.preventDefault();
    const i = S.things.findIndex(u => placeOf(u) === cursor);
    if (t) { cursor = placeOf(t); S.sel = -1; } else if (i >= 0) choose(i); else addThing(cursor);
    changed();
  } else if ((event.key === "Delete" || event.key === "Backspace") && t) { event.preventDefault(); remove(S.sel); }
};
$("remove").onclick = () => { if (S.things[S.sel]) remove(S.sel); };
function another() {
  const shuffled = list => list.map(v => [Math.random(), v]).sort((a, b) => a[0] - b[0]).map(([, v]) => v);
  const shapes = shuffled(SHAPES), colors = shuffled(Object.keys(COLORS)), places = shuffled([...PLACES.keys()]),
    count = 2 + Math.floor(Math.random() * 3);
  S.things = shapes.slice(0, count).map((s, i) => thing(s, colors[i], places[i]));
  S.sel = 0;
  S.breaks = {};
  S.drop.clear();
  if (S.kind === "photo") S.kind = "picture";
  S.aim();
  S.q = firstQuestion(S);
  S.readPrompt();
  S.choose(places[0]);
  changed();
}
$("other").onclick = another;
$("again").onclick = () => { another(); go(0); };
$("mend").onclick = () => { S.breaks = {}; S.drop.clear(); show(); think(); };
all("[data-ask]").forEach(button => {
  button.onclick = () => {
    const t = S.things[S.sel] || S.things[0];
    if (t) setQuestion(button.dataset.ask === "color" ? `What color is the ${t.shape}?` : `Where is the ${t.shape}?`);
  };
});
all(".switch").forEach(box => {
  for (const [name, { chapter, name: title, what }] of Object.entries(SWITCHES)) {
    if (chapter !== Number(box.dataset.chapter)) continue;
    const button = el("button", { onclick: () => { S.breaks[name] = !S.breaks[name]; show(); think(); } });
    button.dataset.name = name;
    button.dataset.only = SWITCHES[name].only || "";
    button.setAttribute("role", "switch");
    button.setAttribute("aria-checked", "false");
    button.append(el("span", { className: "knob" }), el("span", {}, title, el("small", { textContent: what })));
    box.append(button);
  }
});
// EVS drops the tokens that changed least since the previous frame
$("evs").onclick = () => {
  S.drop = new Set(S.drop.size || !S.res ? [] : unchanged(S.res.tokens, S.M, 0.5));
  think();
};
function towerControls() {
  radios("blocks", [...Array(DATA.config.vision.depth).keys()].map(b => `${b + 1}`), S.block,
    b => { S.block = b; towerControls(); chosen(); });
  [...$("blocks").children].forEach((node,
    b) => node.append(el("small", { textContent: S.hasWindows && b % 2 === 0 ? "windows" : "full" })));
  radios("tower-heads", ["mean", "1", "2", "3", "4"], S.towerHead + 1,
    h => { S.towerHead = h - 1; towerControls(); chosen(); });
}
const chosen = () => { derive(); sentences(); save(); wake(); };
all("details.numbers").forEach(box => { box.append(el("dl")); box.ontoggle = numbers; });

// ---------------------------------------------------------------- the stage: what the pointer can choose, arrows can

const canvas = $("stage"), local = event => {
  const box = canvas.getBoundingClientRect();
  return stage.at(event.clientX - box.left, event.clientY - box.top);
};
function pick(h) {
  if (h.kind === "patch") { S.patch = h.id; stage.rescan(); }
  if (h.kind === "col") { S.col = h.id; if (h.id >= S.off && h.id < S.off + S.M) S.token = h.id - S.off; }
  if (h.kind === "px") S.px = h.id;
  if (h.kind === "token") S.choose(h.id);
  if (h.kind === "head") { S.head = [h.id >> 2, h.id & 3]; S.chosen = true; }
  if (h.kind === "drop") { S.drop.has(h.id) ? S.drop.delete(h.id) : S.drop.add(h.id); S.choose(h.id); return think(); }
  chosen();
}
canvas.onpointermove = event => {
  const h = local(event);
  canvas.style.cursor = h ? "pointer" : "default";
  if (h?.kind === "px" && S.px !== h.id) { S.px = h.id; wake(); }
  if (h?.kind === "col" && event.pointerType === "mouse" && S.col !== h.id) pick(h);
};
canvas.onclick = event => { const h = local(event); if (h) pick(h); };
canvas.onkeydown = event => {
  const go = ARROWS[event.key], k = shown, [dx, dy] = go || [0, 0];
  if (event.key === "Enter" && k === 5) return pick({ kind: "drop", id: S.token });
  if (!go) return;
  const step = (n, columns, rows) => clamp(n % columns + dx, 0,
    columns - 1) + columns * clamp(Math.floor(n / columns) + dy, 0, rows - 1);
  if (k >= 1 && k <= 3) {
    const [r, c] = gridOf(S.patch), frame = Math.floor(S.patch / 36),
      to = clamp(frame * GRID + r + dy, 0, S.T * GRID - 1);
    pick({ kind: "patch", id: patchAtGrid(Math.floor(to / GRID), to % GRID, clamp(c + dx, 0, GRID - 1)) });
  } else if (k === 6) pick({ kind: "col",
    id: clamp(S.col + dx + 3 * dy, Math.max(S.fold, S.off - 4), Math.min(S.ids.length, S.off + S.M + 7) - 1) });
  else if (k === 8) pick({ kind: "head", id: step(S.head[0] * 4 + S.head[1], 4, 3) });
  else if (k >= 4) pick({ kind: "token", id: k === 5 ? clamp(S.token + dx, 0, S.M - 1) : step(S.token, 3, 3 * S.T) });
  else return;
  event.preventDefault();
};

// ---------------------------------------------------------------- chapters: scroll is the clock

const sections = all("section"), isNarrow = () => innerWidth < 1040;
let marksOf = [], travelling = 0, shown = -1;
function measure() {
  stage.size();
  const bar = $("bar").offsetHeight, covered = isNarrow() ? bar + $("stagein").offsetHeight : bar,
    seen = innerHeight - covered;
  marksOf = sections.map(section => {
    const h = section.offsetHeight;
    return { y: section.getBoundingClientRect().top + scrollY - covered, from: Math.max(0.12, 1 - 0.8 * seen / h),
      to: Math.min(0.97, Math.max(0.6, 1 - 0.1 * seen / h)) };
  });
  const [x, y, side] = stage.box();
  Object.assign(pad.style, { left: x + "px", top: y + "px", width: side + "px", height: side + "px" });
  wake();
}
function progress() {
  const y = scrollY + 1, k = Math.max(0, marksOf.findLastIndex(mark => y >= mark.y)), mark = marksOf[k],
    next = marksOf[k + 1];
  if (!mark || !next) return k;
  const f = clamp(((y - mark.y) / (next.y - mark.y) - mark.from) / (mark.to - mark.from));
  return k + (still.matches ? Math.round(f) : f);
}
function go(k) {
  const to = Math.min(marksOf[clamp(k, 0, sections.length - 1)].y, document.documentElement.scrollHeight - innerHeight),
    from = scrollY;
  if (still.matches) return scrollTo(0, to);
  const start = performance.now(), id = ++travelling, span = Math.abs(to - from) < innerHeight * 2 ? 1500 : 900;
  const step = now => {
    if (id !== travelling) return;
    const f = clamp((now - start) / span), eased = f < 0.5 ? 4 * f ** 3 : 1 - (2 - 2 * f) ** 3 / 2;
    scrollTo(0, mix(from, to, eased));
    if (f < 1) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}
for (const kind of ["wheel", "touchstart"]) addEventListener(kind, () => travelling++, { passive: true });
sections.forEach((section, i) => {
  const a = el("a", { href: "#c=" + i, onclick: event => { event.preventDefault(); go(i); } },
    el("span", { textContent: section.dataset.name }));
  a.setAttribute("aria-label", section.dataset.name);
  $("rail").append(a);
});
$("home").onclick = event => { event.preventDefault(); go(0); };
let aim = 0, aimed = 0;
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === " " && event.target.closest("button, a, summary")) return;
  const on = event.key === " " && !event.shiftKey || event.key === "PageDown",
    back = event.key === " " && event.shiftKey || event.key === "PageUp";
  if (!on && !back) return;
  event.preventDefault();
  const now = performance.now(), at = now - aimed < 1500 ? aim : Math.round(progress());
  aim = clamp(at + (on ? 1 : -1), 0, sections.length - 1);
  aimed = now;
  go(aim);
});
function arrived(k) {
  if (k === shown) return;
  shown = k;
  [...$("rail").children].forEach((a, i) => {
    a.classList.toggle("done", i < k);
    i === k ? a.setAttribute("aria-current", "step") : a.removeAttribute("aria-current");
  });
  pad.style.display = k === 0 ? "" : "none";
  if (k === 1) stage.rescan();
  if (k >= 8) table();
  save();
  sentences();
}

// ---------------------------------------------------------------- the address, the clock, the start

let saving = 0;
function save() {
  clearTimeout(saving);
  saving = setTimeout(() => {
    try { history.replaceState(null, "", "#" + S.toHash(Math.max(0, shown))); } catch { /* a page in a frame may not */ }
  }, 300);
}
let isAwake = false, tickTock = 0;
function wake() { if (!isAwake) { isAwake = true; requestAnimationFrame(tick); } }
function tick(now) {
  isAwake = false;
  const p = progress();
  arrived(Math.round(p));
  const isMoving = S.kind === "clip" && p < 0.5 && !still.matches && !drag;
  if (isMoving) S.frame = Math.floor(now / 500) % 8 % 6 === 0 && Math.floor(now / 500) % 8 > 5 ? 5 : Math.min(5,
    Math.floor(now / 500) % 8);
  else if (S.kind === "clip") S.frame = p < 0.5 && !still.matches ? 0 : 5;
  if (stage.draw(p, now)) wake();
  else if (isMoving) { clearTimeout(tickTock); tickTock = setTimeout(wake, 120); }
}
function restore() {
  const chapter = S.fromHash(location.hash);
  settled = S.written();
  if (S.kind === "photo") choosePhoto(S.photo); else changed();
  towerControls();
  measure();
  scrollTo(0, chapter ? marksOf[chapter].y : 0);
  arrived(chapter);
}
addEventListener("scroll", wake, { passive: true });
addEventListener("resize", measure);
addEventListener("hashchange", restore);
new ResizeObserver(measure).observe($("story"));
dark.addEventListener("change", () => { stage.theme(); palette(); wake(); });
still.addEventListener("change", wake);
if ("scrollRestoration" in history) history.scrollRestoration = "manual";
document.body.dataset.tower = S.hasWindows ? "windows" : "full";
for (const [name, address] of Object.entries(DATA.links)) $("links").append(el("a",
  { href: address, textContent: name }));
if (DATA.index) $("links").prepend(el("a", { href: DATA.index, textContent: "refvl: all pages" }));
stage.theme();
restore();
boot();

// ---------------------------------------------------------------- for tests and the curious

const answered = () => new Promise(done => waiting.push(done)).then(() => {
  const [first, second] = S.res.steps[0].top;
  return { text: S.said, margin: first[2] - second[2], ms: S.ms };
});
window.refvl = {
  scene(things) {
    setKind("picture");
    S.things = things.map(t => thing(t.shape, t.color, t.place));
    S.sel = 0;
    changed();
  },
  clip(things, direction) { this.scene(things); S.kind = "clip"; S.direction = direction; changed(); },
  photo: name => choosePhoto(name),
  break(names) {
    S.breaks = Object.fromEntries([names].flat().map(name => [name, true]));
    S.drop.clear();
    show();
    think();
  },
  ask(text) { const answer = answered(); setQuestion(text); return answer; },
  answer: answered, pixels: () => framesOf(S.breaks.stale), go, state: S,
};
