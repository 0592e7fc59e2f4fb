// The picture to share: what was exchanged, what both sides say, and how far the fault went. Always on light paper.
import { BREAKS } from "./breaks.js";
import { percent, sureOf, surety } from "./change.js";
import { MINIS, SANS, SERIF } from "./minis.js";
import { makePanel } from "./panel.js";

const WIDE = ["patches", "prompt", "word"];               // boxes whose picture is wider than high

// its sentence, which is also its alt text
export function sharedText(S) {
  const isChanged = S.on && S.said(S.A) !== S.said(S.B), R = S.on ? S.B : S.A;
  const did = S.on ? BREAKS[S.broken].did : "Nothing exchanged", says = isChanged || !S.on ? "It says" : "It still says";
  return { lead: `${did}. ${says} `, said: `“${S.said(R)}”`, sure: `${surety(sureOf(R))} sure`, isChanged };
}

// C: the colours of light paper; view: as in app.js
export function drawCard(S, C, view) {
  const canvas = document.createElement("canvas"), g = canvas.getContext("2d");
  [canvas.width, canvas.height] = [1200, 630];
  g.fillStyle = C.paper;
  g.fillRect(0, 0, 1200, 630);
  const put = (text, x, y, font, color, align = "left") => {
    g.font = font;
    g.fillStyle = color;
    g.textAlign = align;
    g.textBaseline = "alphabetic";
    g.fillText(text, x, y);
    return g.measureText(text).width;
  };
  const { lead, said, isChanged } = sharedText(S);
  const fits = size => { g.font = `500 ${size}px ${SERIF}`; return g.measureText(lead + said).width <= 1104; };
  const size = [50, 46, 42, 38, 34, 30, 24].find(fits) || 20, wide = put(lead, 48, 68, `500 ${size}px ${SERIF}`, C.ink);
  put(said, 48 + wide, 68, `500 ${size}px ${SERIF}`, isChanged ? C.text : C.ink);
  put(S.q, 48, 106, `400 24px ${SANS}`, C.muted);
  for (const side of [0, 1]) {
    const V = view(side, C, ""), x = side ? 624 : 48, y = 128, P = 292, sheet = document.createElement("canvas");
    Object.defineProperty(sheet, "clientWidth", { value: P });
    makePanel(sheet, side).draw(V, "", 0, true);
    g.save();
    g.beginPath();
    g.roundRect(x, y, P, P, 8);
    g.clip();
    g.drawImage(sheet, x, y, P, P);
    g.restore();
    const isLong = V.answer.length > 14, words = isLong ? V.answer.match(/.{1,22}(\s|$)/g) || [] : V.answer.split(" ");
    put(side && S.on ? "broken" : "intact", x + P + 22, y + 24, `600 22px ${SANS}`, V.isWrong ? C.text : C.muted);
    words.slice(0, 4).forEach((word, i) => put(word, x + P + 20, y + (isLong ? 80 + i * 28 : 130 + i * 54),
      `500 ${isLong ? 22 : 54}px ${SERIF}`, V.isWrong ? C.text : C.ink));
    put(`${surety(sureOf(V.R))} sure`, x + P + 22, y + P - 24, `400 24px ${SANS}`, C.muted);
  }
  S.stages.forEach((stage, i) => {
    const w = 108, x = 48 + i * (w + (1104 - 9 * w) / 8), y = 448, h = 84, c = S.on ? Math.min(1, S.change[stage]) : 0;
    const isSource = S.on && BREAKS[S.broken].stage === stage, inside = WIDE.includes(stage) ? 100 : 72;
    g.save();
    g.beginPath();
    g.roundRect(x, y, w, h, 9);
    g.clip();
    g.fillStyle = C.raised;
    g.fillRect(x, y, w, h);
    g.fillStyle = "rgb(217 95 2 / .26)";
    g.fillRect(x, y + h * (1 - c), w, h * c);
    g.translate(x + (w - inside) / 2, y + 6);
    MINIS[stage](g, 72, view(1, C, stage), inside);
    g.restore();
    g.beginPath();
    g.roundRect(x, y, w, h, 9);
    g.strokeStyle = isSource ? C.broken : c > 0.0005 ? "rgb(217 95 2 / .55)" : C.hair;
    g.lineWidth = isSource ? 4 : 2;
    g.stroke();
    put(stage, x + w / 2, y + h + 24, `${isSource ? 650 : 400} 18px ${SANS}`, isSource ? C.text : C.ink, "center");
    if (c >= 0.0005) put(percent(c), x + w / 2, y + h + 44, `400 15px ${SANS}`, C.text, "center");
  });
  put("refvl: a small vision-language model runs in the page. Orange is how far the values of a stage changed.", 48, 614, `400 19px ${SANS}`, C.muted);
  return canvas;
}
