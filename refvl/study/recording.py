"""The stages of transformers' own processor and model, recorded with hooks,
so that `refvl.compare` can explain differences.

transformers receives only the messages and the files. Its processor applies the chat template,
samples frames, writes timestamps and placeholders, and prepares pixels. Images go through its
Pillow backend. Videos go through torchvision (`pip install 'refvl[compare]'`), because transformers
has no other backend for videos. Its model runs the tower, the merge, the positions and the text
model.
"""

import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer, AutoVideoProcessor
from transformers.video_utils import VideoMetadata, load_video

from refvl.checkpoints import find_checkpoint
from refvl.language.loading import progress_bars
from refvl.model import VLM
from refvl.pixels.media import PART, Video
from refvl.processors.glm4v import Glm4vProcessor
from refvl.processors.messages import FITTED, media_of
from refvl.study.comparison import Stages
from refvl.study.readout import Readout
from refvl.study.report import Trace

PIXELS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
# processor -> its image processor, if their names differ; some released files name a class that no longer exists
IMAGES = {"Qwen2_5_VL": "Qwen2VL", "Qwen3VL": "Qwen2VL", "MiniCPMV4_7": "MiniCPMV4_6"}


def transformers_processor(folder: str, vlm: VLM, videos: bool) -> Any:
    """Return transformers' processor for the checkpoint; its class has the same name as refvl's processor class.

    videos: whether the prompt contains videos. Raises ValueError for families without a processor
    in transformers, and ImportError if there are videos but torchvision is missing.
    """
    names = [base.__name__ for base in type(vlm.processor).__mro__ if hasattr(transformers, base.__name__)]
    if not names:
        raise ValueError(f"with: expected a family with a processor in transformers, got {vlm.family.name}")
    if videos and not find_spec("torchvision"):
        raise ImportError("with: transformers' video processors need torchvision: pip install 'refvl[compare]'")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = type(vlm.processor).__name__.removesuffix("Processor")
    images: Any = getattr(transformers, f"{IMAGES.get(own, own)}ImageProcessorPil").from_pretrained(folder)
    parts = {"image_processor": images, "tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    parts["video_processor"] = AutoVideoProcessor.from_pretrained(folder) if videos else images  # never called
    unchecked = {"check_argument_for_proper_class": lambda *arguments: None}
    return type(names[0], (getattr(transformers, names[0]),), unchecked)(**parts)


def transformers_inputs(processor: Any, trace: Trace) -> Any:
    """Return the inputs for `generate` that transformers' processor makes from the messages and files of a trace.

    Media that are not files, and items whose message sets a size or a part of the file, are taken
    from the trace. The result's `video_metadata` contains the sampled indices.
    Arguments for the chat template are not passed on.
    """
    pairs = list(zip(media_of(trace.messages), trace.media, strict=True))
    images = [_file_or(source, medium, how) for (kind, source, how), medium in pairs if kind == "image"]
    videos = [(_file_or(source, medium, how), how) for (kind, source, how), medium in pairs if kind == "video"]

    # replace `fetch_videos`, which needs torchcodec, with transformers' reader that needs only PyAV
    processor.video_processor.fetch_videos = lambda names, sample_indices_fn: zip(
        *[_frames(*videos[int(name)], sample_indices_fn) for name in names], strict=True
    )
    return processor(
        text=[processor.apply_chat_template(trace.messages, tokenize=False, add_generation_prompt=True)],
        images=images or None, videos=[str(i) for i in range(len(videos))] or None, return_metadata=True,
        do_sample_frames=True,  # otherwise, Qwen2.5-VL's class reads all frames; qwen-vl-utils samples them
        return_tensors="pt",
    )  # fmt: skip


def _file_or(source: Any, medium: Any, options: dict) -> Any:
    opened = medium.source if isinstance(medium, Video) else medium.info.get("source")
    # transformers accepts no options for a single item
    return opened if isinstance(source, (str, os.PathLike)) and not options.keys() & {*FITTED, *PART} else medium


def _frames(source: Any, options: dict, sample: Any) -> Any:
    """Return the sampled frames of a file or a `Video`, and their `VideoMetadata`."""
    if isinstance(source, Video):
        indices, fps, duration = list(source.indices), source.source_fps, source.duration
        count = round(len(indices) / source.fps * fps)  # in the file, or in the sampled part of it
        return source.frames, VideoMetadata(count, fps, duration=duration, frames_indices=indices)
    return load_video(source, sample_indices_fn=partial(sample, **{"fps": None} | options))  # None: the default


@torch.inference_mode()
def record_transformers(path_or_id: str, vlm: VLM, trace: Trace, *, max_new_tokens: int = 128) -> Stages:
    """Record a run of transformers' processor and model, with the weights of the same checkpoint,
    on the messages and files of a refvl trace.

    The model has the dtype and device of `vlm`; `trace` must not be pruned. Raises the same
    errors as `transformers_processor`.
    """
    folder = str(find_checkpoint(path_or_id))
    items = {kind: [i for i, p in enumerate(trace.patches) if p.media_tokens.kind == kind] for kind in PIXELS}
    inputs = transformers_inputs(transformers_processor(folder, vlm, bool(items["video"])), trace)
    source, found = f"transformers {transformers.__version__}", dict[str, Any]()
    for i, about in zip(items["video"], inputs.pop("video_metadata", ()), strict=True):
        found[f"decode media/{i}"] = torch.tensor(list(dict.fromkeys(map(int, about.frames_indices))))
    grids = {kind: inputs[names[1]] for kind, names in PIXELS.items() if names[1] in inputs}
    for kind, grid in grids.items():
        rows = inputs[PIXELS[kind][0]].split(grid.prod(1).tolist())
        found |= {f"patchify/{i}": x for i, x in zip(items[kind], rows, strict=True)}
    found["merge/input_ids"] = inputs["input_ids"][0]
    if len(grids) == 2 and isinstance(vlm.processor, Glm4vProcessor):  # transformers accepts only one kind of media
        return Stages(found, source, list(trace.layouts))
    with progress_bars(False):
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=vlm.encoder.dtype)
    model.to(vlm.device).eval()
    encoded, merged = list[Tensor](), list[dict]()

    def keep_rows(tower: Any, arguments: Any, output: Any) -> None:
        deeper = getattr(output, "deepstack_features", None) or ()  # only in Qwen3-VL
        encoded.append(torch.cat([output.pooler_output, *deeper], dim=-1))

    text = model.model.language_model
    with Readout(model, text.layers, inputs["input_ids"].shape[1]) as readout:
        if grids:
            readout.enter_context(model.model.visual.register_forward_hook(keep_rows))
        readout.enter_context(text.register_forward_pre_hook(lambda _, __, kw: merged.append(kw), with_kwargs=True))
        whole = model.generate(**inputs.to(vlm.device), max_new_tokens=max_new_tokens, do_sample=False)
    for kind, grid in grids.items():  # transformers runs the tower in this order
        tokens = (grid.prod(1) // vlm.encoder.config.spatial_merge_size**2).tolist()
        found |= {f"encode/{i}": x for i, x in zip(items[kind], encoded.pop(0).split(tokens), strict=True)}
    found["merge/inputs_embeds"] = embeds = merged[0]["inputs_embeds"][0]
    if features := merged[0].get("deepstack_visual_embeds"):
        rows = embeds.new_zeros(readout.length, sum(x.shape[1] for x in features))
        rows[merged[0]["visual_pos_masks"][0]] = torch.cat(list(features), dim=1)
        found["merge/deepstack"] = rows
    if (positions := merged[0].get("position_ids")) is not None:
        found["positions/ids"] = positions.view(-1, readout.length)[-3:].expand(3, -1)
    found |= {"prefill/last_states": readout.last_states, "prefill/first_logits": readout.first_logits}
    found["decode tokens/token_ids"] = ids = whole[0, readout.length :]
    found["decode tokens/margins"] = readout.margins(len(ids))
    return Stages({name: x.cpu() for name, x in found.items() if x is not None}, source, [*trace.layouts], trace.spans)
