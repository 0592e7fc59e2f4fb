// The shared part of all explorers: controls from the table, canvases for mouse, touch, keyboard and screen readers,
// themes, and the traits `index` and `selected`. A module looks numbers up and draws them:
//
//   import { explorer } from "./shared.js";
//   export default explorer(view => {
//     const cell = 12;
//     view.canvas({                                     // any number of them, side by side
//       name: () => "merged tokens of the image",        // for screen readers
//       size: () => [view.row.columns * cell, view.row.rows * cell],
//       draw(pen) { pen.fillStyle = view.colors.h; pen.fillRect(0, 0, cell, cell); },
//       at: (x, y) => Math.floor(x / cell),              // the item at a point, -1 for none; makes it hover and click
//       step: (item, dx, dy) => item + dx,               // the target of an arrow key; out of range changes nothing
//       drag: (x, y) => view.choose("budget", 3),        // instead of a click, if dragging moves a control; on touch
//                                                        // screens a finger drags sideways; scrolling changes nothing
//       grab: (x, y) => x < 22,                          // where a finger may start to drag in both directions
//     });
//     view.title(() => "What the drawing shows now");   // a sentence above it
//     view.readout(() => `token ${view.item}`,           // describes the item, below; called if item >= 0
//       () => "its exact numbers");                      // optional: folded below that
//     return { count: () => 12, read: () => view.row };  // the number of items; the numbers behind the drawing
//                                                        // walk: "token by token" adds a button that steps through them
//   });
//
// view.row, view.shared: the table of the state, arrays as typed arrays with a `shape`, images as `Image`s.
// view.option(name): the option of a control, one of view.options(name). view.place(name): its index.
// view.choose(name, number): move it.
// view.item: the item under the pointer, or the selected one, or -1. view.select(item): select it.
// view.ease(key, n): n, reached a quarter of a second after it changed; at once if the reader wants no motion. For places
// and sizes that are drawn: where a reader points is looked up in the table.
// view.column(heading): the canvases that follow are one below the other, next to those before it.
// view.big: there is the width of a page of its own, so canvases may be larger.
// view.fit(n): n, or the available width if that is smaller: phones get narrower drawings, not smaller text.
// view.colors: the palette of the theme, `viz.style.THEMES`; `sequence(x)` is for order, 0 to 1. Names that end in
// `_text` are for words. view.fade(pen, x, y, width, height, part): lets this much of a rectangle vanish in the page.

const SANS = '-apple-system, "Segoe UI", "Inter", "Helvetica Neue", "Liberation Sans", Roboto, Arial, sans-serif';
const STYLE = `
.refvl { color: var(--ink); background: var(--surface); font: 15px/1.45 ${SANS}; padding: 8px; }
.refvl .controls, .refvl .pictures { display: flex; flex-wrap: wrap; gap: 8px 24px; align-items: flex-start; }
.refvl .column { display: grid; gap: 8px; max-width: 100%; } .refvl .column > b { contain: inline-size; }
.refvl .controls { margin-bottom: 12px; align-items: center; } .refvl [hidden] { display: none !important; }
.refvl details { min-width: 0; } .refvl details[open].more { flex-basis: 100%; } .refvl .more .controls { margin: 8px 0 0; }
.refvl summary { cursor: pointer; color: var(--muted); width: fit-content; } .refvl .numbers p { margin: 4px 0 0; white-space: pre-line; }
.refvl label { display: flex; gap: 8px; align-items: center; max-width: 100%; }
.refvl label > output { min-width: 6ch; font-variant-numeric: tabular-nums; }
.refvl input[type=range] { width: 180px; accent-color: var(--ink); }
.refvl input, .refvl select, .refvl button { cursor: pointer; } .refvl :disabled { cursor: default; }
.refvl select, .refvl button { font: inherit; border-radius: 6px; padding: 2px 8px; min-height: 30px; color: inherit; background: var(--surface); border: 1px solid var(--line); min-width: 0; max-width: 100%; }
.refvl canvas { max-width: 100%; outline-offset: 2px; touch-action: manipulation; cursor: default; }
.refvl :focus-visible { outline: 2px solid var(--highlight); }
.refvl figure { margin: 0; max-width: 100%; } .refvl figcaption { contain: inline-size; color: var(--muted); font-size: 14px; text-wrap: pretty; }
.refvl .shows { margin: 0 0 10px; font-size: 18px; font-weight: 600; text-wrap: balance; } .refvl .shows:empty { display: none; }
.refvl figcaption::first-letter { text-transform: uppercase; }
.refvl .readout { display: block; min-height: 1.45em; margin-top: 8px; } .refvl .readout::first-letter, .refvl .numbers p::first-letter { text-transform: uppercase; }
@media (pointer: coarse), (max-width: 600px) {
  .refvl input[type=range] { flex: 1 1 120px; min-width: 44px; }
  .refvl input[type=range], .refvl select, .refvl button { min-height: 44px; min-width: 44px; } .refvl summary { line-height: 44px; }
}
@media (max-width: 600px) {  /* the controls stay beside what they change */
  .refvl > .controls { position: sticky; top: 0; z-index: 1; gap: 0 16px; margin: 0 0 8px; max-height: 45vh; overflow: auto; background: var(--surface); border-bottom: 1px solid var(--line); }
  .refvl > .controls label { font-size: 14px; } .refvl label > output { min-width: 3ch; } .refvl .shows { font-size: 16px; }
}`;
const ARRAYS = { u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};

// The table, with arrays and images in place of their references.
async function unpack({ rows, shared, states, arrays, data }, controls) {
  const inflated = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(inflated).arrayBuffer();
  let offset = 0;
  const typed = arrays.map(({ dtype, shape }) => {
    const array = new ARRAYS[dtype](bytes, offset, shape.reduce((a, b) => a * b, 1));
    offset += Math.ceil(array.byteLength / 4) * 4;
    return Object.assign(array, { shape });
  });
  const waiting = [];
  const revive = value => {
    if (typeof value === "string" && value.startsWith("data:image/")) {
      const picture = Object.assign(new Image(), { src: value });
      waiting.push(picture.decode());
      return picture;
    }
    if (Array.isArray(value)) return value.map(revive);
    if (value === null || typeof value !== "object") return value;
    if ("array" in value) return typed[value.array];
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, revive(item)]));
  };
  const table = { rows: rows.map(revive), shared: revive(shared), states, sizes: controls.map(c => c.options.length) };
  await Promise.all(waiting);
  return table;
}

const plain = value => ArrayBuffer.isView(value) || Array.isArray(value) ? Array.from(value, plain)
  : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([k, v]) => [k, plain(v)])) : value;

const same = (a, b, length) => { for (let i = 0; i < length; i++) if (a[i] !== b[i]) return false; return true; };

// The indices of the options in the state `index`; without a list of states, all combinations are states.
function stateOf({ states, sizes }, index) {
  if (states) return states[index];
  return sizes.reduceRight((state, n) => { state.unshift(index % n); index = Math.floor(index / n); return state; }, []);
}

// The indices of the options that `control` offers in `state`: those that exist for the controls before it.
const offered = ({ states, sizes }, state, control) => states
  ? [...new Set(states.filter(s => same(s, state, control)).map(s => s[control]))].sort((a, b) => a - b)
  : [...Array(sizes[control]).keys()];

// The state with `value` at `control`: equal to `wish` before it, and as close to it as possible after it.
function nearest({ states, sizes }, wish, control, value) {
  if (!states) return sizes.reduce((index, n, i) => index * n + (i === control ? value : wish[i]), 0);
  let best = -1, least = Infinity;
  states.forEach((s, i) => {
    if (!same(s, wish, control) || s[control] !== value) return;
    const far = s.slice(control + 1).reduce((sum, v, k) => 100 * sum + Math.abs(v - wish[control + 1 + k]), 0);
    if (far < least) [best, least] = [i, far];
  });
  return best;
}

function themes(palette, redraw) {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const name = () => {
    const lab = document.body.dataset.jpThemeLight;
    return (lab ? lab === "false" : query.matches) ? "dark" : "light";
  };
  const observer = new MutationObserver(redraw);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  query.addEventListener("change", redraw);
  const stop = () => { observer.disconnect(); query.removeEventListener("change", redraw); };
  const colors = () => {
    const { sequence, ...plain } = palette[name()], last = sequence.length - 1;
    return { ...plain, sequence: x => sequence[Math.round(Math.min(1, Math.max(0, x)) * last)] };
  };
  return { colors, stop };
}

// Numbers on their way: `ease(key, n)` is where the number `key` is now, `later` asks for the next frame.
const MOVES = 250, STILL = matchMedia("(prefers-reduced-motion: reduce)");  // ms
function easing(later) {
  const ways = new Map();  // key: [from, to, since]
  return (key, to) => {
    const now = performance.now(), way = ways.get(key);
    if (!way || STILL.matches) { ways.set(key, [to, to, -Infinity]); return to; }
    const part = Math.min(1, (now - way[2]) / MOVES), here = way[0] + (way[1] - way[0]) * part * part * (3 - 2 * part);
    if (way[1] !== to) ways.set(key, [here, to, now]);
    if (way[1] !== to || part < 1) later();
    return way[1] !== to ? here : part < 1 ? here : to;
  };
}

// A slider or menu over the options that exist; `update` puts it where the state is.
function controller(view, number, { label, options, kind, plays }) {
  const menu = kind === "menu", widget = make(menu ? "select" : "input", menu ? {} : { type: "range", min: 0, step: 1 });
  const shown = make("output"), node = make("label", {}, make("span", {}, label), widget, menu ? "" : shown);
  let available = [];
  widget.setAttribute("aria-label", label);
  widget.addEventListener("input", () => view.choose(number, available[+widget.value]));
  const update = () => {
    available = offered(view.table, view.state, number);
    if (menu) widget.replaceChildren(...available.map((o, i) => make("option", { value: i, textContent: options[o] })));
    else widget.max = available.length - 1;
    node.hidden = widget.disabled = available.length < 2;
    widget.value = available.indexOf(view.state[number]);
    shown.value = options[view.state[number]];
    widget.setAttribute("aria-valuetext", shown.value);
  };
  if (kind !== "player") return { node, update, stop() {} };
  const button = make("button", { type: "button" });
  let timer = 0;
  const says = playing => {
    button.textContent = `${playing ? "⏸" : "▶"} ${plays}`;
    button.setAttribute("aria-label", `${playing ? "pause" : "play"}: ${plays}`);
  };
  const stop = () => { clearInterval(timer); timer = 0; says(false); };
  const next = () => {
    if (+widget.value >= available.length - 1) return stop();
    view.choose(number, available[+widget.value + 1]);
  };
  button.addEventListener("click", () => {
    if (timer) return stop();
    if (2 * widget.value >= available.length) view.choose(number, available[0]);  // near the end, start again
    timer = setInterval(next, 700);
    says(true);
  });
  says(false);
  node.append(button);
  return { node, update, stop };
}

// A button that steps through the items, and stops at the last one.
function walker(view, label) {
  const button = make("button", { type: "button" });
  let timer = 0;
  const says = walking => { button.textContent = `${walking ? "⏸" : "▶"} ${label}`; };
  const stop = () => { clearInterval(timer); timer = 0; says(false); };
  button.setAttribute("aria-label", `step through the items, ${label}`);
  button.addEventListener("click", () => {
    if (timer) return stop();
    if (view.selected >= view.count() - 1) view.select(0);
    timer = setInterval(() => (view.selected < view.count() - 1 ? view.select(view.selected + 1) : stop()), 180);
    says(true);
  });
  says(false);
  return { node: button, update() {}, stop };
}

// A canvas in CSS pixels, sharp on every screen. A mouse acts when it is pressed. A finger acts when it is lifted,
// unless it drags, because until then it may be scrolling.
const PULL = 8;  // CSS pixels that a finger moves before it drags
function surface(view, { name, caption, size, draw, at, step, drag, grab }) {
  const canvas = make("canvas"), text = make("figcaption"), node = make("figure", {}, canvas, text);
  const point = event => {
    const box = canvas.getBoundingClientRect(), [width, height] = size();
    return [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height];
  };
  const valid = item => (item >= 0 && item < view.count() ? item : -1);
  const act = event => (drag ? drag(...point(event)) : view.select(valid(at(...point(event)))));
  let from = null, pulls = false;  // where a finger or the mouse went down; whether it moves a control
  if (at || drag) {
    canvas.addEventListener("pointermove", event => {
      const touch = event.pointerType === "touch";
      if (from && touch && Math.abs(event.clientX - from) > PULL) pulls = true;
      if (drag && pulls) return drag(...point(event));
      if (at && !touch) view.hover(valid(at(...point(event))));
      canvas.style.cursor = drag ? (grab ? "grab" : "ew-resize") : valid(at(...point(event))) < 0 ? "default" : "pointer";
    });
    canvas.addEventListener("pointerleave", () => view.hover(-1));
    canvas.addEventListener("pointerdown", event => {
      [from, pulls] = [event.clientX, drag && (event.pointerType !== "touch" || grab?.(...point(event)))];
      if (drag) canvas.setPointerCapture(event.pointerId);
      if (event.pointerType !== "touch") act(event);
    });
    canvas.addEventListener("pointerup", event => {
      if (event.pointerType === "touch" && !pulls) act(event);
      [from, pulls] = [null, false];
    });
    canvas.addEventListener("pointercancel", () => { [from, pulls] = [null, false]; });
  }
  if (drag) canvas.style.touchAction = "pan-y pinch-zoom";
  const hold = event => { if (grab(...point(event.touches[0]))) event.preventDefault(); };
  if (grab) canvas.addEventListener("touchstart", hold, { passive: false });
  if (step) canvas.tabIndex = 0;
  if (step) canvas.addEventListener("keydown", event => {
    if (event.key === "Escape") view.select(-1);
    const arrow = ARROWS[event.key];
    if (!arrow) return;
    event.preventDefault();
    const next = view.selected < 0 ? 0 : step(view.selected, ...arrow);
    if (valid(next) >= 0) view.select(next);
  });
  canvas.setAttribute("role", step ? "application" : "img");
  const update = () => {
    const [width, height] = size(), scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    canvas.style.width = `${width}px`;
    canvas.setAttribute("aria-label", name() + (step ? "; use the arrow keys to move" : ""));
    text.textContent = caption?.() ?? name();
    text.ariaHidden = !caption;  // read out once
    pen.scale(scale, scale);
    pen.font = "12px sans-serif"; pen.lineJoin = "round";
    draw(pen, width, height);
  };
  return { node, update };
}

export function explorer(build) {
  return { async render({ model, el }) {
    const root = make("div", { className: "refvl" }), controls = make("div", { className: "controls" });
    const pictures = make("div", { className: "pictures" }), said = make("output", { className: "readout" }), shows = make("p", { className: "shows" });
    const exact = make("p"), numbers = make("details", { className: "numbers", hidden: true }, make("summary", {}, "exact numbers"), exact);
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", model.get("name"));
    said.setAttribute("aria-live", "polite");
    root.append(make("style", { textContent: STYLE }), controls, shows, pictures, said, numbers);
    // In a notebook's command mode, JupyterLab handles plain keys of the focused element: arrows walk through cells,
    // and D twice deletes one. It listens on the document, so keys that stop here reach only the control.
    root.addEventListener("keydown", event => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey) event.stopPropagation();
    });

    let seen, table, wish, ours, hovered = -1, say = () => "", tell, heading = () => "", canvases = [], widgets = [], frame = 0, column = pictures;
    const theme = themes(model.get("palette"), () => later());
    const view = {
      get table() { return table; },
      get state() { return stateOf(table, model.get("index")); },
      get row() { return table.rows[model.get("index")]; },
      get shared() { return table.shared; },
      get selected() { return Math.min(model.get("selected"), view.count() - 1); },
      get item() { return hovered >= 0 && hovered < view.count() ? hovered : view.selected; },
      number: name => model.get("controls").findIndex(c => c.name === name),
      place: name => view.state[view.number(name)],
      options: name => model.get("controls")[view.number(name)].options,
      option: name => view.options(name)[view.place(name)],
      choose(control, value) {
        const number = typeof control === "string" ? view.number(control) : control;
        const index = nearest(table, wish.map((v, i) => (i < number ? view.state[i] : v)), number, value);
        if (index < 0 || index === model.get("index")) return;
        [wish[number], ours] = [value, index];
        model.set("index", index);
        model.save_changes();
        later();
      },
      select(item) { if (item !== model.get("selected")) { model.set("selected", item); model.save_changes(); later(); } },
      hover(item) { if (item !== hovered) { hovered = item; later(); } },
      canvas(parts) { const made = surface(view, parts); canvases.push(made); column.append(made.node); },
      column(heading) {
        pictures.append(column = make("div", { className: "column" }));
        if (heading) column.append(make("b", {}, heading));
      },
      title(f) { heading = f; },
      readout(f, more) { [say, tell] = [f, more]; },
      fade(pen, x, y, width, height, part) {
        pen.globalAlpha = part; pen.fillStyle = view.colors.surface; pen.fillRect(x, y, width, height); pen.globalAlpha = 1;
      },
      ease: easing(() => later()),
      get big() { return view.fit(960) >= 960; },
      fit: n => Math.min(n, root.clientWidth ? root.clientWidth - 16 : n),
      count: () => 0, read: () => view.row,
    };
    const built = () => {
      widgets = model.get("controls").map((control, number) => controller(view, number, control));
      const rare = widgets.filter((_, number) => model.get("controls")[number].rare).map(w => w.node);
      if (view.walk) widgets.unshift(walker(view, view.walk));
      controls.replaceChildren(...widgets.map(w => w.node).filter(node => !rare.includes(node)));
      if (rare.length) controls.append(make("details", { className: "more" }, make("summary", {}, "more settings"),
        make("div", { className: "controls" }, ...rare)));
    };
    const load = async () => {
      const source = model.get("table"), list = model.get("controls");
      const fresh = await unpack(source, list);
      if (source !== model.get("table")) return;  // a newer table is coming
      [table, seen, hovered] = [fresh, source, -1];
      wish = [...view.state];
      widgets.forEach(w => w.stop());
      built();
    };
    const draw = () => {
      frame = 0;
      if (model.get("table") !== seen) return;
      if (view.selected < 0 && hovered >= view.count()) hovered = -1;
      view.colors = theme.colors();
      for (const [key, value] of Object.entries(view.colors)) root.style.setProperty(`--${key}`, value);
      [...widgets, ...canvases].forEach(part => part.update());
      shows.textContent = heading();
      said.value = view.item >= 0 ? say() : "";
      exact.textContent = tell && view.item >= 0 ? tell() : "";
      numbers.hidden = !exact.textContent;
      root.dataset.index = model.get("index");  // drawn
    };
    const later = () => { frame ||= requestAnimationFrame(draw); };
    const changed = async () => {
      if (model.get("table") !== seen) await load();
      if (model.get("index") !== ours) wish = [...view.state];  // changed from outside
      later();
    };
    await load();
    Object.assign(view, build(view));
    built();
    root.read = () => plain(view.read());  // for tests
    const events = ["change:index", "change:selected", "change:table"];
    events.forEach(event => model.on(event, changed));
    el.append(root);
    draw();
    const resized = new ResizeObserver(later);
    resized.observe(root);
    return () => {
      events.forEach(event => model.off(event, changed));
      widgets.forEach(w => w.stop());
      cancelAnimationFrame(frame);
      resized.disconnect();
      theme.stop();
    };
  } };
}
