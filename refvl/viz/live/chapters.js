// What each chapter adds to the patches and words: below them or above them. `view` is what stage.js hands over.
import { PAINT, ROW, LIST, WINDOWS } from "./seeing.js";
import { TOKENS, PROMPT, POSITIONS, MAP, ATTENTION, WORD } from "./reading.js";

export const CHAPTERS = [LIST, WINDOWS, POSITIONS, MAP, PAINT, ROW, TOKENS, PROMPT, ATTENTION, WORD];
