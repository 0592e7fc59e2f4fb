// The worker: weights in once, then a job in, a record out.
import { makeVLM, unpackWeights } from "./model.js";

let vlm;

export function receive(message) {
  if (message.meta) {
    vlm = makeVLM(unpackWeights(message.bytes, message.meta), message.config);
    return { ready: true, axes: vlm.axes, frequencies: vlm.frequencies };
  }
  const start = performance.now(), record = vlm.run(message.job);
  return { id: message.id, record, ms: performance.now() - start };
}

if (typeof WorkerGlobalScope !== "undefined") onmessage = event => postMessage(receive(event.data));
