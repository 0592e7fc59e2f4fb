"""Vision towers; each file is one encoder, read downward. They know nothing of prompts."""

from refvl.encoders.glm4v import Glm4vVisionConfig, Glm4vVisionTransformer
from refvl.encoders.glm_ocr import GlmOcrVisionConfig, GlmOcrVisionTransformer
from refvl.encoders.navit_siglip import NaVitSiglip, NaVitSiglipConfig
from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer

__all__ = [
    "Glm4vVisionConfig",
    "Glm4vVisionTransformer",
    "GlmOcrVisionConfig",
    "GlmOcrVisionTransformer",
    "NaVitSiglip",
    "NaVitSiglipConfig",
    "Qwen2_5_VisionConfig",
    "Qwen2_5_VisionTransformer",
]
