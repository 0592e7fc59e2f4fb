"""Qwen3.5's text models are those of transformers; here they reject packed prompts, which linear attention would mix.

MiniCPM-V 4.6 and 4.7 also use a Qwen3.5 text model, each with its own rule for positions.
"""

from collections.abc import Sequence

from torch import Tensor

from refvl.language.model import CausalTextModel, SequentialTextModel
from refvl.positions.canvas import CanvasMarks, canvas_positions
from refvl.positions.mrope import MediaSpan

FOLDED_VISION = r"^(model\.)?(vision_tower|merger)\."  # a regular expression for the tower's weights in MiniCPM-V 4.6


class Qwen3_5TextModel(CausalTextModel):
    """The dense or MoE text model of Qwen3.5; the multi-token-prediction layer is skipped, as in transformers."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"^mtp\."]  # noqa: RUF012

    def model_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return positions as in `CausalTextModel`; raise ValueError for packed prompts (`refvl.positions.pack`)."""
        if position_ids is not None and len(position_ids) == 4:
            reason = "because Qwen3.5's linear-attention layers would mix packed prompts"
            raise ValueError(f"position_ids: expected one prompt, {reason}")
        return position_ids


class MiniCPMV4_6TextModel(Qwen3_5TextModel):
    """The text model of MiniCPM-V 4.6: positions are token indices, even for media tokens."""

    _keys_to_ignore_on_load_unexpected = [FOLDED_VISION, r"^mtp\."]  # noqa: RUF012

    positions = SequentialTextModel.positions


class MiniCPMV4_7TextModel(MiniCPMV4_6TextModel):
    """The text model of MiniCPM-V 4.7: an overview and its slices share one canvas."""

    def positions(self, ids_L: Tensor, spans: Sequence[MediaSpan]) -> Tensor:
        """Return positions on canvases, (3, L) int64. Raises ValueError if config.json does not set the separators."""
        marks = CanvasMarks(**{name: getattr(self.config, f"{name}_id") for name in CanvasMarks._fields})
        if spans and None in marks:
            raise ValueError(f"config.json: expected ids for image_start_id and the other separators, got {marks}")
        return canvas_positions(ids_L, spans, marks)
