"""Qwen3.5's text models are those of transformers; this file refuses packed prompts for their linear attention."""

from torch import Tensor

from refvl.language.model import CausalTextModel


class Qwen3_5TextModel(CausalTextModel):
    """A dense or MoE model; the multi-token-prediction layer is skipped, as in transformers."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"^mtp\."]  # noqa: RUF012

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return positions as in `CausalTextModel`; raise ValueError for packed prompts (`refvl.positions.pack`)."""
        if position_ids is not None and len(position_ids) == 4:
            raise ValueError(
                "position_ids: expected one prompt, because Qwen3.5's linear-attention layers would mix packed prompts"
            )
        return position_ids
