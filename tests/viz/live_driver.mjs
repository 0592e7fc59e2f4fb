// Appended to the page's own modules, as one file, by test_live.py, which imports fs: jobs from a file, what they gave to another.
// A job has frames, as files of RGB bytes, or things that are painted here.

const [, , folder] = process.argv, read = name => fs.readFileSync(`${folder}/${name}`);
const setup = JSON.parse(read("setup.json")), raw = read("weights.bin"), list = JSON.parse(read("jobs.json"));
const bytes = raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length), { side } = setup.config.pixels;
const { axes, frequencies } = await receive({ meta: setup.meta, config: setup.config, bytes });
const plain = value => ArrayBuffer.isView(value) ? Array.from(value) : Array.isArray(value) ? value.map(plain) : value;
const S = makeState({ ...setup, photos: {} }, makeTokenizer(setup.tokenizer)), model = { axes, frequencies, heads: S.heads };
const sized = rgb => resize(rgb, SIDE, SIDE, side, side);

const found = [];
for (const { kind, question, frames, things = [], old = [], direction = "left", broken = "swap", isBroken = false, keep = [] } of list) {
  Object.assign(S, { kind, q: question, things, broken, direction });
  S.aim();
  S.readPrompt();
  const shown = frames ? frames.map(name => sized(new Uint8Array(read(name)))) : framesOf(S).map(sized);
  const { record, ...both } = await receive({ job: { frames: shown, old: [sized(paint(placed(old)))], ids: S.ids, off: S.off, broken: isBroken ? broken : "",
    place: S.asked()?.place ?? 4, most: MOST_TOKENS } }).then(({ intact, other }) => ({ record: other, A: intact, B: other }));
  Object.assign(S, both, { change: changes(both.A, both.B, broken, S.stages, model) });
  const out = { ids: S.ids, out: record.out, text: S.said(record), intact: S.said(S.A), change: S.change, cause: why(S)[0], sure: [S.A, S.B].map(sureOf),
    truth: truthOf(kind, things, direction, question) };
  for (const name of keep) out[name] = plain(name === "look" ? record.steps[0].look : name === "before" ? S.A.tokens : record[name]);
  found.push(out);
}
fs.writeFileSync(`${folder}/out`, JSON.stringify(found));
