"""`refvl.compare`, saved stages, and the stages of transformers' model.

Oracles: differences planted one at a time, and transformers' model on the same weights, which a run
without one equals.
"""

import json
import warnings
from dataclasses import replace

import pytest
import torch

import refvl
from refvl.merge import media_places
from refvl.paths import DATA
from refvl.positions import MediaSpan, get_mrope_input_positions
from refvl.study import releases
from refvl.study.comparison import MANIFEST, TENSORS, Stages
from refvl.study.recording import record_transformers
from refvl.study.watch import keep_largest

CHECKPOINTS = DATA / "checkpoints"
QWEN = CHECKPOINTS / "tiny-qwen2_5_vl"
SCENE, PHOTO = (DATA / "pictures" / name for name in ("scene.png", "coffee.jpg"))
CLIP = DATA / "clips" / "scene.mp4"
ASKED = {"prompt": "What color is the circle?", "images": [SCENE, PHOTO], "max_new_tokens": 3}
MOVING = {"prompt": "Which way does the circle move?", "videos": [CLIP], "max_new_tokens": 3}


def load(folder=QWEN, **options):
    return refvl.load(folder, device="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def run():
    return load().trace(**ASKED)


def changed(run, tensors: dict) -> Stages:
    """The stages of a run with some exchanged."""
    return replace(run.stages, tensors=run.stages.tensors | tensors)


# --- the same run -----------------------------------------------------------------------------------------------------


def test_refvl_and_transformers_are_the_same_stage_by_stage(run):
    comparison = refvl.compare(run, record_transformers(str(QWEN), load(), run, max_new_tokens=3))
    assert comparison.first is comparison.stage is None
    assert comparison.verdict == "no difference"
    names = [row.name for row in comparison.rows]
    media = [f"{stage}/{i}" for stage in ("patchify", "encode") for i in (0, 1)]
    text = ["prefill/last_states", "prefill/first_logits", "decode tokens/token_ids", "decode tokens/margins"]
    assert names == [*media, "merge/input_ids", "merge/inputs_embeds", "positions/ids", *text]
    assert comparison.not_in_both == []


# --- where, how much, and the tolerance -------------------------------------------------------------------------------

FIVE, LAST = torch.arange(9)[:, None] == 4, torch.tensor([[0], [0], [1]])
AFTER_1 = torch.tensor([1.0, 1, 1.01, 1])[:, None]
PLACES = {  # stage -> what is done to it, and where the difference is said to be
    "patchify/1": (lambda x: 2 * x, "48 of 48 rows, the first at item 2, patch (t 0, row 0, column 0)"),
    "patchify/0": (lambda x: x[:-4], "shapes (32, 1176) and (36, 1176)"),
    "encode/0": (lambda x: x.masked_fill(FIVE, torch.nan), "at item 1, token (t 0, row 1, column 1)"),
    "merge/input_ids": (lambda x: x + (torch.arange(50) == 7), "1 of 50 rows, the first at token 7"),
    "positions/ids": (lambda x: x + LAST, "50 of 50 rows, the first at token 0"),
    "prefill/last_states": (lambda x: x * AFTER_1, "the first after layer 1"),
    "prefill/first_logits": (lambda x: x * 1.01, "the first at token id"),
    "decode tokens/margins": (lambda x: x + torch.arange(len(x)), "the first at new token 1"),
}


@pytest.mark.parametrize("name", PLACES)
def test_each_difference_has_its_place(run, name):
    """Without a model, no cause is given."""
    change, beyond = PLACES[name]
    comparison = refvl.compare(changed(run, {name: change(run.stages.tensors[name])}), run)
    first = comparison.first
    assert first.name == name and beyond in first.beyond, first
    assert first.cause == ""
    assert comparison.stage == name.split("/")[0]
    assert first.name in comparison.verdict and comparison.verdict in repr(comparison)


def test_two_tokens_that_almost_tie_are_told_from_other_logits(run):
    """By hand: the second token is another, and its margin is no larger than rounding of the
    logits."""
    ids, margins = (run.stages.tensors[f"decode tokens/{name}"].clone() for name in ("token_ids", "margins"))
    ids[1] += 1
    margins[1] = 1e-6
    tie = {"decode tokens/margins": margins}
    other = tie | {"decode tokens/token_ids": ids}
    first = refvl.compare(changed(run, tie), changed(run, other)).first
    assert "the first at new token 1; its best two logits are 1e-06 apart, and rounding explains" in first.beyond
    alone = Stages({"decode tokens/token_ids": ids}, "folders of other software have no logits")
    assert refvl.compare(run, alone).first.beyond == "1 of 2 rows, the first at new token 1"


def test_the_tolerance_of_the_text_model_follows_dtype_width_and_depth(run):
    """By hand: 2 * sqrt(n) * eps, n = 10 * width in float32 and 10 in half precision for each layer
    and one more."""
    states = run.last_states
    layers, width = len(states) - 1, states.shape[1]
    for dtype, rounded in ((torch.float32, 10 * width), (torch.bfloat16, 10)):
        share = 2 * ((layers + 1) * rounded) ** 0.5 * torch.finfo(dtype).eps
        logits, states = run.first_logits.to(dtype), run.last_states.to(dtype)
        both = {"prefill/last_states": states, "prefill/first_logits": logits}
        for factor, differs in ((0.5, False), (2.0, True)):
            moved = logits.float() + factor * share * logits.float().abs().max()
            made = Stages(both | {"prefill/first_logits": moved}, "moved")
            assert (refvl.compare(made, Stages(both, "still")).first is not None) == differs


def test_what_the_inputs_are_apart_is_allowed_for(run):
    """A tower that computed in TF32 is not blamed on the text model behind it."""
    embeds = run.stages.tensors["merge/inputs_embeds"]
    noise = 1e-4 * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0))
    moved = {"merge/inputs_embeds": embeds * (1 + noise), "prefill/first_logits": run.first_logits * (1 + 2e-4)}
    compared = refvl.compare(changed(run, moved), run)
    assert compared.first is None, compared


@pytest.mark.parametrize("share, differs", [(0.9e-3, False), (1.1e-3, True), (0.05, True)])
def test_rows_of_text_are_judged_by_their_own_size(run, share, differs):
    """They are small beside rows of media: 5 % of text rows lie below 1e-3 of the largest value."""
    embeds = run.stages.tensors["merge/inputs_embeds"].clone()
    is_text = torch.ones(len(embeds), dtype=torch.bool)
    is_text[media_places(run.spans)] = False
    assert embeds[is_text].abs().max() * 0.05 < 1e-3 * embeds.abs().max()
    embeds[is_text] *= 1 + share
    compared = refvl.compare(changed(run, {"merge/inputs_embeds": embeds}), run)
    assert (compared.stage == "merge") == differs
    assert not differs or compared.first.beyond.startswith(f"{int(is_text.sum())} of {len(embeds)} rows")


def test_the_tolerance_is_a_share_of_the_largest_value(run):
    embeds = run.embeds[0]
    scale = float(embeds.abs().max())
    for share, differs in ((0.9e-3, False), (1.1e-3, True)):
        moved = changed(run, {"encode/0": embeds + share * scale})
        comparison = refvl.compare(moved, run, rtol=1e-3)
        assert (comparison.stage == "encode") == differs
    assert refvl.compare(changed(run, {"encode/0": embeds + 0.5}), run, rtol=0, atol=0.51).first is None
    ids = run.stages.tensors["decode tokens/token_ids"]
    others = changed(run, {"decode tokens/token_ids": ids + 1})
    assert refvl.compare(others, run, rtol=1).stage == "decode tokens"


# --- causes that need no forward --------------------------------------------------------------------------------------

SPANS = [MediaSpan(2, t=1, h=2, w=5), MediaSpan(14, t=4, h=3, w=2, t_factor=1.0), MediaSpan(40, t=1, h=4, w=2)]
TRUNCATED = [replace(span, t_factor=0.0 if span.t > 1 else 1.0) for span in SPANS]
RULES = {
    "axes in the order w, t, h": lambda right: right[[2, 0, 1]],
    "second_per_grid_truncated": lambda _: get_mrope_input_positions(60, TRUNCATED)[0],
    "larger_side_positions": lambda _: releases.larger_side_positions(60, SPANS)[0],
    "width_offset_positions": lambda _: releases.width_offset_positions(60, SPANS)[0],
    "": lambda right: right + (torch.arange(60) > 30),
}


@pytest.mark.parametrize("cause", RULES)
def test_a_rule_for_positions_is_proven_from_the_spans(cause, tmp_path):
    """And if the run is loaded from a folder."""
    right, _ = get_mrope_input_positions(60, SPANS)
    Stages({"positions/ids": right}, "right", spans=SPANS).save(tmp_path / "right")
    wrong = Stages({"positions/ids": RULES[cause](right)}, "wrong")
    first = refvl.compare(tmp_path / "right", wrong, model=load()).first
    assert first.cause.startswith(cause), first
    assert first.cause.endswith(", in b (wrong)" * bool(cause)), first
    assert bool(first.cause) == bool(cause)


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [ASKED, MOVING, MOVING | {"pruning_rate": 0.5}], ids=["image", "clip", "pruned"])
def test_what_is_saved_is_what_is_compared(asked, tmp_path):
    trace = load().trace(**asked)
    trace.save(tmp_path / "deep" / "run")
    loaded = Stages.load(tmp_path / "deep" / "run")
    assert refvl.compare(trace, tmp_path / "deep" / "run", rtol=0).first is None
    assert loaded.layouts == trace.layouts and loaded.source == f"refvl {refvl.__version__}"
    assert list(loaded.tensors) == list(trace.stages.tensors)
    assert loaded.spans == ([] if "pruning_rate" in asked else trace.spans)
    with pytest.raises(FileExistsError, match="folder: .*run already contains files"):
        trace.save(tmp_path / "deep" / "run")


def rewrite(folder, **changes) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(values | changes))


DAMAGES = {
    "No such file or directory: .*stages.safetensors": lambda f: (f / TENSORS).unlink(),
    "expected a manifest of saved stages": lambda f: rewrite(f, format="x"),
    "truncated or not a safetensors": lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-9]),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_folder_is_refused_in_a_sentence(run, tmp_path, message):
    run.save(tmp_path / "run")
    DAMAGES[message](tmp_path / "run")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        refvl.compare(tmp_path / "run", run)
    assert str(tmp_path) in str(caught.value)


def test_wrong_arguments_are_named(run):
    with pytest.raises(TypeError, match="a: expected a Trace, Stages or a folder of saved stages, got int"):
        refvl.compare(3, run)
    with pytest.raises(ValueError, match="share no recorded stage"):
        refvl.compare(run, Stages({}, "empty"))


def test_what_only_one_run_recorded_leaves_the_verdict_open(run):
    some = Stages({"encode/0": run.embeds[0]}, "a tower")
    assert refvl.compare(some, some).verdict == "no difference"
    verdict = refvl.compare(run, some).verdict
    assert verdict.startswith("undecided: the same where both recorded, but only one recorded decode tokens/margins, ")


# --- the command line -------------------------------------------------------------------------------------------------


def test_one_command_says_where_the_two_differ(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    asked = (QWEN.name, ASKED["prompt"], "-i", SCENE)  # the name of a shipped model
    status, out, _ = shell("trace", *asked, "--with", "transformers", "--save", tmp_path / "a")
    assert status == 0 and "beside transformers" in out
    assert out.rstrip().endswith("\nno difference")
    assert shell("compare", tmp_path / "a", tmp_path / "a")[0] == 0
    stages, plan = Stages.load(tmp_path / "a"), load().encoder.plan([(1, 6, 6)])
    unordered = {"encode/0": stages.tensors["encode/0"][plan.window_index]}
    replace(stages, source="port", tensors=stages.tensors | unordered).save(tmp_path / "b")
    status, out, err = shell("compare", tmp_path / "a", tmp_path / "b", "--model", QWEN)
    assert (status, err) == (1, "")
    assert "first difference: encode/0; window order not undone, in b (port)" in out
    assert shell("compare", tmp_path / "a", tmp_path / "b", "--atol", 1e9)[0] == 0


MISTAKES = {
    "nowhere/manifest.json": ["compare", "nowhere", "nowhere"],
    "with: expected a family with a processor": ["trace", "tiny-step3", "Hi", "--with", "transformers"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line(shell, message):
    status, _, err = shell(*MISTAKES[message])
    assert (status, err.count("\n")) == (1, 1) and message in err


# --- the largest magnitude --------------------------------------------------------------------------------------------


def test_every_stage_keeps_its_largest_magnitude():
    """Oracle: hooks of this test on the same layers."""
    vlm, seen = load(), {"encode": [], "prefill": []}
    layers = {"encode": vlm.encoder.blocks, "prefill": vlm.language_model.model.layers}

    def overhear(stage):
        return lambda _, __, out: seen[stage].append(out[0] if isinstance(out, tuple) else out)

    for stage, blocks in layers.items():
        for block in blocks:
            block.register_forward_hook(overhear(stage))
    trace = vlm.trace(**ASKED)
    prompt = [x for x in seen["prefill"] if x.shape[-2] > 1]
    assert trace.largest["prefill"] == max(float(x.abs().max()) for x in prompt)
    assert trace.largest["encode"] == max(float(x.abs().max()) for x in [*seen["encode"], *trace.embeds])
    assert trace.largest["patchify"] == max(float(p.pixel_values.abs().max()) for p in trace.patches)
    assert trace.largest["merge"] == float(trace.inputs_embeds.abs().max())
    assert f"{trace.largest['encode']:.3g}" in repr(trace)
    assert len(vlm.encoder.blocks[0]._forward_hooks) == 1


def test_float16_near_its_limit_is_warned_of_and_only_there():
    def overflowing(dtype):
        vlm = load(dtype=dtype)
        with torch.no_grad():
            vlm.encoder.blocks[1].mlp.down_proj.bias.fill_(40_000.0)
        return vlm

    with pytest.warns(UserWarning, match=r"encode: values reach 4\d,\d{3}, and float16 ends at 65,504.*bfloat16"):
        overflowing("float16").trace("Hi", images=[SCENE], max_new_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "!" not in overflowing("float32").trace("Hi", images=[SCENE], max_new_tokens=1).magnitude("encode")
    trace = refvl.Trace(inputs_embeds=torch.tensor([float("nan"), 1.0]))
    keep_largest(trace, {"encode": [torch.tensor([70_000.0])], "prefill": []})
    assert (trace.magnitude("encode"), trace.magnitude("merge")) == ("7e+04!", "nan!")
