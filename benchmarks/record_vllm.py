"""Record the stages of a running vLLM in a folder for `refvl compare`. Three commands show why refvl and vLLM differ:

    python -m refvl trace FOLDER "What is it?" --image a.png --save ours
    python -m benchmarks.record_vllm FOLDER "What is it?" --image a.png --save theirs
    python -m refvl compare ours theirs --model FOLDER

This needs an environment with vLLM that also meets refvl's requirements (`benchmarks/vllm_env.sh` creates one). Videos
are sampled by refvl, and vLLM receives their frames, because vLLM would sample a file by its own rule.
"""

import argparse
from pathlib import Path

import torch

import refvl
from benchmarks.vllm_engine import LayerWatch, request, start, watch  # before vllm
from refvl.study.comparison import Stages
from refvl.study.readout import margins


def record(folder: str, prompt: str, images: list[Path], videos: list[Path], dtype: str, max_new_tokens: int):
    """Return the `Stages` of one request, and the answer. vLLM runs the tower on images, then on videos."""
    import vllm

    ours = refvl.load(folder, device="cpu", dtype="float32", progress=False)
    engine = start(folder, dtype=dtype, limit_mm_per_prompt={"image": len(images), "video": len(videos)})
    seen, layers = watch(engine), LayerWatch(engine)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=max_new_tokens)
    [output] = engine.generate([request(ours, prompt, images, videos)], greedy, use_tqdm=False)
    rows, grids = list[torch.Tensor](), list[tuple]()
    for given, _ in seen["embed_multimodal"]:
        for name, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
            if name in given:
                rows += given[name].split(given[grid].prod(1).tolist())
                grids += map(tuple, given[grid].tolist())
    embeds = [x for _, output in seen["embed_multimodal"] for x in output]
    tensors = {f"patchify/{i}": x for i, x in enumerate(rows)} | {f"encode/{i}": x for i, x in enumerate(embeds)}
    tensors["merge/input_ids"] = torch.tensor(output.prompt_token_ids)
    tensors["positions/ids"] = seen["get_mrope_input_positions"][0][1][0]
    ids = torch.tensor(output.outputs[0].token_ids)
    steps = torch.stack([logits[-1] for _, logits in seen["compute_logits"]])[: len(ids)]  # one per token
    tensors |= {"merge/inputs_embeds": layers.inputs_embeds, "prefill/last_states": torch.stack(layers.states)}
    tensors |= {"prefill/first_logits": steps[0], "decode tokens/token_ids": ids}
    tensors["decode tokens/margins"] = margins(steps)
    return Stages(tensors, f"vllm {vllm.__version__}", grids), output.outputs[0].text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a checkpoint of Qwen2.5-VL, Qwen3-VL or GLM")
    parser.add_argument("prompt")
    parser.add_argument("--image", type=Path, action="append", default=[])
    parser.add_argument("--video", type=Path, action="append", default=[])
    parser.add_argument("--save", required=True, help="a new folder")
    args = parser.parse_args()
    stages, answer = record(args.folder, args.prompt, args.image, args.video, "float32", 24)
    stages.save(args.save)
    print(f"answer: {answer}\n{len(stages.tensors)} tensors in {args.save}")


if __name__ == "__main__":
    main()
