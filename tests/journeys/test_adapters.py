"""LoRA adapters on the parts of a model.

Oracle: transformers with PEFT on the same checkpoint and the same adapter.
"""

import json
from itertools import chain, product

import numpy as np
import pytest
import torch
from closeness import assert_agree, assert_logits_agree
from graph_families import build, distance, make_case, manager_of
from prompts import inputs_of
from random_models import NEEDS_5_23, random_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import refvl
from refvl.families import FAMILIES as ROWS
from refvl.paths import DATA
from refvl.serving import adapters, linear

peft = pytest.importorskip("peft")

PHOTO = np.random.default_rng(1).integers(0, 256, (84, 112, 3), dtype=np.uint8)
QUESTION = {"prompt": "What is it?", "images": [PHOTO], "max_new_tokens": 12}
ONE_TOKEN = QUESTION | {"max_new_tokens": 1}


def randomize(model, name: str, seed: int) -> None:
    """An adapter as strong as the weights that it stands beside: PEFT's own begins without an
    effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if f".{name}." in key and "lora_" in key:
                weight.normal_(std=0.2, generator=generator)


def make_adapter(model, folder, name: str = "default", seed: int = 0, parts=adapters.PARTS, **options):
    """Attach a random adapter of rank 4 to `parts`, and save it."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=adapters.layers(model, *parts), **options)
    made = adapters.attach(model, config, name=name)
    randomize(made, name, seed)
    made.save_pretrained(folder, selected_adapters=[name])
    return folder if name == "default" else folder / name


def load(folder, **options):
    vlm = refvl.load(folder, device="cpu", progress=False, **options)
    vlm.language_model.generation_config.eos_token_id = None
    return vlm


FOLDERS, HEAD = ("Qwen2.5-VL", "qwen3_vl", "GLM-4.1V"), ["q_proj", "lm_head"]
CASES = [("Qwen2.5-VL", HEAD), *product(FOLDERS, ["all-linear"]), *product(FOLDERS[1:], [HEAD])]


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request):
    return random_folder(request.param)


def trained_elsewhere(folder, out, **targets):
    """transformers' model with a random adapter, which PEFT saves to `out`."""
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5, **targets))
    randomize(theirs, "default", seed=0)
    theirs.save_pretrained(out)
    theirs.generation_config.eos_token_id = None
    return theirs.eval()


@torch.inference_mode()
def asked(theirs, vlm) -> tuple[list[int], torch.Tensor]:
    """transformers' new ids of QUESTION, and the first token's logits."""
    inputs = inputs_of(vlm, vlm.trace(**QUESTION))
    output = theirs.generate(
        **inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), output.logits[0][0]


def answered(vlm) -> tuple[list[int], torch.Tensor]:
    """The same of refvl."""
    trace = vlm.trace(**QUESTION)
    inputs = inputs_of(vlm, trace)
    output = vlm.generate(
        inputs["input_ids"], pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"],
        max_new_tokens=12, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert output.sequences[0, inputs["input_ids"].shape[1] :].tolist() == trace.token_ids
    return trace.token_ids, output.logits[0][0]


def assert_same(vlm, ours, theirs):
    assert ours[0] == theirs[0]
    assert_logits_agree(vlm, vlm.trace(**QUESTION), ours[1], theirs[1])


@pytest.mark.thorough
@pytest.mark.parametrize(("folder", "targets"), CASES, indirect=["folder"], ids=str)
def test_an_adapter_of_transformers_and_peft(folder, targets, tmp_path):
    """On tower, connector and text model, or on the head, whose own weight PEFT saves as well.

    It was trained with dropout, which must be off.
    """
    theirs = trained_elsewhere(folder, tmp_path, target_modules=targets)
    vlm = load(folder)
    plain = answered(vlm)
    returned = adapters.attach(vlm, tmp_path)
    assert returned is vlm.adapters and "default" in repr(vlm)
    assert not any(weight.requires_grad for weight in returned.parameters())
    wanted = asked(theirs, vlm)
    assert_same(vlm, answered(vlm), wanted)
    assert wanted[0] != plain[0]
    with vlm.adapters.disable_adapter():
        assert_same(vlm, answered(vlm), plain)


def test_an_adapter_for_transformers_and_peft(folder, tmp_path):
    """Oracle: transformers reads what was saved here.

    Without an effect the test would pass by itself: see above.
    """
    vlm = load(folder)
    adapter = make_adapter(vlm, tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    theirs.generation_config.eos_token_id = None
    assert_same(vlm, answered(vlm), asked(theirs, vlm))


OLDER = {  # prefixes before transformers 4.52, in vLLM, and where a text model was trained alone
    "first releases": {"model.visual.": "visual.", "model.language_model.": "model."},
    "vLLM": {"model.visual.": "visual.", "model.language_model.": "language_model.model."},
    "text alone": {"model.language_model.": "model."},
}


def renamed(name: str, prefixes: dict[str, str]) -> str:
    """A layer's name with an older prefix."""
    for new, old in prefixes.items():
        name = name.replace(new, old)
    return name


def edit(folder, out, weights=lambda key: key, config=lambda values: values, change=lambda stored: stored):
    """A copy of an adapter with other names, another config, or other weights."""
    out.mkdir()
    stored = load_file(folder / adapters.WEIGHTS)
    prefix = "base_model.model."
    others = {prefix + weights(key.removeprefix(prefix)): tensor for key, tensor in stored.items()}
    save_file(change(others), out / adapters.WEIGHTS)
    values = json.loads((folder / adapters.CONFIG).read_text())
    (out / adapters.CONFIG).write_text(json.dumps(config(values)))
    return out


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """(answers without an adapter, with "a", with "b"; where PEFT saved the two)."""
    vlm = load(checkpoint, linear="torch")
    ids = [vlm.trace(**QUESTION).token_ids]
    folders = []
    for seed, name in enumerate("ab"):
        folders.append(make_adapter(vlm, tmp_path_factory.mktemp(name), name, seed))
        ids.append(vlm.trace(**QUESTION).token_ids)
    assert len({tuple(row) for row in ids}) == 3
    return ids, folders


@pytest.mark.parametrize("prefixes", OLDER.values(), ids=OLDER)
def test_older_names_are_read(checkpoint, saved, tmp_path, prefixes):
    """Oracle: the same adapter under today's names.

    Layers are those with weights, whatever the config says.
    """
    (_, wanted, _), (a, _) = saved
    vlm = load(checkpoint)

    def other_targets(config: dict) -> dict:
        return config | {"target_modules": ".*q_proj"}

    adapters.attach(vlm, edit(a, tmp_path / "b", lambda name: renamed(name, prefixes), other_targets))
    assert vlm.trace(**QUESTION).token_ids == wanted


@pytest.mark.parametrize("kernel", ["torch", "onednn"])
def test_switch_merge_and_unmerge(checkpoint, saved, kernel, monkeypatch):
    """Oracle: each adapter alone, by torch's kernel; a merged one is the same sum in another order."""
    if kernel == "onednn" and not linear.times_as_fast():
        pytest.skip("this torch has no oneDNN")
    ids, folders = saved
    monkeypatch.setattr(linear, "MIN_WORK", 0)  # each layer by the kernel that was asked for
    vlm = load(checkpoint, linear=kernel)
    adapted = {type(vlm.language_model.get_submodule(name)) for name in ("lm_head", "model.layers.0.mlp.up_proj")}
    assert adapted == {linear.OneDnnLinear if kernel == "onednn" else torch.nn.Linear}
    before = vlm.language_model.lm_head.weight.clone()
    for name, folder in zip("ab", folders, strict=True):
        adapters.attach(vlm, folder, name=name)
    for name, wanted in (("a", ids[1]), ("b", ids[2])):
        vlm.adapters.set_adapter(name)
        assert vlm.trace(**QUESTION).token_ids == wanted
        vlm.adapters.merge_adapter()
        assert vlm.trace(**QUESTION).token_ids == wanted
        vlm.adapters.unmerge_adapter()
    with vlm.adapters.disable_adapter():
        assert vlm.trace(**QUESTION).token_ids == ids[0]
    vlm.adapters.unload()  # the model is as it was
    assert vlm.trace(**QUESTION).token_ids == ids[0]
    assert not [name for name, _ in vlm.encoder.named_parameters() if "lora" in name]
    assert torch.equal(vlm.language_model.lm_head.weight, before)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Qwen2.5-VL", "MiniCPM-V 4.5", "Step3-VL"])
def test_graphs_follow_adapters(family):
    """Attached, switched, merged, scaled and removed. Oracle: the encoder without graphs."""
    encoder = build(family)
    layouts = {"Qwen2.5-VL": [(1, 4, 4)], "MiniCPM-V 4.5": [((4, 4), (2, 5))], "Step3-VL": [(1, 2), (0, 0)]}[family]
    kernels = {id(encoder.get_parameter(name)) for name in encoder.kernels}
    linear = [n for n, m in encoder.named_modules() if isinstance(m, torch.nn.Linear) and id(m.weight) not in kernels]
    manager = manager_of(encoder)
    first = manager.execute(make_case(encoder, layouts).rows, layouts)
    config = peft.LoraConfig(r=2, target_modules=linear, init_lora_weights=False)
    model = peft.PeftModel(encoder, config, "a").eval()
    model.add_adapter("b", config)

    def replayed() -> list[torch.Tensor]:
        case = make_case(encoder, layouts)
        outputs = manager.execute(case.rows, layouts)
        assert distance(outputs, case.wanted) <= 1e-4  # as in test_graph_weights: a stale graph is off by much more
        return outputs

    with_a = replayed()
    assert distance(with_a, first) > 0.01
    model.set_adapter("b")
    assert distance(replayed(), with_a) > 0.01
    model.set_adapter("a")
    model.merge_adapter()
    assert distance(replayed(), with_a) <= 1e-4
    model.unmerge_adapter()
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.set_scale("a", 3.0)
    assert distance(replayed(), with_a) > 0.01
    with model.disable_adapter():
        assert distance(replayed(), first) <= 1e-4
    model.unload()
    assert distance(replayed(), first) <= 1e-4


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-30B-A3B-Instruct", "Qwen3.5-9B", "GLM-OCR"])
def test_names_are_those_of_transformers(name):
    """Oracle: the linear layers of transformers' model of a released config."""
    vlm = refvl.load(DATA / "configs" / f"{name}.json", weights="random", device="meta")
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(vlm.config)
    linear = {name for name, module in theirs.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(adapters.layers(vlm)) == linear - {"lm_head"}


@pytest.mark.parametrize("family", ROWS, ids=lambda family: family.name)
def test_every_layer_belongs_to_one_part(family):
    """Oracle: whether the layer is the encoder's, and whether it has blocks around it."""
    names = adapters.layer_names(family)
    for place, home in names.places.items():
        assert (names.part(place) == "language_model") == home.startswith("language_model")
    assert set(map(names.part, names.connector)) == {"connector"}
    assert names.part(next(iter(names.places)) + "x") != "language_model"  # a prefix ends at a dot


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Already unmerged")  # PEFT's, of layers that this adapter does not touch
@pytest.mark.parametrize("name", ["tiny-qwen2_5_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3"])
def test_parts_of_shipped_models(name):
    """Oracle: merged and unmerged are the same sums; each part changes its half, and the parts are
    all there is."""
    vlm = load(DATA / "checkpoints" / name)
    by_part = {part: adapters.layers(vlm, part) for part in adapters.PARTS}
    assert all(by_part.values())
    assert sorted(chain(*by_part.values())) == sorted(adapters.layers(vlm))
    [plain] = vlm.encode(images=[PHOTO])
    for part, names in by_part.items():
        made = adapters.attach(vlm, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False), name=part)
        [embeds] = vlm.encode(images=[PHOTO])
        moved = not torch.equal(embeds, plain)
        assert moved == (part != "language_model")
        made.merge_adapter()
        assert_agree(vlm.encode(images=[PHOTO])[0], embeds, vlm.encoder)
        made.unmerge_adapter()
    assert sorted(adapters.layers(vlm)) == sorted(chain(*by_part.values()))


BAD = {  # what is changed in a saved adapter, and what the error says
    "other layers": ({"weights": lambda n: n.replace("self_attn", "attention")}, "no such linear layers: .*attention"),
    "half a pair": ({"change": lambda s: {k: v for k, v in s.items() if "lora_A" in k}}, "missing weights: .*lora_B"),
    "weights of another kind": (
        {"change": lambda s: s | {"base_model.model.lm_head.bias": torch.ones(3)}},
        "weights without a layer: .*lm_head.bias",
    ),
}


@pytest.mark.parametrize("name", ["GLM-4.6V", "Step3-VL", pytest.param("Step-3.7", marks=NEEDS_5_23)])
def test_lora_beside_experts_is_b_times_a(name, tmp_path):
    """Adapters cover what is not stacked.

    Oracle: B A, scaled, added by hand to the weights of each layer.
    """
    merged = load(random_folder(name))
    before = merged.trace(**ONE_TOKEN).first_logits
    adapter = make_adapter(load(random_folder(name)), tmp_path)
    attached = load(random_folder(name), adapters=[adapter])
    stored, layers = load_file(adapter / adapters.WEIGHTS), adapters._adaptable(merged)
    for layer in adapters.layers(merged):
        a, b = (stored.pop(f"base_model.model.{layer}.lora_{half}.weight") for half in "AB")
        layers[layer].weight.data += 8 / 4 * b @ a
    assert not stored
    ours, expected = attached.trace(**ONE_TOKEN), merged.trace(**ONE_TOKEN)
    assert_logits_agree(merged, expected, ours.first_logits, expected.first_logits)
    assert not torch.equal(expected.first_logits, before)


@pytest.mark.parametrize("case", BAD)
def test_an_adapter_that_does_not_fit_is_refused(checkpoint, saved, tmp_path, case):
    """Nothing in it is ignored."""
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=f"^adapter: .*{message}"):
        adapters.attach(load(checkpoint), edit(saved[1][0], tmp_path / "b", **changes))


def test_clear_errors(checkpoint, saved, tmp_path):
    _, (a, _) = saved
    vlm = load(checkpoint)
    with pytest.raises(ValueError, match=r"^adapter: .*Can't find 'adapter_config.json'"):
        adapters.attach(vlm, tmp_path)
    with pytest.raises(FileNotFoundError, match="^adapter: 'no/such/adapter' is not a local folder"):
        adapters.attach(vlm, "no/such/adapter")
    for other in ({"r": 4}, edit(a, tmp_path / "b", config=lambda values: values | {"peft_type": "IA3"})):
        with pytest.raises(TypeError, match=r"^adapter: expected a folder, a hub id or a peft.LoraConfig, got "):
            adapters.attach(vlm, other)
    with pytest.raises(ValueError, match=r"^parts: .* got 'head'"):
        adapters.layers(vlm, "head")
    adapters.attach(vlm, a, name="a")
    with pytest.raises(ValueError, match=r"^name: expected a new name, got 'a'"):
        adapters.attach(vlm, a, name="a")


def test_the_command_line_takes_adapters(checkpoint, saved, shell):
    """Oracle: the same from Python. Two adapters add up."""
    _, folders = saved
    vlm = load(checkpoint)
    vlm.language_model.generation_config.eos_token_id = vlm.processor.tokenizer.eos_token_id
    for name, folder in zip("ab", folders, strict=True):
        adapters.attach(vlm, folder, name=name)
    vlm.adapters.base_model.set_adapter(["a", "b"])
    given = [argument for folder in folders for argument in ("--adapter", str(folder))]
    said = shell("chat", checkpoint, "What is it?", "--max-new-tokens", 8, *given)
    assert said == (0, vlm.chat("What is it?", max_new_tokens=8) + "\n", "")
    status, _, err = shell("trace", checkpoint, "What is it?", "--with", "transformers", *given)
    assert status == 1 and err.startswith("refvl: with: transformers prunes nothing and gets no adapter")


def test_quantised_weights_are_not_merged():
    """Oracle: the flag that transformers' quantisers set on the model."""
    vlm = refvl.load("tiny-qwen2_5_vl", device="cpu", progress=False)
    vlm.language_model.is_quantized = True
    with pytest.raises(ValueError, match="merge_adapter: not supported for quantised weights"):
        adapters.attach(vlm, peft.LoraConfig(r=2, target_modules=adapters.layers(vlm))).merge_adapter()
