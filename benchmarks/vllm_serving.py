"""Check whether a running vLLM computes the same results as refvl:
`python -m benchmarks.vllm_serving`, or `make test-vllm`.

The folders of Qwen and GLM are loaded into an engine of vLLM 0.32 on this CPU, in float32; refvl and vLLM get the same
questions about held-out scenes. Prompt ids, positions, the logits of the first token and the ids of the answer are
compared, request by request. If the results differ, refvl runs again with vLLM's inputs (resized pixels and positions
after pruning), and must then agree. If a request agrees in neither run, the exit status is 1. `benchmarks/vllm_env.sh`
creates the environment.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import refvl
from benchmarks import vllm_engine  # before vllm
from data.training.evaluate_tiny import requests_for
from data.training.tiny_family import find_family
from refvl.merge import merge_embeddings
from refvl.paths import DATA
from refvl.positions import mrope_delta
from refvl.study.report import Trace

RATES = {"qwen2_5_vl": (0.0, 0.25, 0.5, 0.75), "qwen3_vl": (0.0,), "glm4v": (0.0,)}  # pruning rates by family
TOLERANCE = 2e-5  # as a share of the largest logit: both use float32, but add in a different order
NEW_TOKENS = 24


def questions(name: str, count: int, q: float) -> list[tuple[str, dict]]:
    """Return (kind, arguments of `chat`) of all requests to a family; with pruning, "motion" is the
    only one of the family's own kinds.
    """
    kinds = ["motion"] if q else find_family(name).kinds
    found = [(kind, request.arguments) for kind in kinds for request in requests_for(kind, count)]
    motions, colors = requests_for("motion", count // 3, first=2000), requests_for("color", count, first=1000)
    for motion, one, other in zip(motions, colors, colors[1:], strict=False):
        found.append(("two images", one.arguments | {"images": one.arguments["images"] + other.arguments["images"]}))
        found.append(("image and video", motion.arguments | one.arguments))
    return found + odd_sizes(count)


def odd_sizes(count: int) -> list[tuple[str, dict]]:
    """Return requests about parts of a photo, whose sizes and aspect ratios require a resize."""
    rng, photo = np.random.default_rng(7), np.asarray(Image.open(DATA / "pictures" / "coffee.jpg").convert("RGB"))
    found = []
    for _ in range(count):
        height, width = rng.integers(40, np.minimum(photo.shape[:2], 400))
        top, left = rng.integers(0, np.array(photo.shape[:2]) - (height, width) + 1)
        image = photo[top : top + height, left : left + width]
        found.append(("odd sizes", {"prompt": "What color is the circle?", "images": [image]}))
    return found


def first_logits(model: refvl.VLM, trace: Trace) -> Tensor:
    """Return the logits after the prompt of the trace, (vocabulary,)."""
    deeper = {"deepstack_embeds": trace.deepstack[None]} if trace.deepstack.numel() else {}
    with torch.inference_mode():
        output = model.language_model(
            inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None], logits_to_keep=1, **deeper
        )
    return output.logits[0, -1].float()


def positions_of(seen: dict, q: float, length: int) -> Tensor:
    """Return the positions in vLLM's language model, (3, L)."""
    if not q:
        return seen["get_mrope_input_positions"][-1][1][0][:, :length].clone()
    calls = seen["recompute_mrope_positions"]
    return [output[1] for given, output in calls if given["num_computed_tokens"] == 0][-1][:, :length].clone()


def as_given(model: refvl.VLM, trace: Trace, seen: dict, positions: Tensor) -> Trace:
    """Return the trace with vLLM's inputs: its positions and, if all media are images, the pixels of its resize."""
    trace = replace(trace, positions=positions, delta=mrope_delta(positions))
    [(given, _)] = seen["embed_multimodal"][:1]
    if "pixel_values" not in given or trace.patches[-1].media_tokens.kind == "video":
        return trace
    with torch.inference_mode():
        embeds = model.encoder(given["pixel_values"].float(), trace.layouts).split(list(map(len, trace.embeds)))
    hidden = trace.inputs_embeds.shape[1]
    rows = merge_embeddings(torch.cat([trace.inputs_embeds, trace.deepstack], 1), trace.spans, embeds)
    return replace(trace, inputs_embeds=rows[:, :hidden], deepstack=rows[:, hidden:])


def compare_one(model: refvl.VLM, trace: Trace, output: Any, seen: dict, q: float) -> dict:
    """Return which results agree, and the largest difference of the first logits as a share of the largest logit."""
    said, ids = output.outputs[0], output.prompt_token_ids
    theirs = torch.tensor([said.logprobs[0][token].logprob for token in range(len(said.logprobs[0]))])

    def apart(run: Trace) -> float:
        ours = first_logits(model, run)
        return float((ours - theirs[: len(ours)]).abs().max() / ours.abs().max())

    positions, own = positions_of(seen, q, len(ids)), apart(trace)
    same = {"prompt": trace.input_ids.tolist() == ids, "answer": list(said.token_ids) == trace.token_ids}
    same["positions"] = positions.shape == trace.positions.shape and positions.equal(trace.positions)
    agrees, given = same["answer"] and own <= TOLERANCE, own
    if not agrees and same["prompt"]:
        run = as_given(model, trace, seen, positions)
        [text] = model.answers([run], max_new_tokens=NEW_TOKENS)
        given = apart(run)
        agrees = text == model.processor.text(list(said.token_ids)) and given <= TOLERANCE
    return same | {"agrees": same["prompt"] and agrees, "apart": own, "apart_given": given}


def ask(name: str, q: float, count: int) -> list[dict]:
    """Run a family's requests at a pruning rate; return one row per kind: the number of
    requests that agree, and the largest differences.

    If vLLM prunes, its positions differ from refvl's; see `refvl.study.releases`.
    """
    from vllm import SamplingParams

    folder = find_family(name).folder
    model = refvl.load(folder, device="cpu", dtype="float32", progress=False)
    options = {"video_pruning_rate": q} if q else {}
    engine = vllm_engine.start(folder, limit_mm_per_prompt={"image": 2, "video": 1}, **options)
    seen, greedy = vllm_engine.watch(engine), SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=-1)
    found: dict[str, list[dict]] = {}
    for kind, arguments in questions(name, count, q):
        trace = model.trace(**arguments, max_new_tokens=NEW_TOKENS, pruning_rate=q)
        seen.clear()
        [output] = engine.generate([vllm_engine.request(model, **arguments)], greedy, use_tqdm=False)
        found.setdefault(kind, []).append(compare_one(model, trace, output, seen, q))
    rows = []
    for kind, compared in found.items():
        counts = {what: sum(one[what] for one in compared) for what in ("prompt", "positions", "answer", "agrees")}
        apart = {what: max(one[what] for one in compared) for what in ("apart", "apart_given")}
        rows.append({"family": name, "kind": kind, "q": q, "asked": len(compared)} | counts | apart)
    return rows


def alone(function: Callable, *arguments) -> list[dict]:
    """Run a function in a separate process, because an engine ends only with its process; return the result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, help="requests of each kind; a third as many with two media")
    parser.add_argument("--model", choices=RATES, action="append", help="only this family; may be repeated")
    args = parser.parse_args()
    rows = []
    for name in args.model or RATES:
        for q in RATES[name]:
            found = alone(ask, name, q, args.n)
            print(*map(json.dumps, found), sep="\n", flush=True)
            rows += found
    if failures := [row for row in rows if row["agrees"] != row["asked"]]:
        raise SystemExit(f"requests: expected each to agree or to be explained, got neither for some of {failures}")


if __name__ == "__main__":
    main()
