"""A vLLM engine in this process, whose model's inputs and outputs can be observed, and the parts that two of our
folders lack.

Qwen's and GLM's folders load unchanged. Step3's sizes are constants in vLLM, and released MiniCPM-V folders contain
code that ours do not: `stand_ins` replaces both by ours. Names are those of vLLM 0.32; `benchmarks/vllm_env.sh` makes
an environment with its build for CPUs. Import this module first, because vLLM reads these variables during its import.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, BatchFeature, Qwen3Config, SiglipVisionConfig

import refvl
from refvl.paths import DATA
from refvl.pixels.crops import CropConfig
from refvl.pixels.slices import plan_slices, slice_grid

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
WATCHED = ("embed_multimodal", "get_mrope_input_positions", "recompute_mrope_positions", "compute_logits")


def start(folder: str | Path, **options) -> Any:
    """Build a float32 `vllm.LLM` that caches nothing between requests, normalises first, and returns raw logits."""
    import vllm

    options = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16} | options
    engine = vllm.LLM(
        str(folder), enforce_eager=True, seed=0, enable_prefix_caching=False, async_scheduling=False,
        mm_processor_cache_gb=0, mm_device_do_normalize=False, logprobs_mode="raw_logits", max_logprobs=-1,
        allowed_local_media_path=str(DATA), **options,
    )  # fmt: skip
    if options.get("video_pruning_rate"):  # the runner for CPUs does not set this
        runner(engine).is_multimodal_pruning_enabled = True
    return engine


def start_tower(
    checkpoint: Path, vision_config: dict, weights: dict[str, Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the tower of a vLLM engine that loads `checkpoint` with this tower in place of its own.

    weights: tensors by transformers' names. The tower accepts (N, values) patch rows and (items, 3) grids, as vLLM's
        model calls it.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        config = json.loads((checkpoint / "config.json").read_text())
        config["vision_config"] = {"model_type": config["vision_config"]["model_type"]} | vision_config
        (Path(folder) / "config.json").write_text(json.dumps(config))
        tensors = load_file(checkpoint / "model.safetensors")
        [prefix] = {name.partition("visual.")[0] for name in tensors if "visual." in name}
        tensors = {name: tensor for name, tensor in tensors.items() if "visual." not in name}
        tensors |= {f"{prefix}visual.{name}": tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, Path(folder) / "model.safetensors")
        engine = start(folder, skip_mm_profiling=True)
    from vllm.forward_context import set_forward_context

    def tower(pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        own = runner(engine)  # keep the engine alive, because it empties its runner when it is deleted
        with set_forward_context(None, own.vllm_config):
            return own.model.visual(pixel_values, grid_thw=grid_thw)

    return tower


def runner(engine: Any) -> Any:
    """Return the model runner, whose `model` is the model."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def watch(engine: Any) -> dict[str, list[tuple[dict, Any]]]:
    """Record (keyword arguments, output) of each method's calls from now on; clear the record between requests."""
    model, seen = runner(engine).model, dict[str, list]()

    def wrap(name: str, inner: Callable) -> Callable:
        def outer(*args, **kwargs):
            output = inner(*args, **kwargs)
            seen.setdefault(name, []).append((kwargs, output))
            return output

        return outer

    for name in WATCHED:
        if hasattr(model, name):
            object.__setattr__(model, name, wrap(name, getattr(model, name)))
    return seen


class LayerWatch:
    """Hooks on the layers of an engine's text model, which record the last prompt's inputs, and its last token after
    each layer.

    vLLM's layers return their update and the residual separately, and overwrite both later, so their sum is copied at
    once.
    """

    def __init__(self, engine: Any):
        self.inputs_embeds, self.states = torch.empty(0), list[Tensor]()
        layers = runner(engine).model.language_model.model.layers
        layers[0].register_forward_pre_hook(self._begin)
        for layer in layers:
            layer.register_forward_hook(lambda _, given, output: self._keep(*output))

    def _begin(self, layer: torch.nn.Module, given: tuple) -> None:
        _, hidden_LD, *_ = given  # (positions, hidden states, residual)
        self.is_prompt = len(hidden_LD) > 1
        if self.is_prompt:
            self.inputs_embeds = hidden_LD.clone()
            self.states = [self.inputs_embeds[-1]]

    def _keep(self, hidden_LD: Tensor, residual_LD: Tensor) -> None:
        if self.is_prompt:
            self.states.append(hidden_LD[-1] + residual_LD[-1])


def request(model: refvl.VLM, prompt: str, images=(), videos=()) -> dict:
    """Return the request for vLLM: the template's text, decoded images, and frames with their indices in the file."""
    messages = model.processor.messages(prompt, images, videos)
    media: dict[str, list] = {"image": [], "video": []}
    for medium in model.processor.decode(messages):
        if hasattr(medium, "frames"):
            about = {"fps": medium.source_fps, "duration": medium.duration, "total_num_frames": medium.total_num_frames}
            about |= {"frames_indices": list(map(int, medium.indices)), "do_sample_frames": False}
            media["video"].append((medium.frames, about | {"video_backend": "opencv"}))
        else:
            media["image"].append(medium)
    text, _ = model.processor.render(messages)
    return {"prompt": text, "multi_modal_data": {kind: found for kind, found in media.items() if found}}


def messages(prompt: str, images=(), videos=()) -> list[dict]:
    """Return the same request for `LLM.chat`, for media that are files."""
    media = [("image_url", path) for path in images] + [("video_url", path) for path in videos]
    content = [{"type": kind, kind: {"url": path.as_uri()}} for kind, path in media]
    return [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]


def stand_ins(model: refvl.VLM) -> None:
    """Patch vLLM for the families whose folders it does not load unchanged; do nothing for others."""
    if model.family.name.startswith("Step3"):
        _step3(model.processor.image_config)
    if model.family.name.startswith("MiniCPM-V"):
        _minicpmv(model)


def _step3(config: CropConfig) -> None:
    """Set the sizes of our images, for which vLLM has constants of the release: 728, 504 and 3024 px."""
    import vllm.model_executor.models.step3_vl as models
    import vllm.transformers_utils.processors.step3_vl as processors

    def determine_window_size(self, long: int, short: int) -> int:
        if long < config.image_size:
            return short if long / short > 1.5 else 0
        return min(short, config.crop_size) if long / short > 4 else config.crop_size

    sizes = config.image_size, config.crop_size, config.image_tokens, config.crop_tokens
    processors.Step3VLImageProcessor.__init__.__defaults__ = (*sizes, True)
    processors.ImagePatcher.determine_window_size = determine_window_size
    models.MAX_IMAGE_SIZE = processors.MAX_IMAGE_SIZE = config.max_side


class FlatConfig(Qwen3Config):
    """Read MiniCPM-V 4.5's config.json as the release's own code does: the text model's keys, and a vision config."""

    model_type = "minicpmv"

    def __init__(self, vision_config: dict | None = None, **values):
        self.vision_config = SiglipVisionConfig(**(vision_config or {}))
        super().__init__(**values)


class SlicesAsReleased:
    """Provide refvl's slices under the names of the release's own image processor, as vLLM calls them."""

    im_id_start, im_id_end = "<image_id>", "</image_id>"

    def __init__(self, model: refvl.VLM):
        self.processor, self.image_feature_size = model.processor, model.processor.query_num
        self.max_slice_nums = model.processor.image_config.max_slice_nums

    def _config(self, max_slice_nums: int | None):
        return replace(self.processor.image_config, max_slice_nums=max_slice_nums or self.max_slice_nums)

    def get_sliced_grid(self, size, max_slice_nums: int | None = None):
        return slice_grid(*size, self._config(max_slice_nums))

    def get_slice_image_placeholder(self, size, image_idx=0, max_slice_nums=None, use_image_id=True) -> str:
        plan = plan_slices(*size, self._config(max_slice_nums))
        medium = replace(self.processor.media_tokens("image", plan.layout), grid=plan.grid)
        return self.processor.write_image(medium, image_idx)

    def __call__(self, images, do_pad=True, return_tensors=None, **kwargs) -> BatchFeature:
        """Turn images [[image], ...] into strips (3, P, L * P), sizes (width, height) and tgt_sizes (S, 2)."""
        found = {"pixel_values": [], "image_sizes": [], "tgt_sizes": []}
        for [image] in images:
            [patches] = self.processor.patchify([image])
            tgt_sizes = [size for group in patches.layout for size in group.slices]
            rows = patches.pixel_values.split([h * w for h, w in tgt_sizes])
            side = self.processor.image_config.patch_size
            strips = [x.view(-1, 3, side, side).permute(1, 2, 0, 3).reshape(3, side, -1) for x in rows]
            found["pixel_values"].append(strips)
            found["image_sizes"].append([image.size])
            found["tgt_sizes"].append(torch.tensor(tgt_sizes))
        return BatchFeature(found)


def _minicpmv(model: refvl.VLM) -> None:
    """Provide the config and image processor of MiniCPM-V 4.5, which released folders contain as code."""
    from vllm.model_executor.models.minicpmv import MiniCPMVProcessingInfo
    from vllm.transformers_utils.processors.minicpmv import MiniCPMVProcessor

    AutoConfig.register("minicpmv", FlatConfig)
    slices = SlicesAsReleased(model)
    MiniCPMVProcessor.check_argument_for_proper_class = lambda self, name, argument: type(argument)
    MiniCPMVProcessingInfo.get_hf_processor = lambda info, **kwargs: MiniCPMVProcessor(
        image_processor=slices, tokenizer=info.get_tokenizer(), version=info.get_model_version()
    )
