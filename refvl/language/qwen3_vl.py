"""Qwen3-VL's text models are transformers'; here is what their checkpoints and deeper features need."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from refvl.language.model import CausalTextModel


class Qwen3VLTextModel(CausalTextModel):
    """Dense or with experts. The first layers each add the features of an earlier block of the tower (deepstack)."""

    @property
    def row_width(self) -> int:
        """D * (1 + k)."""
        return self.config.hidden_size * (1 + self.config.deepstack_layers)

    def forward(self, *args, deepstack_embeds=None, **kwargs):
        """As in `CausalTextModel`. deepstack_embeds: (B, L, D * k), i-th D added behind layer i."""
        if deepstack_embeds is not None:
            visual_BL = deepstack_embeds.any(-1)
            features = deepstack_embeds[visual_BL].split(self.config.hidden_size, dim=-1)
            kwargs |= {"visual_pos_masks": visual_BL, "deepstack_visual_embeds": features}
        return super().forward(*args, **kwargs)


# released experts lie transposed, in one tensor: transformers maps them for the whole model only
register_checkpoint_conversion_mapping(
    "qwen3_vl_moe_text", get_checkpoint_conversion_mapping("qwen3_vl_moe"), overwrite=True
)
