"""Kimi K2.5's text model, which is transformers' DeepSeek-V3; tokens are counted one by one."""

import torch
from torch import Tensor

from refvl.language.model import SequentialTextModel

VISION = r"^(model\.)?(vision_tower|mm_projector)\."  # names of the tower's weights


class KimiK25TextModel(SequentialTextModel):
    """DeepSeek-V3. The id that a video's tokens have in the prompt lies behind the vocabulary."""

    _keys_to_ignore_on_load_unexpected = [VISION]  # noqa: RUF012

    def text_rows(self, ids_L: Tensor) -> Tensor:
        """(L, W): the embeddings of the ids; of one behind the vocabulary, which a medium's row replaces, the first."""
        return super().text_rows(torch.where(ids_L < self.config.vocab_size, ids_L, 0))
