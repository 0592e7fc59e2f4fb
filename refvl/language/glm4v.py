"""GLM's text models are those of transformers; each class lists the checkpoint weights that it skips."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from refvl.language.model import CausalTextModel


# the layers after the last one predict several tokens at once; refvl skips them, as transformers does
class Glm4vMoeTextModel(CausalTextModel):
    """GLM-4.5V and GLM-4.6V."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"layers\.(46|92)\."]  # noqa: RUF012


class GlmOcrTextModel(CausalTextModel):
    """GLM-OCR."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"layers\.16\."]  # noqa: RUF012


# the checkpoint has one tensor per expert, the model one for all; transformers maps them only for the whole model
register_checkpoint_conversion_mapping("glm4v_moe_text", get_checkpoint_conversion_mapping("glm4v_moe"), overwrite=True)
