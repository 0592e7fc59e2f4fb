"""Prompts prefilled in chunks. Oracle: the whole prefill of the same request.

The two prefills round in different orders: logits agree as far as rounding explains (`closeness`),
and ids are the same unless the best two are nearer than that, which they are in none of these.
"""

import numpy as np
import pytest
import torch
from closeness import assert_logits_agree
from random_models import WITHOUT_VIDEOS, random_model

PHOTOS = list(np.random.default_rng(1).integers(0, 256, (2, 60, 90, 3), dtype=np.uint8))
FRAMES = np.random.default_rng(0).integers(0, 256, (7, 60, 90, 3), dtype=np.uint8)
NEW_TOKENS = 4
MODELS = ["Qwen2.5-VL", "qwen3_vl", "qwen3_5", "GLM-4.1V", "glm46v", "Step3-VL"]
MODELS += [f"MiniCPM-V {version}" for version in ("2.0", "2.6", "4.5")]
PRUNES = MODELS[:5]


def asked(name):
    """A model, and messages with two images and, where it takes them, a video between."""
    video = [{"type": "video", "video": FRAMES}, {"type": "text", "text": "then"}] if name not in WITHOUT_VIDEOS else []
    first, second = ({"type": "image", "image": photo} for photo in PHOTOS)
    content = [first, {"type": "text", "text": "and"}, *video, second, {"type": "text", "text": "What is it?"}]
    return random_model(name), [{"role": "user", "content": content}]


def run_and_logits(vlm, messages, **options):
    """A trace, and the logits from which its first token was chosen."""
    seen = []

    def keep(module, given, output):
        seen.append(output.logits[0, -1])

    with vlm.language_model.register_forward_hook(keep):
        trace = vlm.trace(messages, max_new_tokens=NEW_TOKENS, eos_token_id=-1, **options)
    return trace, seen[-NEW_TOKENS]


@pytest.mark.parametrize("name", MODELS)
def test_ids_logits_and_positions_equal_the_whole_prefill(name):
    vlm, messages = asked(name)
    for q in (0.0, 0.6) if name in PRUNES else (0.0,):
        whole, expected = run_and_logits(vlm, messages, pruning_rate=q)
        for chunk in (9, 10_000):
            trace, logits = run_and_logits(vlm, messages, pruning_rate=q, prefill_chunk=chunk)
            assert trace.token_ids == whole.token_ids, (q, chunk)
            assert_logits_agree(vlm, whole, logits, expected)
            assert torch.equal(trace.positions, whole.positions)
            assert trace.delta == whole.delta
            assert torch.equal(trace.input_ids, whole.input_ids)
            assert torch.equal(trace.keep, whole.keep)
            assert sum(trace.chunks) == len(trace.input_ids) - 1
            assert max(trace.chunks) <= chunk
            assert not trace.embeds


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "GLM-4.1V", "MiniCPM-V 4.5"])
def test_pieces_of_a_medium_are_what_patchify_makes(name):
    """Oracle: `patchify`, row for row, whatever the size of the pieces; sizes are known without a
    pixel."""
    vlm, _ = asked(name)
    for medium in vlm.processor.decode(vlm.processor.messages("", PHOTOS[:1], [FRAMES])):
        [whole] = vlm.processor.patchify([medium])
        assert vlm.processor.extents([medium]) == [whole.media_tokens]
        for max_tokens in (1, whole.media_tokens.num_tokens // 2, 10**6):
            layouts, rows = zip(*vlm.processor.pieces(medium, max_tokens), strict=True)
            assert torch.equal(torch.cat([levels.normalize() for levels in rows]), whole.pixel_values)
            assert sum(vlm.encoder.item_size(layout)[1] for layout in layouts) == whole.media_tokens.num_tokens


def test_media_are_encoded_when_they_are_needed_and_not_before():
    """Between two encodes come the forwards that use up the first: no more than a chunk or a step
    is ever ahead."""
    vlm, messages = asked("Qwen2.5-VL")
    events = []

    def on_step(module, given, kwargs, output):
        events.append(("prefill", kwargs["position_ids"].shape[-1]))

    encode = vlm.encoder.register_forward_hook(lambda module, given, rows: events.append(("encode", len(rows))))
    prefill = vlm.language_model.register_forward_hook(on_step, with_kwargs=True)
    with encode, prefill:
        trace = vlm.trace(messages, prefill_chunk=5, max_new_tokens=1)
    first, clip, second = vlm.processor.patchify(vlm.processor.decode(messages))
    step = clip.media_tokens.num_tokens // clip.layout[0]
    encoded = read = 0
    is_media = torch.isin(trace.full_ids, torch.tensor(list(vlm.token_ids.values())))
    for kind, count in events:
        if kind == "encode":
            needed = int(is_media[: read + 5].sum())
            assert encoded < needed, "the medium could have waited"
            encoded += count
        else:
            read += count
    assert encoded == int(is_media.sum())
    images = {first.media_tokens.num_tokens, second.media_tokens.num_tokens}
    assert {count for kind, count in events if kind == "encode"} == images | {max(step, 5 // step * step)}


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "qwen3_5"])
def test_beams_streams_and_a_penalty_continue_from_chunks(name):
    vlm, messages = asked(name)
    for options in ({"num_beams": 3}, {"repetition_penalty": 1.5}):
        whole = vlm.chat(messages, max_new_tokens=NEW_TOKENS, **options)
        assert vlm.chat(messages, max_new_tokens=NEW_TOKENS, prefill_chunk=16, **options) == whole
    pieces = vlm.chat(messages, max_new_tokens=NEW_TOKENS, prefill_chunk=16, stream=True)
    assert "".join(pieces) == vlm.chat(messages, max_new_tokens=NEW_TOKENS)


def test_text_alone_and_a_prompt_that_is_too_long(monkeypatch):
    vlm, messages = asked("Qwen2.5-VL")
    whole = vlm.trace("Where is the circle?", max_new_tokens=NEW_TOKENS)
    assert vlm.trace("Where is the circle?", max_new_tokens=NEW_TOKENS, prefill_chunk=3).token_ids == whole.token_ids
    monkeypatch.setattr(vlm.language_model.config, "max_position_embeddings", 40)
    with pytest.raises(ValueError, match="prompt: expected at most 39 tokens in a context of 40"):
        vlm.chat(messages, prefill_chunk=8)


def test_a_chunk_is_a_positive_integer():
    vlm, _ = asked("Qwen2.5-VL")
    for value, error in ((0, ValueError), (-3, ValueError), (2.5, TypeError), ("8", TypeError)):
        with pytest.raises(error, match="prefill_chunk"):
            vlm.chat("What?", images=["nowhere.png"], prefill_chunk=value)
