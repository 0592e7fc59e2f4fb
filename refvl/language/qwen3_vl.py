"""Qwen3-VL's text models are those of transformers; this file adds DeepStack features and a weight mapping."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from refvl.language.model import CausalTextModel


class Qwen3VLTextModel(CausalTextModel):
    """A dense or MoE model; each of its first layers adds the features of an earlier tower block (DeepStack)."""

    @property
    def row_width(self) -> int:
        """The width of an embedding and its k DeepStack features, D * (1 + k)."""
        return self.config.hidden_size * (1 + self.config.deepstack_layers)

    def forward(self, *args, attention_mask=None, deepstack_embeds=None, **kwargs):
        """Run as in `CausalTextModel`.

        deepstack_embeds: (B, L, D * k); the i-th group of D features is added after layer i.
        """
        if deepstack_embeds is not None:
            visual_BL = deepstack_embeds.any(-1)
            features = deepstack_embeds[visual_BL].split(self.config.hidden_size, dim=-1)
            kwargs |= {"visual_pos_masks": visual_BL, "deepstack_visual_embeds": features}
        return super().forward(*args, **kwargs | {"attention_mask": attention_mask})


# checkpoints store all experts in one transposed tensor; transformers maps it only for the whole VLM
register_checkpoint_conversion_mapping(
    "qwen3_vl_moe_text", get_checkpoint_conversion_mapping("qwen3_vl_moe"), overwrite=True
)
