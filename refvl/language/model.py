"""The text model: embeddings and positions in, tokens out.

The language model itself is transformers' own (`AutoModel` of the checkpoint's text config), generation too: KV
cache, sampling, streaming. What refvl adds is what a vision-language model needs - it is driven with embeddings
instead of ids, and with (3, B, L) M-RoPE positions that it did not compute - in a wrapper that holds no vision tower.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from refvl.checks import check_shape
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

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def positions(self, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
        """(3, L) int64 positions of a prompt with media at `spans`: M-RoPE."""
        return get_mrope_input_positions(num_tokens, spans)[0]

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
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


class SequentialTextModel(CausalTextModel):
    """A text model that counts tokens one by one, media included: the three axes are the same."""

    def positions(self, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
        """(3, L) int64: 0, 1, 2, ... on every axis."""
        return torch.arange(num_tokens).expand(3, -1)

    def forward(self, *args, position_ids: Tensor | None = None, **kwargs) -> CausalLMOutputWithPast:
        """As above; of (3, B, L) positions one axis is handed on."""
        if position_ids is not None and position_ids.ndim == 3:
            position_ids = position_ids[0]
        return super().forward(*args, position_ids=position_ids, **kwargs)


def load_language_model(
    folder: Path,
    text_config,
    *,
    dtype: torch.dtype,
    device,
    model_class: type[CausalTextModel] = CausalTextModel,
    progress: bool = True,
    **kwargs,
) -> CausalTextModel:
    """The text part of the checkpoint in `folder`, strictly: missing and misshapen weights raise ValueError.

    kwargs (`device_map`, `tp_plan`, `attn_implementation`, ...) go to transformers' `from_pretrained`; those that place
    the weights win over `device`.
    """
    with _progress_bars(progress):
        model, info = model_class.from_pretrained(
            folder,
            config=text_config,
            dtype=dtype,
            key_mapping=KEY_MAPPING,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they can be listed together with the missing ones
            **kwargs,
        )
    problems = {kind: info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")}
    lines = [
        f"  {kind} ({len(found)}): {', '.join(map(str, sorted(found)))}" for kind, found in problems.items() if found
    ]
    if lines:
        raise ValueError(f"{folder}: the weights do not match the text model\n" + "\n".join(lines))
    return model.eval() if PLACED_BY & kwargs.keys() else model.eval().to(device)


@contextmanager
def _progress_bars(wanted: bool):
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
    text_config,
    *,
    dtype: torch.dtype,
    device,
    model_class: type[CausalTextModel] = CausalTextModel,
    seed: int = 0,
    **kwargs,
) -> CausalTextModel:
    """The same model with random weights, at its true shape; on `meta` it costs no memory."""
    on_meta = torch.device(device).type == "meta"
    with torch.device("meta" if on_meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(text_config, dtype=dtype, **kwargs)
    return model.eval() if on_meta else model.eval().to(device)


@torch.inference_mode()
def generate(
    language_model: CausalTextModel,
    input_ids: Tensor,
    inputs_embeds: Tensor,
    positions: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    **kwargs,
) -> Tensor:
    """New token ids (B, at most max_new_tokens), greedy unless kwargs say otherwise (`do_sample`, `temperature`, ...).

    input_ids: (B, L), what the embeddings stand for: a repetition penalty counts them. inputs_embeds: (B, L, D).
    positions: (3, B, L) int64; decode steps continue at the last position + 1 on every axis, so the prompt must end
    in text. attention_mask: (B, L), 0 for left padding.
    """
    batch_and_length = tuple(check_shape(input_ids, ("B", "L"), "input_ids").shape)
    check_shape(inputs_embeds, (*batch_and_length, language_model.config.hidden_size), "inputs_embeds")
    check_shape(positions, (3, *batch_and_length), "positions")
    check_shape(attention_mask, batch_and_length, "attention_mask")
    kwargs = {"do_sample": False} | kwargs
    if not kwargs["do_sample"]:  # the checkpoint's sampling defaults mean nothing to greedy decoding
        kwargs = {"temperature": None, "top_p": None, "top_k": None} | kwargs
    ids = language_model.generate(
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        position_ids=positions,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        **kwargs,
    )
    return ids[:, input_ids.shape[1] :]
