"""MiniCPM-V from folder to text. Oracles: prompts written by hand, transformers' text models in a loop without a cache,
MiniCPM's formulas for version 2.0, the sampling that the checkpoints' cards show.
"""

import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoint_factory_minicpmv import (
    HIDDEN,
    QUERIES,
    TEXT_CLASSES,
    VERSIONS,
    WITH_CLIPS,
    make_minicpmv_checkpoint,
    minicpmv_config,
    random_weights,
    text_config,
    token,
    tokenizer,
)
from closeness import assert_agree
from PIL import Image
from random_models import load
from safetensors.torch import load_file, save_file

from refvl.paths import DATA
from refvl.pixels.media import load_video
from refvl.pixels.slices import SliceGroup
from refvl.processors.minicpmv import MiniCPMV4_5Processor
from refvl.processors.minicpmv_video import patches_per_token, temporal_ids

RANDOM = np.random.default_rng(0)
CLIP = DATA / "clips" / "bigbuckbunny.mp4"
SMALL = Image.fromarray(RANDOM.integers(0, 256, (50, 60, 3), dtype=np.uint8))  # one slice: the overview
LARGE = Image.fromarray(RANDOM.integers(0, 256, (110, 100, 3), dtype=np.uint8))  # 2 x 2 slices
WIDE = Image.fromarray(RANDOM.integers(0, 256, (30, 200, 3), dtype=np.uint8))  # 3 x 1
MOVING = RANDOM.integers(0, 256, (5, 40, 60, 3), dtype=np.uint8)
GRIDS = {id(SMALL): None, id(LARGE): (2, 2), id(WIDE): (3, 1)}
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """version -> checkpoint folder."""
    return {v: make_minicpmv_checkpoint(tmp_path_factory.mktemp("minicpmv") / v, v) for v in VERSIONS}


@pytest.fixture(scope="module")
def models(folders):
    return {version: load(folder) for version, folder in folders.items()}


# ------------------------------------------------------------------------------------------ oracles


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def minicpm_logits(weights: dict, config: dict, embeds_LD: torch.Tensor) -> torch.Tensor:
    """MiniCPM by its formulas: a Llama whose residuals are scaled by scale_depth / sqrt(layers), whose logits are
    divided by hidden / dim_model_base. embeds: (L, D), text already times scale_emb."""
    L, D = embeds_LD.shape
    H, eps, layers = config["num_attention_heads"], config["rms_norm_eps"], config["num_hidden_layers"]
    scale = config["scale_depth"] / math.sqrt(layers)
    angle = torch.arange(L)[:, None] * 1e4 ** (-torch.arange(0, D // H, 2) / (D // H))
    cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angle.cos(), angle.sin()))

    def heads(x):
        return x.view(L, H, D // H)

    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    x = embeds_LD
    for i in range(layers):
        w = {n.split(f"layers.{i}.")[1]: t for n, t in weights.items() if f"llm.model.layers.{i}." in n}
        h = rms(x, w["input_layernorm.weight"], eps)
        q, k, v = (heads(h @ w[f"self_attn.{n}_proj.weight"].T) for n in "qkv")
        scores = torch.einsum("qhk,shk->hqs", turn(q), turn(k)) / math.sqrt(D // H)
        scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf)
        attended = torch.einsum("hqs,shk->qhk", scores.softmax(-1), v).reshape(L, D)
        x = x + scale * (attended @ w["self_attn.o_proj.weight"].T)
        h = rms(x, w["post_attention_layernorm.weight"], eps)
        h = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        x = x + scale * (h @ w["mlp.down_proj.weight"].T)
    x = rms(x, weights["llm.model.norm.weight"], eps)
    return (x / (D / config["dim_model_base"])) @ weights["llm.lm_head.weight"].T


def text_oracle(version: str):
    """(embed ids, logits of embeddings), from the weights by name: formulas for 2.0, transformers for the others."""
    weights, config = random_weights(version), minicpmv_config(version)
    table = weights["llm.model.embed_tokens.weight"]
    if version == "2.0":
        return lambda ids: config["scale_emb"] * table[ids], lambda e: minicpm_logits(weights, config, e)
    model = TEXT_CLASSES[version][1](text_config(version)).eval()
    model.load_state_dict({n.removeprefix("llm."): t for n, t in weights.items() if n.startswith("llm.")})
    return lambda ids: table[ids], lambda e: model(inputs_embeds=e[None]).logits[0]


@torch.no_grad()
def greedy(version: str, ids: list[int], media: list[torch.Tensor], new_tokens: int = NEW_TOKENS) -> list[int]:
    """A loop without a cache; the media's embeddings stand where the prompt has unknown tokens."""
    embed, logits = text_oracle(version)
    embeds = embed(torch.tensor(ids))
    embeds[torch.tensor(ids) == token("<unk>")] = torch.cat(media) if media else embeds[:0]
    stop, answer = {token("</s>"), token("<|eot_id|>"), token("<|im_end|>")}, []
    while len(answer) < new_tokens and not (answer and answer[-1] in stop):
        answer.append(int(logits(embeds)[-1].argmax()))
        embeds = torch.cat([embeds, embed(torch.tensor(answer[-1:]))])
    return answer


def picture_text(version: str, grid, number: int) -> str:
    queries = "<unk>" * QUERIES
    overview, piece = f"<image>{queries}</image>", f"<slice>{queries}</slice>"
    if version in WITH_CLIPS:
        rows = [piece * grid[0]] * grid[1] if grid else []
        return f"<image_id>{number}</image_id>{overview}" + "\n".join(rows)
    return overview + (f"<slice>{chr(10).join([overview * grid[0]] * grid[1])}</slice>" if grid else "")


def prompt_ids(version: str, content: str) -> list[int]:
    """One user turn, by hand."""
    text = {
        "2.0": f"<用户>{content}<AI>",
        "2.5": f"<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    }.get(version, f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")
    bos = [token("<s>")] if version in ("2.0", "2.5", "4.0") else []
    return bos + tokenizer().encode(text).ids


def pictures_text(version: str, images) -> list[str]:
    return [picture_text(version, GRIDS[id(image)], i) for i, image in enumerate(images)]


# ------------------------------------------------------------------------------------- ids and prompts

PICTURES = {"text": [], "one slice": [SMALL], "sliced": [LARGE], "wide": [WIDE], "several": [LARGE, SMALL, WIDE]}


@pytest.mark.parametrize("images", PICTURES.values(), ids=PICTURES.keys())
@pytest.mark.parametrize("version", VERSIONS)
def test_prompt_and_generated_ids_of_pictures(models, version, images):
    vlm = models[version]
    trace = vlm.trace("What is it?", images=images, max_new_tokens=NEW_TOKENS)
    ids = prompt_ids(version, "\n".join([*pictures_text(version, images), "What is it?"]))
    assert trace.full_ids.tolist() == ids
    media = vlm.encode(images)
    assert [len(m) for m in media] == [QUERIES * (1 + math.prod(GRIDS[id(i)] or (0,))) for i in images]
    assert trace.token_ids == greedy(version, ids, media)
    assert trace.positions.tolist() == [list(range(len(ids)))] * 3 and trace.delta == 0


@pytest.mark.parametrize("version", WITH_CLIPS[:2])
def test_a_clip_is_a_row_of_frames(models, version):
    vlm = models[version]
    trace = vlm.trace("What moves?", videos=[MOVING], max_new_tokens=NEW_TOKENS)
    frame = f"<image>{'<unk>' * QUERIES}</image>"
    ids = prompt_ids(version, "\n".join([frame] * 5 + ["What moves?"]))
    assert trace.full_ids.tolist() == ids and len(trace.spans) == 5
    frames = [vlm.encode([Image.fromarray(f)])[0][:QUERIES] for f in MOVING]  # an overview is what a small picture is
    assert_agree(trace.embeds[0], torch.cat(frames), vlm.encoder)
    assert trace.token_ids == greedy(version, ids, vlm.encode(videos=[MOVING]))


def test_4_5_packs_frames_and_says_when_they_were_taken(models):
    vlm = load_packing(models["4.5"], 3)
    trace = vlm.trace("What moves?", videos=[MOVING], max_new_tokens=NEW_TOKENS)
    pack = f"<image>{'<unk>' * QUERIES}</image>"
    ids = prompt_ids("4.5", f"{pack}\n{pack}\nWhat moves?")
    assert trace.full_ids.tolist() == ids
    [layout] = trace.layouts
    assert [group.temporal_ids for group in layout] == [(0, 5, 10), (15, 20)]  # five frames, two a second
    assert len(set(layout[0].slices)) == 1 and trace.embeds[0].shape == (2 * QUERIES, HIDDEN)
    assert trace.token_ids == greedy("4.5", ids, vlm.encode(videos=[MOVING]))


def load_packing(vlm, packing):
    """The same model with `packing` frames in a set."""
    copy = type(vlm)(vlm.config, MiniCPMV4_5Processor.__new__(MiniCPMV4_5Processor), vlm.encoder, vlm.language_model)
    copy.processor.__dict__ |= vlm.processor.__dict__
    copy.processor.video_config = replace(vlm.processor.video_config, packing=packing)
    return copy


@pytest.mark.parametrize("version", WITH_CLIPS)
def test_pictures_and_clips_in_one_message(models, version):
    """Pictures are numbered as they come, frames have no number; kinds may alternate."""
    vlm = models[version]
    content = [
        {"type": "image", "image": LARGE}, {"type": "text", "text": "then"}, {"type": "video", "video": MOVING[:2]},
        {"type": "image", "image": SMALL}, {"type": "text", "text": "which?"},
    ]  # fmt: skip
    trace = vlm.trace([{"role": "user", "content": content}], max_new_tokens=NEW_TOKENS)
    first, second = pictures_text(version, [LARGE, SMALL])
    frame = f"<image>{'<unk>' * QUERIES}</image>"
    ids = prompt_ids(version, "\n".join([first, "then", frame, frame, second, "which?"]))
    assert trace.full_ids.tolist() == ids
    pictures, [clip] = vlm.encode([LARGE, SMALL]), vlm.encode(videos=[MOVING[:2]])
    assert trace.token_ids == greedy(version, ids, [pictures[0], clip, pictures[1]])


# ----------------------------------------------------------------------------------------- text models


def test_embeddings_of_pictures_are_not_scaled(models):
    """Version 2.0: scale_emb belongs to text; logits are MiniCPM's to the last digits, not only their order."""
    vlm, (embed, logits) = models["2.0"], text_oracle("2.0")
    trace = vlm.trace("What?", images=[SMALL], max_new_tokens=1)
    is_text = trace.full_ids != token("<unk>")
    assert torch.equal(trace.inputs_embeds[is_text], embed(trace.full_ids[is_text]))
    assert torch.equal(trace.inputs_embeds[~is_text], vlm.encode([SMALL])[0])
    ours = vlm.language_model(
        inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None]
    ).logits[0]  # fmt: skip
    assert_agree(ours, logits(trace.inputs_embeds), vlm.language_model)


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_logits_equal_transformers(models, version):
    vlm, (_, logits) = models[version], text_oracle(version)
    embeds = torch.randn(90, HIDDEN, generator=torch.Generator().manual_seed(1))  # beyond LongRoPE's short range
    ours = vlm.language_model(inputs_embeds=embeds[None], position_ids=torch.arange(90).expand(3, 1, -1)).logits[0]
    assert_agree(ours, logits(embeds), vlm.language_model)


def test_an_answer_ends_where_the_vocabulary_says(models):
    """generation_config.json of some releases names one end only; turns end with others."""
    stop = models["2.6"].language_model.generation_config.eos_token_id
    assert {token("</s>"), token("<|im_end|>"), token("<|eot_id|>")} <= set(stop)


def test_an_unknown_token_at_the_very_start_is_text(models):
    """Oracle: the rule by hand: only an unknown token right behind a start is a placeholder."""
    processor = models["2.6"].processor
    ids = processor.mark_ids
    found = processor.placeholders(torch.tensor([ids["unk"], ids["im_start"], ids["unk"], ids["im_end"]]))
    assert found[0] not in processor.token_ids.values()
    assert found[2] in processor.token_ids.values()


# ------------------------------------------------------------------------------------------- loading


def test_config_is_flat_and_no_code_is_run(folders, monkeypatch):
    """auto_map names classes beside the weights; whoever resolved them would fail here."""

    def refuse(*args, **kwargs):
        raise AssertionError("remote code was asked for")

    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", refuse)
    monkeypatch.setattr("transformers.models.auto.tokenization_auto.get_class_from_dynamic_module", refuse)
    for version, folder in folders.items():
        vlm = load(folder)
        assert vlm.family.name == f"MiniCPM-V {version}" and vlm.config.query_num == QUERIES


def test_speech_is_left_out_and_said_so(folders, models, tmp_path):
    folder = make_minicpmv_checkpoint(tmp_path / "omni", "2.6", model_type="minicpmo")
    weights = load_file(folder / "model.safetensors")
    speech = (
        "apm.layers.0.fc1.weight",
        "tts.emb.weight",
        "audio_projection_layer.linear1.weight",
        "audio_avg_pooler.w",
    )
    save_file(weights | {name: torch.ones(2) for name in speech}, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="4 weights of apm, audio_avg_pooler, audio_projection_layer, tts are skipped"):
        vlm = load(folder)
    answers = [m.chat("What?", images=[LARGE], max_new_tokens=NEW_TOKENS) for m in (vlm, models["2.6"])]
    assert answers[0] == answers[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folders["2.6"])


def test_a_tokenizer_without_the_marks_is_named(tmp_path):
    folder = make_minicpmv_checkpoint(tmp_path / "marks", "2.6")
    values = json.loads((folder / "preprocessor_config.json").read_text()) | {"slice_start": "<no such mark>"}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="tokenizer: has no special tokens .'<no such mark>'"):
        load(folder)


# -------------------------------------------------------------------------------------- clips and time


def test_frames_of_a_file_are_those_of_the_cards(models):
    """2.6: a frame each second, the clip's 132 frames at 25 a second; beyond max_frames the middle of equal parts."""
    [video] = models["2.6"].processor.decode(models["2.6"].processor.messages("", [], [CLIP]))
    assert video.indices == (0, 25, 50, 75, 100, 125)
    capped = {"type": "video", "video": str(CLIP), "max_frames": 4}
    [video] = models["2.6"].processor.decode([{"role": "user", "content": [capped]}])
    kept, gap = [0, 25, 50, 75, 100, 125], 6 / 4
    assert video.indices == tuple(kept[int(i * gap + gap / 2)] for i in range(4))


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
    expected = [int(i * gap + gap / 2) for i in range(wanted)]
    indices = MiniCPMV4_5Processor.sample(total, fps, config)
    assert indices == expected
    processor = MiniCPMV4_5Processor.__new__(MiniCPMV4_5Processor)
    processor.video_config = config
    video = replace(
        load_video(np.zeros((1, 2, 2, 3), np.uint8)), source_fps=fps, indices=tuple(indices), duration=duration
    )
    groups = processor.group(video, (32, 32))
    assert {len(group.slices) for group in groups[:-1]} <= {packing} and len(groups) == math.ceil(wanted / packing)
    scale = np.arange(0, duration, 0.1)
    nearest = np.abs(np.array(indices)[:, None] / fps - scale).argmin(1)
    ids = [i for group in groups for i in group.temporal_ids]
    assert np.abs(np.array(ids) - nearest).max() <= 1, "only where a frame lies between two tenths may rounding differ"
    assert np.mean(np.array(ids) == nearest) > 0.9 and ids == sorted(ids)


def test_temporal_ids_are_tenths_of_a_second():
    """By hand: frames 0, 7, 9 of a clip of 10 frames at 10 a second."""
    video = replace(load_video(np.zeros((3, 2, 2, 3), np.uint8)), source_fps=10.0, indices=(0, 7, 9), duration=1.0)
    assert temporal_ids(video) == [0, 7, 9]
    assert temporal_ids(replace(video, source_fps=30.0, duration=1 / 3)) == [0, 2, 3]


def test_six_frames_become_64_tokens():
    """The card's number: 96 patches a token, 6 of them without packing 16."""
    frames = ((32, 32),) * 6
    assert patches_per_token((SliceGroup(frames, tuple(range(6))),), 64) == 96
    assert patches_per_token(tuple(SliceGroup((f,)) for f in frames), 64) == 16
    assert patches_per_token((SliceGroup(frames, (-1,) * 6),), 64) == 16  # without times nothing is merged


# ---------------------------------------------------------------------------------------------- errors


# ---------------------------------------------------------------------------------- planning, command line
