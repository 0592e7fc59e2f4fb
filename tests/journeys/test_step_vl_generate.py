"""Step3-VL-10B and Step-3.7 from folder to text. Oracles: transformers' whole Step-3.7 on the same folder; for
Step3-VL-10B, which transformers lacks, its tower of Step-3.7 and its Qwen3, on the same weights.

Crops and prompts are Step3's, which tests/journeys/test_step3_generate.py holds.
"""

import numpy as np
import pytest
import torch
from checkpoint_factory import make_step_vl_checkpoint, step_vision_model
from closeness import assert_agree
from PIL import Image
from random_models import NEEDS_5_23, random_folder, random_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Qwen3ForCausalLM

import refvl

pytestmark = NEEDS_5_23
RANDOM = np.random.default_rng(0)
SMALL = Image.fromarray(RANDOM.integers(0, 256, (60, 70, 3), dtype=np.uint8))  # no crops
SQUARE = Image.fromarray(RANDOM.integers(0, 256, (112, 112, 3), dtype=np.uint8))  # 2 x 2
WIDE = Image.fromarray(RANDOM.integers(0, 256, (60, 150, 3), dtype=np.uint8))
REQUESTS = {"text": [], "no crops": [SMALL], "crops": [SQUARE], "several": [SMALL, WIDE, SQUARE]}
NEW_TOKENS = 10


def squares_of(trace) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(overviews, crops, crops of each image) as pixels, from the patch rows of a trace."""
    overviews, crops, counts = [], [], []
    for patches in trace.patches:
        pixels, count = patches.pixel_values, patches.layout.crops
        for i, side in enumerate([4] * count + [8]):
            rows, pixels = pixels[: side**2], pixels[side**2 :]
            square = rows.view(side, side, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, side * 14, side * 14)
            (crops if i < count else overviews).append(square)
        counts.append(count)
    return torch.stack(overviews), torch.stack(crops) if crops else None, counts


@pytest.mark.thorough
@pytest.mark.parametrize("images", REQUESTS.values(), ids=REQUESTS)
@torch.inference_mode()
def test_step_3_7_is_transformers(images):
    """Oracle: the same folder, prompt and pixels through transformers' whole model."""
    theirs = AutoModelForImageTextToText.from_pretrained(random_folder("Step-3.7"), dtype=torch.float32).eval()
    trace = random_model("Step-3.7").trace("What is it?", images=images, max_new_tokens=NEW_TOKENS)
    inputs = {"input_ids": trace.full_ids[None], "attention_mask": torch.ones_like(trace.full_ids)[None]}
    if images:
        overviews, crops, counts = squares_of(trace)
        inputs |= {"pixel_values": overviews, "pixel_values_local": crops, "num_local_patches": counts}
    ids = theirs.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(trace.full_ids) :]
    assert trace.token_ids == ids.tolist()
    assert len(set(trace.token_ids)) > 3, "the oracle must be able to disagree"


@pytest.mark.thorough
@pytest.mark.parametrize("images", REQUESTS.values(), ids=REQUESTS)
@torch.inference_mode()
def test_step3_vl_10b_is_transformers_tower_and_qwen3(images):
    """Oracle: transformers' two parts, joined here."""
    folder = random_folder("Step3-VL-10B")
    vlm = random_model("Step3-VL-10B")
    weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items() if name[:2] != "vi"}
    text = Qwen3ForCausalLM.from_pretrained(None, config=vlm.config.text_config, state_dict=weights).eval()
    trace = vlm.trace("What is it?", images=images, max_new_tokens=NEW_TOKENS)
    embeds = text.get_input_embeddings()(trace.full_ids)
    if images:
        tower, projector = step_vision_model(folder)
        rows, (overviews, crops, counts) = [], squares_of(trace)
        for overview, count in zip(overviews, counts, strict=True):
            rows += [tower(square[None]).last_hidden_state[0] for square in ([] if crops is None else crops[:count])]
            rows.append(tower(overview[None]).last_hidden_state[0])
            crops = crops if crops is None else crops[count:]
        rows = torch.cat(rows) @ projector.T
        assert_agree(torch.cat(trace.embeds), rows, vlm.encoder)
        embeds[trace.full_ids == vlm.config.image_token_id] = rows
    ids = text.generate(inputs_embeds=embeds[None], max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    assert trace.token_ids == ids.tolist() and len(set(trace.token_ids)) > 3


def test_both_orders_of_rotary_pairs_load(tmp_path):
    """The released file turns neighbours, the file of transformers' names halves. Oracle: the same answers and rows."""
    folder = make_step_vl_checkpoint(tmp_path / "step", "step3p7")
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    theirs.save_pretrained(folder, save_original_format=False)
    names = load_file(folder / "model.safetensors")
    assert "model.vision_model.layers.0.self_attn.q_proj.weight" in names
    again, vlm = refvl.load(folder, device="cpu", progress=False), random_model("Step-3.7")
    for part in ("encoder", "language_model"):
        weights, wanted = getattr(again, part).state_dict(), getattr(vlm, part).state_dict()
        assert weights.keys() == wanted.keys() and all(torch.equal(weights[n], wanted[n]) for n in wanted)


def test_layouts_are_those_of_transformers():
    """Oracle: transformers' image processor of Step-3.7; it cuts no square whose long side is exactly image_size."""
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

    theirs = Step3p7ImageProcessor()
    processor = refvl.load({"model_type": "step_robotics"}, weights="random", device="meta").processor
    draw = np.random.default_rng(3)
    sizes = [(int(w), int(h)) for w, h in draw.integers(4, 3600, (400, 2))]
    for width, height in [*sizes, (727, 300), (729, 500), (20, 400)]:
        layout = processor.layout_of(Image.new("1", (width, height)))
        *_, columns, rows, _ = theirs._plan_patches(width, height, 728, 504)
        assert (layout.rows, layout.columns) == (rows, columns), (width, height)
    assert processor.layout_of(Image.new("1", (728, 728))).crops == 4
    assert theirs.get_number_of_image_patches(728, 728) == 0
