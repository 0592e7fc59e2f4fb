"""Vision towers; each file is one encoder, read downward. They know nothing of prompts."""

from refvl.encoders.features import (
    get_feature_selector,
    get_num_selected_vision_tokens,
    resolve_visual_encoder_outputs,
)
from refvl.encoders.glm4v import Glm4vVisionConfig, Glm4vVisionTransformer
from refvl.encoders.glm_ocr import GlmOcrVisionConfig, GlmOcrVisionTransformer
from refvl.encoders.info import get_vision_encoder_info, get_vit_attn_backend
from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer

__all__ = [
    "Glm4vVisionConfig",
    "Glm4vVisionTransformer",
    "GlmOcrVisionConfig",
    "GlmOcrVisionTransformer",
    "Qwen2_5_VisionConfig",
    "Qwen2_5_VisionTransformer",
    "get_feature_selector",
    "get_num_selected_vision_tokens",
    "get_vision_encoder_info",
    "get_vit_attn_backend",
    "resolve_visual_encoder_outputs",
]
