"""Kimi K2.5's text model is transformers' DeepSeek-V3; its positions are the token indices."""

import torch
from torch import Tensor

from refvl.language.model import SequentialTextModel

VISION = r"^(model\.)?(vision_tower|mm_projector)\."  # a regular expression for the tower's weights


class KimiK25TextModel(SequentialTextModel):
    """DeepSeek-V3, for prompts in which video tokens have an id beyond the vocabulary."""

    _keys_to_ignore_on_load_unexpected = [VISION]  # noqa: RUF012

    def text_rows(self, ids_L: Tensor) -> Tensor:
        """Return the embeddings of the ids, (L, W).

        Ids beyond the vocabulary get the first embedding, which is replaced later.
        """
        return super().text_rows(torch.where(ids_L < self.config.vocab_size, ids_L, 0))
