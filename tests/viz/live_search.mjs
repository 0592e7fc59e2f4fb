// Appended to the page's own modules by test_live.py: for each thing that can be exchanged, how many answers to the page's
// questions change on drawn inputs, and the surest change.
const [, , folder, count] = process.argv, read = name => fs.readFileSync(`${folder}/${name}`);
const setup = JSON.parse(read("setup.json")), raw = read("weights.bin"), { side } = setup.config.pixels;
await receive({ meta: setup.meta, config: setup.config, bytes: raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length) });
const S = makeState({ ...setup, photos: {} }, makeTokenizer(setup.tokenizer));

let seed = 7;
const random = n => { seed = (seed * 1103515245 + 12345) % 2147483648; return Math.floor(seed / 2147483648 * n); };
const pick = (list, n) => { const rest = [...list]; return Array.from({ length: n }, () => rest.splice(random(rest.length), 1)[0]); };
// reach: how far a shape may be from the centre of its place, px
function scene(n, reach = 0) {
  const shapes = pick(SHAPES, n), colors = pick(Object.keys(COLORS), n), places = pick([...PLACES.keys()], n);
  const off = () => random(2 * reach + 1) - reach;
  return shapes.map((shape, i) => ({ shape, color: colors[i], place: places[i], dx: off(), dy: off() }));
}
const sized = rgb => resize(rgb, SIDE, SIDE, side, side);

const names = Object.keys(BREAKS).filter(name => ["picture", "clip"].some(kind =>
  (kind === "picture" || setup.prompts.clip) && appliesTo(name, setup.config, kind)));
const found = Object.fromEntries(names.map(name => [name, { asked: 0, changed: 0, kinds: {}, score: 0 }]));
async function consider(kind, things, wanted) {
  Object.assign(S, { kind, things, old: scene(3), direction: pick(Object.keys(DIRECTIONS), 1)[0] });
  S.aim();
  if (S.isBoxedIn()) return;
  const shown = framesOf(S).map(sized), old = [sized(paint(placed(S.old)))];
  for (const q of questionsOf(kind, things)) for (const broken of wanted) {
    Object.assign(S, { q, broken });
    S.readPrompt();
    const job = { frames: shown, old, ids: S.ids, off: S.off, broken, place: S.asked()?.place ?? 4, most: MOST_TOKENS };
    const { intact, other } = await receive({ job }), [a, b] = [intact, other].map(S.said), entry = found[broken];
    const asks = q.split(" ").slice(0, 2).join(" "), tally = entry.kinds[asks] ??= [0, 0];
    entry.asked++;
    tally[1]++;
    if (a === b) continue;
    entry.changed++;
    tally[0]++;
    const isTrue = truthOf(kind, things, S.direction, q) === a, isShort = b.split(" ").length <= 2 || broken === "drop";
    const score = sureOf(intact) * sureOf(other) * (isTrue ? 1 : 0.01) * (isShort ? 1 : 0.5) * (a.startsWith("There is no") ? 0.8 : 1) * (q.startsWith("Where") ? 1 : 0.9);
    if (score <= entry.score) continue;
    const { direction } = S, clip = kind === "clip" ? { direction } : {};
    Object.assign(entry, { score, kind, things, old: S.old, q, ...clip, said: [a, b], sure: [sureOf(intact), sureOf(other)] });
  }
}
const kindOf = name => BREAKS[name].needs === "clip" ? "clip" : "picture";
for (let i = 0; i < Number(count); i++) for (const kind of ["picture", "clip"]) {
  const wanted = names.filter(name => kindOf(name) === kind);
  if (wanted.length) await consider(kind, scene(kind === "clip" ? 2 : 3), wanted);
}
for (let i = 0; i < 60; i++) {                            // where none was found: fewer and more shapes, off their centres
  const weak = names.filter(name => found[name].score < 0.5);
  if (!weak.length) break;
  const name = weak[i % weak.length];
  await consider(kindOf(name), scene(1 + (i + 2) % 4, i % 3 ? 4 * (i % 3) : 0), [name]);
}
fs.writeFileSync(`${folder}/out`, JSON.stringify(found));
