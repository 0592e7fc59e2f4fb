"""GLM's text models are those of transformers; each class lists the checkpoint weights that it skips."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from refvl.language.model import CausalTextModel


# the multi-token-prediction layers at the end are skipped, as in transformers
class Glm4vMoeTextModel(CausalTextModel):
    """The text model of GLM-4.5V and GLM-4.6V."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"layers\.(46|92)\."]  # noqa: RUF012


class GlmOcrTextModel(CausalTextModel):
    """The text model of GLM-OCR."""

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"layers\.16\."]  # noqa: RUF012


# checkpoints have a tensor per expert, the model has one for all; transformers maps them only for the whole VLM
register_checkpoint_conversion_mapping("glm4v_moe_text", get_checkpoint_conversion_mapping("glm4v_moe"), overwrite=True)
