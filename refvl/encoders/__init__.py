"""Vision towers; each file is one encoder, read downward. They know nothing of prompts."""

from refvl.encoders.glm4v import Glm4vVisionConfig, Glm4vVisionTransformer
from refvl.encoders.glm_ocr import GlmOcrVisionConfig, GlmOcrVisionTransformer
from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.encoders.step3_vl import Step3VisionConfig, Step3VisionEncoder

__all__ = [
    "Glm4vVisionConfig",
    "Glm4vVisionTransformer",
    "GlmOcrVisionConfig",
    "GlmOcrVisionTransformer",
    "Qwen2_5_VisionConfig",
    "Qwen2_5_VisionTransformer",
    "Step3VisionConfig",
    "Step3VisionEncoder",
]
