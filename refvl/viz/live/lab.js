// Two runs of one input: intact, and with one thing exchanged. In the worker, and in node for tests and the search.
import { IN_TOWER, PRUNED } from "./breaks.js";
import { unchanged } from "./evs.js";
import { makeVLM, unpackWeights } from "./model.js";

export function makeLab({ bytes, meta, config }) {
  const tensors = unpackWeights(bytes, meta), first = makeVLM(tensors, config), second = makeVLM(tensors, config);

  // frames, old: RGB bytes at the side of the model, old for a buffer that was not refilled. broken: a name, or "".
  // place: the one that is left out, 0 to 8. Each of the two towers keeps its last image, so decoding alone is repeated.
  function twin({ frames, old = [], ids, off, broken = "", place = 0, most = 24 }) {
    const intact = first.run({ frames, ids, off, most });
    if (!broken) return { intact, other: intact };
    const M = intact.tokens.length / config.text.hidden_size, perFrame = M / intact.T;
    const drop = broken === "drop" ? [...Array(M).keys()].filter(m => m % perFrame === place)
      : broken === "evs" ? unchanged(intact.tokens, M, PRUNED, perFrame) : [];
    const isStale = broken === "stale", vlm = IN_TOWER.includes(broken) ? second : first;
    return { intact, other: vlm.run({ frames: isStale ? old : frames, ids, off, breaks: { [broken]: true }, drop, most }) };
  }
  return { twin, axes: first.axes, frequencies: first.frequencies };
}
