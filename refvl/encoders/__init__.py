"""Vision towers; each file is one encoder, read downward. They know nothing of prompts."""

from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer

__all__ = ["Qwen2_5_VisionConfig", "Qwen2_5_VisionTransformer"]
