// Appended to the page's own modules, as one file, by test_live.py, which imports fs: jobs from a file, what they gave to another.

const [, , folder] = process.argv, read = name => fs.readFileSync(`${folder}/${name}`);
const setup = JSON.parse(read("setup.json")), raw = read("weights.bin"), list = JSON.parse(read("jobs.json"));
const bytes = raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length), { side } = setup.config.pixels;
receive({ meta: setup.meta, config: setup.config, bytes });
const words = makeTokenizer(setup.tokenizer), plain = value =>
  ArrayBuffer.isView(value) ? Array.from(value) : Array.isArray(value) ? value.map(plain) : value;

const found = list.map(({ kind, question, frames, breaks = {}, drop = [], keep }) => {
  const pixels = frames.map(name => { const [rgb, h, w] = [new Uint8Array(read(name)), SIDE, SIDE]; return resize(rgb, h, w, side, side); });
  const { before, pad, count, between, after } = setup.prompts[kind];
  const ids = [...before, ...Array(count).fill(pad), ...between, ...words.encode(question), ...after];
  const { record } = receive({ id: 1, job: { frames: pixels, ids, off: before.length, breaks, drop, most: 24 } });
  const out = { ids, out: record.out, text: words.decode(record.out), top: record.steps[0].top[0][0] };
  for (const name of keep || []) out[name] = plain(record[name]);
  if (keep?.includes("look")) out.look = plain(record.steps[0].look);
  return out;
});
fs.writeFileSync(`${folder}/out`, JSON.stringify(found));
