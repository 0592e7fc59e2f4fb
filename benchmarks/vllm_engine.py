"""A vLLM engine in this process, whose inputs and outputs can be observed.

Qwen's and GLM's folders load unchanged. Methods have the names of vLLM 0.32; `benchmarks/vllm_env.sh` creates an
environment with its build for CPUs. Import this module before vLLM, because it sets environment variables that vLLM
reads on import.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import refvl

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
WATCHED = ("embed_multimodal", "get_mrope_input_positions", "recompute_mrope_positions", "compute_logits")


def start(folder: str | Path, **options) -> Any:
    """Build a float32 `vllm.LLM` that caches nothing between requests, normalises pixels on the
    CPU, and returns raw logits.
    """
    import vllm

    options = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16} | options
    engine = vllm.LLM(
        str(folder), enforce_eager=True, seed=0, enable_prefix_caching=False, async_scheduling=False,
        mm_processor_cache_gb=0, mm_device_do_normalize=False, logprobs_mode="raw_logits", max_logprobs=-1,
        **options,
    )  # fmt: skip
    if options.get("video_pruning_rate"):  # vLLM's runner for CPUs does not set this
        runner(engine).is_multimodal_pruning_enabled = True
    return engine


def runner(engine: Any) -> Any:
    """Return the engine's model runner; its `model` is the loaded model."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def watch(engine: Any) -> dict[str, list[tuple[dict, Any]]]:
    """Return a record that collects (keyword arguments, output) of watched calls; clear it between requests."""
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
    """Hooks on the layers of an engine's text model; they record the inputs and the last token's states of a prompt.

    vLLM's layers return their update and the residual separately, and overwrite both later, so their sum is copied
    immediately.
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
