"""The text model: embeddings and positions in, tokens out.

The language model itself is transformers' own (`AutoModel` of the checkpoint's text config), generation too: KV
cache, sampling, streaming. What refvl adds is what a vision-language model needs - it is driven with embeddings
instead of ids, and with (3, B, L) M-RoPE positions that it did not compute - in a wrapper that holds no vision tower.
"""

import copy
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    AutoModel,
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.generation.utils import GenerateOutput
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from refvl.checkpoints import FLOAT_DTYPES, weight_headers
from refvl.checks import check_names, check_positive, check_positive_int
from refvl.positions import MediaSpan, get_mrope_input_positions

# checkpoint name -> wrapper name, as regular expressions: after transformers 4.52, and as vLLM saves them
KEY_MAPPING = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^llm\.": "",  # MiniCPM-V
}
PLACED_BY = {"device_map", "tp_plan", "tp_size", "distributed_config"}  # then transformers puts the weights in place


class CausalTextModel(PreTrainedModel, GenerationMixin):
    """A transformers text model with its output head; `forward` takes embeddings and positions of any rank.

    Parameter names are those of the original checkpoints: `model.layers...`, `model.norm`, `lm_head`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\."]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def row_width(self) -> int:
        """W, values in the encoder's rows that this model takes: D, its own width.

        A class whose layers take k deeper features of the tower (deepstack) says D * (1 + k) here, and takes them in
        `forward` as `deepstack_embeds`.
        """
        return self.config.hidden_size

    def text_rows(self, ids_L: Tensor) -> Tensor:
        """(L, W): the embeddings of the ids, wide enough for a medium's rows."""
        text_LD = self.get_input_embeddings()(ids_L.to(self.device))
        return F.pad(text_LD, (0, self.row_width - text_LD.shape[1]))

    def positions(self, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
        """(3, L) int64 positions of a prompt with media at `spans`: M-RoPE."""
        return get_mrope_input_positions(num_tokens, spans)[0]

    def prepare_inputs_for_generation(  # type: ignore[override]  # transformers calls it by names
        self,
        input_ids: Tensor,
        attention_mask=None,
        inputs_embeds=None,
        past_key_values: Cache | None = None,
        deepstack_embeds=None,
        **kwargs,
    ) -> dict[str, Any]:
        """transformers', which would hand the prompt's deeper features to the decode steps as well.

        transformers looks for the names of the arguments, to know what a model takes. Of a prompt that is in the cache
        already, only what is not goes through the model: transformers' assisted decoding would run it twice.
        """
        base: Any = super()
        if kwargs.get("is_first_iteration") and inputs_embeds is None and past_key_values is not None:
            kwargs["next_sequence_length"] = input_ids.shape[1] - past_key_values.get_seq_length()
        inputs = base.prepare_inputs_for_generation(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            **kwargs,
        )
        if kwargs.get("is_first_iteration") and deepstack_embeds is not None:
            inputs["deepstack_embeds"] = deepstack_embeds
        return inputs

    def _expand_inputs_for_generation(  # type: ignore[override]  # transformers calls it by names
        self, expand_size: int = 1, position_ids: Tensor | None = None, **kwargs
    ) -> tuple[Tensor, dict[str, Any]]:
        """transformers', which in 5.17 repeats positions along their first axis for beams: prompts are the second."""
        base: Any = super()
        input_ids, inputs = base._expand_inputs_for_generation(expand_size=expand_size, **kwargs)
        if position_ids is not None:
            inputs["position_ids"] = position_ids.repeat_interleave(expand_size, dim=1)
        return input_ids, inputs

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """What transformers' model inside takes of (3, B, L) positions: all three axes."""
        return position_ids

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values=None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """(B, L, D) embeddings, (3, B, L) positions -> logits (B, L or logits_to_keep, vocabulary)."""
        outputs = self.model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=self.model_positions(position_ids),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SequentialTextModel(CausalTextModel):
    """A text model that counts tokens one by one, media included: the three axes are the same."""

    def positions(self, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
        """(3, L) int64: 0, 1, 2, ... on every axis."""
        return torch.arange(num_tokens).expand(3, -1)

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """(B, L): one of the axes."""
        return position_ids if position_ids is None or position_ids.ndim < 3 else position_ids[0]


def load_language_model(
    folder: Path,
    text_config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    model_class: type[CausalTextModel] = CausalTextModel,
    progress: bool = True,
    **kwargs,
) -> CausalTextModel:
    """The text part of the checkpoint in `folder`, strictly.

    kwargs (`device_map`, `tp_plan`, `attn_implementation`, ...) go to transformers' `from_pretrained`; those that place
    the weights win over `device`. On CUDA the weights go straight to the device where accelerate is installed, else
    through host memory. Raises ValueError that lists missing, unexpected and misshapen weights, those that
    are no plain floats (unless a `quantization_config` says how to read them), and those that hold nan or inf. Sizes
    and dtypes are compared with the headers of the files before memory is taken.
    """
    if not kwargs.get("quantization_config") and not _says_how_to_read(text_config):
        _check_headers(folder, text_config, model_class)
    device = torch.device(device)
    if device.type == "cuda" and not PLACED_BY & kwargs.keys() and importlib.util.find_spec("accelerate"):
        kwargs["device_map"] = {"": device}
    _check_groups(kwargs.get("quantization_config"), text_config, model_class)
    with progress_bars(progress):
        loaded: Any = model_class.from_pretrained(
            folder,
            config=text_config,
            dtype=dtype,
            key_mapping=KEY_MAPPING,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they can be listed together with the missing ones
            **kwargs,
        )
    model, info = loaded
    _report(folder, {kind: info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")})
    _report(folder, {"nan or inf": [name for name, weight in model.named_parameters() if not _is_finite(weight)]})
    _check_token_ids(folder, model.generation_config)
    return model.eval() if PLACED_BY & kwargs.keys() else model.eval().to(device)


def _check_groups(quantization_config: Any, text_config: PretrainedConfig, model_class: type[CausalTextModel]) -> None:
    """Refuse groups of values that share a scale (torchao's `PerGroup`) where rows are no multiple of them."""
    layout = getattr(quantization_config, "quant_type", None)
    group = getattr(getattr(layout, "granularity", layout), "group_size", None)
    if not isinstance(group, int) or group < 1:
        return
    with torch.device("meta"):
        linear = [m for m in model_class._from_config(copy.deepcopy(text_config)).modules() if isinstance(m, nn.Linear)]
    if uneven := sorted({layer.in_features for layer in linear if layer.in_features % group}):
        raise ValueError(f"quantization_config: groups of {group} values do not divide rows of {uneven[0]}")


def _check_token_ids(folder: Path, config: GenerationConfig) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if not all((isinstance(i, int) and not isinstance(i, bool)) or i is None for i in ids):
            raise ValueError(f"{folder / 'generation_config.json'}: {name} must be a token id, got {value!r}")


def _says_how_to_read(text_config: PretrainedConfig) -> bool:
    """Whether a quantised checkpoint names a method of transformers, which silently ignores those unknown to it."""
    method = getattr(text_config, "quantization_config", None)
    return isinstance(method, dict) and "quant_method" in method and AutoHfQuantizer.supports_quant_method(method)


def _check_headers(folder: Path, text_config: PretrainedConfig, model_class: type[CausalTextModel]) -> None:
    """Refuse, from the headers of the files, what could not become the text model; takes no memory."""
    ignored = "|".join(model_class._keys_to_ignore_on_load_unexpected)
    stored = {_rename(name): header for name, header in weight_headers(folder).items() if not re.search(ignored, name)}
    _report(
        folder, {"no plain floats": [f"{n} is {h.dtype}" for n, h in stored.items() if h.dtype not in FLOAT_DTYPES]}
    )
    layers = {found[1] for name in stored if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    if text_config.num_hidden_layers > len(layers):
        raise ValueError(
            f"{folder}: the config's text model has {text_config.num_hidden_layers} layers (num_hidden_layers), the "
            f"weights are of {len(layers)}"
        )
    with torch.device("meta"):
        wanted = dict(model_class._from_config(copy.deepcopy(text_config)).named_parameters())
    pairs = ((name, tuple(wanted[name].shape), header.shape) for name, header in stored.items() if name in wanted)
    misfits = [  # experts may lie transposed, to be turned while they are read
        f"{name} is {shape}, the config says {want}"
        for name, want, shape in pairs
        if shape != want and not (len(shape) == 3 and sorted(shape) == sorted(want))
    ]
    _report(folder, {"mismatched": misfits})
    values, there = sum(weight.numel() for weight in wanted.values()), sum(header.numel for header in stored.values())
    if values > 2 * there:  # a few that are missing are listed by name once the others are loaded
        raise ValueError(f"{folder}: the config's text model has {values:,} values, the weights are {there:,}")


def _rename(name: str) -> str:
    """A checkpoint's name as the wrapper's."""
    return next((re.sub(old, new, name) for old, new in KEY_MAPPING.items() if re.match(old, name)), name)


def _report(folder: Path, problems: dict[str, Sequence]) -> None:
    found = {kind: sorted(map(str, of_kind)) for kind, of_kind in problems.items() if of_kind}
    if lines := [f"  {kind} ({len(of_kind)}): {', '.join(of_kind)}" for kind, of_kind in found.items()]:
        raise ValueError(f"{folder}: the weights do not match the text model\n" + "\n".join(lines))


def _is_finite(weight: Tensor) -> bool:
    """By the smallest and the largest value: one pass and no copy; nan becomes both."""
    packed = is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)  # torchao's, of several tensors
    if packed or weight.is_meta or weight.dtype.itemsize < 2 or not weight.is_floating_point() or not weight.numel():
        return True  # on disk, or quantised
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return all(bool(value.isfinite()) for value in local.aminmax())


@contextmanager
def progress_bars(wanted: bool) -> Iterator[None]:
    """transformers' own switch is global: put it back afterwards."""
    were_on = logging.is_progress_bar_enabled()
    if not wanted:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def random_language_model(
    text_config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    model_class: type[CausalTextModel] = CausalTextModel,
    **kwargs,
) -> CausalTextModel:
    """The same model with random weights, at its true shape; on `meta` it costs no memory."""
    built_on = "meta" if torch.device(device).type == "meta" else "cpu"  # the same values on every device
    with torch.device(built_on), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class._from_config(text_config, dtype=dtype, **kwargs).eval().to(device)


LOSE_MEDIA = (  # with these transformers goes back to the prompt's ids, in which the media are placeholders
    "prefill_chunk_size", "assistant_early_exit",
)  # fmt: skip
DRAFTS = ("prompt_lookup_num_tokens", "assistant_model")  # options with which transformers guesses tokens ahead
GENERATE_OPTIONS = sorted(
    {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig()), "tokenizer"}
    - {"self", "inputs", "kwargs", "custom_generate"}  # the last would run code of a checkpoint
)


def option(language_model: CausalTextModel, options: dict, name: str) -> Any:
    """What `generate` will take for an option: given by name, in a `generation_config`, or the checkpoint's own.

    Where nobody says it, 1 for a number of beams or sequences, else None.
    """
    config = options.get("generation_config") or language_model.generation_config
    value = options.get(name, getattr(config, name, None))
    return 1 if value is None and name in ("num_beams", "num_return_sequences") else value


MAX_BEAMS = 1024  # every beam is a copy of the prompt


def check_generate_options(language_model: CausalTextModel, options: dict, own: Sequence[str] = ()) -> None:
    """Raise ValueError, naming the option, that transformers' `generate` has not, or that loses the media.

    own: what the caller takes besides, for near misses (`image` for `images`).
    """
    check_names(options, [*own, *GENERATE_OPTIONS], "generate", ValueError)
    for name in ("num_beams", "num_return_sequences"):
        if name in options and check_positive_int(options[name], name) > MAX_BEAMS:
            raise ValueError(f"{name}: must be at most {MAX_BEAMS}, got {options[name]}")
    for name in ("temperature", "top_p", "repetition_penalty"):
        if options.get(name) is not None:
            check_positive(options[name], name)
    for name in LOSE_MEDIA:
        if option(language_model, options, name) is not None:
            raise ValueError(f"{name}: not with media: transformers would read their placeholders as text")
    if draft := drafts(language_model, options):
        if options.get("prompt_lookup_num_tokens") is not None:
            check_positive_int(options["prompt_lookup_num_tokens"], "prompt_lookup_num_tokens")
        for name, alone in (("num_beams", 1), ("num_return_sequences", 1), ("cache_implementation", None)):
            if (value := option(language_model, options, name)) != alone:
                raise ValueError(f"{name}: must be {alone} with {draft}, got {value!r}")
    if options.get("use_cache") is False:
        raise ValueError("use_cache: must be True: without a cache placeholders would be read as text")


def drafts(language_model: CausalTextModel, options: dict) -> str | None:
    """The option, if any, that makes transformers guess tokens ahead, for one forward to check them all."""
    return next((name for name in DRAFTS if option(language_model, options, name) is not None), None)


def new_cache(language_model: CausalTextModel) -> Cache:
    """An empty cache, which grows."""
    return DynamicCache(config=language_model.config)


def prefill(
    language_model: CausalTextModel, inputs_embeds: Tensor, deepstack_embeds: Tensor, positions: Tensor, cache: Cache
) -> None:
    """Put keys and values into the cache: of (1, n, D) embeddings with (1, n, W - D) deeper features, (3, 1, n)."""
    deeper = {"deepstack_embeds": deepstack_embeds} if deepstack_embeds.shape[-1] else {}
    language_model(
        inputs_embeds=inputs_embeds, position_ids=positions.to(inputs_embeds.device), past_key_values=cache,
        use_cache=True, logits_to_keep=1, **deeper,
    )  # fmt: skip


class Assistant:
    """A text model that has read the prompt, media included, where transformers takes a model that drafts from ids."""

    def __init__(self, language_model: Any, cache: Cache):
        self.language_model, self.cache = language_model, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.language_model, name)

    def generate(self, **options) -> Any:
        """transformers' `generate`, which gives the cache of a call to the next one, and to the first none."""
        return self.language_model.generate(**({"past_key_values": self.cache} | options))


@torch.inference_mode()
def generate(
    language_model: CausalTextModel,
    input_ids: Tensor,
    prompt: tuple[Tensor, Tensor] | Cache,
    positions: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    **options,
) -> GenerateOutput:
    """transformers' output, whose `sequences` are the new ids (B * num_return_sequences, at most max_new_tokens).

    input_ids: (B, L), of the prompt: a repetition penalty counts them. prompt: its embeddings (B, L, D) and its
    deeper features (B, L, W - D), see `row_width`, zeros where nothing is added; or the keys and values of all but its
    last token. positions: (3, B, L) int64; decode steps continue at the last position + 1 on every axis, so the prompt
    must end in text. attention_mask: (B, L), 0 for left padding. options: those of transformers' `generate`
    (`do_sample`, `num_beams`, ...), greedy without them.
    """
    draft = drafts(language_model, options)
    if draft and len(input_ids) > 1:
        raise ValueError(f"{draft}: one prompt at a time, got a batch of {len(input_ids)}")
    if draft and isinstance(prompt, tuple):  # or transformers would go back to the ids, in which media are placeholders
        embeds, deepstack = prompt
        prompt = new_cache(language_model)
        if embeds.shape[1] > 1:
            prefill(language_model, embeds[:, :-1], deepstack[:, :-1], positions[..., :-1], prompt)
    if isinstance(prompt, tuple):
        options["inputs_embeds"], deepstack = prompt
        if deepstack.shape[-1]:
            options["deepstack_embeds"] = deepstack
    else:
        copies = max(option(language_model, options, name) for name in ("num_beams", "num_return_sequences"))
        if copies > 1:
            prompt.batch_repeat_interleave(copies)
        options["past_key_values"] = prompt
    if options.get("generation_config") is None:
        options = {"do_sample": False} | options
        if not options["do_sample"]:  # the checkpoint's sampling defaults mean nothing to greedy decoding
            options = {"temperature": None, "top_p": None, "top_k": None} | options
    output: Any = GenerationMixin.generate(
        language_model,  # type: ignore[arg-type]  # transformers asks for a protocol that its own base class misses
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        **({"use_cache": True} | options | {"return_dict_in_generate": True}),
    )
    output.sequences = output.sequences[:, input_ids.shape[1] :]
    return output
