"""GLM, Qwen3-VL and Qwen3.5 from folder to text: what transformers says of the same checkpoint, id for id.

Oracles: transformers' `generate`, `get_rope_index` and image processors. What each family does alone is in
`test_glm_generate.py` and `test_qwen3_generate.py`; Qwen2.5-VL, whose pixels are cut by hand, is in `test_generate.py`.
"""

from functools import partial

import numpy as np
import pytest
import torch
from checkpoint_factory import glm_transformers_model, make_glm_checkpoint, make_qwen3_checkpoint
from prompts import CONTENTS, PHOTOS, image_part, inputs_of, text_part
from random_models import load
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from refvl.paths import DATA
from refvl.pixels.media import load_image

CLIP = DATA / "clips" / "bigbuckbunny.mp4"
MOVING = np.random.default_rng(0).integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
NEW_TOKENS = 12
GLM = {
    "GLM-4.1V": ("glm4v", "Glm4vProcessor"),
    "GLM-4.6V-Flash": ("glm4v", "Glm46VProcessor"),
    "GLM-4.5V": ("glm4v_moe", "Glm4vProcessor"),
    "GLM-4.6V": ("glm4v_moe", "Glm46VProcessor"),
    "GLM, glm46v": ("glm46v", "Glm46VProcessor"),
    "GLM-GA": ("glmga", "Glm46VProcessor"),
    "GLM-OCR": ("glm_ocr", "Glm46VProcessor"),
}
MAKERS = {name: partial(make_glm_checkpoint, model_type=kind, processor_class=its) for name, (kind, its) in GLM.items()}
for name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
    MAKERS[name] = partial(make_qwen3_checkpoint, model_type=name)
ALL_CONTENTS = CONTENTS | {
    "a clip": [{"type": "video", "video": str(CLIP)}, text_part("What moves?")],
    "frames in memory and a picture": [
        text_part("See"), {"type": "video", "video": MOVING}, image_part(PHOTOS[1]), text_part("What moves?"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module", params=MAKERS)
def folder(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def vlm(folder):
    return load(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    return glm_transformers_model(folder)


def is_glm(vlm) -> bool:
    return vlm.family.name.startswith("GLM")


@pytest.mark.parametrize("name", ALL_CONTENTS)
def test_ids_and_positions_equal_transformers(vlm, oracle, name):
    """transformers cannot take an image beside a video for GLM: it counts one token for both kinds."""
    parts = [part for part in ALL_CONTENTS[name] if part["type"] != "image" or "frames" not in name or not is_glm(vlm)]
    trace = vlm.trace([{"role": "user", "content": parts}], max_new_tokens=NEW_TOKENS)
    inputs = inputs_of(vlm, trace)
    theirs = oracle.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert trace.token_ids == theirs[0, len(trace.full_ids) :].tolist()
    assert len(set(trace.token_ids)) > 3, "the oracle must be able to disagree"
    assert torch.equal(vlm.generate(**inputs, max_new_tokens=NEW_TOKENS), theirs)
    grids = {name: inputs[name] for name in inputs if name.endswith("grid_thw")}
    positions, delta = oracle.model.get_rope_index(
        input_ids=inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], **grids
    )
    assert torch.equal(trace.full_positions, positions[:, 0]) and trace.delta == int(delta)


def test_left_padded_batch_equals_transformers_and_single_prompts(vlm, oracle):
    names = ("one image", "text only", "images between text")
    traces = [vlm.trace([{"role": "user", "content": CONTENTS[n]}], max_new_tokens=NEW_TOKENS) for n in names]
    rows = [inputs_of(vlm, trace) for trace in traces]
    length = max(len(trace.full_ids) for trace in traces)
    inputs = {
        name: torch.cat([torch.nn.functional.pad(row[name], (length - row[name].shape[1], 0)) for row in rows])
        for name in ("input_ids", "mm_token_type_ids", "attention_mask")
    }
    for name in ("pixel_values", "image_grid_thw"):
        inputs[name] = torch.cat([row[name] for row in rows if name in row])
    theirs = oracle.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(vlm.generate(**inputs, max_new_tokens=NEW_TOKENS), theirs)
    assert theirs[:, length:].tolist() == [trace.token_ids for trace in traces]


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_evs_restricts_the_layout_and_keeps_every_second(vlm, oracle, rate):
    """Definition: the full run restricted to what is kept, deeper features too; `generate` prunes alike.

    Oracle of GLM's ids: transformers, given the survivors.
    """
    full = vlm.trace("What moves?", videos=[CLIP], max_new_tokens=1)
    pruned = vlm.trace("What moves?", videos=[CLIP], max_new_tokens=NEW_TOKENS, pruning_rate=rate)
    (mask,) = pruned.keep_masks
    dropped = int((~mask).sum())
    assert dropped > 0 and len(pruned.input_ids) == len(full.input_ids) - dropped
    assert torch.equal(pruned.positions, full.positions[:, pruned.keep])
    assert torch.equal(pruned.inputs_embeds, full.inputs_embeds[pruned.keep])
    assert torch.equal(pruned.deepstack, full.deepstack[pruned.keep])
    assert pruned.delta == full.delta + dropped
    for span, kept in zip(pruned.spans, mask.split(full.spans[0].num_tokens), strict=True):
        assert torch.equal(pruned.keep[span.offset :][: span.num_tokens], kept)
    is_text = vlm.processor.placeholders(full.full_ids) != vlm.token_ids["video"]
    assert pruned.keep[is_text].all()
    given = {"video_embeds": full.embeds, "video_grid_thw": full.layouts, "pruning_rate": rate}
    ids = vlm.generate(full.full_ids[None], **given, max_new_tokens=NEW_TOKENS)
    assert ids[0, len(full.full_ids) :].tolist() == pruned.token_ids
    if is_glm(vlm):
        theirs = oracle.generate(
            input_ids=pruned.input_ids[None], inputs_embeds=pruned.inputs_embeds[None],
            position_ids=pruned.positions[:, None], attention_mask=torch.ones(1, len(pruned.input_ids)),
            max_new_tokens=NEW_TOKENS, do_sample=False,
        )  # fmt: skip
        assert pruned.token_ids == theirs[0, len(pruned.input_ids) :].tolist()


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda p: p.stem)
def test_pictures_equal_transformers_pillow_processor(folder, vlm, photo):
    processor = Glm4vImageProcessorPil if is_glm(vlm) else Qwen2VLImageProcessorPil
    theirs = processor.from_pretrained(folder)(images=[load_image(photo)], return_tensors="pt")
    [ours] = vlm.processor.patchify([load_image(photo)])
    assert theirs["image_grid_thw"].tolist() == [list(ours.layout)]
    assert torch.equal(ours.pixel_values, theirs["pixel_values"])
