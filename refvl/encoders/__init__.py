"""Vision encoders: each file reads from top to bottom; `tower` and `grid` contain the common parts.

The encoders do not depend on prompts.
"""

from refvl.lazy import lazy_names

FILES = {
    "glm4v": "Glm4vVisionConfig Glm4vVisionTransformer",
    "glm_ocr": "GlmOcrVisionConfig GlmOcrVisionTransformer",
    "minicpmv": "MiniCPMV2_0Encoder MiniCPMV2_5Encoder MiniCPMV2_6Encoder MiniCPMV4_0Encoder MiniCPMV4_5Encoder "
                "MiniCPMVEncoderConfig",
    "minicpmv4_6": "MiniCPMV4_6Encoder MiniCPMV4_6VisionConfig MiniCPMV4_7Encoder",
    "navit_siglip": "NaVitSiglip NaVitSiglipConfig",
    "qwen2_5_vl": "Qwen2_5_VisionConfig Qwen2_5_VisionTransformer",
    "qwen3_vl": "Qwen3VLVisionConfig Qwen3VLVisionTransformer Qwen3_5VisionConfig Qwen3_5VisionTransformer",
    "resampler": "Resampler2_5 Resampler4_5",
    "resampler2": "Resampler2",
    "siglip_vit": "SiglipViT SiglipViTConfig",
    "step3_vl": "Step3VisionConfig Step3VisionEncoder",
    "step_vl": "StepVLEncoder StepVLVisionConfig",
    "vision_utils": "get_vision_encoder_info get_vit_attn_backend resolve_visual_encoder_outputs",
}  # fmt: skip
__getattr__, __dir__, __all__ = lazy_names(__name__, FILES)
