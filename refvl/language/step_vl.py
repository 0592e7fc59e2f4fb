"""Step3-VL-10B's config.json, and the text models of both releases: transformers' Qwen3 and Step-3.7.

transformers has no class for `step_robotics`, the model_type of Step3-VL-10B.
"""

import re

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from refvl.language.model import SequentialTextModel
from refvl.language.step3_config import Step3VLConfig

VISION = r"^(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\."  # the tower's weights


class PerceptionEncoderConfig(PretrainedConfig):
    """The sizes of the images and of the tower, under the released file's names."""

    model_type = "perception_encoder"
    base_config_key = "vision_config"

    width: int = 1536
    layers: int = 47
    heads: int = 16
    mlp_ratio: float = 8960 / 1536
    num_channels: int = 3
    image_size: int = 728
    patch_size: int = 14
    # crop_size and max_side are constants in the released code; small checkpoints change them
    crop_size: int = 504
    max_side: int = 3024
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5


class StepVLConfig(Step3VLConfig):
    """The whole config.json of Step3-VL-10B: Step3's keys, but with configs of different parts."""

    model_type = "step_robotics"
    sub_configs = {"vision_config": PerceptionEncoderConfig, "text_config": Qwen3Config}  # noqa: RUF012

    image_token_id: int = 151679


AutoConfig.register(StepVLConfig.model_type, StepVLConfig, exist_ok=True)


class StepVLTextModel(SequentialTextModel):
    """The text model of Step3-VL-10B: Qwen3."""

    _keys_to_ignore_on_load_unexpected = [VISION]  # noqa: RUF012


class Step37TextModel(SequentialTextModel):
    """Step-3.7's text model; the multi-token-prediction layers are skipped, as in transformers."""

    _keys_to_ignore_on_load_unexpected = [VISION, r"layers\.(45|46|47)\."]  # noqa: RUF012

    def __init__(self, config):
        from transformers.models.step3p7 import modeling_step3p7  # imported here because few callers need it

        config.allow_global_per_layer_attribute_access = True  # `refvl info` reads head counts, which differ by layer
        PreTrainedModel.__init__(self, config)
        self.model = modeling_step3p7.Step3p7TextModel(config)  # `AutoModel` has no entry for the text model alone
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# checkpoints store all experts in one tensor of three parts; transformers maps it only for the whole VLM
_mapping = get_checkpoint_conversion_mapping("step3p7") or []
_experts = [rule for rule in _mapping if re.search(r"moe|share_expert", "".join(rule.source_patterns))]
register_checkpoint_conversion_mapping(Step37TextModel.__name__, _experts, overwrite=True)
