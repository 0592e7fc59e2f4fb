"""From a folder, a hub id or a config to a `VLM`: choose the device and dtype, load the weights, assemble the parts."""

import inspect
import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm.auto import tqdm
from transformers import PretrainedConfig

from refvl import checkpoints, families
from refvl.attention import choose_backend, is_ampere
from refvl.checks import WORDED, blame, check_names, check_positive_int
from refvl.language.loading import load_language_model, random_language_model
from refvl.model import VLM
from refvl.paths import data
from refvl.serving.linear import choose_linear, fuse_layers, use_onednn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLACEMENT = (  # arguments of transformers' `from_pretrained` that place the text model on devices
    "device_map", "max_memory", "offload_folder", "offload_buffers", "tp_plan", "tp_size", "device_mesh",
    "distributed_config", "quantization_config",
)  # fmt: skip


class NoText:
    """The value of `model.language_model` if there is no text model: it is falsy, and
    reading its attributes raises ValueError.
    """

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` look up these methods
            raise AttributeError(name)
        raise ValueError("text: the model was loaded without its language model; load it with text=True")


def load(
    path_or_id: str | Path | dict | PretrainedConfig,
    *,
    device: str | int | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    attention: str = "auto",
    linear: str = "auto",
    weights: str = "checkpoint",
    text: bool = True,
    graphs: bool | dict | None = None,
    media_cache: Any = None,
    compile: bool = False,
    max_cache_len: int | None = None,
    adapters: Sequence[str | Path] | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    progress: bool = True,
    **model_kwargs,
) -> VLM:
    """Load a model from a local folder or a hub id in Hugging Face layout; the config determines the family.

    path_or_id: a folder, a hub id, or the name of a shipped model, such as "tiny-qwen2_5_vl". With
        random weights, it may also be a config, or the name of a shipped config, such as
        "Qwen2.5-VL-7B-Instruct.json".
    device: "auto" uses CUDA if available; with torchrun, "auto" and "cuda" give each process its
    own GPU.
    dtype: a torch dtype or its name; "auto" is the checkpoint's own dtype on CUDA and float32 on a
    CPU. GPUs before Ampere (T4, V100) do not support bfloat16, so they use float16, with a warning.
    attention: the backend of the vision tower (`refvl.attention`).
    linear: the kernel for float32 linear layers on a CPU: "torch", "onednn", or "auto" for the
    faster one on this machine (`refvl.serving.linear`).
    weights: "checkpoint", or "random" to build the full-size model from a config alone (a folder, a
    JSON file, a dict). On device "meta", no memory is needed.
    text: False omits the language model. Then only the vision tower's weights are read or
    downloaded, and only `encode` and `feature_map` (`refvl.serving.features`) can run.
    graphs: True captures the encoder in graphs at load time (CUDA graphs, or the trace backend on
    other devices); a dict sets the options of `EncoderGraphManager`.
    media_cache: a `MediaCache` (`refvl.serving.media_cache`), or the number of tokens whose
    embeddings are cached; cached items are not encoded again.
    compile: True generates answers with a cache of fixed size, for which transformers compiles the
        decode step on CUDA. The first answer then takes longer, and later answers take less time.
        If the tower runs varlen attention, its blocks are compiled at load time, with a progress
        bar. Without CUDA, only the size of the cache is fixed.
    max_cache_len: the minimum size of the fixed-size cache, in tokens of prompt and answer. None:
    the size that the longest previous call needed; each longer call makes transformers compile
    again.
    adapters: folders or hub ids of LoRA adapters to attach; their effects add up
    (`refvl.serving.adapters`). If the checkpoint's folder also contains an adapter, `adapters` is
    required; [] ignores that adapter.
    revision, cache_dir, token, local_files_only: as in `huggingface_hub.snapshot_download`.
    model_kwargs: arguments of transformers' text model, for example `attn_implementation`.
        `device_map="auto"`, or a map, distributes layers over devices, host memory and disk (needs
        accelerate). `distributed_config=DistributedConfig(tp_plan="auto")` of
        `transformers.distributed` splits every layer among the processes of torchrun. The vision
        tower is not split; it stays on `device`.

    Raises FileNotFoundError if the checkpoint is missing, TypeError for unknown arguments, and
    ValueError for an unknown family, malformed files or weights that do not fit.
    """
    _check_arguments(path_or_id, weights, text, graphs, compile, max_cache_len, model_kwargs)
    if str(path_or_id).endswith(".json") and not os.path.isfile(str(path_or_id)):
        path_or_id = data(str(path_or_id), kind="path_or_id")
    stored = weights == "checkpoint"
    assemble = VLM if media_cache is None else _with_cache(media_cache)
    hub = {"revision": revision, "cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    folder, processor_folder = _find_folders(path_or_id, stored and text, hub)
    config = families.read_config(folder or path_or_id)
    family = families.find_family(config)
    _check_features(family, config, graphs, model_kwargs)
    if stored and folder is not None and not text:
        checkpoints.download_tower(path_or_id, folder, family.vision_prefix, hub)
    if stored and folder is None:
        raise ValueError("weights: a config alone contains no weights; pass a checkpoint folder, or weights='random'")

    _check_adapters(adapters, folder if stored else None)
    device = _resolve_device(device)
    place: dict[str, Any] = {"dtype": _resolve_dtype(dtype, config, device), "device": device}
    kernel = choose_linear(linear, device, place["dtype"])
    models = _load_models(folder if stored else None, config, attention, progress, place, model_kwargs, text)
    if kernel == "onednn":
        for model in filter(None, models):
            use_onednn(model)
    with blame(f"{processor_folder}: tokenizer or processor files cannot be read", WORDED):
        processor = families.load_processor(processor_folder, config)
        if stored and text and processor.tokenizer is None:
            raise ValueError(f"{folder}: tokenizer.json is missing; with text=False, the vision tower loads without it")
    vlm = assemble(config, processor, *models)
    if text:
        _add_stop_tokens(vlm)
    if adapters:
        _attach_adapters(vlm, adapters)

    if compile:
        _compile(vlm, max_cache_len, progress)
    if graphs:
        vlm.graphs = _capture_graphs(vlm, {} if graphs is True else graphs, progress)
    return vlm


def _find_folders(path_or_id, stored: bool, hub: dict) -> tuple[Path | None, Path | None]:
    """Return the checkpoint's folder (None for a config alone), and the folder of the processor's files, or None.

    The processor's files are next to config.json; those of a config NAME.json are in the folder
    NAME.
    """
    if not isinstance(path_or_id, (str, Path)):
        return None, None
    if str(path_or_id).endswith(".json"):
        file = Path(path_or_id)
        beside = file.parent if file.name == "config.json" else file.with_suffix("")
        return None, beside if beside.is_dir() else None
    folder = checkpoints.find_checkpoint(path_or_id, weights=stored, **hub)
    return folder, folder


def _check_arguments(path_or_id, weights, text: bool, graphs, compile: bool, max_cache_len, model_kwargs: dict) -> None:
    """Raise TypeError for arguments of the wrong type and for unknown names, and ValueError for wrong values."""
    if weights not in ("checkpoint", "random"):
        raise ValueError(f"weights: expected 'checkpoint' or 'random', got {weights!r}")
    if max_cache_len is not None and not (compile and text and check_positive_int(max_cache_len, "max_cache_len")):
        raise ValueError("max_cache_len: requires compile=True and text=True; otherwise no cache has a fixed size")
    if not isinstance(path_or_id, (str, Path, dict, PretrainedConfig)):
        kind = f"{type(path_or_id).__name__} {path_or_id!r}"
        raise TypeError(f"path_or_id: expected a folder, a hub id, a dict or a transformers config, got {kind}")
    if graphs is not None and not isinstance(graphs, (bool, dict)):
        raise TypeError(f"graphs: expected True, False or a dict of options, got {graphs!r}")
    if "trust_remote_code" in model_kwargs:
        raise TypeError("trust_remote_code: refvl runs no code from a checkpoint; omit this argument")
    own = [name for name in inspect.signature(load).parameters if name != "model_kwargs"]
    check_names(model_kwargs, [*own, "attn_implementation", "experts_implementation", *PLACEMENT], "load")
    if weights == "random" and (placed := [name for name in model_kwargs if name in PLACEMENT]):
        raise TypeError(f"{placed[0]}: applies to a checkpoint's weights, but weights='random' loads no checkpoint")
    if model_kwargs and not text:
        raise TypeError(f"{next(iter(model_kwargs))}: belongs to the language model, which text=False omits")


def _with_cache(media_cache: Any) -> Callable[..., VLM]:
    """Return a function that makes a model with a `MediaCache`. media_cache: the cache, or
    its size in tokens.
    """
    from refvl.serving.media_cache import CachedVLM, MediaCache

    cache = media_cache if isinstance(media_cache, MediaCache) else MediaCache(media_cache)
    return partial(CachedVLM, media_cache=cache)


def _check_features(family: families.Family, config: PretrainedConfig, graphs: bool | dict | None, options: dict):
    """Raise ValueError for a feature that the family does not support, and TypeError for unknown graph options."""
    if graphs:
        family.require("graphs")
    if options.get("quantization_config") or getattr(config, "quantization_config", None):
        family.require("quantised")
    if isinstance(graphs, dict):
        from refvl.graphs import EncoderGraphManager

        check_names(graphs, list(inspect.signature(EncoderGraphManager).parameters), "graphs")


def _check_adapters(adapters: Any, folder: Path | None) -> None:
    """Raise TypeError unless `adapters` is a list or None.

    Raise ValueError if `adapters` is None although there is an adapter next to the weights.
    """
    if adapters is None:
        if folder and (folder / "adapter_config.json").is_file():
            ways = f"attach it with adapters=[{str(folder)!r}] (--adapter), or ignore it with adapters=[]"
            raise ValueError(f"adapters: {folder} contains an adapter next to its weights; {ways}")
    elif isinstance(adapters, (str, Path)) or not isinstance(adapters, Sequence):
        raise TypeError(f"adapters: expected a list of folders or hub ids, got {type(adapters).__name__} {adapters!r}")


def _attach_adapters(vlm: VLM, adapters: Sequence[str | Path]) -> None:
    """Attach adapters from their folders or hub ids, and activate all of them."""
    from refvl.serving.adapters import attach

    for adapter in adapters:
        attach(vlm, adapter, name=str(adapter).replace(".", "_"))
    vlm.adapters.base_model.set_adapter(list(vlm.adapters.peft_config))


def _load_models(
    folder: Path | None, config: PretrainedConfig, attention: str, progress: bool, place: dict, model_kwargs: dict,
    text: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Load the encoder and the text model (or `NoText`) strictly from `folder`; without a folder, build random ones."""
    text_config = families.text_config_of(config)
    if (how := getattr(config, "quantization_config", None)) is not None:  # this key may be outside text_config
        text_config.quantization_config = how
    options = {"model_class": families.find_family(config).text_model, **place, **model_kwargs}
    if folder is None:
        with blame("config: cannot build an encoder and a text model", WORDED):
            encoder = random_encoder(config, attention=attention, **place)
            return encoder, random_language_model(text_config, **options) if text else NoText()
    with blame(f"{folder}: config.json does not describe an encoder", WORDED):
        encoder = load_encoder(folder, config, attention=attention, progress=progress, **place)
    if not text:
        return encoder, NoText()
    warn_of_left_out(folder, families.find_family(config))
    with blame(f"{folder}: config.json and generation_config.json describe no text model", WORDED):
        return encoder, load_language_model(folder, text_config, progress=progress, **options)


def load_encoder(folder: Path, config: PretrainedConfig, *, dtype, device, attention: str, progress: bool = True):
    """Load the vision tower of the checkpoint in `folder` strictly, onto `device` in `dtype`; read no other weights."""
    prefix = families.find_family(config).vision_prefix
    there = sum(header.parameter_count for header in checkpoints.weight_headers(folder, prefix).values())
    encoder = empty_encoder(config, dtype=dtype, device=device, attention=attention, stored=there)
    encoder.load_weights(checkpoints.iterate_weights(folder, prefix, progress=progress))
    return encoder


def warn_of_left_out(folder: Path, family: families.Family) -> None:
    """Warn about the parts of a checkpoint that belong to neither vision nor text, naming each one."""
    skipped = [name.split(".")[0] for name in checkpoints.weight_headers(folder) if re.search(family.left_out, name)]
    if skipped:
        parts = ", ".join(sorted(set(skipped)))
        warnings.warn(f"{folder}: {len(skipped)} weights of {parts} are skipped; refvl ignores audio", stacklevel=2)


def random_encoder(config: PretrainedConfig, *, dtype, device, attention: str, seed: int = 0):
    """Build the tower at full size with random weights (normal, std 0.02; norms 1, biases 0)."""
    encoder = empty_encoder(config, dtype=dtype, device=device, attention=attention)
    if encoder.device.type == "meta":
        return encoder
    generator = torch.Generator(encoder.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return encoder


def empty_encoder(config: PretrainedConfig, *, dtype, device, attention: str, stored: int | None = None):
    """Build the tower on `device` with uninitialised weights, which take no memory on `meta`.

    stored: the number of the tower's values in the checkpoint. Raises ValueError, before memory
    is allocated, if the tower would have more than twice as many.
    """
    with torch.device("meta"):
        encoder = families.find_family(config).encoder.from_config(config, attention=attention)
    values = sum(weight.numel() for weight in encoder.parameters())
    if stored is not None and values > 2 * stored:  # a few missing or misshapen weights are listed by name later
        raise ValueError(f"vision_config: its tower would have {values:,} parameters; the checkpoint has {stored:,}")
    choose_backend(attention, torch.device(device), dtype, encoder.config.head_dim)  # check the backend
    encoder = encoder.to(dtype).to_empty(device=device).eval()
    if encoder.device.type == "cuda":
        fuse_layers(encoder)
    return encoder


def _add_stop_tokens(vlm: VLM) -> None:
    """Append the processor's stop tokens to those of generation_config.json."""
    if stop := vlm.processor.stop_token_ids:
        config = vlm.language_model.generation_config
        own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        config.eos_token_id = list(dict.fromkeys(i for i in (*own, *stop) if i is not None))


def _compile(vlm: VLM, max_cache_len: int | None, progress: bool) -> None:
    """If there is a text model, let it decode with a cache of fixed size. If the tower runs
    varlen attention, compile its blocks by encoding a blank image.
    """
    if vlm.language_model:
        vlm.language_model.generation_config.cache_implementation = "static"
        vlm.language_model.generation_config.max_cache_len = max_cache_len
    if vlm.encoder.backend(None, vlm.device) == "varlen":
        vlm.encoder.compile_blocks()
        with tqdm(total=1, desc="compile the tower's blocks", disable=not progress) as bar:
            vlm.encode([Image.new("RGB", (448, 448))])
            bar.update()


def _capture_graphs(vlm: VLM, options: dict, progress: bool) -> Any:
    """Capture the encoder in graphs.

    If the largest image that the model accepts is small, as in tiny models, it determines the
    smallest budget.
    """
    from refvl.graphs.manager import MIN_BUDGET, EncoderGraphManager
    from refvl.serving.options import check_runnable

    check_runnable(vlm)
    min_budget = max(vlm.processor.tokens_at_once, min(MIN_BUDGET, vlm.processor.largest_picture))
    options = {"min_budget": min_budget, "progress": progress} | options
    manager = EncoderGraphManager(vlm.encoder, **options)
    manager.capture()
    return manager


def _resolve_device(device: str | int | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with blame("device"):
        device = torch.device(device)
    try:
        torch.empty(0, device=device)
    except Exception as error:  # each kind of device raises its own error, and some errors do not name the device
        raise ValueError(f"device: {str(device)!r} is absent from this machine or this build of torch") from error
    if device == torch.device("cuda"):  # add an index, because each thread has its own current device
        own = os.environ.get("LOCAL_RANK")  # with torchrun, each process has its own GPU
        device = torch.device("cuda", torch.cuda.current_device() if own is None else int(own))
    return device


def _resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the torch dtype; "auto" selects the checkpoint's own dtype on a GPU, and float32 on a CPU."""
    if dtype == "auto":
        own = config.dtype or config.get_text_config().dtype or torch.float32
        dtype = torch.float32 if device.type == "cpu" else own
    if (name := str(dtype).removeprefix("torch.")) not in DTYPES:
        raise ValueError(f"dtype: expected 'auto' or one of {list(DTYPES)}, got {dtype!r}")
    if name == "bfloat16" and device.type == "cuda" and not is_ampere(device):
        card = torch.cuda.get_device_name(device)
        warnings.warn(f"dtype: {card} does not compute in bfloat16; the model is loaded in float16", stacklevel=3)
        return torch.float16
    return DTYPES[name]
