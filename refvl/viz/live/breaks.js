// What can be exchanged, and the stages of the map. stage: where it is; name: on its switch; side: over the panel;
// only: in the headline; did: in a shared picture; needs: the input or tower without which it does not exist.
export const BREAKS = {
  swap: { stage: "positions", name: "exchange h and w", side: "h and w exchanged", did: "I exchanged row and column, h and w",
    only: "only row and column, %h and %w, are exchanged" },
  one: { stage: "positions", name: "one place for all tokens", side: "one place for all tokens",
    did: "I gave all image tokens one place", only: "but all image tokens share one place" },
  back: { stage: "positions", name: "reverse time", side: "time reversed", did: "I reversed t",
    only: "only time, %t, runs backwards", needs: "clip" },
  bgr: { stage: "pixels", name: "exchange red and blue", side: "red and blue exchanged",
    did: "I exchanged red and blue", only: "only red and blue are exchanged" },
  raw: { stage: "pixels", name: "skip the normalisation", side: "not normalised", did: "I skipped the normalisation",
    only: "only the normalisation is missing" },
  stale: { stage: "pixels", name: "forget to refill a buffer", side: "the last scene’s pixels",
    did: "I forgot to refill a buffer", only: "only a buffer was not refilled", needs: "picture" },
  lines: { stage: "patches", name: "read line by line", side: "patches line by line",
    did: "I read the patches line by line", only: "only the patches are read line by line" },
  unsorted: { stage: "windows", name: "cut without sorting", side: "windows not sorted",
    did: "I cut windows without sorting", only: "only the windows are cut unsorted", needs: "windows" },
  open: { stage: "windows", name: "remove the windows", side: "no windows", did: "I removed the windows",
    only: "only the windows are gone", needs: "windows" },
  unsortedBack: { stage: "tokens", name: "forget to reorder", side: "tokens in window order",
    did: "I left the tokens in window order", only: "but the tokens are left in window order", needs: "windows" },
  deep: { stage: "deepstack", name: "leave DeepStack out", side: "without DeepStack", did: "I left DeepStack out",
    only: "only the features of earlier blocks are missing", needs: "deepstack" },
  drop: { stage: "prompt", name: "leave one place out", side: "one place left out",
    did: "I left one place out of the prompt", only: "only the tokens of one place are left out" },
  evs: { stage: "prompt", name: "prune too much", side: "EVS at 0.75", did: "I pruned all but nine tokens",
    only: "only the tokens that changed least are gone", needs: "clip" },
};
export const PRUNED = 0.75;                               // the rate of `evs`, at which only the first frame pair is left
export const IN_TOWER = ["bgr", "raw", "stale", "lines", "unsorted", "open", "unsortedBack"];

// the boxes of the map, in the order of the path
export function stagesOf({ vision }) {
  const middle = vision.fullatt_block_indexes ? ["windows", "tower", "tokens"] : ["tower", "tokens", "deepstack"];
  return ["pixels", "patches", ...middle, "prompt", "positions", "attention", "word"];
}
export const appliesTo = (name, config, kind) => {
  const has = { clip: kind === "clip", picture: kind === "picture", windows: config.vision.fullatt_block_indexes,
    deepstack: config.vision.deepstack_visual_indexes };
  return !BREAKS[name].needs || Boolean(has[BREAKS[name].needs]);
};
