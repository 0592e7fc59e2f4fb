// The worker: weights in once, then a job in, two records out.
import { makeLab } from "./lab.js";

let lab;

// `packed`: the weights as text, base64 of a deflated file; `bytes`: the file itself
async function bytesOf({ packed, bytes }) {
  if (bytes) return bytes;
  const text = atob(packed), deflated = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) deflated[i] = text.charCodeAt(i);
  return new Response(new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

export async function receive(message) {
  if (message.meta) {
    lab = makeLab({ ...message, bytes: await bytesOf(message) });
    return { ready: true, axes: lab.axes, frequencies: lab.frequencies };
  }
  const start = performance.now(), records = lab.twin(message.job);
  return { id: message.id, ...records, ms: performance.now() - start };
}

if (typeof WorkerGlobalScope !== "undefined") onmessage = async event => postMessage(await receive(event.data));
