"""Adapters: PEFT's LoRA on the text model, connector and tower, with transformers' names for the layers.

    family        text model                      connector                                    tower            served
    Qwen          model.language_model, lm_head   model.visual.merger, .deepstack_merger_list  model.visual     all
    GLM           model.language_model, lm_head   model.visual.merger, .downsample             model.visual     all
    MiniCPM-V     llm                             resampler                                    vpm              text
    ... 4.6, 4.7  model.language_model, lm_head   model.merger.mlp.0                           .vision_tower    none
    Step          model, lm_head                  vit_downsampler*, vit_large_projector        vision_model     none

The names are those of `LayerNames` below. PEFT receives one module that contains the parts of a
model under these names. Therefore, transformers with PEFT and serving engines can read adapters
saved by refvl, and refvl can read adapters saved by PEFT. PEFT replaces the model's layers with
its own, which chat, trace, encode and graphs then use. `attach` returns a PEFT model, which
switches, merges, unmerges and saves adapters.

"served" lists the parts whose adapters vLLM 0.32 supports. Without
`enable_tower_connector_lora=True`, vLLM silently ignores the layers of the tower and the connector.
vLLM accepts one adapter per request, with a rank of at most `max_lora_rank` (16), and supports
neither DoRA nor `modules_to_save`.

An adaptable layer is an `nn.Linear` that computes with its own `weight`, a subclass of it, or its
quantised form in transformers. Convolutions (patch embedding, GLM's downsampling) and position
tables are not adapted.
"""

import re
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from refvl.checkpoints import download
from refvl.checks import blame

PARTS = ("language_model", "connector", "tower")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # the start of all names in PEFT's files
PEFTS_OWN = re.compile(r"\.(lora_\w+|modules_to_save|original_module)(\.|$)")


@dataclass(frozen=True, slots=True)
class LayerNames:
    """transformers' names for the parts of a family.

    places: module name -> the module's location in a `VLM`. connector: the names of the connector's
    modules. renamed: regular expressions for alternative names -> replacements; the first match
    counts.
    """

    places: dict[str, str]
    connector: tuple[str, ...]
    renamed: dict[str, str]

    def part(self, name: str) -> str:
        """Return the part in `PARTS` to which the layer `name` belongs."""
        text = tuple(f"{place}." for place, home in self.places.items() if home.startswith("language_model"))
        if f"{name}.".startswith(text):
            return "language_model"
        return "connector" if f"{name}.".startswith(tuple(f"{place}." for place in self.connector)) else "tower"

    def rename(self, name: str) -> str:
        """Return this family's name for a layer that an adapter names."""
        return next((re.sub(old, new, name) for old, new in self.renamed.items() if re.match(old, name)), name)


GRIDS = LayerNames(
    {"model.visual": "encoder", "model.language_model": "language_model.model", "lm_head": "language_model.lm_head"},
    ("model.visual.merger", "model.visual.deepstack_merger_list", "model.visual.downsample"),
    {  # layer names from before transformers 4.52, from vLLM, and from a text model that was trained alone
        r"^model\.(?=visual\.|vision_tower\.|merger\.|language_model\.)": "model.",
        r"^visual\.": "model.visual.",
        r"^language_model\.lm_head\b": "lm_head",
        r"^language_model\.(model\.)?": "model.language_model.",
        r"^model\.": "model.language_model.",
    },
)
MINICPMV = LayerNames(
    {"llm": "language_model", "vpm": "encoder.vpm", "resampler": "encoder.resampler"},
    ("resampler",),
    {r"^(?=model\.|lm_head\b)": "llm."},
)
FOLDED = LayerNames(  # MiniCPM-V 4.6 and 4.7; layers that fold windows are not adapted
    {name: home for name, home in GRIDS.places.items() if name != "model.visual"}
    | {"model.vision_tower.encoder": "encoder.encoder", "model.merger.mlp.0": "encoder.merger"},
    ("model.merger",),
    GRIDS.renamed,
)
STEP3_CONNECTOR = ("vit_downsampler", "vit_downsampler2", "vit_large_projector")
STEP3 = LayerNames(
    {"model": "language_model.model", "lm_head": "language_model.lm_head", "vision_model": "encoder.vision_model"}
    | {name: f"encoder.{name}" for name in STEP3_CONNECTOR},
    STEP3_CONNECTOR,
    {r"^model\.(?=vision_model\.|vit_)": ""},
)


def layer_names(family: Any) -> LayerNames:
    """Return transformers' names for the parts of `family`."""
    rows = {"MiniCPM-V 4.6": FOLDED, "MiniCPM-V 4.7": FOLDED, "MiniCPM-V": MINICPMV, "Step": STEP3}
    return next((names for name, names in rows.items() if family.name.startswith(name)), GRIDS)


def layers(model, *parts: str) -> list[str]:
    """Return the names of all adaptable layers in the given `PARTS` (default: all), for PEFT's `target_modules`.

    The output head is omitted, as in PEFT's "all-linear". Raises ValueError for unknown parts.
    """
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"parts: expected only names from {list(PARTS)}, got {unknown.pop()!r}")
    part_of = layer_names(model.family).part
    return [name for name in _adaptable(model) if part_of(name) in (parts or PARTS) and not name.endswith("lm_head")]


def attach(model, adapter: Any, *, name: str = "default", **hub) -> Any:
    """Attach an adapter to a model and activate it; return PEFT's model and store it as `model.adapters`.

    adapter: a folder or hub id of an adapter that PEFT saved for this model, with refvl or
    transformers. For a new adapter that you will train, pass a `peft.LoraConfig`. name: the name of
    this adapter, if there are several. hub: `revision` and similar arguments (see
    `refvl.checkpoints.download`). Use the methods of PEFT's model for everything else:

        adapters.set_adapter("name")               activate one, or several with adapters.base_model.set_adapter([...])
        with adapters.disable_adapter(): ...       deactivate all
        adapters.merge_adapter(), .unmerge_adapter()   not with quantised weights
        adapters.save_pretrained(folder)

    A loaded adapter is frozen until `adapters.set_requires_grad(name)`, and dropout is off
    until `adapters.train()`. Raises FileNotFoundError, TypeError or ValueError, naming
    `adapter`, for anything but a LoRA adapter, for layers that the model lacks, and for weights
    that do not fit. After an error in PEFT, load the model again.
    """
    import peft  # pip install 'refvl[adapters]'

    model.family.require("adapters")
    if model.adapters is not None and name in model.adapters.peft_config:
        raise ValueError(f"name: expected a new name, got {name!r}; in use: {', '.join(model.adapters.peft_config)}")
    stored = None
    if isinstance(adapter, (str, Path)):
        folder = Path(adapter).expanduser().resolve()
        if not folder.exists():
            folder = download(str(adapter), [CONFIG, WEIGHTS], hub, name="adapter")
        with blame(f"adapter: {folder}"):
            adapter, stored = peft.PeftConfig.from_pretrained(folder), load_file(folder / WEIGHTS)
    if not isinstance(adapter, peft.LoraConfig):
        raise TypeError(f"adapter: expected a folder, a hub id or a peft.LoraConfig, got {type(adapter).__name__}")
    with blame("adapter"):
        weights = None if stored is None else _read(model, adapter, stored)
        if model.adapters is None:
            model.adapters = peft.PeftModel(_by_name(model), adapter, name)
        else:
            model.adapters.add_adapter(name, adapter)
            model.adapters.set_adapter(name, inference_mode=adapter.inference_mode)
        if weights is not None:
            filled = peft.set_peft_model_state_dict(model.adapters, weights, adapter_name=name)
            empty = [key for key in filled.missing_keys if ".lora_" in key and f".{name}." in key]
            if filled.unexpected_keys or empty:
                raise ValueError(f"weights without a layer: {filled.unexpected_keys}; missing weights: {empty}")
    if model.language_model and getattr(model.language_model, "is_quantized", False):
        model.adapters.merge_adapter = _refuse_to_merge
    return model.adapters.eval()


def _refuse_to_merge(*arguments, **options) -> None:
    raise ValueError("merge_adapter: not supported for quantised weights; merge into a model in full precision")


def _read(model, config: Any, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a saved adapter under this model's names, and change PEFT's config accordingly.

    The weights determine the layers and their ranks, because a config may contain older names, or
    suffixes that also match layers of the tower.
    """
    names = layer_names(model.family)
    weights = {names.rename(key.removeprefix(PREFIX)): tensor for key, tensor in stored.items()}
    ranks = {key.partition(".lora_A")[0]: len(tensor) for key, tensor in weights.items() if ".lora_A" in key}
    if unknown := sorted({key.partition(".lora_")[0] for key in weights if ".lora_" in key} - _adaptable(model).keys()):
        raise ValueError(f"this model has no such linear layers: {', '.join(unknown[:3])} (of {len(unknown)})")
    config.target_modules, config.exclude_modules, config.layers_to_transform = set(ranks), None, None
    config.rank_pattern = ranks
    config.alpha_pattern = {names.rename(layer): alpha for layer, alpha in (config.alpha_pattern or {}).items()}
    config.inference_mode = True
    return {f"{PREFIX}{key}": tensor for key, tensor in weights.items()}


# ------------------------------------------------------------------------------------------- names and modules


class _Names(nn.Module):
    """Modules with transformers' names. If PEFT replaces a module here, the module is also
    replaced in the model.
    """

    def lend(self, name: str, home: Any, attribute: str) -> None:
        """Give a module a name. home, attribute: the module's parent, and the attribute that contains the module."""
        setattr(self, name, getattr(home, attribute))
        self.__dict__.setdefault("homes", {})[name] = home, attribute

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if where := self.__dict__.get("homes", {}).get(name):
            home, attribute = where
            setattr(home, attribute, value)


def _by_name(model) -> nn.Module:
    """Return the model's parts as one module with transformers' names."""
    root = _Names()
    for place, home in layer_names(model.family).places.items():
        if home.startswith("language_model") and not model.language_model:
            continue  # loaded with text=False
        *above, name = place.split(".")
        parent = root
        for part in above:
            if not hasattr(parent, part):
                setattr(parent, part, _Names())
            parent = getattr(parent, part)
        *above, attribute = home.split(".")
        parent.lend(name, reduce(getattr, above, model), attribute)
    return root


def _adaptable(model) -> dict[str, nn.Module]:
    """Return all adaptable layers by name: linear layers that checkpoints do not store as convolutions."""
    kernels = {id(model.encoder.get_parameter(name)) for name in model.encoder.kernels}
    found = dict[str, nn.Module]()
    for name, module in _by_name(model).named_modules():
        if isinstance(module, nn.Linear) and not PEFTS_OWN.search(name) and id(module.weight) not in kernels:
            found[name.removesuffix(".base_layer")] = module
    return found
