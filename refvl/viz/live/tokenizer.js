// Byte-level BPE as in tokenizer.json: text -> pieces -> bytes -> merges by rank -> ids. Special tokens in a text are text.

// how Qwen2 cuts text into pieces; (?i:...) written out, for engines without it
const PIECES = new RegExp(
  "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" +
  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", "gu");

// the printable letter that stands for each byte, as GPT-2 chose them
const LETTERS = (() => {
  const printable = b => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  let next = 256;
  return [...Array(256).keys()].map(b => String.fromCharCode(printable(b) ? b : next++));
})();
const BYTES = Object.fromEntries(LETTERS.map((letter, b) => [letter, b]));

// pieces: the text of every id, in letters that stand for bytes. merges: ["h e", ...], the first of the highest rank
export function makeTokenizer({ pieces, merges, special }) {
  const ids = new Map(pieces.map((piece, id) => [piece, id])), rank = new Map(merges.map((pair, i) => [pair, i]));
  const isSpecial = id => id >= special;

  function encodePiece(piece) {
    const parts = Array.from(new TextEncoder().encode(piece), b => LETTERS[b]);
    for (;;) {
      let best = -1, lowest = Infinity;
      for (let i = 0; i + 1 < parts.length; i++) {
        const r = rank.get(parts[i] + " " + parts[i + 1]);
        if (r < lowest) { lowest = r; best = i; }
      }
      if (best < 0) return parts.map(part => ids.get(part));
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
  }
  const encode = text => (text.normalize("NFC").match(PIECES) || []).flatMap(encodePiece);

  function decode(list) {
    const said = list.filter(id => !isSpecial(id) && id < pieces.length).map(id => pieces[id]).join("");
    return new TextDecoder().decode(Uint8Array.from(said, letter => BYTES[letter]));
  }
  // one token as a person reads it
  const label = id => {
    if (isSpecial(id)) return pieces[id] || "";
    const text = id < pieces.length ? decode([id]) : "";
    return text === "\n" ? "⏎" : text.trim() || "␣";
  };
  return { encode, decode, label, isSpecial };
}
