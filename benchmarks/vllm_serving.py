"""Whether a running vLLM answers as refvl does, from the shipped folders: `python -m benchmarks.vllm_serving --write`.

Needs an environment with vLLM (its CPU build does) in which refvl's requirements are met too. One engine at a time is
asked about files (images, clips), held-out scenes, and, where vLLM takes them, embeddings that refvl's tower has made;
every answer is compared with refvl's own. MiniCPM-V and Step3 need remote code, or sizes that vLLM has as constants.
"""

import argparse
import base64
import io
import json

import numpy as np
import torch
from PIL import Image

import refvl
from benchmarks.report import environment, write_measurement
from data.training import demo_scenes, photos, scenes
from data.training.evaluate_tiny import requests_for
from data.training.run import digest
from refvl.paths import DATA

FOLDERS = ("tiny-qwen2_5_vl", "tiny-glm4v")
EMBEDS = ("tiny-qwen2_5_vl",)  # for which vLLM takes embeddings


def data_url(pixels: np.ndarray) -> str:
    """(H, W, 3) uint8 as a PNG in a URL."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def cases(count: int) -> dict[str, list[tuple[dict, str, dict]]]:
    """Per kind of medium: (part of a message for vLLM, question, medium for refvl)."""
    picture, clip, film = demo_scenes.PICTURE, demo_scenes.CLIP, DATA / "clips" / photos.CLIP
    found: dict[str, list] = {"image file": [], "clip file": [], "held-out image": []}
    for question in (q for kind in scenes.all_questions(demo_scenes.demo_picture()).values() for q in kind[:1]):
        part = {"type": "image_url", "image_url": {"url": picture.as_uri()}}
        found["image file"].append((part, question.text, {"images": [picture]}))
    questions_of = {clip: ("Which way does the circle move?", "What moves?", "hello"), film: ("What is in the clip?",)}
    for file, questions in questions_of.items():
        part = {"type": "video_url", "video_url": {"url": file.as_uri()}}
        found["clip file"] += [(part, question, {"videos": [file]}) for question in questions]
    for kind in ("color", "shape", "place"):
        for request in requests_for(kind, count, first=200_000):
            [pixels] = request.arguments["images"]
            part = {"type": "image_url", "image_url": {"url": data_url(pixels)}}
            found["held-out image"].append((part, request.question.text, {"images": [pixels]}))
    return found


def ask(name: str, count: int) -> dict:
    """One folder: how many answers of each kind there are, and how many are the same."""
    from vllm import LLM, SamplingParams

    folder = DATA / "checkpoints" / name
    ours, embeds = refvl.load(folder, device="cpu", dtype="float32", progress=False), name in EMBEDS
    engine = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=1024, enable_mm_embeds=embeds,
        limit_mm_per_prompt={"image": 1, "video": 1}, allowed_local_media_path=str(DATA), seed=0,
    )  # fmt: skip
    greedy, result = SamplingParams(temperature=0, max_tokens=24), {}
    for kind, asked in cases(count).items():
        expected = [ours.chat(question, **medium, max_new_tokens=24) for _, question, medium in asked]
        messages = [[{"role": "user", "content": [part, {"type": "text", "text": text}]}] for part, text, _ in asked]
        said = [output.outputs[0].text for output in engine.chat(messages, greedy, use_tqdm=False)]
        result[kind] = {"asked": len(asked), "same": sum(map(str.__eq__, said, expected))}
    if embeds:
        requests, expected = [], []
        for request in requests_for("place", count, first=300_000):
            trace = ours.trace(**request.arguments, max_new_tokens=24)
            expected.append(trace.text)
            content = [{"type": "image"}, {"type": "text", "text": request.question.text}]
            prompt = ours.processor.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            image = {"image_embeds": trace.embeds[0], "image_grid_thw": torch.tensor([trace.layouts[0]])}
            requests.append({"prompt": prompt, "multi_modal_data": {"image": image}})
        said = [output.outputs[0].text for output in engine.generate(requests, greedy, use_tqdm=False)]
        result["embeddings"] = {"asked": len(said), "same": sum(map(str.__eq__, said, expected))}
    return {"weights_sha256": digest(folder), "answers": result}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=30, help="held-out scenes of each kind")
    parser.add_argument("--folder", choices=FOLDERS, help="only this one")
    parser.add_argument("--write", action="store_true", help="keep the result under data/measurements")
    args = parser.parse_args()

    import vllm

    results = {name: ask(name, args.n) for name in ([args.folder] if args.folder else FOLDERS)}
    print(json.dumps(results, indent=2))
    if args.write:
        what = "answers of vLLM that are those of refvl, from the shipped folders, greedy, float32"
        record = {"what": what, **environment("cpu"), "vllm": vllm.__version__, "folders": results}
        write_measurement("vllm_serving", record)


if __name__ == "__main__":
    main()
