"""Every family from folder to text. Oracle: transformers' model of the weights.

Where transformers lacks the whole, prompts are written by hand, media go through the tower one by
one, and a text model of transformers reads everything again at each step.
What one family does alone follows below; the golden prompts are vLLM's.

transformers 5.10 to 5.23 and vLLM 0.32 keep the marks that Qwen3-VL's chat template writes around a
video. In 4.57, those of the frames take their place, as in refvl. Prompts go to transformers as
ids, so that only the tests of the wording see a difference.
"""

import itertools
import json
import math
import re
import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import checkpoint_factory_minicpmv as minicpmv
import numpy as np
import pytest
import torch
from checkpoint_factory import (
    change_json,
    change_weights,
    make_qwen3_checkpoint,
    make_step3_checkpoint,
    step3_tokenizer,
    step_vision_model,
)
from checkpoint_factory_minicpmv import HIDDEN, QUERIES, VERSIONS, WITH_CLIPS, token
from closeness import assert_agree
from PIL import Image
from prompts import PHOTOS, inputs_of
from random_models import NEEDS_5_23, WITHOUT_VIDEOS, load, make, random_folder, random_model, their_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, ProcessorMixin, Qwen3ForCausalLM
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor as HFGlm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor as HFGlm46VProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as HFQwen3VLProcessor
from transformers.video_utils import VideoMetadata

import refvl
from refvl.language.step3_config import Step3VLConfig
from refvl.paths import DATA
from refvl.pixels.by_hand import smart_resize
from refvl.pixels.crops import CropLayout, cut_crops, prepare_pixels
from refvl.pixels.media import load_video
from refvl.pixels.patch_configs import Qwen3VLPatchConfig, smart_resize_video
from refvl.pixels.slices import SliceConfig, SliceGroup, plan_slices
from refvl.positions.timestamps import sample_video_frames
from refvl.processors.glm4v import Glm46VProcessor
from refvl.processors.minicpmv import MiniCPMV4_5Processor
from refvl.processors.minicpmv_video import patches_per_token
from refvl.processors.qwen3_vl import even_indices
from refvl.processors.step3_vl import MARKS as STEP3_MARKS
from refvl.processors.step3_vl import Step3VLProcessor

NEW_TOKENS = 12
RANDOM = np.random.default_rng(0)
CLIP = DATA / "clips" / "bigbuckbunny.mp4"
GOLDEN = json.loads((DATA.parent / "tests" / "golden" / "step3_vl.json").read_text())
GLM = ["GLM-4.1V", "GLM-4.6V-Flash", "GLM-4.5V", "GLM-4.6V", "glm46v", "glmga", "GLM-OCR"]
GRIDS = ["Qwen2.5-VL", *GLM, "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
MINICPM = [f"MiniCPM-V {version}" for version in VERSIONS]
FOLDED = ["MiniCPM-V 4.6", "MiniCPM-V 4.6, 4x", "MiniCPM-V 4.7"]
NEWER = ["Step3-VL-10B", "Step-3.7", *FOLDED]


def noise(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (*shape, 3), dtype=np.uint8)


SIDES = {"SMALL": (50, 60), "SQUARE": (220, 220), "WIDE": (100, 300), "STRIP": (40, 80)}  # height, width in pixels
PICTURES = {name: Image.fromarray(noise(*sides)) for name, sides in SIDES.items()}
MOVING = noise(5, 40, 60)
CLIPS = {"MOVING": MOVING, "LARGE": noise(2, 200, 200), "FILE": CLIP}
SLICES = {"SMALL": None, "SQUARE": (2, 2), "WIDE": (3, 1), "STRIP": (2, 1)}  # of MiniCPM-V to 4.5: columns, rows
FRAMES_OF_FILE = {"2.6": 6, "4.0": 6, "4.5": 16}  # of 5.28 seconds: one a second, or three
CROPS = {"SMALL": (0, 0), "SQUARE": (4, 4), "WIDE": (2, 6), "STRIP": (1, 2)}  # of Step3: rows, columns
REQUESTS = {  # what a user's turn holds, in order
    "text": ["Where is the circle?"],
    "side by side": ["SMALL", "WIDE", "SQUARE", "STRIP", "Which?"],
    "between text": ["First", "SQUARE", "then", "SMALL", "which is red?"],
    "a line between": ["SQUARE", "\n", "SMALL", "\n\nWhich?"],
    "large frames": ["LARGE", "\nWhat moves?"],
    "file": ["FILE", "What moves?"],
    "both": ["SQUARE", "then", "MOVING", "SMALL", "And?"],
}


def turn(parts: list[str]) -> list[dict]:
    def part(name: str) -> dict:
        kind = "image" if name in PICTURES else "video" if name in CLIPS else "text"
        return {"type": kind, kind: (PICTURES | CLIPS).get(name, name)}

    return [{"role": "user", "content": [part(name) for name in parts]}]


# ---------------------------------------------------------------------------------- oracles: transformers' whole models


def squares_of(vlm, picture: Image.Image) -> list[torch.Tensor]:
    """Step3's crops, then the overview, each (3, side, side)."""
    config = vlm.processor.image_config
    overview, crops, _ = cut_crops(picture, config)
    squares = [prepare_pixels(crop, config.crop_size, config) for crop in crops]
    return [*squares, prepare_pixels(overview, config.image_size, config)]


def step_inputs(name: str, trace, parts) -> dict:
    inputs = {"input_ids": trace.full_ids[None], "attention_mask": torch.ones_like(trace.full_ids)[None]}
    squares = [squares_of(random_model(name), PICTURES[part]) for part in parts if part in PICTURES]
    if squares:
        crops = [crop for picture in squares for crop in picture[:-1]]
        inputs["pixel_values"] = torch.stack([picture[-1] for picture in squares])
        inputs["pixel_values_local"] = torch.stack(crops)
        inputs["num_local_patches"] = [len(picture) - 1 for picture in squares]
    return inputs


class FramesAsPictures:
    """In place of transformers' video processor, which needs torchvision: each frame through its
    image processor."""

    slice_mode, model_input_names = True, ("pixel_values_videos", "target_sizes_videos")

    def __init__(self, pictures):
        self.pictures, self.downsample_mode = pictures, pictures.downsample_mode

    def __call__(self, videos, **options) -> dict:
        made = self.pictures([Image.fromarray(frame) for video in videos for frame in video], return_tensors="pt")
        return {
            "pixel_values_videos": made["pixel_values"],
            "target_sizes_videos": made["target_sizes"],
            "grids_videos": np.array(made["grids"]),
            "num_frames_per_video": [len(video) for video in videos],
        }


@cache
def folded_processor(name: str):
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
    from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor

    folder = random_folder(name)
    pictures = MiniCPMV4_6ImageProcessorPil.from_pretrained(folder)
    parts = {"image_processor": pictures, "video_processor": FramesAsPictures(pictures)}
    made = MiniCPMV4_7Processor if "4.7" in name else MiniCPMV4_6Processor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *arguments: None)
        return made(**parts, tokenizer=AutoTokenizer.from_pretrained(folder))


def folded_inputs(name: str, trace, parts) -> dict:
    """What transformers' processor makes of the same turn: prompt and pixels as ours."""
    vlm = random_model(name)
    text = vlm.processor.apply_template(vlm.processor.messages(turn(parts)))
    images, videos = ([media[part] for part in parts if part in media] or None for media in (PICTURES, CLIPS))
    made = folded_processor(name)(
        text=[text], images=images, videos=videos, return_mm_token_type_ids=True, return_tensors="pt"
    )
    inputs = dict(made)
    assert trace.full_ids.tolist() == inputs["input_ids"][0].tolist()
    for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        rows = [p.pixel_values for p in trace.patches if p.media_tokens.kind == kind]
        assert bool(rows) == (key in inputs)
        if rows:  # their strip (1, 3, P, N * P) -> (N, 3*P*P)
            strip = inputs[key][0].unflatten(-1, (-1, 14)).permute(2, 0, 1, 3).flatten(1)
            torch.testing.assert_close(torch.cat(rows), strip, rtol=0, atol=1e-6)
    if "4.7" not in name:
        del inputs["mm_token_type_ids"]
    return inputs


INPUTS = dict.fromkeys(GRIDS, lambda name, trace, parts: inputs_of(random_model(name), trace))
INPUTS |= {"Step-3.7": step_inputs} | dict.fromkeys(FOLDED, folded_inputs)


def ask_transformers(name: str, trace, parts) -> tuple[list[int], torch.Tensor]:
    model, inputs = their_model(name), INPUTS[name](name, trace, parts)
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    if name in GRIDS:
        assert torch.equal(random_model(name).generate(**inputs, max_new_tokens=NEW_TOKENS), ids)
    positions = torch.arange(len(trace.full_ids)).expand(3, -1)
    if name in GRIDS or ("4.7" in name and trace.patches):
        sizes = {key: inputs.get(key) for key in inputs if key.endswith("grid_thw") or "target_sizes" in key}
        types = {"input_ids": inputs["input_ids"], "mm_token_type_ids": inputs["mm_token_type_ids"]}
        positions, delta = model.model.get_rope_index(**types, **sizes)
        positions = positions[:, 0]
        assert trace.delta == int(delta)
    return ids[0, len(trace.full_ids) :].tolist(), positions


# ------------------------------------------------------------------------------- oracles: prompts and loops by hand


@cache
def text_oracle(name: str):
    """(embed ids, logits of embeddings) from the weights by name; of Step3-VL, which nothing else
    reads, our own."""
    if name == "Step3-VL":
        model = random_model(name).language_model
    elif name == "Step3-VL-10B":
        weights = load_file(random_folder(name) / "model.safetensors")
        weights = {key: weight.float() for key, weight in weights.items() if not key.startswith("vi")}
        config = random_model(name).config.text_config
        model = Qwen3ForCausalLM.from_pretrained(None, config=config, state_dict=weights).eval()
    else:
        version = name.split()[1]
        weights = {name: w for name, w in minicpmv.random_weights(version).items() if name.startswith("llm.")}
        model = minicpmv.TEXT_CLASSES[version][1](minicpmv.text_config(version)).eval()
        model.load_state_dict({name.removeprefix("llm."): w for name, w in weights.items()})
    scale, table = 3 if name == "MiniCPM-V 2.0" else 1, model.get_input_embeddings()
    return lambda ids: scale * table(ids), lambda embeds: model(inputs_embeds=embeds[None]).logits[0]


def minicpmv_prompt(version: str, parts: list[str]) -> list[int]:
    queries, number, pieces = "<unk>" * QUERIES, 0, []
    overview, piece = f"<image>{queries}</image>", f"<slice>{queries}</slice>"
    for part in parts:
        columns, rows = SLICES.get(part) or (0, 0)
        if part in CLIPS:
            pieces += [overview] * (FRAMES_OF_FILE[version] if part == "FILE" else len(CLIPS[part]))
        elif part not in PICTURES:
            pieces.append(part)
        elif version in WITH_CLIPS:
            pieces.append(f"<image_id>{number}</image_id>{overview}" + "\n".join([piece * columns] * rows))
            number += 1
        else:
            lines = "\n".join([overview * columns] * rows)
            pieces.append(overview + (f"<slice>{lines}</slice>" if rows else ""))
    content = "\n".join(pieces)
    text = {
        "2.0": f"<用户>{content}<AI>",
        "2.5": f"<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    }.get(version, f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")
    bos = [token("<s>")] if version in ("2.0", "2.5", "4.0") else []
    return bos + minicpmv.tokenizer().encode(text).ids


def step3_prompt(parts: list[str]) -> list[int]:
    """1 token for a crop, 4 for an overview."""

    def written(part: str) -> str:
        rows, columns = CROPS[part]
        crops = "<patch_newline>".join(["<patch_start><im_patch><patch_end>" * columns] * rows)
        return crops + "<im_start>" + "<im_patch>" * 4 + "<im_end>"

    content = "".join(written(part) if part in PICTURES else part for part in parts)
    text = f"<|begin_of_sentence|><|BOT|>user\n{content}<|EOT|><|BOT|>assistant\n"
    return step3_tokenizer().encode(text, add_special_tokens=False).ids


def rows_by_hand(name: str, part: str) -> torch.Tensor:
    """A medium's embeddings, its squares one by one.

    A frame is what an overview is, but for 4.5, which reads times.
    """
    vlm = random_model(name)
    if part in CLIPS and name != "MiniCPM-V 4.5":
        [video] = vlm.processor.decode(vlm.processor.messages("", videos=[CLIPS[part]]))
        return torch.cat([vlm.encode([Image.fromarray(frame)])[0][:QUERIES] for frame in video.frames])
    if name in MINICPM:
        return vlm.encode([PICTURES[part]])[0] if part in PICTURES else vlm.encode(videos=[CLIPS[part]])[0]
    squares = squares_of(vlm, PICTURES[part])
    if name == "Step3-VL":
        return torch.cat([vlm.encoder(square[None])[0] for square in squares])
    tower, projector = step_vision_model(random_folder(name))
    return torch.cat([tower(square[None]).last_hidden_state[0] for square in squares]) @ projector.T


def ask_by_hand(name: str, trace, parts) -> tuple[list[int], torch.Tensor]:
    """A loop without a cache; media stand where the prompt has placeholders."""
    vlm, (embed, logits) = random_model(name), text_oracle(name)
    is_step = name.startswith("Step")
    ids = torch.tensor(step3_prompt(parts) if is_step else minicpmv_prompt(name.split()[1], parts))
    assert trace.full_ids.tolist() == ids.tolist()
    is_medium = ids == (vlm.config.image_token_id if is_step else token("<unk>"))
    embeds = embed(ids)
    assert torch.equal(trace.inputs_embeds[~is_medium], embeds[~is_medium])
    rows = [rows_by_hand(name, part) for part in parts if part in PICTURES | CLIPS]
    if rows:
        assert_agree(trace.inputs_embeds[is_medium], torch.cat(rows), vlm.encoder)
        embeds[is_medium] = torch.cat(rows)
    stop, answer = vlm.language_model.generation_config.eos_token_id, []
    while len(answer) < NEW_TOKENS and not (answer and answer[-1] in (stop if isinstance(stop, list) else [stop])):
        answer.append(int(logits(embeds)[-1].argmax()))
        embeds = torch.cat([embeds, embed(torch.tensor(answer[-1:]))])
    assert trace.delta == 0
    return answer, torch.arange(len(ids)).expand(3, -1)


@cache
def asked(name: str, request: str):
    """(the request, its trace). transformers takes no image beside a video for GLM: it counts one
    token for both."""
    parts = REQUESTS[request]
    if name in GLM and CLIPS.keys() & {*parts}:
        parts = [part for part in parts if part not in PICTURES]
    return parts, random_model(name).trace(turn(parts), max_new_tokens=NEW_TOKENS)


def requests_of(name: str) -> list[str]:
    """What a family takes. transformers' processor of MiniCPM-V 4.6 cannot open a file, and its
    model of Qwen2.5-VL places the text after a video elsewhere (`test_generate.py`)."""
    left_out = {"FILE"} if name in FOLDED else set()
    if name in ("Qwen2.5-VL", *WITHOUT_VIDEOS):
        left_out = CLIPS.keys()
    return [request for request, parts in REQUESTS.items() if not left_out & {*parts}]


FAMILIES = [*GRIDS, *MINICPM, "Step3-VL", *NEWER]
MARKS = {name: [NEEDS_5_23, pytest.mark.thorough] for name in NEWER}
CASES = [
    pytest.param(name, request, marks=MARKS.get(name, []), id=f"{name}, {request}")
    for name in FAMILIES
    for request in requests_of(name)
]


@pytest.mark.parametrize(("name", "request_"), CASES)
@torch.inference_mode()
def test_prompts_positions_and_ids_equal_the_oracle(name, request_):
    parts, trace = asked(name, request_)
    ids, positions = (ask_transformers if name in INPUTS else ask_by_hand)(name, trace, parts)
    assert trace.token_ids == ids
    assert torch.equal(trace.full_positions, positions)


# ------------------------------------------------------------------------------------------------------------- grids


def worded(name: str, frames) -> tuple[list[int], str]:
    """Our ids of a picture and a clip, and the template's text with the picture's tokens repeated."""
    processor = random_model(name).processor
    messages = processor.messages("What moves?", [PHOTOS[0]], [frames])
    media = processor.extents(processor.decode(messages))
    tokenizer = AutoTokenizer.from_pretrained(random_folder(name))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    mark = "<|image|>" if name in GLM else "<|image_pad|>"
    return processor.tokenize(messages, media), text.replace(mark, mark * media[0].num_tokens)


@pytest.mark.parametrize("frames", [MOVING, CLIP], ids=["odd", "file"])
@pytest.mark.parametrize("name", GLM)
def test_glm_writes_a_clip_as_transformers_does(name, frames):
    """Oracle: the release's `replace_video_token`, which truncates seconds for GLM-4.1V and keeps
    tenths for GLM-4.6V."""
    processor = random_model(name).processor
    [clip] = processor.patchify(processor.decode(processor.messages("", videos=[frames])))
    hf = HFGlm46VProcessor if isinstance(processor, Glm46VProcessor) else HFGlm4vProcessor
    theirs = hf.__new__(hf)
    theirs.image_token, theirs.video_processor = "<|image|>", SimpleNamespace(merge_size=2)
    read = [clip.source.indices[i] for i in processor.frames_read(clip.source)]
    metadata = VideoMetadata(clip.source.total_num_frames, fps=clip.source.source_fps, frames_indices=read)
    inputs = {"video_grid_thw": torch.tensor([clip.layout]), "video_metadata": [metadata]}
    ids, text = worded(name, frames)
    written = text.replace("<|video|>", theirs.replace_video_token(inputs, 0))
    assert ids == AutoTokenizer.from_pretrained(random_folder(name))(written)["input_ids"]


@pytest.mark.parametrize("frames", [noise(6, 90, 120), MOVING, MOVING[:1], CLIP], ids=["six", "odd", "one", "file"])
def test_qwen3_writes_a_clip_as_transformers_does(frames, monkeypatch):
    """Oracle: their `replace_video_token`, in place of the template's three tokens (4.57), or of the one in the
    middle (5.10 and later, if `outer_tokens` is set)."""
    processor = random_model("qwen3_vl").processor
    [clip] = processor.patchify(processor.decode(processor.messages("", videos=[frames])))
    theirs = HFQwen3VLProcessor.__new__(HFQwen3VLProcessor)
    theirs.tokenizer = AutoTokenizer.from_pretrained(random_folder("qwen3_vl"))
    theirs.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    marks = ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>")
    theirs.vision_start_token, theirs.video_token, theirs.vision_end_token = marks
    metadata = SimpleNamespace(fps=clip.source.source_fps, frames_indices=list(clip.source.indices))
    inputs = {"video_grid_thw": torch.tensor([clip.layout]), "video_metadata": [metadata]}
    written = theirs.replace_video_token(inputs, 0)
    ids, text = worded("qwen3_vl", frames)
    assert ids == theirs.tokenizer(text.replace("".join(marks), written))["input_ids"]
    monkeypatch.setattr(processor, "outer_tokens", True)
    ids, text = worded("qwen3_vl", frames)
    assert ids == theirs.tokenizer(text.replace(marks[1], written))["input_ids"]
    assert len(re.findall(r"<\d+\.\d seconds><\|vision_start\|>", written)) == clip.layout[0]


@pytest.mark.parametrize(("total", "fps"), [(132, 25.0), (7, 30.0), (1, 25.0), (3, 2.0), (9000, 29.97), (61, 24.0)])
def test_frames_of_qwen3_are_those_of_transformers(total, fps):
    """Oracle: `Qwen3VLVideoProcessor.sample_frames`, called on a stand-in, because its class needs
    torchvision."""
    source = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl").Qwen3VLVideoProcessor
    stand_in = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    for options in ({}, {"fps": 1.0}, {"num_frames": min(total, 6)}):
        theirs = source.sample_frames(stand_in, metadata, **options).tolist()
        assert even_indices(total, fps, **options) == theirs


@pytest.mark.parametrize("frames", [1, 5, 31])
def test_sizes_of_qwen3_follow_the_budget_of_each_kind(frames):
    """By hand: an image has one budget, a clip one for all of its frames; capped, each frame at
    most its share."""
    counted, least, most = max(frames, 2), 128 * 32 * 32, 200_000
    picture = Qwen3VLPatchConfig(max_pixels=most)
    clip = Qwen3VLPatchConfig.for_video(max_pixels=most)
    capped = replace(clip, cap_pixels_per_frame=True, max_video_tokens=4)
    share = max(min(4 * 32 * 32, most // counted), int(least * 1.05))
    assert clip.frame_floor(counted) == -(-least // counted)
    assert clip.frame_budget(counted) == most // counted
    for size in itertools.product(range(60, 400, 97), range(60, 400, 41)):
        wanted = smart_resize(*size, factor=32, min_pixels=65536, max_pixels=most)
        assert picture.target_size(*size) == wanted
        for config, budget in ((clip, most), (capped, share * counted)):
            wanted = smart_resize_video(counted, *size, factor=32, min_pixels=least, max_pixels=budget)
            assert config.target_size(*size, frames) == wanted


def test_experts_of_qwen3_as_they_are_released(tmp_path):
    """In the released files of Qwen3-VL's MoE the experts' matrices lie transposed: (experts, in,
    out)."""
    folder = make_qwen3_checkpoint(tmp_path, "qwen3_vl_moe")
    expected = load(folder).trace("Hi", max_new_tokens=4).token_ids

    def released(weights: dict) -> dict:
        return {n: w.transpose(1, 2) if ".experts." in n else w for n, w in weights.items()}

    def cut(weights: dict) -> dict:
        return {n: w[:, 1:] if "experts.down" in n else w for n, w in weights.items()}

    assert load(change_weights(folder, released)).trace("Hi", max_new_tokens=4).token_ids == expected
    change_weights(folder, cut)
    with pytest.raises(ValueError, match=r"mismatched \(3\).*experts\.down_proj"):
        load(folder)


@pytest.mark.parametrize("name", GLM)
def test_a_picture_and_a_clip_in_one_prompt_of_glm(name):
    """By hand: each clip's rows stand in its frames; 2 x 112 x 112 px are a picture's budget, 10 x
    90 x 90 a clip's."""
    vlm = random_model(name)
    both = vlm.trace("What is it?", images=PHOTOS[:1], videos=[noise(6, 90, 120)], max_new_tokens=2)
    image, *frames = both.spans
    assert len(frames) == 3 and image.num_tokens == both.patches[0].media_tokens.num_tokens
    for span, rows in zip(frames, both.embeds[1].split(frames[0].num_tokens), strict=True):
        assert torch.equal(both.inputs_embeds[span.offset :][: span.num_tokens], rows)
    inputs = inputs_of(vlm, both)
    assert vlm.generate(**inputs, max_new_tokens=2)[0, len(both.full_ids) :].tolist() == both.token_ids
    for (t, h, w), area in zip(both.layouts, (2 * 112**2, 10 * 90**2), strict=True):
        assert 2 * t * h * w * 14**2 <= area < 2 * t * (h + 2) * (w + 2) * 14**2


@pytest.mark.parametrize("name", GLM)
def test_the_folder_of_glm_chooses_sampler_and_words(name):
    vlm = random_model(name)
    names = json.loads((random_folder(name) / "preprocessor_config.json").read_text())
    own = {"glmga": "GlmgaProcessor"}  # whose files name the class of GLM-4.6V
    assert type(vlm.processor).__name__ == own.get(name, names["processor_class"])
    trace = vlm.trace("go", videos=[CLIP], max_new_tokens=1)
    sample = sample_video_frames(vlm.processor.variant, fps=25, total_num_frames=132, duration=132 / 25)
    assert trace.media[0].indices == tuple(dict.fromkeys(sample.indices))
    assert trace.patches[0].media_tokens.timestamps == tuple(sample.timestamps)
    assert trace.layouts[0][0] == len(sample.timestamps) == len(sample.indices) // 2


def test_a_frame_of_glm_may_lose_its_tokens_but_not_its_second():
    """Six equal frames, three steps: only the first step survives; written out, what the language
    model reads."""
    vlm, still = random_model("GLM-4.1V"), np.repeat(noise(1, 90, 120), 6, axis=0)
    trace = vlm.trace("go", videos=[still], max_new_tokens=1, pruning_rate=0.7)
    tokens = trace.spans[0].num_tokens
    assert trace.keep_masks[0].tolist() == [True] * tokens + [False] * (2 * tokens)
    read = vlm.processor.tokenizer.decode(trace.input_ids)
    first, empty = (f"<|begin_of_image|>{'<|image|>' * n}<|end_of_image|>" for n in (tokens, 0))
    assert f"<|begin_of_video|>{first}0{empty}1{empty}2<|end_of_video|>" in read


def test_frames_of_glm_are_looked_at_once_and_in_pairs():
    """By hand: an odd clip ends in its last frame twice; 0 0 1 1 2 2 of 2 a second are 0 1 2 2, at
    seconds 0 and 1."""
    patchify, moving = random_model("GLM-4.1V").processor.patchify, noise(3, 90, 120)
    video = replace(load_video(moving), source_fps=2.0)
    odd, even = patchify([video, load_video(moving[[0, 1, 2, 2]])])
    assert torch.equal(odd.pixel_values, even.pixel_values)
    twice = replace(video, frames=moving[[0, 0, 1, 1, 2, 2]], indices=(0, 0, 1, 1, 2, 2))
    once = replace(video, frames=moving[[0, 1, 2, 2]], indices=(0, 1, 2, 2))
    ours, theirs = patchify([twice, once])
    assert torch.equal(ours.pixel_values, theirs.pixel_values)
    assert ours.media_tokens == theirs.media_tokens
    assert ours.media_tokens.timestamps == (0, 1)
    assert ours.media_tokens.thw[0] == 2


# ------------------------------------------------------------------------------------------------------------- Step3


@pytest.mark.parametrize("case", GOLDEN["patcher"], ids=lambda c: f"{c['width']}x{c['height']}")
def test_prompt_lengths_equal_golden(case):
    """Oracle: vLLM's counts for the released sizes, crops, newlines and marks included."""
    processor = Step3VLProcessor(Step3VLConfig())
    assert (processor.image_tokens, processor.crop_tokens) == (169, 81)
    layout = processor.layout_of(Image.new("RGB", (case["width"], case["height"])))
    medium = processor.media_tokens("image", layout)
    assert layout.crops == case["num_patches"]
    assert medium.num_tokens == 169 + 81 * layout.crops
    processor.__dict__["mark_ids"] = {mark: 10 + i for i, mark in enumerate(STEP3_MARKS)}
    ids = processor.expand(1, medium)
    assert len(ids) == case["num_tokens"] and ids.count(1) == medium.num_tokens
    assert ids.count(12) == case["num_newlines"]


@pytest.mark.parametrize("case", GOLDEN["repl"], ids=lambda c: str(c["num_patches"]))
def test_marks_equal_golden(case):
    """Oracle: vLLM's ids of a picture; the golden data have 5 tokens for an overview and 3 for a
    crop."""
    processor = Step3VLProcessor(Step3VLConfig())
    processor.image_tokens, processor.crop_tokens = GOLDEN["repl_feature_sizes"]
    processor.__dict__["mark_ids"] = GOLDEN["repl_token_map"]
    rows = sum(case["mask"]) + 1 if case["num_patches"] else 0
    layout = CropLayout(rows, case["num_patches"] // rows if rows else 0)
    medium = processor.media_tokens("image", layout)
    assert processor.expand(GOLDEN["repl_token_map"]["<im_patch>"], medium) * case["num_images"] == case["ids"]


NAMINGS = {
    "transformers": lambda name: name if name.startswith("lm_head")
    else "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else f"model.{name}",
    "vLLM": lambda name: f"language_model.{name}" if name.startswith(("model.", "lm_head.")) else name,
}  # fmt: skip


@pytest.mark.parametrize("naming", [*NAMINGS, pytest.param("rotary halves", marks=NEEDS_5_23)])
def test_every_naming_of_step3s_weights_loads(tmp_path, naming):
    """Oracle: the released names.

    Step-3.7's turn neighbours, in the file of transformers' names halves.
    """
    if naming in NAMINGS:
        name, folder = "Step3-VL", make_step3_checkpoint(tmp_path, naming=NAMINGS[naming])
    else:
        name, folder = "Step-3.7", make("Step-3.7", tmp_path / "step")
        theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        theirs.save_pretrained(folder, save_original_format=False)
        assert "model.vision_model.layers.0.self_attn.q_proj.weight" in load_file(folder / "model.safetensors")
    for part in ("encoder", "language_model"):
        weights, wanted = (getattr(vlm, part).state_dict() for vlm in (load(folder), random_model(name)))
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[n], wanted[n]) for n in wanted)


def test_step3s_sentence_begins_once(tmp_path):
    """The template writes the begin of sentence, and so does the tokenizer; a template without it
    leaves it to it."""
    vlm, folder = random_model("Step3-VL"), make_step3_checkpoint(tmp_path)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("{{- bos_token -}}", ""))
    expected = vlm.trace("Hi", max_new_tokens=1).full_ids
    assert torch.equal(load(folder).trace("Hi", max_new_tokens=1).full_ids, expected)
    begin = vlm.config.text_config.bos_token_id
    assert AutoTokenizer.from_pretrained(folder)("Hi")["input_ids"][0] == begin
    assert expected.tolist().count(begin) == 1


@NEEDS_5_23
def test_layouts_of_step3_7_are_those_of_transformers():
    """Oracle: transformers' image processor of Step-3.7; a square of exactly image_size is not cut."""
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

    theirs = Step3p7ImageProcessor()
    processor = refvl.load({"model_type": "step_robotics"}, weights="random", device="meta").processor
    sizes = np.random.default_rng(3).integers(4, 3600, (400, 2)).tolist()
    for width, height in [
        (727, 300),
        (728, 728),
        (728, 400),
        (729, 500),
        (20, 400),
        *(s for s in sizes if max(s) <= 200 * min(s)),
    ]:
        layout = processor.layout_of(Image.new("1", (width, height)))
        *_, columns, rows, _ = theirs._plan_patches(width, height, 728, 504)
        assert (layout.rows, layout.columns) == (rows, columns), (width, height)


# --------------------------------------------------------------------------------------------------------- MiniCPM-V


@pytest.mark.parametrize("name", MINICPM)
@torch.inference_mode()
def test_logits_equal_the_oracle(name):
    """To the last digits, not only their order."""
    model, (_, logits) = random_model(name).language_model, text_oracle(name)
    embeds = torch.randn(90, HIDDEN, generator=torch.Generator().manual_seed(1))  # beyond LongRoPE's short range
    ours = model(inputs_embeds=embeds[None], position_ids=torch.arange(90).expand(3, 1, -1)).logits[0]
    assert_agree(ours, logits(embeds), model)


def test_4_5_packs_frames_and_says_when_they_were_taken():
    vlm = load(random_folder("MiniCPM-V 4.5"))
    vlm.processor.video_config = replace(vlm.processor.video_config, packing=3)
    trace = vlm.trace("What moves?", videos=[MOVING], max_new_tokens=1)
    [layout] = trace.layouts
    assert [group.temporal_ids for group in layout] == [(0, 5, 10), (15, 20)]  # five frames, two a second
    assert len(set(layout[0].slices)) == 1
    assert trace.embeds[0].shape == (2 * QUERIES, HIDDEN)
    pack = f"<image>{'<unk>' * QUERIES}</image>"
    assert trace.full_ids.tolist() == minicpmv_prompt("4.5", [pack, pack, "What moves?"])
    assert torch.equal(trace.inputs_embeds[trace.full_ids == token("<unk>")], trace.embeds[0])


def test_an_answer_ends_where_the_vocabulary_says():
    """generation_config.json of some releases names one end only; turns end with others."""
    stop = random_model("MiniCPM-V 2.6").language_model.generation_config.eos_token_id
    assert {token("</s>"), token("<|im_end|>"), token("<|eot_id|>")} <= set(stop)


def test_an_unknown_token_at_the_very_start_is_text():
    """Oracle: the rule by hand: only an unknown token right behind a start is a placeholder."""
    processor = random_model("MiniCPM-V 2.6").processor
    ids = processor.mark_ids
    found = processor.placeholders(torch.tensor([ids["unk"], ids["im_start"], ids["unk"], ids["im_end"]]))
    assert found[0] not in processor.token_ids.values()
    assert found[2] in processor.token_ids.values()


def test_speech_is_left_out_and_said_so(tmp_path):
    folder = minicpmv.make_minicpmv_checkpoint(tmp_path / "omni", "2.6", model_type="minicpmo")
    names = ("apm.layers.0.fc1.weight", "tts.emb.weight", "audio_projection_layer.linear1.weight", "audio_avg_pooler.w")
    change_weights(folder, lambda weights: weights | {name: torch.ones(2) for name in names})
    with pytest.warns(UserWarning, match="4 weights of apm, audio_avg_pooler, audio_projection_layer, tts are skipped"):
        vlm = load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = load(random_folder("MiniCPM-V 2.6"))
    answers = {m.chat("What?", images=[PICTURES["SQUARE"]], max_new_tokens=8) for m in (vlm, plain)}
    assert len(answers) == 1


def test_a_tokenizer_without_the_marks_is_named(tmp_path):
    folder = minicpmv.make_minicpmv_checkpoint(tmp_path / "marks", "2.6")
    change_json(folder / "preprocessor_config.json", lambda values: values | {"slice_start": "<no such mark>"})
    with pytest.raises(ValueError, match="tokenizer: has no special tokens .'<no such mark>'"):
        load(folder)


def test_frames_of_a_file_are_those_of_the_cards():
    """2.6: a frame each second, the clip's 132 frames at 25 a second; beyond max_frames the middle
    of equal parts."""
    processor = random_model("MiniCPM-V 2.6").processor
    kept = (0, 25, 50, 75, 100, 125)
    gap = 6 / 4
    for options, wanted in (({}, kept), ({"max_frames": 4}, tuple(kept[int(i * gap + gap / 2)] for i in range(4)))):
        content = [{"type": "video", "video": str(CLIP)} | options]
        [video] = processor.decode([{"role": "user", "content": content}])
        assert video.indices == wanted


@pytest.mark.parametrize(
    ("seconds", "fps"), [(0.3, 25), (5, 30), (59, 24), (60, 25), (90, 29.97), (180, 25), (700, 12)]
)
def test_sampling_and_packing_of_4_5_are_those_of_its_card(seconds, fps):
    """Oracle: the card's example, written again; it was made for whole packs of at most 180 sets."""
    total, config = round(seconds * fps), MiniCPMV4_5Processor.frames
    duration = total / fps
    if 3 * int(duration) <= 180:
        packing, wanted = 1, round(min(3, round(fps)) * min(180, duration))
    else:
        packing = math.ceil(duration * 3 / 180)
        wanted = round(duration * 3) if packing <= 3 else 180 * 3
        packing = min(packing, 3)
    gap = total / wanted
    indices = MiniCPMV4_5Processor.sample(total, fps, config)
    assert indices == [int(i * gap + gap / 2) for i in range(wanted)]
    processor = MiniCPMV4_5Processor.__new__(MiniCPMV4_5Processor)
    processor.video_config = config
    video = load_video(np.zeros((1, 2, 2, 3), np.uint8))
    groups = processor.group(replace(video, source_fps=fps, indices=tuple(indices), duration=duration), (32, 32))
    assert {len(group.slices) for group in groups[:-1]} <= {packing}
    assert len(groups) == math.ceil(wanted / packing)
    scale = np.arange(0, duration, 0.1)
    nearest = np.abs(np.array(indices)[:, None] / fps - scale).argmin(1)
    ids = [i for group in groups for i in group.temporal_ids]
    assert np.abs(np.array(ids) - nearest).max() <= 1, "only where a frame lies between two tenths may rounding differ"
    assert np.mean(np.array(ids) == nearest) > 0.9 and ids == sorted(ids)


def test_six_frames_become_64_tokens():
    """The card's number: 96 patches a token, 6 of them without packing 16."""
    frames = ((32, 32),) * 6
    assert patches_per_token((SliceGroup(frames, tuple(range(6))),), 64) == 96
    assert patches_per_token(tuple(SliceGroup((f,)) for f in frames), 64) == 16
    assert patches_per_token((SliceGroup(frames, (-1,) * 6),), 64) == 16  # without times nothing is merged


@NEEDS_5_23
def test_slices_of_4_6_are_those_of_transformers():
    """Oracle: the sizes of transformers' image processor, over random pictures, in both modes."""
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    theirs = MiniCPMV4_6ImageProcessorPil()
    for width, height in np.random.default_rng(0).integers(30, 3000, (300, 2)).tolist():
        for mode, multiple in (("16x", 4), ("4x", 2)):
            plan = plan_slices(width, height, SliceConfig(multiple=multiple))
            grid = theirs.get_sliced_grid((height, width), 9, 448)
            assert plan.grid == (tuple(grid[::-1]) if grid else None)
            rule = {"scale_resolution": 448, "patch_size": 14, "downsample_mode": mode}
            overview = theirs.find_best_resize((height, width), **rule, allow_upscale=grid is None)
            assert plan.tgt_sizes[0] == tuple(side // 14 for side in overview)
            if grid:
                refined = theirs.get_refine_size((height, width), grid, **rule, allow_upscale=True)
                cell = tuple(side // count // 14 for side, count in zip(refined, grid, strict=True))
                assert set(plan.tgt_sizes[1:]) == {cell}


@NEEDS_5_23
@pytest.mark.parametrize(
    ("total", "fps"), [(40, 10.0), (7, 29.97), (1, 1.0), (4000, 24.0), (5000, 29.97), (1281, 10.0)]
)
def test_frames_of_4_6_are_sampled_as_transformers_does(total, fps):
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    processor = random_model("MiniCPM-V 4.6").processor
    assert list(processor.frame_indices(total, fps)) == MiniCPMV4_6VideoProcessor().sample_frames(metadata)
