"""Packed prompts. Oracle: a forward of each prompt alone, in float64; transformers' own model and Trainer."""

import copy

import pytest
import torch
from random_models import MAKERS, WITHOUT_VIDEOS, random_model

import refvl
from refvl.language.qwen3_5 import Qwen3_5TextModel
from refvl.paths import DATA
from refvl.positions import PackingCollator, pack, truncate

PICTURE, PAGE, CLIP = DATA / "pictures/scene.png", DATA / "pictures/page.png", DATA / "clips/scene.mp4"
each_family = pytest.mark.parametrize("name", MAKERS)


def traces_of(name: str) -> list:
    """Three prompts: several media, text alone, one image."""
    videos = {} if name in WITHOUT_VIDEOS else {"videos": [CLIP]}
    requests = [
        {"prompt": "What is it?", "images": [PAGE, PICTURE]} | videos,
        {"prompt": "Hi"},
        {"prompt": "And?", "images": [PICTURE]},
    ]
    return [random_model(name).trace(**request, max_new_tokens=1) for request in requests]


def loss_of(language_model, features: list[dict], position_ids) -> torch.Tensor:
    """Summed cross-entropy of the next token, with the embeddings of `features` end to end."""
    deepstack = torch.cat([f["deepstack_embeds"] for f in features])[None]
    given = {"deepstack_embeds": deepstack} if deepstack.shape[-1] else {}
    embeds = torch.cat([f["inputs_embeds"] for f in features])[None]
    logits = language_model(inputs_embeds=embeds, position_ids=position_ids, use_cache=False, **given).logits[0]
    labels = torch.cat([f["labels"] for f in features])
    return torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)


def features_of(traces: list, placeholders: torch.Tensor) -> list[dict]:
    """In float64, with the ids as labels but for placeholders and the first of each prompt."""
    features = []
    for trace in traces:
        labels = trace.input_ids.masked_fill(torch.isin(trace.input_ids, placeholders), -100)
        labels[0] = -100
        rows = {"inputs_embeds": trace.inputs_embeds.double(), "deepstack_embeds": trace.deepstack.double()}
        features.append({"input_ids": trace.input_ids, "positions": trace.positions, "labels": labels} | rows)
    return features


@each_family
@pytest.mark.thorough
def test_packed_prompts_give_the_losses_and_gradients_of_separate_ones(name):
    """To 1e-6, as routers of experts are float32 in any case; with the rows of M-RoPE alone prompts see each other."""
    traces = traces_of(name)
    features = features_of(traces, torch.tensor(list(random_model(name).token_ids.values())))
    language_model = copy.deepcopy(random_model(name).language_model).double()
    packed = pack(traces)
    if isinstance(language_model, Qwen3_5TextModel):
        with pytest.raises(
            ValueError,
            match=r"expected one prompt, because Qwen3\.5's linear-attention layers would mix packed prompts",
        ):
            loss_of(language_model, features, packed["position_ids"])
        return
    found = []
    for way in ("alone", "packed"):
        language_model.zero_grad()
        if way == "alone":
            losses = [loss_of(language_model, [f], f["positions"][:, None]) for f in features]
        else:
            losses = [loss_of(language_model, features, packed["position_ids"])]
        torch.stack(losses).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in language_model.parameters() if p.grad is not None])
        found.append((sum(loss.item() for loss in losses), gradients))
    (alone, expected), (together, gradients) = found
    assert together == pytest.approx(alone, rel=1e-6)
    assert (gradients - expected).norm() <= 1e-6 * expected.norm()
    if random_model(name).language_model.model_positions(torch.zeros(3, 1, 1)).ndim == 3:
        leaking = loss_of(language_model, features, packed["position_ids"][1:]).item()
        assert abs(leaking - alone) > 1e-3 * alone


@each_family
@pytest.mark.parametrize("q", [0.0, 0.5])
def test_a_cut_prompt_is_a_beginning_with_whole_media(name, q):
    """Oracle: for every length, the placeholders of each item are all there or none is."""
    model = random_model(name)
    if q and not model.family.can["pruning"]:
        pytest.skip("cannot prune")
    videos = {} if name in WITHOUT_VIDEOS else {"videos": [CLIP]}
    images = [PAGE, PICTURE]
    trace = model.trace("Why?", images=images, pruning_rate=q, max_new_tokens=1, **videos)
    placeholders = torch.isin(trace.input_ids, torch.tensor(list(model.token_ids.values())))
    kept_of = trace.keep_masks if q else [None] * len(trace.embeds)
    sizes = [len(rows) if mask is None else int(mask.sum()) for mask, rows in zip(kept_of, trace.embeds, strict=True)]
    for length in range(int(placeholders.nonzero()[0]), len(trace.input_ids) + 2):
        cut = truncate(trace, length)
        kept = len(cut["input_ids"])
        assert kept <= length and torch.equal(cut["input_ids"], trace.input_ids[:kept])
        assert torch.equal(cut["positions"], trace.positions[:, :kept])
        assert int(placeholders[:kept].sum()) == sum(sizes[i] for i in cut["media"])
    assert cut["media"] == list(range(len(sizes))) and kept == len(trace.input_ids)


def test_what_is_left_of_the_length_is_a_sequence_of_its_own():
    prompts = [{"input_ids": torch.tensor([5, 6, 7]), "positions": torch.arange(3).expand(3, 3)}] * 2
    packed = pack(prompts, pad_to=10)
    assert packed["input_ids"].tolist() == [[5, 6, 7, 5, 6, 7, 0, 0, 0, 0]]
    assert packed["position_ids"][0].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3]]
    assert packed["cu_seqlens"].tolist() == [0, 3, 6, 10] and packed["cu_seqlens"].dtype == torch.int32
    assert pack(prompts)["cu_seqlens"].tolist() == [0, 3, 6] == pack(prompts, pad_to=6)["cu_seqlens"].tolist()


PROMPT = {"input_ids": torch.arange(4), "positions": torch.zeros(3, 4, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: expected at least one prompt, got none"),
        ([PROMPT | {"positions": torch.zeros(3, 5)}], {}, r"prompts\[0\]: positions: dimension 1 must be 4"),
        ([PROMPT], {"pad_to": 3}, "pad_to: must be at least 4, got 3; truncate the prompts or raise pad_to"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        pack(prompts, **options)


@pytest.mark.thorough
def test_transformers_trainer_takes_a_packed_step(tmp_path):
    """One step by transformers' Trainer on its own Qwen2.5-VL: the mean loss of separate prompts, by their tokens."""
    from transformers import Qwen2_5_VLForConditionalGeneration, Trainer, TrainingArguments

    folder = DATA / "checkpoints/tiny-qwen2_5_vl"
    ours = refvl.load(folder, device="cpu", progress=False)
    theirs = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    questions = ("What color is the circle?", "Where is the star?")
    traces = [ours.trace(q, images=[PICTURE], max_new_tokens=1) for q in questions]
    features, summed, count = [], 0.0, 0
    for trace in traces:
        media = {"pixel_values": trace.patches[0].pixel_values, "image_grid_thw": torch.tensor([trace.layouts[0]])}
        features.append({"input_ids": trace.input_ids, "positions": trace.positions, "labels": trace.input_ids} | media)
        ids = trace.input_ids[None]
        given = {"input_ids": ids, "labels": ids, "position_ids": trace.positions[:, None]}
        with torch.no_grad():
            alone = theirs(**given, use_cache=False, **media).loss
        summed += alone.item() * (len(trace.input_ids) - 1)
        count += len(trace.input_ids) - 1
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=1, report_to=[], use_cpu=True, optim="sgd",
        remove_unused_columns=False, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(theirs, arguments, train_dataset=features, data_collator=PackingCollator())
    trainer.train()
    [logged] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(summed / count, rel=1e-3)  # Trainer rounds what it logs to four digits
