"""The media cache.

Oracle: the same model without it, and a tower that refuses to run where a hit is promised.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from random_models import MAKERS, WITHOUT_VIDEOS, random_folder, random_model

import refvl
from refvl.encoders.tower import send_rows
from refvl.graphs import EncoderGraphManager
from refvl.pixels.media import load_video
from refvl.serving import media_cache
from refvl.serving.media_cache import CachedVLM, MediaCache

RANDOM = np.random.default_rng(0)
A, B, C = (Image.fromarray(x) for x in RANDOM.integers(0, 256, (3, 112, 112, 3), dtype=np.uint8))
CLIP = RANDOM.integers(0, 256, (6, 60, 90, 3), dtype=np.uint8)
each_family = pytest.mark.parametrize("name", MAKERS)


def cached(model: refvl.VLM, cache: MediaCache | None = None) -> CachedVLM:
    """The same parts behind a cache."""
    return CachedVLM(model.config, model.processor, model.encoder, model.language_model, cache or MediaCache(4096))


def qwen(cache: MediaCache | None = None) -> CachedVLM:
    return cached(random_model("Qwen2.5-VL"), cache)


def own(name: str = "Qwen2.5-VL", **options) -> CachedVLM:
    """One whose weights a test may change."""
    return refvl.load(random_folder(name), device="cpu", progress=False, media_cache=4096, **options)


def counts(model) -> tuple[int, int]:
    stats = model.media_cache.stats()
    return stats.hits, stats.misses


@contextmanager
def no_tower(model):
    """A tower that does not run: what is answered here was kept."""

    def refuse(*_):
        raise AssertionError("the tower ran")

    with model.encoder.register_forward_pre_hook(refuse):
        yield


@each_family
def test_nothing_is_encoded_twice(name):
    model = cached(random_model(name))
    media = {"images": [A, B]} | ({} if name in WITHOUT_VIDEOS else {"videos": [CLIP]})
    want = random_model(name).trace("What is it?", max_new_tokens=6, **media)
    first = model.trace("What is it?", max_new_tokens=6, **media)
    n = len(want.patches)
    assert counts(model) == (0, n)
    assert first.cached == [False] * n
    assert not first.seconds_saved
    with no_tower(model):
        again = model.trace("What is it?", max_new_tokens=6, **media)
    assert counts(model) == (n, n) and again.cached == [True] * n
    assert again.seconds_saved == model.media_cache.stats().seconds_saved > 0
    assert f"{n} of {n} in the media cache" in repr(again)
    for trace in (first, again):
        assert trace.token_ids == want.token_ids
        assert all(torch.equal(x, y) for x, y in zip(trace.embeds, want.embeds, strict=True))


ASKED = {
    "stream": lambda m: "".join(m.chat("And this?", images=[A], max_new_tokens=6, stream=True)),
    "chunks": lambda m: m.chat("And this?", images=[A], max_new_tokens=6, prefill_chunk=99),
    "batch": lambda m: m.chat_batch([{"prompt": f"{i}?", "images": [A] * i} for i in range(3)], max_new_tokens=6),
    "pruned": lambda m: m.chat("And this?", videos=[CLIP], max_new_tokens=6, pruning_rate=0.5),
    "feature map": lambda m: m.feature_map(A).tolist(),
    "generate": lambda m: m.generate(**tensors(), max_new_tokens=6).tolist(),
}


@cache
def tensors() -> dict:
    trace = random_model("Qwen2.5-VL").trace("What?", images=[A], max_new_tokens=1)
    rows, grids = trace.patches[0].pixel_values, trace.layouts
    return {"input_ids": trace.full_ids[None], "pixel_values": rows, "image_grid_thw": grids}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_every_way_of_asking_uses_it(ask):
    model = qwen()
    want = ask(random_model("Qwen2.5-VL"))
    assert ask(model) == want
    with no_tower(model):
        assert ask(model) == want


def test_a_medium_that_comes_twice_is_encoded_once():
    model = qwen()
    one, two, other = model.encode([A, A, B])
    assert counts(model) == (1, 2) and torch.equal(one, two) and not torch.equal(one, other)
    model.media_cache.clear()
    assert model.media_cache.stats() == media_cache.MediaCacheStats()


def test_misses_alone_go_through_the_graphs():
    """What a replay held is told by the numbers that media have in the prompt."""
    model = own()
    model.graphs = EncoderGraphManager(model.encoder, budgets=[16, 64], progress=False)
    want = random_model("Qwen2.5-VL").encode([A, B, C])
    model.encode([B])
    trace = model.trace("What?", images=[A, B, C], max_new_tokens=2)
    assert trace.cached == [False, True, False]
    assert {i for b in trace.graph_batches for i in b.indices} == {0, 2}
    assert model.graphs.stats().hits == 3
    for ours, theirs in zip(trace.embeds, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


# ---------------------------------------------------------------------------------------------------------- the key


def test_times_are_in_the_key_where_the_tower_reads_them():
    """The same frames at another rate: MiniCPM-V 4.5 gives them other times, Qwen2.5-VL's tower
    sees no time."""
    slow, fast = (load_video(CLIP, fps=fps) for fps in (1.0, 4.0))
    for name, hits in (("MiniCPM-V 4.5", 0), ("Qwen2.5-VL", 1)):
        model = cached(random_model(name))
        first, second = model.encode(videos=[slow])[0], model.encode(videos=[fast])[0]
        assert counts(model) == (hits, 2 - hits)
        assert torch.equal(first, second) == bool(hits)
        assert torch.equal(second, random_model(name).encode(videos=[fast])[0])


def test_preprocessing_is_in_the_key():
    """Another mean gives other values of the same levels; another layout other neighbours of the
    same rows."""
    model = own()
    model.encode([A])
    config = model.processor.image_config
    model.processor.image_config = replace(config, image_mean=(0.5, 0.5, 0.5))
    [shifted] = model.encode([A])
    model.media_cache.clear()
    assert torch.equal(shifted, model.encode([A])[0]) and counts(model) == (0, 1)
    [patches] = model.processor.patchify([A])
    keys = [model.media_cache.keys(model.encoder, [patches.rows], [grid])[0] for grid in ((1, 8, 8), (1, 4, 16))]
    assert len({*keys}) == 2 and all(len(key) == 32 for key in keys)


def fused_step(encoder):
    """After it, torch counts no change."""
    for weight in encoder.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(encoder.parameters(), lr=0.01, fused=True).step()


def last_norm(encoder) -> torch.nn.Module:
    return [module for module in encoder.modules() if hasattr(module, "eps")][-1]


def other_activation(encoder):
    """Of the families here, Qwen2.5-VL alone has a module for it; of the others a norm is replaced."""
    names = [name for name, m in encoder.named_modules() if isinstance(m, torch.nn.GELU) or hasattr(m, "eps")]
    encoder.set_submodule(names[-1], torch.nn.Tanh().eval())


KNOBS = {
    "a fused step": fused_step,
    "in place": lambda e: [x.detach().copy_(x.flip(0)) for x in e.parameters()],  # an equal sum of bits
    "data": lambda e: last_norm(e).weight.data.mul_(2),
    "numpy": lambda e: last_norm(e).weight.detach().numpy().fill(2),
    "assigned": lambda e: e.load_state_dict({n: x + 1 for n, x in e.state_dict().items()}, assign=True),
    "dtype": lambda e: e.to(torch.bfloat16),
    "epsilon": lambda e: setattr(last_norm(e), "eps", 1.0),
    "activation": other_activation,
}


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "qwen3_vl", "GLM-4.1V", "MiniCPM-V 4.5", "Step3-VL"])
@pytest.mark.parametrize("change", KNOBS.values(), ids=KNOBS)
def test_a_tower_that_changed_misses(name, change):
    model = own(name, text=False)
    [before] = model.encode([A])
    change(model.encoder)
    [after] = model.encode([A])
    assert counts(model) == (0, 2)
    model.media_cache.clear()
    assert torch.equal(after, model.encode([A])[0])
    assert not torch.equal(after.float(), before.float())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "GLM-4.1V", "MiniCPM-V 4.5", "Step3-VL"])
def test_adapters_miss_while_they_act_and_nothing_is_cached_while_they_train(name):
    """In MiniCPM-V, PEFT switches the mode of the tower's parts, but not that of the encoder."""
    peft = pytest.importorskip("peft")
    model = own(name, text=False)
    [plain] = model.encode([A])
    layers = refvl.adapters.layers(model, "tower")
    config = peft.LoraConfig(target_modules=layers, init_lora_weights=False, lora_dropout=0.5)
    adapters = refvl.adapters.attach(model, config)
    [adapted] = model.encode([A])
    for _ in range(2):
        assert torch.equal(model.encode([A])[0], adapted)
        with adapters.disable_adapter():
            assert torch.equal(model.encode([A])[0], plain)
        adapters.train()
        assert not torch.equal(model.encode([A])[0], model.encode([A])[0])
        adapters.eval()
    assert counts(model) == (3, 3) and not torch.equal(adapted, plain)


# ------------------------------------------------------------------------------------------------- bounds and copies


def test_the_least_recently_used_goes_first():
    [rows] = random_model("Qwen2.5-VL").encode([A])
    model = qwen(MediaCache(2 * len(rows)))
    model.encode([A, B])
    model.encode([A])
    model.encode([C])  # B goes
    stats = model.media_cache.stats()
    assert (stats.items, stats.tokens, stats.bytes) == (2, 2 * len(rows), 2 * rows.nbytes)
    with no_tower(model):
        model.encode([A, C])
    model.encode([B])
    assert counts(model) == (3, 4)


def test_what_is_larger_than_the_cache_drives_nothing_out():
    small = A.resize((56, 56))
    rows, larger = random_model("Qwen2.5-VL").encode([small, A])
    model = qwen(MediaCache(len(rows)))
    model.encode([small])
    for _ in range(2):
        assert len(larger) > len(rows)
        assert torch.equal(model.encode([A])[0], random_model("Qwen2.5-VL").encode([A])[0])
    with no_tower(model):
        model.encode([small])
    assert counts(model) == (1, 3)


@torch.inference_mode()
def test_what_comes_out_may_be_written_into():
    model = qwen()
    want = random_model("Qwen2.5-VL").encode([A])[0]
    for _ in range(3):
        for rows in model.encode([A, A]):
            assert torch.equal(rows, want)
            rows.zero_()


def test_a_watched_run_looks_inside_a_tower_that_runs():
    model = qwen()
    model.encode([A])
    trace = model.trace("What?", images=[A], max_new_tokens=1, hidden_states=True)
    assert len(trace.tower_hidden_states) == model.encoder.config.depth + 1


# ------------------------------------------------------------------------------------------------ threads and models


def test_threads_share_a_cache():
    """Each asks for all items in its own order, again and again, and overwrites what it gets."""
    model, start = qwen(), threading.Barrier(4)
    want = random_model("Qwen2.5-VL").encode([A, B, C])

    def ask(i: int) -> None:
        order = np.random.default_rng(i).permutation(3).tolist()
        start.wait(60)
        for _ in range(3):
            for n, rows in zip(order, model.encode([(A, B, C)[n] for n in order]), strict=True):
                torch.testing.assert_close(rows, want[n], rtol=0, atol=1e-4 * float(want[n].abs().max()))
                with torch.inference_mode():
                    rows.zero_()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    hits, misses = counts(model)
    assert hits + misses == 4 * 3 * 3 and 3 <= misses <= 4 * 3


@pytest.mark.parametrize("limit", [0, 1.5, "many"])
def test_the_limit_is_a_positive_number(limit):
    with pytest.raises((ValueError, TypeError), match="^media_cache: "):
        refvl.load(random_folder("Qwen2.5-VL"), device="cpu", progress=False, media_cache=limit)


def test_rows_of_the_caller_on_any_device_have_a_key():
    """bfloat16 has no NumPy type, and rows may be a view."""
    model = qwen()
    [patches] = model.processor.patchify([A])
    rows = send_rows([patches.rows], model.encoder)
    variants = [rows, rows.to(torch.bfloat16), torch.stack([rows, rows], 1)[:, 0], rows.clone().requires_grad_()]
    keys = [model.media_cache.keys(model.encoder, [x], [patches.layout])[0] for x in variants]
    assert keys[0] == keys[2] == keys[3] != keys[1]
