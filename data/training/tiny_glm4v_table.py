"""The tiny GLM-4.1V whose tower has to read its position table: `data/checkpoints/tiny-glm4v-table`.

Its training began with weights of `tiny-glm4v`, which reads places from M-RoPE, and with a new table. It continued with
exchanged vectors of the table and with scenes of other sizes: see `train_tiny.py`, 8 and 9. Apart from the weights,
both folders are the same.
"""

import torch
from torch import nn

from data.training.tiny_glm4v import TinyGlm4v


class TinyGlm4vTable(TinyGlm4v):
    name, release = "glm4v_table", "glm4v-table"
    reads_places = False
    reads_table = True
    recipe = {  # noqa: RUF012
        "begin_with": "502bfc06a919644edc20d05c23c0a86241374c2644fa26669c83745df574ac5a", "seed": 4, "steps": 1000,
        "see": 150, "warmup": 30, "pictures": 12, "picture_batches": 2, "clips": 3, "asides": 2, "photos": 4,
        "lr": 2e-3, "muon_lr": 3e-3, "measure_on": 96, "measure_every": 200,
    }  # fmt: skip

    def init_weights(self, model: nn.Module) -> None:
        """Patches are normalised before the table is added; a table as small as other matrices would have no effect."""
        super().init_weights(model)
        table = model.visual.embeddings["position_embedding"].weight
        nn.init.normal_(table, generator=torch.Generator().manual_seed(7))


FAMILY = TinyGlm4vTable()
