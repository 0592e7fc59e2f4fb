"""The text models of MiniCPM-V 4.6 and 4.7: both are transformers' Qwen3.5, and each has its own rule for positions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from refvl.language.qwen3_5 import Qwen3_5TextModel
from refvl.positions.canvas import CanvasMarks, canvas_positions
from refvl.positions.mrope import MediaSpan

VISION = r"^(model\.)?(vision_tower|merger)\."  # a regular expression for the tower's weights


class MiniCPMV4_6TextModel(Qwen3_5TextModel):
    """MiniCPM-V 4.6: positions are the token indices, including those of media tokens."""

    _keys_to_ignore_on_load_unexpected = [VISION, r"^mtp\."]  # noqa: RUF012

    def positions(self, ids_L: Tensor, spans: Sequence[MediaSpan]) -> Tensor:
        """Return 0, 1, 2, ... on every axis, (3, L) int64."""
        return torch.arange(len(ids_L)).expand(3, -1)


class MiniCPMV4_7TextModel(MiniCPMV4_6TextModel):
    """MiniCPM-V 4.7: an overview and its slices share one canvas."""

    def positions(self, ids_L: Tensor, spans: Sequence[MediaSpan]) -> Tensor:
        """Return positions on canvases, (3, L) int64. Raises ValueError if config.json does not set the separators."""
        marks = CanvasMarks(**{name: getattr(self.config, f"{name}_id") for name in CanvasMarks._fields})
        if spans and None in marks:
            raise ValueError(f"config.json: expected token ids for image_start_id and other separators, got {marks}")
        return canvas_positions(ids_L, spans, marks)
