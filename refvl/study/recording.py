"""The stages of transformers' own model, recorded with hooks, so that `refvl.compare` can explain differences.

transformers prepares the images (its Pillow backend) and runs its own tower, merge, positions and text model. It gets
refvl's prompt. For videos it also gets refvl's patch rows, because its own video processor samples files itself and
needs torchvision. So neither the prompt nor these rows are recorded.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText

from refvl.language.loading import progress_bars
from refvl.model import VLM
from refvl.pixels.media import Video
from refvl.processors.glm4v import Glm4vProcessor, Glm46VProcessor, GlmgaProcessor
from refvl.processors.qwen2_5_vl import Qwen2_5_VLProcessor
from refvl.processors.qwen3_vl import Qwen3VLProcessor
from refvl.study.comparison import Stages
from refvl.study.readout import Readout
from refvl.study.report import Trace

IMAGE_PROCESSORS: dict[type, str] = {
    Qwen2_5_VLProcessor: "Qwen2VLImageProcessorPil", Qwen3VLProcessor: "Qwen2VLImageProcessorPil",
    Glm4vProcessor: "Glm4vImageProcessorPil", Glm46VProcessor: "Glm46VImageProcessorPil",
    GlmgaProcessor: "GlmgaImageProcessorPil",
}  # fmt: skip


def transformers_inputs(vlm: VLM, trace: Trace) -> dict[str, Any]:
    """Return the prompt and pixels of a trace, before pruning, as inputs for transformers' `generate`.

    Raises ValueError for families whose model transformers does not have. transformers' GLM marks images and videos
    with the same token, so it also raises ValueError for a GLM prompt with both.
    """
    if type(vlm.processor) not in IMAGE_PROCESSORS:
        reason = "because transformers' model can be recorded only for these families"
        raise ValueError(f"with: expected a Qwen or GLM model, {reason}, got {vlm.family.name}")
    kinds = vlm.processor.placeholders(trace.full_ids)
    is_video, is_glm = kinds == vlm.token_ids["video"], isinstance(vlm.processor, Glm4vProcessor)
    ids = torch.where(is_video, vlm.token_ids["image"], trace.full_ids) if is_glm else trace.full_ids
    types = (kinds == vlm.token_ids["image"]).int() + 2 * is_video.int()
    inputs = {"input_ids": ids[None], "mm_token_type_ids": types[None], "attention_mask": torch.ones_like(ids)[None]}
    images = [p for p in trace.patches if p.media_tokens.kind == "image"]
    videos = [p for p in trace.patches if p.media_tokens.kind == "video"]
    if is_glm and images and videos:
        raise ValueError(f"with: expected only images or only videos for transformers' {vlm.family.name}, got both")
    if images:
        inputs["pixel_values"] = torch.cat([p.pixel_values for p in images])
        inputs["image_grid_thw"] = torch.tensor([p.layout for p in images])
    if videos:
        inputs["pixel_values_videos"] = torch.cat([p.pixel_values for p in videos])
        inputs["video_grid_thw"] = torch.tensor([p.layout for p in videos])
    if videos and isinstance(vlm.processor, Qwen2_5_VLProcessor):
        per_second = vlm.config.vision_config.tokens_per_second
        inputs["second_per_grid_ts"] = torch.tensor([p.media_tokens.t_factor / per_second for p in videos])
    return inputs


@torch.inference_mode()
def record_transformers(path_or_id: str, vlm: VLM, trace: Trace, *, max_new_tokens: int = 128) -> Stages:
    """Run transformers' model, with the weights of the same checkpoint, on the media and the prompt of a refvl trace.

    The model has the dtype and device of `vlm`; `trace` must not be pruned. Raises ValueError as `transformers_inputs`
    does.
    """
    inputs, places = transformers_inputs(vlm, trace), range(len(trace.media))
    prepare = getattr(transformers, IMAGE_PROCESSORS[type(vlm.processor)]).from_pretrained(path_or_id)
    with progress_bars(False):
        model: Any = AutoModelForImageTextToText.from_pretrained(path_or_id, dtype=vlm.encoder.dtype)
    model.to(vlm.device).eval()
    videos = [i for i in places if isinstance(trace.media[i], Video)]
    images = [i for i in places if i not in videos]
    source, layouts, found = f"transformers {transformers.__version__}", list(trace.layouts), dict[str, Tensor]()
    if images:
        prepared = prepare(images=[trace.media[i] for i in images], return_tensors="pt")
        inputs |= {name: prepared[name] for name in ("pixel_values", "image_grid_thw")}
        rows = prepared["pixel_values"].split(prepared["image_grid_thw"].prod(1).tolist())
        found |= {f"patchify/{i}": x for i, x in zip(images, rows, strict=True)}
        if prepared["image_grid_thw"].tolist() != [list(trace.layouts[i]) for i in images]:
            return Stages(found, source, layouts)  # the prompt has a different number of placeholders
    encoded, merged = list[Tensor](), list[dict]()

    def keep_rows(tower: Any, arguments: Any, output: Any) -> None:
        deeper = getattr(output, "deepstack_features", None) or ()  # of Qwen3-VL
        encoded.append(torch.cat([output.pooler_output, *deeper], dim=-1))

    hooks = [
        model.model.visual.register_forward_hook(keep_rows),
        model.model.language_model.register_forward_pre_hook(lambda _, __, kw: merged.append(kw), with_kwargs=True),
    ]
    on_device = {name: x.to(vlm.device) for name, x in inputs.items()}
    readout = Readout(model, model.model.language_model.layers, inputs["input_ids"].shape[1])
    ids = model.generate(**on_device, max_new_tokens=max_new_tokens, do_sample=False)[0, readout.length :]
    for hook in (*hooks, readout):
        hook.remove()
    for kind, members in (("image", images), ("video", videos)):  # transformers runs the tower in this order
        if members:
            tokens = inputs[f"{kind}_grid_thw"].prod(1) // vlm.encoder.config.spatial_merge_size**2
            found |= {f"encode/{i}": x for i, x in zip(members, encoded.pop(0).split(tokens.tolist()), strict=True)}
    found["merge/inputs_embeds"] = merged[0]["inputs_embeds"][0]
    if features := merged[0].get("deepstack_visual_embeds"):
        rows = found["merge/inputs_embeds"].new_zeros(readout.length, sum(x.shape[1] for x in features))
        rows[merged[0]["visual_pos_masks"][0]] = torch.cat(list(features), dim=1)
        found["merge/deepstack"] = rows
    found["positions/ids"] = merged[0]["position_ids"][-3:, 0]
    made = {"prefill/last_states": readout.last_states, "prefill/first_logits": readout.first_logits}
    made |= {"decode tokens/token_ids": ids, "decode tokens/margins": readout.margins(len(ids))}
    found |= {name: x for name, x in made.items() if x is not None}
    return Stages({name: x.cpu() for name, x in found.items()}, source, layouts, trace.spans)
