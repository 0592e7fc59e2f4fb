"""The text model: from embeddings and positions to tokens.

The language model is transformers' own (`AutoModel` of the checkpoint's text config). transformers
also provides generation: the KV cache, sampling and streaming. refvl adds a wrapper without a
vision tower, which accepts embeddings instead of ids, and (3, B, L) M-RoPE positions computed
elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from refvl.positions.mrope import MediaSpan, mrope_positions
from refvl.trace import check_finite, synchronized_time


class CausalTextModel(PreTrainedModel, GenerationMixin):
    """A transformers text model with an output head; `forward` accepts embeddings, and positions of any rank.

    Parameter names are those of the original checkpoints: `model.layers...`, `model.norm`,
    `lm_head`.
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
        """W, the number of values in each encoder row that this model accepts; by default its own width D.

        A class whose layers accept k DeepStack features returns D * (1 + k) here, and accepts the
        features in `forward` as `deepstack_embeds`.
        """
        return self.config.hidden_size

    def text_rows(self, ids_L: Tensor) -> Tensor:
        """Return the embeddings of the ids, (L, W), as wide as the encoder's rows."""
        text_LD = self.get_input_embeddings()(ids_L.to(self.device))
        return F.pad(text_LD, (0, self.row_width - text_LD.shape[1]))

    def positions(self, ids_L: Tensor, spans: Sequence[MediaSpan]) -> Tensor:
        """Return the M-RoPE positions of a prompt with media at `spans`, (3, L) int64."""
        return mrope_positions(len(ids_L), spans)

    def prepare_inputs_for_generation(  # type: ignore[override]  # transformers passes keywords
        self, input_ids: Tensor, attention_mask=None, inputs_embeds=None, past_key_values=None, deepstack_embeds=None,
        position_shift=None, **kwargs,
    ) -> dict[str, Any]:  # fmt: skip
        """Drop the prompt's DeepStack features in decode steps; transformers would pass them in every step.

        position_shift: (B, 3), added to the positions of decode steps, which transformers continues
        from those of the prompt's last token.

        transformers inspects this method's argument names to find out what a model accepts. This
        method also keeps cached tokens from running again; otherwise, transformers' assisted
        decoding would run the prompt twice.
        """
        base: Any = super()
        if inputs_embeds is None and past_key_values is not None:
            kwargs["next_sequence_length"] = input_ids.shape[1] - int(past_key_values.get_seq_length())
        kwargs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds, "past_key_values": past_key_values}
        inputs = base.prepare_inputs_for_generation(input_ids, **kwargs)
        if kwargs.get("is_first_iteration") and deepstack_embeds is not None:
            inputs["deepstack_embeds"] = deepstack_embeds
        if position_shift is not None and not kwargs.get("is_first_iteration"):
            inputs["position_ids"] = inputs["position_ids"] + position_shift.T[..., None]
        return inputs

    def _expand_inputs_for_generation(  # type: ignore[override]  # transformers passes keywords
        self, expand_size: int = 1, position_ids: Tensor | None = None, **kwargs
    ) -> tuple[Tensor, dict[str, Any]]:
        """Expand positions for beams along the prompts' axis; transformers 5.17 repeats them along the first axis."""
        base: Any = super()
        input_ids, inputs = base._expand_inputs_for_generation(expand_size=expand_size, **kwargs)
        if position_ids is not None:
            inputs["position_ids"] = position_ids.repeat_interleave(expand_size, dim=1)
        return input_ids, inputs

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return the positions that transformers' inner model accepts: here all three axes of (3, B, L)."""
        return position_ids

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None, attention_mask: Tensor | None = None, past_key_values=None,
        logits_to_keep: int | Tensor = 0, **kwargs,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return logits (B, L or logits_to_keep, vocabulary) for (B, L, D) embeddings and (3, B, L) positions."""
        kwargs |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "past_key_values": past_key_values}
        positions = self.model_positions(position_ids)
        outputs = self.model(position_ids=positions, attention_mask=attention_mask, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        if inputs_embeds is not None and torch.is_inference_mode_enabled():  # the prompt of an answer
            check_finite(logits, "prefill: the first logits of prompt")
        return CausalLMOutputWithPast(
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SequentialTextModel(CausalTextModel):
    """A text model whose positions are the token indices, even for media tokens, so the three
    axes are equal.
    """

    def positions(self, ids_L: Tensor, spans: Sequence[MediaSpan]) -> Tensor:
        """Return 0, 1, 2, ... on every axis, (3, L) int64."""
        return torch.arange(len(ids_L)).expand(3, -1)

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return one of the axes, (B, L), because all three are equal."""
        return position_ids if position_ids is None or position_ids.ndim < 3 else position_ids[0]


@dataclass(eq=False)
class TokenTimer(BaseStreamer):
    """A streamer that records token times: transformers calls `put` first with the prompt, then with each new token."""

    device: torch.device | None
    listeners: Sequence[BaseStreamer | None] = ()  # streamers that receive the same calls; None is ignored
    times: list[float] = field(default_factory=list)  # in seconds

    def put(self, value: Tensor) -> None:
        self.times.append(synchronized_time(self.device))
        for listener in filter(None, self.listeners):
            listener.put(value)

    def end(self) -> None:
        for listener in filter(None, self.listeners):
            listener.end()


@torch.inference_mode()
def generate(
    language_model: CausalTextModel, input_ids: Tensor, positions: Tensor, attention_mask: Tensor, **options
) -> GenerateOutput:
    """Return transformers' output, whose `sequences` are the new ids (B * num_return_sequences, max_new_tokens or
    fewer).

    input_ids: the prompt's ids, (B, L), which a repetition penalty counts. positions: (3, B, L)
    int64; decode steps continue at the last position + 1 on every axis, plus an optional
    `position_shift` (B, 3). attention_mask: (B, L), 0 for left padding. options: options of
    transformers' `generate` (`max_new_tokens`, `do_sample`, ...); the default is greedy decoding.
    `options` must contain the prompt's `inputs_embeds` (B, L, D) and, for layers that accept
    DeepStack features, `deepstack_embeds` (B, L, W - D; see `row_width`). If a cache already holds
    all tokens except the last, `options` contains the cache as `past_key_values` instead.
    """
    if (seed := options.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    if options.get("temperature") == 0:  # OpenAI's and vLLM's name for greedy decoding
        options |= {"temperature": None, "do_sample": False}
    if options.get("generation_config") is None:
        options = {"do_sample": False} | options
        if not options["do_sample"]:  # greedy decoding ignores the checkpoint's sampling defaults
            options = {"temperature": None, "top_p": None, "top_k": None} | options
    inputs = {"input_ids": input_ids, "position_ids": positions, "attention_mask": attention_mask}
    options = {"use_cache": True} | options | inputs | {"return_dict_in_generate": True}
    model: Any = language_model  # transformers requires a protocol that its own base class lacks
    output: Any = GenerationMixin.generate(model, **options)
    output.sequences = output.sequences[:, input_ids.shape[1] :]
    return output
