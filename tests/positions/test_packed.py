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


def loss_and_gradients(language_model, batch: dict, rows: int = 4) -> tuple[float, torch.Tensor]:
    """Of the summed cross-entropy of the next token, with the last `rows` rows of positions."""
    given = {name: batch[name] for name in ("inputs_embeds", "deepstack_embeds") if batch[name].shape[-1]}
    language_model.zero_grad()
    logits = language_model(position_ids=batch["position_ids"][-rows:], use_cache=False, **given).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], batch["labels"][0, 1:], reduction="sum", ignore_index=-100)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in language_model.parameters() if p.grad is not None])


def features_of(traces: list, placeholders: torch.Tensor) -> list[dict]:
    """In float64, with the ids as labels but for placeholders and the first of each prompt."""
    features = []
    for trace in traces:
        labels = trace.input_ids.masked_fill(torch.isin(trace.input_ids, placeholders), -100)
        labels[0] = -100
        rows = {"inputs_embeds": trace.inputs_embeds.double(), "deepstack_embeds": trace.deepstack.double()}
        rows["attention_mask"] = torch.ones_like(labels)
        features.append({"input_ids": trace.input_ids, "positions": trace.positions, "labels": labels} | rows)
    return features


@each_family
@pytest.mark.thorough
def test_packed_prompts_give_the_losses_and_gradients_of_separate_ones(name):
    """To 1e-6, as routers of experts are float32 in any case; with the rows of M-RoPE alone prompts see each other.

    A prompt without labels adds nothing; text needs no DeepStack features, and no prompt a mask of
    ones.
    """
    features = features_of(traces_of(name), torch.tensor(list(random_model(name).token_ids.values())))
    language_model = copy.deepcopy(random_model(name).language_model).double()
    packed = PackingCollator()(features)
    if isinstance(language_model, Qwen3_5TextModel):
        with pytest.raises(
            ValueError, match=r"one prompt, because Qwen3\.5's linear-attention layers would mix packed"
        ):
            loss_and_gradients(language_model, packed)
        return
    alone = []
    for feature in features:
        batch = {key: value[None] for key, value in feature.items()}
        batch["position_ids"] = feature["positions"][:, None]
        alone.append(loss_and_gradients(language_model, batch, rows=3))
    for lacking, i in ((None, 0), ("labels", 0), ("labels", 2), ("deepstack_embeds", 1), ("attention_mask", 0)):
        given = [feature | {lacking: None} if j == i else feature for j, feature in enumerate(features)]
        loss, gradients = loss_and_gradients(language_model, PackingCollator()(given))
        losses, expected = zip(*(x for j, x in enumerate(alone) if lacking != "labels" or j != i), strict=True)
        assert loss == pytest.approx(sum(losses), rel=1e-6)
        assert (gradients - sum(expected)).norm() <= 1e-6 * sum(expected).norm()
    if random_model(name).language_model.model_positions(torch.zeros(3, 1, 1)).ndim == 3:
        leaking, _ = loss_and_gradients(language_model, packed, rows=3)
        assert abs(leaking - sum(loss for loss, _ in alone)) > 1e-3 * leaking


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
        ([PROMPT, PROMPT | {"labels": [1, 2, 3]}], {}, r"features\[1\]: labels: dimension 0 must be 4, got 3"),
        ([PROMPT | {"inputs_embeds": torch.zeros(4, 8)}, PROMPT], {}, r"features\[1\]: expected inputs_embeds, be"),
        ([PROMPT, PROMPT | {"mm_token_type_ids": [0] * 4}], {}, r"features\[0\]: expected mm_token_type_ids, because"),
        ([PROMPT | {"deepstack_embeds": torch.zeros(3, 8)}], {}, r"features\[0\]: deepstack_embeds: dimension 0 must"),
        ([PROMPT | {"attention_mask": [0, 1, 1, 1]}], {}, "attention_mask: expected ones, got zeros; remove"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        PackingCollator(**options)(prompts)


def test_a_prompt_without_labels_and_the_padding_have_no_loss():
    """Oracle: written by hand. The dtypes are those given, and what belongs to media is joined."""
    first = PROMPT | {"mm_token_type_ids": torch.tensor([0, 1, 1, 0]), "labels": None}
    second = first | {"labels": [5, 6, 7, 8], "pixel_values": torch.ones(3, 2), "attention_mask": [1, 1, 1, 1]}
    batch = PackingCollator(pad_to=10)([first, second])
    assert batch["labels"].tolist() == [[-100] * 5 + [6, 7, 8] + [-100] * 2]
    assert batch["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0, 1, 1, 0, 0, 0]]
    assert batch["pixel_values"].shape == (3, 2) and "attention_mask" not in batch


@pytest.mark.thorough
def test_transformers_trainer_takes_a_packed_step(tmp_path):
    """One step by transformers' Trainer on its own Qwen2.5-VL: the mean loss of separate prompts, by their tokens."""
    from transformers import Qwen2_5_VLForConditionalGeneration, Trainer, TrainingArguments

    folder = DATA / "checkpoints/tiny-qwen2_5_vl"
    ours = refvl.load(folder, device="cpu", progress=False)
    theirs = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    questions = ("What color is the circle?", "Where is the star?")
    traces = [ours.trace(q, images=[PICTURE], max_new_tokens=1) for q in questions]
    features, summed, count, placeholder = [], 0.0, 0, ours.token_ids["image"]
    for trace in traces:
        media = {"pixel_values": trace.patches[0].pixel_values, "image_grid_thw": torch.tensor([trace.layouts[0]])}
        ids = trace.input_ids[None]
        theirs_adds = {"attention_mask": torch.ones_like(ids[0]), "mm_token_type_ids": (ids[0] == placeholder).int()}
        features.append({"input_ids": ids[0], "positions": trace.positions, "labels": ids[0]} | media | theirs_adds)
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
