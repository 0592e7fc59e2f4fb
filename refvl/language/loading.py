"""The text part of a checkpoint, loaded strictly: missing, misshapen or non-finite weights raise an error."""

import copy
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from refvl.checkpoints import raise_for_weights, weight_headers
from refvl.language.model import CausalTextModel

# regular expressions for checkpoint names (of transformers 4.52 or later, and of vLLM) -> the wrapper's names
KEY_MAPPING = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^llm\.": "",  # MiniCPM-V
}
FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")  # names of dtypes in safetensors
NO_ADAPTER = "no adapter"  # this folder does not exist, so transformers finds no adapter to attach
PART = "text model"  # the name of this part in errors
PLACED_BY = {"device_map", "tp_plan", "tp_size", "distributed_config"}  # if one is set, transformers places the weights


def load_language_model(
    folder: Path, text_config: PretrainedConfig, *, dtype, device, model_class=CausalTextModel, progress=True, **kwargs
) -> CausalTextModel:
    """Load the text part of the checkpoint in `folder`, strictly.

    kwargs (`device_map`, `distributed_config`, `attn_implementation`, ...) are passed to
    transformers' `from_pretrained`; those that place the weights override `device`. On CUDA,
    weights are loaded directly onto the GPU if accelerate is installed, otherwise through host
    memory. Raises ValueError, listing the weights, if some are missing or unexpected, have a
    different shape, or contain nan or inf. Weights that are not plain floats also raise this error,
    unless a `quantization_config` sets a method. Sizes and dtypes are compared with the files'
    headers before memory is allocated.
    """
    if not kwargs.get("quantization_config") and not _says_how_to_read(text_config):
        _check_headers(folder, text_config, model_class)
    device = torch.device(device)
    if device.type == "cuda" and not PLACED_BY & kwargs.keys() and importlib.util.find_spec("accelerate"):
        kwargs["device_map"] = {"": device}
    with progress_bars(progress):
        loaded: Any = model_class.from_pretrained(
            folder,
            config=text_config,
            dtype=dtype,
            key_mapping=KEY_MAPPING,
            use_safetensors=True,
            adapter_kwargs={"subfolder": NO_ADAPTER},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatched weights are listed together with the missing ones
            **kwargs,
        )
    model, info = loaded
    kinds = ("missing", "unexpected", "mismatched")
    raise_for_weights(folder, PART, {kind: sorted(map(str, info[f"{kind}_keys"])) for kind in kinds})
    broken = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    raise_for_weights(folder, PART, {"nan or inf": sorted(broken)})
    return model.eval() if PLACED_BY & kwargs.keys() else model.eval().to(device)


def _says_how_to_read(text_config: PretrainedConfig) -> bool:
    """Return whether transformers supports the checkpoint's quantisation method; transformers
    silently ignores unknown methods.
    """
    method = getattr(text_config, "quantization_config", None)
    return isinstance(method, dict) and "quant_method" in method and AutoHfQuantizer.supports_quant_method(method)


def _check_headers(folder: Path, text_config: PretrainedConfig, model_class: type[CausalTextModel]) -> None:
    """Read the files' headers and raise an error for weights that do not fit the text model; allocates no memory."""
    ignored = "|".join(model_class._keys_to_ignore_on_load_unexpected)
    stored = {name: header for name, header in weight_headers(folder).items() if not re.search(ignored, name)}
    no_floats = [f"{name} is {header.dtype}" for name, header in stored.items() if header.dtype not in FLOAT_DTYPES]
    raise_for_weights(folder, PART, {"not plain floats": sorted(no_floats)})
    with torch.device("meta"):
        wanted = model_class._from_config(copy.deepcopy(text_config))
    values = sum(weight.numel() for weight in wanted.parameters())
    there = sum(header.parameter_count for header in stored.values())
    if values > 2 * there:  # a few missing or misshapen weights are listed by name after loading
        raise ValueError(f"{folder}: the config's text model has {values:,} values, but the weights have {there:,}")


def _is_finite(weight: Tensor) -> bool:
    """Return whether all values are finite, in one pass without a copy: minimum and maximum are nan if any value is."""
    packed = is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)  # torchao's weights have parts
    if packed or weight.is_meta or weight.dtype.itemsize < 2 or not weight.is_floating_point() or not weight.numel():
        return True  # the weight is on disk, or quantised
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return all(bool(value.isfinite()) for value in local.aminmax())


@contextmanager
def progress_bars(wanted: bool) -> Iterator[None]:
    """Set transformers' global switch for progress bars, and restore it afterwards."""
    were_on = logging.is_progress_bar_enabled()
    if not wanted:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def random_language_model(
    text_config: PretrainedConfig, *, dtype, device, model_class=CausalTextModel, **kwargs
) -> CausalTextModel:
    """Build the text model at full size with random weights; on `meta`, it needs no memory."""
    built_on = "meta" if torch.device(device).type == "meta" else "cpu"  # random values are the same on every device
    with torch.device(built_on), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class._from_config(text_config, dtype=dtype, **kwargs).eval().to(device)
