"""The stages of transformers' own model, recorded with hooks,
so that `refvl.compare` can explain differences.

transformers prepares the images (its Pillow backend) and runs its own tower, merge, positions and
text model. It gets refvl's prompt. For videos it also gets refvl's patch rows, because its own
video processor samples files itself and needs torchvision. So neither the prompt nor these rows are
recorded.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText

from refvl.language.loading import progress_bars
from refvl.model import VLM
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
PIXELS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def transformers_inputs(vlm: VLM, trace: Trace) -> dict[str, Any]:
    """Return the prompt and pixels of a trace, before pruning,
    as inputs for transformers' `generate`.

    Raises ValueError for families whose model transformers does not have. transformers' GLM marks
    images and videos with the same token, so it also raises ValueError for a GLM prompt with both.
    """
    if type(vlm.processor) not in IMAGE_PROCESSORS:
        reason = "because transformers' model can be recorded only for these families"
        raise ValueError(f"with: expected a Qwen or GLM model, {reason}, got {vlm.family.name}")
    by_kind = {kind: [p for p in trace.patches if p.media_tokens.kind == kind] for kind in PIXELS}
    is_glm = isinstance(vlm.processor, Glm4vProcessor)
    if is_glm and all(by_kind.values()):
        wanted = f"only images or only videos for transformers' {vlm.family.name}"
        raise ValueError(f"with: expected {wanted}, got both")
    kinds = vlm.processor.placeholders(trace.full_ids)
    is_image, is_video = (kinds == vlm.token_ids[kind] for kind in PIXELS)
    ids = torch.where(is_video, vlm.token_ids["image"], trace.full_ids) if is_glm else trace.full_ids
    types = is_image.int() + 2 * is_video.int()
    inputs = {"input_ids": ids, "mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
    inputs = {name: row[None] for name, row in inputs.items()}
    for kind, (rows, grids) in PIXELS.items():
        if items := by_kind[kind]:
            inputs[rows] = torch.cat([p.pixel_values for p in items])
            inputs[grids] = torch.tensor([p.layout for p in items])
    if by_kind["video"] and isinstance(vlm.processor, Qwen2_5_VLProcessor):
        per_second = vlm.config.vision_config.tokens_per_second
        seconds = [p.media_tokens.t_factor / per_second for p in by_kind["video"]]
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    return inputs


@torch.inference_mode()
def record_transformers(path_or_id: str, vlm: VLM, trace: Trace, *, max_new_tokens: int = 128) -> Stages:
    """Run transformers' model, with the weights of the same checkpoint,
    on the media and the prompt of a refvl trace.

    The model has the dtype and device of `vlm`; `trace` must not be pruned. Raises ValueError as
    `transformers_inputs` does.
    """
    inputs, layouts = transformers_inputs(vlm, trace), list(trace.layouts)
    prepare = getattr(transformers, IMAGE_PROCESSORS[type(vlm.processor)]).from_pretrained(path_or_id)
    with progress_bars(False):
        model: Any = AutoModelForImageTextToText.from_pretrained(path_or_id, dtype=vlm.encoder.dtype)
    model.to(vlm.device).eval()
    items = {kind: [i for i, p in enumerate(trace.patches) if p.media_tokens.kind == kind] for kind in PIXELS}
    source, found = f"transformers {transformers.__version__}", dict[str, Any]()
    if images := items["image"]:
        prepared = prepare(images=[trace.media[i] for i in images], return_tensors="pt")
        inputs |= {name: prepared[name] for name in PIXELS["image"]}
        grids = prepared["image_grid_thw"]
        rows = prepared["pixel_values"].split(grids.prod(1).tolist())
        found |= {f"patchify/{i}": x for i, x in zip(images, rows, strict=True)}
        if grids.tolist() != [list(layouts[i]) for i in images]:
            return Stages(found, source, layouts)  # the prompt has a different number of placeholders
    encoded, merged = list[Tensor](), list[dict]()

    def keep_rows(tower: Any, arguments: Any, output: Any) -> None:
        deeper = getattr(output, "deepstack_features", None) or ()  # of Qwen3-VL
        encoded.append(torch.cat([output.pooler_output, *deeper], dim=-1))

    text = model.model.language_model
    with Readout(model, text.layers, inputs["input_ids"].shape[1]) as readout:
        readout.enter_context(model.model.visual.register_forward_hook(keep_rows))
        keep_inputs = text.register_forward_pre_hook(lambda _, __, kw: merged.append(kw), with_kwargs=True)
        readout.enter_context(keep_inputs)
        on_device = {name: x.to(vlm.device) for name, x in inputs.items()}
        ids = model.generate(**on_device, max_new_tokens=max_new_tokens, do_sample=False)[0, readout.length :]
    for kind, members in items.items():  # transformers runs the tower in this order
        if members:
            tokens = inputs[PIXELS[kind][1]].prod(1) // vlm.encoder.config.spatial_merge_size**2
            found |= {f"encode/{i}": x for i, x in zip(members, encoded.pop(0).split(tokens.tolist()), strict=True)}
    found["merge/inputs_embeds"] = embeds = merged[0]["inputs_embeds"][0]
    if features := merged[0].get("deepstack_visual_embeds"):
        rows = embeds.new_zeros(readout.length, sum(x.shape[1] for x in features))
        rows[merged[0]["visual_pos_masks"][0]] = torch.cat(list(features), dim=1)
        found["merge/deepstack"] = rows
    found["positions/ids"] = merged[0]["position_ids"][-3:, 0]
    found |= {"prefill/last_states": readout.last_states, "prefill/first_logits": readout.first_logits}
    found |= {"decode tokens/token_ids": ids, "decode tokens/margins": readout.margins(len(ids))}
    tensors = {name: x.cpu() for name, x in found.items() if x is not None}
    return Stages(tensors, source, layouts, trace.spans)
