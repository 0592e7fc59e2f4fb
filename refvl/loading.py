"""From a folder, a hub id or a config to a `VLM`: what goes where, in which dtype, with which weights."""

import os
from pathlib import Path

import torch
from transformers import PretrainedConfig

from refvl import checkpoints, families
from refvl.graphs.manager import MIN_BUDGET, EncoderGraphManager
from refvl.language.model import load_language_model, random_language_model
from refvl.pipeline import VLM

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load(
    path_or_id: str | Path | dict | PretrainedConfig,
    *,
    device="auto",
    dtype="auto",
    attention: str = "auto",
    weights: str = "checkpoint",
    graphs: bool | dict | None = None,
    progress: bool = True,
    **model_kwargs,
) -> VLM:
    """A model from a local folder or a hub id in Hugging Face layout; the family comes from the config.

    device: "auto" takes CUDA when there is one, each process of torchrun its own. dtype: a torch dtype or its name;
    "auto" is the checkpoint's own on CUDA and float32 on a CPU. attention: backend of the vision tower
    (`refvl.attention`). weights: "checkpoint", or "random" to build the true shape from a config alone (a folder, a
    JSON file, a dict) - on device "meta" it costs no memory. graphs: True captures the encoder in graphs now (CUDA
    graphs, or their stand-in elsewhere); a dict gives the options of `EncoderGraphManager`. model_kwargs go to
    transformers' text model: `attn_implementation`; `device_map="auto"` or a map, to spread its layers over devices,
    memory and disk (needs accelerate); `tp_plan="auto"`, to split every layer among the processes that torchrun
    started. The vision tower stays whole, on `device`.

    Raises FileNotFoundError when nothing is there, ValueError for an unknown family or weights that do not fit.
    """
    if weights not in ("checkpoint", "random"):
        raise ValueError(f"weights: expected 'checkpoint' or 'random', got {weights!r}")
    from_folder = isinstance(path_or_id, (str, Path)) and not str(path_or_id).endswith(".json")
    if weights == "checkpoint" and not from_folder:
        raise ValueError("weights: a config alone has none; give a checkpoint folder, or weights='random'")
    folder = checkpoints.find_checkpoint(path_or_id, weights=weights == "checkpoint") if from_folder else None
    config = families.read_config(folder or path_or_id)
    options = {"device": (device := _resolve_device(device)), "dtype": _resolve_dtype(dtype, config, device)}
    family, text_config = families.find_family(config), families.text_config_of(config)
    if weights == "random":
        encoder = families.random_encoder(config, attention=attention, **options)
        language_model = random_language_model(text_config, model_class=family.text_model, **options, **model_kwargs)
    else:
        encoder = families.load_encoder(folder, config, attention=attention, progress=progress, **options)
        language_model = load_language_model(
            folder, text_config, model_class=family.text_model, progress=progress, **options, **model_kwargs
        )
    vlm = VLM(config, families.load_processor(folder, config), encoder, language_model)
    _add_stop_tokens(vlm)
    if graphs:
        vlm.graphs = _capture_graphs(vlm, {} if graphs is True else graphs, progress)
    return vlm


def _add_stop_tokens(vlm: VLM) -> None:
    """Those that the processor knows, after those of generation_config.json."""
    if stop := vlm.processor.stop_token_ids:
        config = vlm.language_model.generation_config
        own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        config.eos_token_id = list(dict.fromkeys(i for i in (*own, *stop) if i is not None))


def _capture_graphs(vlm: VLM, options: dict, progress: bool) -> EncoderGraphManager:
    """The smallest inferred budget is the checkpoint's largest picture where that is small, as in the tiny models."""
    vlm.check_runnable()
    min_budget = max(vlm.processor.tokens_at_once, min(MIN_BUDGET, vlm.processor.largest_picture))
    manager = vlm.family.graphs(vlm.encoder, **({"min_budget": min_budget, "progress": progress} | options))
    manager.capture()
    return manager


def _resolve_device(device) -> torch.device:
    if device == "auto" and torch.cuda.is_available():  # torchrun's processes take the GPUs of their machine in turn
        device = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
    try:
        device = torch.device("cpu" if device == "auto" else device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r} is no torch device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {str(device)!r} was asked for, but this machine has no CUDA device")
    return device


def _resolve_dtype(dtype, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        own = config.dtype or config.get_text_config().dtype or torch.float32
        dtype = torch.float32 if device.type == "cpu" else own
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES:
        raise ValueError(f"dtype: expected 'auto' or one of {[str(d) for d in DTYPES]}, got {dtype!r}")
    return resolved
