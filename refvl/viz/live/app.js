// The page: one input, two runs, one thing exchanged. Everything that is shown follows from the two records.
import { BREAKS } from "./breaks.js";
import { drawCard, sharedText } from "./card.js";
import { CELLS, FRAME, changes, finder, lookOf, percent, sureOf, surety, towerLook } from "./change.js";
import { MINIS, headPicture, patchTiles } from "./minis.js";
import { NUMBERS } from "./numbers.js";
import { makePanel, outline } from "./panel.js";
import { COLORS, DIRECTIONS, PAPER, PLACES, RADIUS, SHAPES, SIDE, frameThings, framesOf, paint, placed, resize } from "./pixels.js";
import { MOST_THINGS, MOST_TOKENS, makeState, thing } from "./state.js";
import { makeTokenizer } from "./tokenizer.js";
import { H, T, W, cut, esc, questionsOf, sentences, truthOf, why } from "./words.js";

const $ = id => document.getElementById(id), all = (query, from = document) => [...from.querySelectorAll(query)];
const DATA = JSON.parse($("data").textContent), tokenizer = makeTokenizer(DATA.tokenizer), { label } = tokenizer;
const still = matchMedia("(prefers-reduced-motion: reduce)"), dark = matchMedia("(prefers-color-scheme: dark)");
const S = makeState(DATA, tokenizer);
S.headNow = () => S.head ?? S.autoHead ?? 0;
function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// ---------------------------------------------------------------- the model, in a worker made of this page's own text

let worker, isReady = false, isWanted = false, flight = null, idle = [], isFirstRun = true;
function boot() {
  const text = $("worker").textContent, message = { meta: DATA.meta, config: DATA.config, packed: $("weights").textContent };
  $("weights").remove();
  try {
    worker = new Worker(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    worker.onmessage = ({ data }) => landed(data);
    worker.onerror = event => { $("head").textContent = `The model stopped: ${event.message}`; };
  } catch {                                               // where a frame may have no worker
    document.head.append(el("script", { textContent: `(() => { ${text}\nwindow.receive = receive; })()` }));
    worker = { postMessage: message => setTimeout(() => window.receive(message).then(landed)) };
  }
  worker.postMessage(message);
}
function think() {
  S.aim();
  S.readPrompt();
  isWanted = true;
  document.body.classList.add("busy");
  pump();
  save();
}
function pump() {
  if (!isReady || flight || !isWanted) return;
  isWanted = false;
  const { ids, off, q, broken, kind } = S, place = S.asked()?.place ?? 4, at = SIDE, to = DATA.config.pixels.side;
  const toModel = frames => frames.map(rgb => resize(rgb, at, at, to, to));
  flight = { ids, q, kind, broken: isFirstRun ? "" : broken };   // the first answer does not wait for the second run
  const old = broken === "stale" ? toModel([paint(placed(S.old))]) : [];
  worker.postMessage({ job: { frames: toModel(framesNow()), old, ids, off, broken: flight.broken, place, most: MOST_TOKENS } });
}
function landed(message) {
  if (message.ready) {
    isReady = true;
    S.model = { axes: message.axes, frequencies: message.frequencies, heads: S.heads };
    return pump();
  }
  const { q, kind, broken } = flight;
  flight = null;
  if (isFirstRun) { isFirstRun = false; isWanted = true; }
  if (q === S.q && kind === S.kind && (broken === S.broken || !broken)) {
    Object.assign(S, { A: message.intact, B: message.other, ms: message.ms });
    S.change = changes(S.A, S.B, broken, S.stages, S.model);
    S.sheets = [S.A, S.B].map(R => patchTiles(R, DATA.config.pixels));
    S.step = Math.min(S.step, Math.max(0, S.A.out.length - 1));
    S.autoHead = finder(S.A, S.step, S.off, S.heads).head;
    if (!isWanted) document.body.classList.remove("busy");
    show();
  }
  pump();
  if (!flight && !isWanted) idle.splice(0).forEach(done => done());
}
const settled = () => new Promise(done => { if (isReady && !flight && !isWanted) done(); else idle.push(done); });

// ---------------------------------------------------------------- the frames, for the model and for eyes

let photo = null;                                         // { coarse: RGB bytes, fine: a canvas }
const thingsAt = (frame, things = S.things) => S.kind === "clip" && things.length ? frameThings(placed(things), S, frame) : placed(things);
const framesNow = () => S.kind === "photo" ? [photo?.coarse || paint([])] : framesOf(S);
const FINE = 8, bitmaps = new Map();                      // a scene for eyes, sharper than the 84 px that the model gets
function bitmap(things, isSwapped) {
  const key = JSON.stringify([S.kind === "photo" ? S.photo : things, isSwapped]);
  if (!bitmaps.has(key)) {
    const n = SIDE * FINE, canvas = new OffscreenCanvas(n, n), g = canvas.getContext("2d");
    g.fillStyle = `rgb(${PAPER})`;
    g.fillRect(0, 0, n, n);
    if (S.kind === "photo" && photo) g.drawImage(photo.fine, 0, 0, n, n);
    else for (const t of things) {
      g.save();
      g.translate(t.x * FINE, t.y * FINE);
      outline(g, t.shape, RADIUS * FINE);
      g.fillStyle = `rgb(${COLORS[t.color]})`;
      g.fill();
      g.restore();
    }
    if (isSwapped) {
      const image = g.getImageData(0, 0, n, n), { data } = image;
      for (let i = 0; i < data.length; i += 4) [data[i], data[i + 2]] = [data[i + 2], data[i]];
      g.putImageData(image, 0, 0);
    }
    if (bitmaps.size > 40) bitmaps.clear();
    bitmaps.set(key, canvas);
  }
  return bitmaps.get(key);
}
// a photograph: its middle square on white, shrunk to 84 x 84 as refvl would
function choosePhoto(name, source = DATA.photos[name]?.src) {
  if (!source) return Promise.resolve();
  $("why").textContent = "";
  return new Promise(done => {
    const image = new Image();
    image.onload = () => {
      const side = Math.min(image.width, image.height), small = Math.min(side, 512), fine = document.createElement("canvas");
      fine.width = fine.height = small;
      const g = fine.getContext("2d");
      g.imageSmoothingQuality = "high";
      g.fillStyle = "#fff";
      g.fillRect(0, 0, small, small);
      g.drawImage(image, (image.width - side) / 2, (image.height - side) / 2, side, side, 0, 0, small, small);
      const bytes = g.getImageData(0, 0, small, small).data.filter((_, i) => i % 4 < 3);
      photo = { fine, coarse: resize(bytes, small, small, SIDE, SIDE) };
      bitmaps.clear();
      S.photo = name;
      setKind("photo");
      done();
    };
    image.onerror = () => { $("why").textContent = "The browser cannot read this file as an image."; done(); };
    image.src = source;
  });
}

// ---------------------------------------------------------------- what a side shows

let palette = null;
const NAMES = ["paper", "raised", "ink", "muted", "line", "hair", "empty", "t", "h", "w", "wt", "broken", "text", "claim", "ring"];
function colorsOf(isLight) {
  const root = document.documentElement;
  root.dataset.theme = isLight ? "light" : "";
  const css = getComputedStyle(root), found = Object.fromEntries(NAMES.map(n => [n, css.getPropertyValue(`--${n}`).trim()]));
  root.dataset.theme = "";
  return found;
}
const labelAmong = (id, ids) => ids.filter(other => label(other) === label(id)).length > 1 ? tokenizer.decode([id]).replace(/^ /, "␣") : label(id);
function view(side, C = palette, stage = S.stage) {
  const isOther = side === 1 && S.on, R = isOther ? S.B : S.A, broken = isOther && S.B !== S.A ? S.broken : "", isSeen = stage !== "";
  const things = isSeen && broken === "stale" ? S.old : S.things, answer = R ? S.said(R) : "", spot = S.spot(), asked = S.asked(things);
  const isWrong = Boolean(isOther && R && answer !== S.said(S.A)), isClip = S.kind === "clip";
  const frames = isClip ? [0, 1, 2, 3, 4, 5] : [0];
  return {
    R, broken, isWrong, isOther, answer, side, kind: S.kind, asked: asked ? asked.place : -1,
    claimed: S.q.startsWith("Where") ? PLACES.indexOf(answer) : -1, bitmaps: frames.map(f => bitmap(thingsAt(f, things), isSeen && broken === "bgr")),
    frame: isClip ? S.frame : 0, isMixed: ["lines", "unsortedBack"].includes(broken),
    moved: Boolean(isOther && S.A && S.positionsDiffer(spot)), C, isDark: dark.matches && C === palette, off: S.off, ids: S.ids, M: S.M, T: S.T,
    label, labelAmong, head: S.headNow(), heads: S.heads, perLayer: S.perLayer, towerHead: S.towerHead, perBlock: S.perBlock, seat: S.seat(), model: S.model,
    step: Math.min(S.step, R ? R.steps.length - 1 : 0), sheet: S.sheets?.[isOther ? 1 : 0], pixels: DATA.config.pixels, ghost: S.ghost, spot,
  };
}
S.positionsDiffer = m => [0, 1, 2].some(axis => S.A.positions[axis][S.off + m] !== S.B.positions[axis][S.off + m]);

const panels = all(".side canvas").map(makePanel);
let frame = 0, beat = 0;
function wake() { if (!frame) frame = requestAnimationFrame(tick); }
function tick(time) {
  frame = 0;
  const isPlaying = S.kind === "clip" && S.stage === "" && !S.ghost && !still.matches;
  S.frame = isPlaying ? Math.min(5, Math.floor(time / 450) % 8) : 5;
  const moves = panels.map((panel, side) => panel.draw(view(side), S.stage, time, still.matches));
  handles();                                              // they follow the tiles
  if (moves.some(Boolean)) wake();
  else if (isPlaying) { clearTimeout(beat); beat = setTimeout(wake, 120); }
}

// ---------------------------------------------------------------- words

const ARROWS = '<svg viewBox="0 0 44 30" fill="none" stroke="currentColor" stroke-width="2.2" stroke-linecap="round" stroke-linejoin="round" ' +
  'aria-hidden="true"><path d="M6 10H38M31 3l7 7M6 20H38M13 27l-7-7"/></svg>';
const GLYPH = {
  swap: `${H}&#8202;${ARROWS}&#8202;${W}`, back: `${T}&#8202;→&#8202;−${T}`,
  bgr: '<span style="color:rgb(215 40 40)">red</span> ⇄ <span style="color:rgb(70 105 235)">blue</span>',
};
function answers() {
  all(".side").forEach((node, side) => {
    const V = view(side), p = sureOf(V.R), box = node.querySelector(".answer"), text = V.answer || "(nothing)";
    node.classList.toggle("on", V.isWrong);
    node.classList.toggle("marked", side === 1 && S.on);
    node.querySelector(".cap span").textContent = side && S.on ? BREAKS[S.broken].side : side ? "intact, too" : "intact";
    const said = el("p", { className: `said${text.length > 16 ? " long" : ""}` }), words = V.R.out.map((id, i) => ({ i, word: label(id) }));
    if (S.stage === "attention" && words.length && words.length < 6) words.forEach(({ i, word }, n) => {
      const button = el("button", { textContent: word, onclick: () => { S.step = i; S.head = null; S.autoHead = finder(S.A, i, S.off, S.heads).head; chosen(); } });
      button.setAttribute("aria-pressed", i === V.step);
      button.setAttribute("aria-label", `Attention before “${word}”`);
      said.append(...(n ? [" "] : []), button);
    }); else said.textContent = cut(V.R, text);
    const bar = el("span", { className: "bar" }, el("i"));
    bar.firstChild.style.width = `${100 * p}%`;
    box.replaceChildren(el("p", { className: "asked", textContent: S.q }), said, el("p", { className: "sure" }, bar, el("span", { textContent: `${surety(p)} sure` })));
    const canvas = node.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${side && S.on ? BREAKS[S.broken].side : "intact"}: ${described()}. The answer: ${text}.`);
    all(".heads")[side].classList.toggle("on", side === 1 && S.on);
  });
}
function described() {
  if (S.kind === "photo") return S.photo === "own" ? "your photo" : `a photo of ${DATA.photos[S.photo].what}`;
  const things = S.things.map(t => `${t.color} ${t.shape}, ${PLACES[t.place]}`).join("; ") || "an empty scene";
  return S.kind === "clip" && S.distance ? `${things}; the first shape moves ${S.direction}` : things;
}
function shell() {
  const broken = BREAKS[S.broken], isDrawn = Boolean(GLYPH[S.broken]);
  $("switch").setAttribute("aria-checked", S.on);
  $("switch").setAttribute("aria-label", broken.name);
  $("glyph").innerHTML = GLYPH[S.broken] || esc(broken.name);
  $("glyph").className = isDrawn ? "" : "text";
  $("what").textContent = isDrawn ? broken.name.split(" ")[0] : "";
  Object.assign(document.body.dataset, { stage: S.stage, kind: S.kind });
  const list = questionsOf(S.kind, S.things, S.isBoxedIn());
  if (!list.includes(S.q)) list.unshift(S.q);
  $("question").replaceChildren(...list.map(q => new Option(q, q)));
  $("question").value = S.q;
  $("numbers").hidden = !S.stage || !S.A;
}
function show() {
  shell();
  if (S.A) {
    const { head, line } = sentences(S), isChanged = S.said(S.A) !== S.said(S.B);
    if ($("head").innerHTML !== head) $("head").innerHTML = head;
    if ($("line").innerHTML !== line) $("line").innerHTML = line;
    $("bite").hidden = !S.on || isChanged || S.stage !== "" || !DATA.bites[S.broken];
    answers();
    heads();
    map();
    if ($("formulas").open) numbers();
  }
  handles();
  wake();
}
const chosen = () => { save(); show(); };

// ---------------------------------------------------------------- the map

const boxes = S.stages.map((stage, i) => {
  const button = el("button", { className: `box ${stage}`, onclick: () => open(S.stage === stage ? "" : stage) },
    el("span", { className: "pic" }, el("canvas")), el("span", { className: "name", textContent: stage }), el("span", { className: "pct" }));
  button.onkeydown = event => {
    const next = i + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] || 0);
    if (next !== i && boxes[next]) { event.preventDefault(); boxes[next].focus(); open(S.stages[next]); }
  };
  $("map").append(button);
  return button;
});
function map() {
  const density = Math.min(2, devicePixelRatio || 1), broken = BREAKS[S.broken].stage, from = S.stages.indexOf(broken);
  boxes.forEach((box, i) => {
    const stage = S.stages[i], canvas = box.querySelector("canvas"), s = canvas.clientHeight, wide = canvas.clientWidth, g = canvas.getContext("2d");
    [canvas.width, canvas.height] = [wide, s].map(v => Math.round(v * density));
    g.setTransform(density, 0, 0, density, 0, 0);
    MINIS[stage](g, s, view(1, palette, stage), wide);
    const c = S.on ? Math.min(1, S.change[stage]) : 0, isSource = S.on && broken === stage, hurts = c >= 0.0005;
    box.style.setProperty("--c", c);
    box.style.setProperty("--d", `${Math.max(0, i - from) * 110}ms`);
    box.classList.toggle("hurt", hurts);
    box.classList.toggle("source", isSource);
    box.classList.toggle("flows", hurts && S.change[S.stages[i + 1]] >= 0.0005);
    box.querySelector(".pct").innerHTML = !hurts && !isSource ? "" : isSource ? `<span>broken: </span>${percent(c)}` : `${percent(c)}<span> changed</span>`;
    if (S.stage === stage) box.setAttribute("aria-current", "step"); else box.removeAttribute("aria-current");
    box.title = hurts ? "how far these values are from the intact run's: identical at 0 %, nothing in common at 100 %" : "";
    box.setAttribute("aria-label", `${stage}${isSource ? ", broken here" : ""}${hurts ? `, ${percent(c)} changed` : ""}`);
  });
}
function open(stage) {
  if (stage && !S.stage) try { history.pushState({ v: stage }, "", S.toHash()); } catch { /* a frame may not */ }
  Object.assign(S, { stage, note: "", focus: null });
  chosen();
}
const close = () => { if (history.state?.v && history.length > 1 && !S.isLinked) history.back(); else open(""); };

// ---------------------------------------------------------------- heads, of the language model or of the tower

const headsOf = () => S.stage === "tower" ? { count: S.towerHeads, per: S.perBlock, layer: "block", mine: S.towerHead, choose: h => { S.towerHead = h; } }
  : { count: S.heads, per: S.perLayer, layer: "layer", mine: S.headNow(), choose: h => { S.head = h; } };
function heads() {
  if (S.stage !== "attention" && S.stage !== "tower") return;
  const { count, per, layer, mine, choose } = headsOf(), isTower = S.stage === "tower", w = 48, h = isTower ? 48 : 60;
  all(".heads").forEach((box, side) => {
    if (box.children.length !== count || box.dataset.of !== S.stage) {
      box.dataset.of = S.stage;
      box.replaceChildren(...Array.from({ length: count }, (_, i) => {
        const button = el("button", { title: `${layer} ${Math.floor(i / per) + 1}, head ${i % per + 1}`, onclick: () => { choose(i); chosen(); } }, el("canvas"));
        button.setAttribute("role", "radio");
        button.onkeydown = event => {
          const go = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -2, ArrowDown: 2 }[event.key];
          if (!go) return;
          event.preventDefault();
          const next = (i + go + count) % count;
          choose(next);
          chosen();
          box.children[next].focus();
        };
        return button;
      }));
    }
    const V = view(side), seen = i => isTower ? towerLook(V.R, Math.floor(i / per), i % per, V.seat).look : lookOf(V.R, V.step, i, S.heads).slice(S.off, S.off + S.M);
    [...box.children].forEach((button, i) => {
      const canvas = button.firstChild, look = seen(i), sum = look.reduce((a, b) => a + b, 0), best = look.indexOf(Math.max(...look));
      [canvas.width, canvas.height] = [2 * w, 2 * h];
      canvas.getContext("2d").setTransform(2, 0, 0, 2, 0, 0);
      headPicture(canvas.getContext("2d"), w, h, look, { n: isTower ? 6 : 3, T: S.T, C: palette, isWrong: V.isOther,
        target: isTower ? V.seat : S.asked() ? S.spot() : -1, rest: isTower ? undefined : 1 - sum });
      button.setAttribute("aria-checked", i === mine);
      button.tabIndex = i === mine ? 0 : -1;
      const where = isTower ? `line ${Math.floor(best % FRAME / 6) + 1}, column ${best % 6 + 1}` : PLACES[best % CELLS];
      button.setAttribute("aria-label", `${button.title}: ${percent(look[best])} at ${where}`);
    });
  });
}

// ---------------------------------------------------------------- dragging, and keys

const remember = () => { if (S.kind === "picture" && !(S.on && S.broken === "stale")) S.old = S.things.map(t => ({ ...t })); };
function moveTo(t, place) {
  if (place < 0 || place === t.place) return;
  const there = S.at(place);
  if (there) Object.assign(there, { place: t.place, dx: 0, dy: 0 });
  Object.assign(t, { place, dx: 0, dy: 0 });
  Object.assign(S, { focus: null, patch: null, note: "" });
  think();
  show();
}
function ask(q) {
  Object.assign(S, { q: q.slice(0, 200), step: 0, head: null, note: "", focus: null, patch: null });
  think();
  show();
}
const askAbout = t => {
  if (S.kind === "clip") ask(t === S.things[0] && S.distance ? `Which way does the ${t.shape} move?` : `What color is the ${t.shape}?`);
  else ask(`${S.q.startsWith("What color") ? "What color is" : "Where is"} the ${S.things.filter(u => u.shape === t.shape).length > 1 ? `${t.color} object` : t.shape}?`);
};
function focusOn(m) {
  if (m !== S.focus) { S.focus = m; chosen(); }
}
all(".side .view").forEach((box, side) => {
  const canvas = box.querySelector("canvas"), panel = panels[side];
  const point = event => { const r = canvas.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  const tokenUnder = event => ["", "tokens", "positions", "attention"].includes(S.stage) ? panel.tokenAt(...point(event)) : -1;
  const hit = event => { const m = tokenUnder(event); return m < 0 || S.kind === "photo" ? undefined : S.at(m % CELLS); };
  let drag = null;
  canvas.addEventListener("touchstart", event => { if (hit(event.touches[0])) event.preventDefault(); }, { passive: false });
  canvas.onpointerdown = event => {
    const t = hit(event);
    if (S.stage === "positions" && tokenUnder(event) >= 0) focusOn(tokenUnder(event));
    if (S.stage === "tower") {
      const seat = panel.seatAt(...point(event), view(side));
      if (seat >= 0) { S.patch = seat; chosen(); }
    }
    if (!t) return;
    drag = { t, from: point(event), moved: false };
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = event => {
    const [x, y] = point(event);
    canvas.style.cursor = drag ? "grabbing" : hit(event) ? "grab" : S.stage === "tower" ? "pointer" : "";
    if (!drag && S.stage === "positions" && event.pointerType === "mouse" && tokenUnder(event) >= 0) focusOn(tokenUnder(event));
    if (!drag) return;
    if (!drag.moved && Math.hypot(x - drag.from[0], y - drag.from[1]) > 5) {
      drag.moved = true;
      remember();
      document.body.classList.add("dragged");
    }
    if (!drag.moved) return;
    S.ghost = { side, x, y, thing: drag.t };
    const m = panel.tokenAt(x, y, S.stage === "" ? 20 : 8);
    moveTo(drag.t, m < 0 ? -1 : m % CELLS);
    wake();
  };
  canvas.onpointerleave = event => { if (event.pointerType === "mouse" && S.stage === "positions" && !drag) focusOn(null); };
  canvas.onpointerup = canvas.onpointercancel = event => {
    if (!drag) return;
    const { t, moved } = drag;
    drag = S.ghost = null;
    if (!moved && event.type === "pointerup") askAbout(t); else show();
  };
});
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function handles() {                                      // each shape can be reached with Tab and moved with arrows
  const box = all(".things")[0], P = panels[0].width() || 0, count = S.kind === "photo" ? 0 : S.things.length;
  while (box.children.length > count) box.lastChild.remove();
  while (box.children.length < count) {
    const i = box.children.length, button = el("button", { onclick: () => askAbout(S.things[i]) });
    button.onkeydown = event => {
      const t = S.things[i], [dx, dy] = STEPS[event.key] || [], x = t.place % 3 + dx, y = Math.floor(t.place / 3) + dy;
      if (event.key === "Delete" || event.key === "Backspace") { event.preventDefault(); removeThing(i); }
      if (dx === undefined) return;
      event.preventDefault();
      if (x >= 0 && x < 3 && y >= 0 && y < 3) { remember(); moveTo(t, 3 * y + x); }
    };
    box.append(button);
  }
  for (let i = 0; i < count; i++) {
    const t = S.things[i], [x, y, s] = panels[0].tileAt(t.place) || [(t.place % 3) * P / 3, Math.floor(t.place / 3) * P / 3, P / 3];
    Object.assign(box.children[i].style, { left: `${x}px`, top: `${y}px`, width: `${s}px`, height: `${s}px` });
    box.children[i].setAttribute("aria-label", `${t.color} ${t.shape}, ${PLACES[t.place]}. Arrow keys move it, Enter asks about it, Delete removes it.`);
  }
}

// ---------------------------------------------------------------- what is exchanged

function choose(name) {
  Object.assign(S, { broken: name, on: true, touched: true });
  pour();
  bite();
}
function bite() {                                         // an input and a question for which this one was seen to bite
  const found = DATA.bites[S.broken];
  Object.assign(S, { note: "", step: 0, head: null, focus: null, patch: null });
  if (found) {
    const { kind, things, old, direction, q, kinds } = found, asks = q.split(" ").slice(0, 2).join(" "), [n, m] = kinds[asks];
    Object.assign(S, { kind, q, things: things.map(t => ({ ...t })), old: old.map(t => ({ ...t })), direction: direction || S.direction });
    S.note = `it changed ${n === m ? `all ${m}` : `${n} of ${m}`} answers to “${esc(asks)} …” that were tried`;
  }
  think();
  show();
}
let pouring = 0;
function pour() {                                         // the levels of the map rise one after another
  document.body.classList.add("pour");
  clearTimeout(pouring);
  pouring = setTimeout(() => document.body.classList.remove("pour"), 1400);
}
$("switch").onclick = () => { Object.assign(S, { touched: true, on: !S.on, note: "" }); pour(); chosen(); };
$("bite").onclick = bite;
$("other").onclick = () => {
  const names = Object.keys(BREAKS).filter(name => DATA.bites[name] || S.offers(name));
  names.sort((a, b) => S.stages.indexOf(BREAKS[a].stage) - S.stages.indexOf(BREAKS[b].stage));
  $("breaks").replaceChildren(...names.map(name => {
    const { stage, name: text } = BREAKS[name], { asked = 0, changed = 0 } = DATA.bites[name] || {};
    const button = el("button", { onclick: () => { $("list").close(); choose(name); } }, el("small", { textContent: stage }),
      el("span", { textContent: text }), el("small", { textContent: `${changed || "none"} of ${asked}` }));
    button.setAttribute("aria-pressed", name === S.broken && S.on);
    return button;
  }));
  $("list").showModal();
};

// ---------------------------------------------------------------- the input

function setKind(kind) {
  if (kind === "clip" && !S.things.length) S.things = [thing("circle", "red", 2)];
  Object.assign(S, { kind, A: null, B: null, step: 0, head: null, focus: null, patch: null });
  askWhatFits();
}
function changeThings(change) {
  remember();
  change();
  askWhatFits();
}
function askWhatFits() {                                  // the question stays if the input has it
  S.note = "";
  S.aim();
  const list = questionsOf(S.kind, S.things, S.isBoxedIn());
  if (!list.includes(S.q)) S.q = list[0];
  think();
  show();
  if ($("edit").open) inputs();
}
const removeThing = i => changeThings(() => { S.things.splice(i, 1); });
function select(name, options, value, change) {
  const node = el("select", { onchange: () => change(node.value) });
  node.append(...options.map(([text, key, isTaken]) => Object.assign(new Option(text, key), { disabled: Boolean(isTaken) })));
  node.value = value;
  node.setAttribute("aria-label", name);
  return node;
}
function inputs() {                                       // the dialog in which the reader makes an input
  const kinds = { picture: "Scene", ...(DATA.prompts.clip ? { clip: "Video" } : {}), photo: "Photo" };
  $("kinds").replaceChildren(...Object.entries(kinds).map(([kind, text]) => {
    const input = el("input", { type: "radio", name: "kind", checked: kind === S.kind,
      onchange: () => kind === "photo" ? choosePhoto(DATA.photos[S.photo] ? S.photo : "coffee") : setKind(kind) });
    return el("label", {}, input, text);
  }));
  const same = list => list.map(v => [v, v]);
  $("list-of-things").replaceChildren(...S.things.map((t, i) => {
    const places = PLACES.map((p, m) => [p, m, m !== t.place && S.at(m)]), set = change => changeThings(() => Object.assign(t, change));
    const remove = el("button", { className: "close", textContent: "×", onclick: () => removeThing(i) });
    remove.setAttribute("aria-label", `Remove the ${t.shape}`);
    return el("li", {}, select(`Colour of shape ${i + 1}`, same(Object.keys(COLORS)), t.color, color => set({ color })),
      select(`Shape ${i + 1}`, same(SHAPES), t.shape, shape => set({ shape })),
      select(`Place of shape ${i + 1}`, places, t.place, place => set({ place: Number(place), dx: 0, dy: 0 })), remove);
  }));
  const isFull = S.things.length >= MOST_THINGS;
  $("add").disabled = isFull;
  $("full").textContent = isFull ? "The model was trained on at most four shapes." : "";
  const ways = Object.keys(DIRECTIONS).map(d => [d, d, !S.roomTo(d)]);
  $("ways").replaceChildren(el("span", { textContent: S.distance ? "The first shape moves " : "The first shape is boxed in: nothing moves." }),
    ...(S.distance ? [select("Direction", ways, S.direction, direction => changeThings(() => { S.direction = direction; }))] : []));
  $("photos").replaceChildren(...Object.entries(DATA.photos).map(([name, { what, src }]) => {
    const button = el("button", { onclick: () => choosePhoto(name) }, el("img", { src, alt: what }));
    button.setAttribute("aria-pressed", name === S.photo && S.kind === "photo");
    return button;
  }));
}
$("add").onclick = () => changeThings(() => {
  const unused = (list, key) => list.find(v => !S.things.some(t => t[key] === v));
  const place = [4, 2, 3, 7, 1, 5, 6, 0, 8].find(p => !S.at(p));
  S.things.push(thing(unused(SHAPES, "shape"), unused(Object.keys(COLORS), "color"), place));
});
$("make").onclick = () => { inputs(); $("free").value = ""; $("edit").showModal(); };
$("own").onchange = () => {
  const reader = new FileReader();
  reader.onload = () => choosePhoto("own", reader.result);
  if ($("own").files[0]) { $("why").textContent = "Reading …"; reader.readAsDataURL($("own").files[0]); }
};
$("asking").onsubmit = event => {
  event.preventDefault();
  const q = $("free").value.trim();
  if (q) { $("edit").close(); ask(q); }
};
$("question").onchange = event => ask(event.target.value);
$("shuffle").onclick = () => {
  const pick = (list, n) => { const rest = [...list]; return Array.from({ length: n }, () => rest.splice(Math.floor(Math.random() * rest.length), 1)[0]); };
  const shapes = pick(SHAPES, 3), paints = pick(Object.keys(COLORS), 3), places = pick([...PLACES.keys()], 3);
  remember();
  S.things = shapes.map((shape, i) => thing(shape, paints[i], places[i]));
  if (S.kind === "photo") S.kind = "picture";
  const off = Math.max(0, S.things.findIndex(t => t.place % 4));   // ask about one that h and w can move
  S.aim();
  ask(S.kind === "clip" ? questionsOf("clip", S.things, S.isBoxedIn())[0] : `Where is the ${S.things[off].shape}?`);
};

// ---------------------------------------------------------------- dialogs, keys, and the address

function numbers() {
  const rows = NUMBERS[S.stage](view(1));
  $("rows").replaceChildren(...rows.flatMap(([what, formula]) => [el("dt", { textContent: what }), el("dd", { textContent: formula })]));
}
$("numbers").onclick = () => { numbers(); $("formulas").showModal(); };
const shared = () => {
  const { lead, said, sure } = sharedText(S);
  return `${lead}${said}, ${sure}. ${S.q} ${described()}.`;
};
$("share").onclick = () => {
  save.now();
  $("link").value = location.href;
  $("png").src = drawCard(S, colorsOf(true), view).toDataURL("image/png");
  $("png").alt = shared();
  $("unshared").textContent = S.kind === "photo" && S.photo === "own" ? "Your photo stays with you: it is in the picture, but not in the link." : "";
  $("send").hidden = !navigator.share;
  $("copy").textContent = "Copy link";
  $("card").showModal();
};
$("copy").onclick = async () => {
  try { await navigator.clipboard.writeText($("link").value); } catch { $("link").select(); document.execCommand("copy"); }
  $("copy").textContent = "Copied";
};
$("save").onclick = () => el("a", { href: $("png").src, download: `broken-${S.broken}.png` }).click();
$("send").onclick = () => navigator.share({ text: $("png").alt, url: $("link").value }).catch(() => {});
for (const dialog of all("dialog")) dialog.onclick = event => { if (event.target === dialog) dialog.close(); };

let saving = 0;
function save() { clearTimeout(saving); saving = setTimeout(save.now, 150); }
save.now = () => {
  clearTimeout(saving);
  try { history.replaceState({ v: S.stage }, "", S.toHash()); } catch { /* a page in a frame may not */ }
};
function restore() {
  S.fromHash(location.hash);
  S.isLinked = Boolean(S.stage);
  if (S.kind === "photo" && DATA.photos[S.photo]) choosePhoto(S.photo); else { think(); show(); }
}
addEventListener("popstate", event => {
  if (!event.state) return restore();
  Object.assign(S, { stage: event.state.v, note: "", focus: null });
  chosen();
});
addEventListener("keydown", event => {
  if (event.target.closest("dialog, select, input") || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "Escape" && S.stage) close();
  if (event.key !== " " || event.target.closest("button, a")) return;
  event.preventDefault();                                 // the tour: one box after the other
  const path = ["", ...S.stages], at = path.indexOf(S.stage);
  open(path[(at + (event.shiftKey ? path.length - 1 : 1)) % path.length]);
});
$("home").onclick = () => { if (S.stage) close(); };
addEventListener("resize", () => { panels.forEach(p => p.size()); show(); });
dark.addEventListener("change", () => { palette = colorsOf(false); show(); });
still.addEventListener("change", wake);

palette = colorsOf(false);
const isFirst = location.hash.length < 2 && !still.matches;
restore();
if (isFirst) {                                            // the same model twice; then the switch flips, once
  S.on = false;
  idle.push(() => setTimeout(() => { if (!S.on && !S.touched && !S.stage) { S.on = true; pour(); chosen(); } }, 1100));
  show();
}
boot();

// ---------------------------------------------------------------- for tests and the curious

const answer = async () => {
  await settled();
  const R = S.on ? S.B : S.A, [first, second] = R.steps[0].top;
  return { text: S.said(R), margin: first[2] - second[2], ms: S.ms };
};
window.refvl = {
  breaks: Object.keys(BREAKS).filter(name => DATA.bites[name] || S.offers(name)), state: S, answer, settled, go: open, choose,
  scene(things) { S.things = things.map(t => ({ ...t })); setKind("picture"); },
  clip(things, direction) { S.things = things.map(t => ({ ...t })); S.direction = direction; setKind("clip"); },
  photo: name => choosePhoto(name),
  break(names) { const [name] = [names].flat(); Object.assign(S, { touched: true, on: Boolean(name), broken: name || S.broken }); think(); show(); },
  ask(text) { ask(text); return answer(); },
  async broken(name, text) {
    if (!S.offers(name)) throw new RangeError(`name: expected one of ${this.breaks.join(", ")}, for this input, got ${name}`);
    Object.assign(S, { broken: name, on: true, touched: true });
    ask(text);
    await settled();
    const isChanged = S.said(S.A) !== S.said(S.B), [cause, reason] = isChanged ? [null, null] : why(S);
    return { text: S.said(S.B), intact: S.said(S.A), p: sureOf(S.B), cause, reason, change: S.change };
  },
  share() {
    save.now();
    return { url: location.href, alt: shared() };
  },
  truth: () => truthOf(S.kind, S.things, S.direction, S.q), pixels: framesNow,
};
