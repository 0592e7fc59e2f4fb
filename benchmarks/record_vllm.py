"""The stages of a running vLLM, in a folder for `refvl compare`. Why do the two differ? Three commands:

    python -m refvl trace FOLDER "What is it?" --image a.png --save ours
    python -m benchmarks.record_vllm FOLDER "What is it?" --image a.png --save theirs
    python -m refvl compare ours theirs

Needs an environment with vLLM (its CPU build does) in which refvl's requirements are met too. The engine runs in this
process, so that two methods of its model can be wrapped: what goes into the tower, what comes out, and the positions.
Their names are those of vLLM 0.32, for Qwen2.5-VL and GLM; this script has not been run. Pictures only: vLLM samples
the files of clips by its own rule.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from PIL import Image

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported


def record(folder: str, prompt: str, images: list[Path], dtype: str, max_new_tokens: int):
    """The `Stages` of one request, and its answer."""
    import vllm
    from transformers import AutoTokenizer

    from refvl.comparison import Stages

    engine = vllm.LLM(
        folder, dtype=dtype, enforce_eager=True, enable_prefix_caching=False, max_num_seqs=1, seed=0,
        limit_mm_per_prompt={"image": len(images)},
    )  # fmt: skip
    model = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    seen: dict[str, tuple[dict, Any]] = {}

    def watch(name: str) -> None:
        inner = getattr(model, name)

        def outer(*args, **kwargs):
            output = inner(*args, **kwargs)
            seen.setdefault(name, (kwargs, output))
            return output

        object.__setattr__(model, name, outer)

    watch("embed_multimodal")
    watch("get_mrope_input_positions")
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    request = {"prompt": text, "multi_modal_data": {"image": [Image.open(path).convert("RGB") for path in images]}}
    greedy = vllm.SamplingParams(temperature=0, max_tokens=max_new_tokens)
    [output] = engine.generate([request], greedy, use_tqdm=False)
    given, embeds = seen["embed_multimodal"]
    grids = [tuple(grid) for grid in given["image_grid_thw"].tolist()]
    rows = given["pixel_values"].split([t * h * w for t, h, w in grids])
    tensors = {f"patchify/{i}": x for i, x in enumerate(rows)} | {f"encode/{i}": x for i, x in enumerate(embeds)}
    tensors["merge/input_ids"] = torch.tensor(output.prompt_token_ids)
    tensors["positions/ids"] = seen["get_mrope_input_positions"][1][0]
    tensors["decode tokens/token_ids"] = torch.tensor(output.outputs[0].token_ids)
    return Stages(tensors, f"vllm {vllm.__version__}", grids), output.outputs[0].text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a checkpoint of Qwen2.5-VL or GLM")
    parser.add_argument("prompt")
    parser.add_argument("--image", type=Path, action="append", required=True)
    parser.add_argument("--save", required=True, help="a new folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args = parser.parse_args()
    stages, answer = record(args.folder, args.prompt, args.image, args.dtype, args.max_new_tokens)
    stages.save(args.save)
    print(f"answer: {answer}\n{len(stages.tensors)} tensors in {args.save}")


if __name__ == "__main__":
    main()
