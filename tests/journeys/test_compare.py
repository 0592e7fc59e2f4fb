"""`refvl.compare`, saved stages, and the stages of transformers' model. Oracles: differences planted one at a time, and
transformers' model on the same weights, which a run without one equals.
"""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import refvl
from refvl.paths import DATA
from refvl.pixels import patches
from refvl.study import releases as upstream
from refvl.study.comparison import MANIFEST, TENSORS, Stages
from refvl.study.recording import record_transformers, transformers_inputs
from refvl.study.watch import keep_largest

QWEN, GLM = DATA / "checkpoints" / "tiny-qwen2_5_vl", DATA / "checkpoints" / "tiny-glm4v"
QWEN3 = DATA / "checkpoints" / "tiny-qwen3_vl"
SCENE, PHOTO, CLIP = DATA / "pictures" / "scene.png", DATA / "pictures" / "coffee.jpg", DATA / "clips" / "scene.mp4"
ASKED = {"prompt": "What color is the circle?", "images": [SCENE, PHOTO], "max_new_tokens": 3}
MOVING = {"prompt": "Which way does the circle move?", "videos": [CLIP], "max_new_tokens": 3}


def load(folder=QWEN, **options):
    return refvl.load(folder, device="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def run():
    return load().trace(**ASKED)


@pytest.fixture(scope="module")
def theirs(run):
    return record_transformers(str(QWEN), load(), run, max_new_tokens=3)


@pytest.fixture(scope="module")
def clip_run():
    return load().trace(**MOVING)


# --- the same run -----------------------------------------------------------------------------------------------------


def test_refvl_and_transformers_are_the_same_stage_by_stage(run, theirs):
    comparison = refvl.compare(run, theirs)
    assert comparison.first is comparison.stage is None and "no difference" in comparison.verdict
    names = [row.name for row in comparison.rows]
    media = [f"{stage}/{i}" for stage in ("patchify", "encode") for i in (0, 1)]
    text = ["prefill/last_states", "prefill/first_logits", "decode tokens/token_ids", "decode tokens/margins"]
    assert names == [*media, "merge/inputs_embeds", "positions/ids", *text]
    assert comparison.not_in_both == ["merge/input_ids"]  # transformers is given refvl's


@pytest.mark.parametrize("asked", [ASKED | {"images": [PHOTO]}, MOVING], ids=["image", "clip"])
@pytest.mark.parametrize("folder", [GLM, QWEN3], ids=lambda folder: folder.name)
def test_other_families_are_recorded_too(folder, asked):
    """The tower's rows with deeper features and all, where there are any."""
    vlm = load(folder)
    trace = vlm.trace(**asked)
    comparison = refvl.compare(trace, record_transformers(str(folder), vlm, trace, max_new_tokens=3))
    assert comparison.first is None and {"encode/0", "positions/ids"} <= {row.name for row in comparison.rows}


# --- five planted differences -----------------------------------------------------------------------------------------


def test_a_bilinear_resize_is_found(monkeypatch, theirs):
    def bilinear(image, config):
        height, width = config.target_size(image.height, image.width)
        return image.resize((width, height), Image.Resampling.BILINEAR)

    monkeypatch.setattr(patches, "resize_image", bilinear)
    first = refvl.compare(load().trace(**ASKED), theirs).first
    assert first.name == "patchify/1" and first.cause.startswith("resize"), "the scene needs no resize, the photo does"
    assert "of 48 rows, the first at item 2, patch (t 0, row " in first.beyond


def test_one_shade_in_one_row_is_no_other_order(theirs):
    """By hand: what vLLM's bicubic filter does to a scene of which all other rows are the same."""
    tensors = {name: tensor.clone() for name, tensor in theirs.tensors.items()}
    tensors["patchify/0"][3, :2] += 2 / 255
    first = refvl.compare(replace(theirs, tensors=tensors), theirs).first
    assert first.name == "patchify/0" and first.cause.startswith("resize"), first.cause


def test_a_swapped_mean_is_found(theirs):
    vlm = load()
    config = vlm.processor.image_config
    vlm.processor.image_config = replace(config, image_mean=config.image_mean[::-1])
    first = refvl.compare(vlm.trace(**ASKED), theirs).first
    assert first.name == "patchify/0" and first.cause.startswith("normalisation")
    moved = abs(config.image_mean[0] - config.image_mean[2]) / min(config.image_std[0], config.image_std[2])
    assert first.largest == pytest.approx(moved, rel=1e-5)
    assert first.beyond == "36 of 36 rows, the first at item 1, patch (t 0, row 0, column 0)"


def test_a_window_order_that_is_not_undone_is_found(monkeypatch, theirs):
    vlm = load()
    plan = vlm.encoder.plan_checked

    def forgetful(layouts):
        metadata = plan(layouts)
        return replace(metadata, reverse_index=torch.arange(len(metadata.reverse_index)))

    monkeypatch.setattr(vlm.encoder, "plan_checked", forgetful)
    run = vlm.trace(**ASKED)
    first = refvl.compare(run, theirs).first
    assert first.name == "encode/0" and first.cause.startswith("order")
    order = plan([(1, 6, 6)]).window_index
    row, column = divmod(int((order != torch.arange(9)).int().argmax()), 3)
    assert first.beyond.endswith(f"the first at item 1, token (t 0, row {row}, column {column})")


def test_positions_that_cost_the_larger_side_are_found(monkeypatch, clip_run):
    vlm = load()
    wrong = upstream.larger_side_positions
    monkeypatch.setattr(vlm.language_model, "positions", lambda ids, spans: wrong(len(ids), spans)[0])
    first = refvl.compare(vlm.trace(**MOVING), clip_run).first
    assert first.name == "positions/ids" and first.cause.startswith("positions: how far an item moves")
    [span] = clip_run.spans
    assert first.beyond.endswith(f"the first at token {span.offset + span.num_tokens}"), "the text after the clip"


def test_a_tower_in_bfloat16_is_found(theirs):
    vlm = load()
    vlm.encoder.to(torch.bfloat16)
    first = refvl.compare(vlm.trace(**ASKED), theirs).first
    assert first.name == "encode/0" and first.cause == "precision: bfloat16 against float32"


def test_a_tower_that_computed_in_bfloat16_is_found_in_float32_rows(run, theirs):
    """As where a server writes float32: the dtype no longer tells."""
    vlm = load()
    vlm.encoder.to(torch.bfloat16)
    rows = {f"encode/{i}": x.float() for i, x in enumerate(vlm.encode(ASKED["images"]))}
    first = refvl.compare(Stages(run.stages.tensors | rows, "x", run.layouts), theirs).first
    assert first.name == "encode/0" and first.cause.startswith("precision: a tower in bfloat16")


# --- other differences ------------------------------------------------------------------------------------------------


def changed(run, **tensors) -> Stages:
    """The stages of a run with some exchanged: names with _ for /."""
    return Stages(run.stages.tensors | {n.replace("__", "/"): x for n, x in tensors.items()}, "changed", run.layouts)


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("patchify/0", lambda x: x.flip(0), "order: the patch rows"),
        ("patchify/1", lambda x: x[:-4], "resize: different limits"),
        ("patchify/1", lambda x: 2 * x, "normalisation"),
        (
            "encode/1",
            lambda x: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * x.std(),
            "weights",
        ),
        ("encode/0", lambda x: x.index_fill(0, torch.tensor([4]), torch.inf), "overflow"),
        ("encode/0", lambda x: x.index_fill(0, torch.tensor([4]), torch.nan), "overflow"),
        ("encode/0", lambda x: x[:-1], "resize"),
        ("merge/input_ids", lambda x: x.clone().index_fill_(0, torch.tensor([7]), 1), "tokens"),
        ("merge/inputs_embeds", lambda x: x.flip(0), "order"),
        ("positions/ids", lambda x: x[[0, 2, 1]], "positions: order of the axes"),
        ("prefill/last_states", lambda x: x * torch.tensor([1.0, 1, 1.01, 1])[:, None], "layer 1: its norms"),
        ("prefill/first_logits", lambda x: x * 1.01, "head: the final norm, or the weights"),
        ("decode tokens/token_ids", lambda x: x + 1, "decoding: the same logits, a different choice"),
        ("decode tokens/token_ids", lambda x: x + torch.arange(len(x)), "decoding: positions of new tokens"),
        ("decode tokens/margins", lambda x: x + torch.arange(len(x)), "decoding: positions of new tokens"),
    ],
)
def test_each_difference_has_its_usual_cause(run, name, change, cause):
    after = run.stages.tensors[name]
    first = refvl.compare(changed(run, **{name.replace("/", "__"): change(after)}), run).first
    assert first.name == name and first.cause.startswith(cause), first


def test_two_tokens_that_almost_tie_are_told_from_other_logits(run):
    """By hand: the second token is another, and its margin is no larger than rounding of the logits."""
    ids, margins = (run.stages.tensors[f"decode tokens/{name}"].clone() for name in ("token_ids", "margins"))
    ids[1] += 1
    margins[1] = 1e-6
    tie = Stages(run.stages.tensors | {"decode tokens/margins": margins}, "tie", run.layouts)
    other = Stages(tie.tensors | {"decode tokens/token_ids": ids}, "other", run.layouts)
    first = refvl.compare(tie, other).first
    assert first.cause.startswith("two tokens that almost tie: their logits are 1e-06 apart"), first.cause
    assert first.beyond.endswith("the first at new token 1")


def test_tokens_alone_leave_both_causes_open(run):
    """Folders of other software, or of earlier releases, hold no logits."""
    old = {
        name: x for name, x in run.stages.tensors.items() if not name.startswith("prefill") and "margins" not in name
    }
    new = old | {"decode tokens/token_ids": old["decode tokens/token_ids"] + 1}
    first = refvl.compare(Stages(new, "new"), Stages(old, "old"), model=load()).first
    assert first.cause == "weights or kernels of the text model; two tokens that almost tie"


def test_the_tolerance_of_the_text_model_follows_dtype_width_and_depth(run):
    """By hand: 2 * sqrt(n) * eps, n = 10 * width in float32 and 10 in half precision for each layer and one more."""
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
    compared = refvl.compare(Stages(run.stages.tensors | moved, "moved"), run)
    assert compared.first is None, compared


def test_the_tolerance_is_a_share_of_the_largest_value(run):
    embeds = run.embeds[0]
    scale = float(embeds.abs().max())
    for share, differs in ((0.9e-3, False), (1.1e-3, True)):
        comparison = refvl.compare(changed(run, encode__0=embeds + share * scale), run, rtol=1e-3)
        assert (comparison.stage == "encode") == differs
    assert refvl.compare(changed(run, encode__0=embeds + 0.5), run, rtol=0, atol=0.51).first is None
    ids = run.stages.tensors["decode tokens/token_ids"]
    assert refvl.compare(changed(run, **{"decode tokens__token_ids": ids + 1}), run, rtol=1).stage == "decode tokens"


def test_both_forms_name_the_difference_and_escape_it(run):
    other = Stages(run.stages.tensors | {"encode/0": run.embeds[0] * 2}, "<b>", [])
    comparison = refvl.compare(other, run)
    assert "encode/0" in repr(comparison) and "DIFFERS" in repr(comparison) and comparison.verdict in repr(comparison)
    table = comparison._repr_html_()
    assert "&lt;b&gt;" in table and "<b>" not in table and table.count("<tr>") == 1 + len(comparison.rows)
    assert "token 0" in comparison.first.beyond or "item 1" in comparison.first.beyond


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, None), {}, TypeError, "a: expected a Trace, Stages or a folder of saved stages, got int"),
        ((None, 3), {}, TypeError, "b: expected a Trace"),
        ((None, Stages({}, "empty")), {}, ValueError, "share no recorded stage"),
        ((None, None), {"rtol": -1}, ValueError, "rtol: must be 0 or more, got -1"),
        ((None, None), {"atol": float("nan")}, ValueError, "atol: must be 0 or more, got nan"),
        ((None, None), {"rtol": "1"}, TypeError, "rtol: expected a number"),
        ((None, None), {"model": "x"}, TypeError, "model: expected a VLM, as refvl.load returns, got str"),
        (("nowhere", None), {}, FileNotFoundError, "nowhere: contains no saved stages"),
    ],
)
def test_wrong_arguments_are_named(run, arguments, options, error, message):
    with pytest.raises(error, match=message):
        refvl.compare(*(run if x is None else x for x in arguments), **options)


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_compared(run, clip_run, tmp_path):
    for name, trace in {"image": run, "clip": clip_run}.items():
        trace.save(tmp_path / "deep" / name)
        loaded = Stages.load(tmp_path / "deep" / name)
        assert refvl.compare(trace, tmp_path / "deep" / name, rtol=0).first is None
        assert loaded.layouts == trace.layouts and loaded.source == f"refvl {refvl.__version__}"
        assert list(loaded.tensors) == list(trace.stages.tensors)
    half = Stages({"encode/0": run.embeds[0].to(torch.bfloat16)}, "half")
    half.save(tmp_path / "half")
    assert Stages.load(tmp_path / "half").tensors["encode/0"].dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "half"], "nothing unfinished is left"


def test_a_pruned_run_is_saved_with_its_masks(tmp_path):
    trace = load().trace(**MOVING, pruning_rate=0.5)
    trace.save(tmp_path / "pruned")
    loaded = Stages.load(tmp_path / "pruned").tensors
    assert torch.equal(loaded["prune/0"], trace.keep_masks[0]) and len(loaded["positions/ids"][0]) == len(
        trace.input_ids
    )


def test_a_folder_that_holds_files_is_left_alone(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="folder: .*full already contains files"):
        run.save(tmp_path / "full")
    with pytest.raises(FileExistsError, match="folder: expected a new or empty folder, got the file .*file$"):
        run.save(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full", "precious"]
    (tmp_path / "empty").mkdir()
    run.save(tmp_path / "empty")
    assert Stages.load(tmp_path / "empty").tensors


def test_a_write_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("refvl.study.comparison.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        run.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def rewrite(folder, **changes) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(values | changes))


def resave(folder, tensors) -> None:
    save_file(tensors, folder / TENSORS)
    rewrite(folder, tensors={n: [str(x.dtype).removeprefix("torch."), *x.shape] for n, x in tensors.items()})


HOSTILE = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is missing"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "stages.safetensors is missing"),
    "a folder for a file": (lambda f: [(f / TENSORS).unlink(), (f / TENSORS).mkdir()], "stages.safetensors is missing"),
    "no JSON": (lambda f: (f / MANIFEST).write_text("{"), "not valid JSON"),
    "a list": (lambda f: (f / MANIFEST).write_text("[]"), "expected a JSON object"),
    "deep JSON": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "not valid JSON"),
    "another format": (lambda f: rewrite(f, format="x"), "expected a manifest of saved stages"),
    "tensors a list": (lambda f: rewrite(f, tensors=[]), "expected a manifest of saved stages"),
    "layouts a word": (lambda f: rewrite(f, layouts="x"), "expected a manifest of saved stages"),
    "another shape": (
        lambda f: rewrite(f, tensors={"encode/0": ["float32", 1]}),
        "expected the tensors listed in manifest.json, but",
    ),
    "truncated": (
        lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-9]),
        "truncated or not a safetensors",
    ),
    "a pickle": (lambda f: (f / TENSORS).write_bytes(b"\x80\x04N."), "truncated or not a safetensors"),
    "another stage": (lambda f: resave(f, {"think/0": torch.ones(2)}), "'decode tokens'], got 'think/0'"),
    "no name": (lambda f: resave(f, {"encode": torch.ones(2)}), "'decode tokens'], got 'encode'"),
    "flat": (lambda f: resave(f, {"encode/0": torch.ones(2)}), "for 'encode/0', got torch.float32 of shape (2,)"),
    "a number": (lambda f: resave(f, {"merge/x": torch.ones(())}), "for 'merge/x', got torch.float32 of shape ()"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_folder_is_refused_in_a_sentence(run, tmp_path, kind):
    damage, message = HOSTILE[kind]
    run.save(tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        refvl.compare(tmp_path / "run", run)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "layouts", [[], [[0, 0, 0]], [[1, 6]], ["x", None], [[10**9, 2, 2]], [[1, 7, 6]], [[-1, 6, 6]]]
)
def test_layouts_that_do_not_fit_are_not_believed(run, tmp_path, layouts):
    run.save(tmp_path / "run")
    rewrite(tmp_path / "run", layouts=layouts)
    for name in ("patchify/0", "encode/0"):
        other = changed(run, **{name.replace("/", "__"): run.stages.tensors[name] + 1})
        row = refvl.compare(tmp_path / "run", other).first
        assert row.name == name and "the first at item 1, " in row.beyond and "(t" not in row.beyond


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_one_command_says_why_the_two_differ(shell, tmp_path):
    status, out, _ = shell(
        "trace", QWEN, ASKED["prompt"], "-i", SCENE, "--with", "transformers", "--save", tmp_path / "a"
    )
    assert status == 0 and "beside transformers" in out and "no difference in the stages that both recorded" in out
    assert shell("compare", tmp_path / "a", tmp_path / "a")[0] == 0
    rows = Stages.load(tmp_path / "a")
    Stages(rows.tensors | {"encode/0": rows.tensors["encode/0"].flip(0)}, "b", rows.layouts).save(tmp_path / "b")
    status, out, err = shell("compare", tmp_path / "a", tmp_path / "b")
    assert status == 1 and "first difference: encode/0; usual cause: order" in out and err == ""
    assert shell("compare", tmp_path / "a", tmp_path / "b", "--atol", 1e9)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nowhere", "nowhere"], "nowhere: contains no saved stages"),
        (
            ["trace", DATA / "checkpoints" / "tiny-step3", "Hi", "--with", "transformers"],
            "with: expected a Qwen or GLM model, because transformers' model can be recorded only for these families, "
            "got Step3-VL",
        ),
        (
            ["trace", GLM, "Hi", "-i", SCENE, "-v", CLIP, "--with", "transformers"],
            "expected only images or only videos for transformers' GLM",
        ),
        (
            ["trace", QWEN, "Hi", "-v", CLIP, "--with", "transformers", "--pruning-rate", 0.5],
            "pruning_rate: must be 0 with",
        ),
    ],
)
def test_a_mistake_is_one_line(shell, arguments, message):
    status, out, err = shell(*arguments)
    assert (status, out, err.count("\n")) == (1, "", 1) and message in err


def test_an_image_and_a_video_for_transformers_glm_are_refused_by_name():
    """transformers' model marks both with one token, and would say that features and tokens do not match."""
    vlm = load(GLM)
    trace = vlm.trace("Hi", images=[SCENE], videos=[CLIP], max_new_tokens=1)
    for call in (lambda: transformers_inputs(vlm, trace), lambda: record_transformers(str(GLM), vlm, trace)):
        with pytest.raises(
            ValueError, match=r"with: expected only images or only videos for transformers' GLM.*, got both"
        ):
            call()


@pytest.mark.thorough
def test_saved_runs_are_explained_with_a_checkpoint(shell, tmp_path):
    vlm = load()
    vlm.trace(**ASKED).save(tmp_path / "right")
    rotary = vlm.language_model.model.rotary_emb
    rotary.register_forward_pre_hook(lambda module, args: (args[0], args[1][[0, 2, 1]]))
    vlm.trace(**ASKED).save(tmp_path / "wrong")
    status, out, _ = shell("compare", tmp_path / "right", tmp_path / "wrong", "--model", QWEN)
    assert status == 1 and "cause: layer 0: rotary, h and w exchanged, in b (refvl" in out


# --- the largest magnitude --------------------------------------------------------------------------------------------


def test_every_stage_keeps_its_largest_magnitude():
    """Oracle: hooks of this test on the same layers."""
    vlm, seen = load(), {"encode": [], "prefill": []}
    layers = {"encode": vlm.encoder.blocks, "prefill": vlm.language_model.model.layers}
    for stage, blocks in layers.items():
        for block in blocks:
            block.register_forward_hook(
                lambda _, __, out, stage=stage: seen[stage].append(out[0] if isinstance(out, tuple) else out)
            )
    trace = vlm.trace(**ASKED)
    prompt = [x for x in seen["prefill"] if x.shape[-2] > 1]
    assert trace.largest["prefill"] == max(float(x.abs().max()) for x in prompt)
    assert trace.largest["encode"] == max(float(x.abs().max()) for x in [*seen["encode"], *trace.embeds])
    assert trace.largest["patchify"] == max(float(p.pixel_values.abs().max()) for p in trace.patches)
    assert trace.largest["merge"] == float(trace.inputs_embeds.abs().max())
    assert f"{trace.largest['encode']:.3g}" in repr(trace) and "max |x|" in trace._repr_html_()
    assert not vlm.encoder.blocks[0]._forward_hooks.keys() - {next(iter(vlm.encoder.blocks[0]._forward_hooks))}


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
