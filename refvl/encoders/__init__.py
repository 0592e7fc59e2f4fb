"""Vision encoders: each file reads from top to bottom; `tower.py` and `grid.py` contain the common parts.

The encoders do not depend on prompts.
"""

from refvl.encoders.glm4v import Glm4vVisionConfig, Glm4vVisionTransformer
from refvl.encoders.glm_ocr import GlmOcrVisionConfig, GlmOcrVisionTransformer
from refvl.encoders.minicpmv import (
    MiniCPMV2_0Encoder,
    MiniCPMV2_5Encoder,
    MiniCPMV2_6Encoder,
    MiniCPMV4_0Encoder,
    MiniCPMV4_5Encoder,
    MiniCPMVEncoderConfig,
)
from refvl.encoders.minicpmv4_6 import MiniCPMV4_6Encoder, MiniCPMV4_6VisionConfig, MiniCPMV4_7Encoder
from refvl.encoders.navit_siglip import NaVitSiglip, NaVitSiglipConfig
from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.encoders.qwen3_vl import (
    Qwen3_5VisionConfig,
    Qwen3_5VisionTransformer,
    Qwen3VLVisionConfig,
    Qwen3VLVisionTransformer,
)
from refvl.encoders.resampler import Resampler2_5, Resampler4_5
from refvl.encoders.resampler2 import Resampler2
from refvl.encoders.siglip_vit import SiglipViT, SiglipViTConfig
from refvl.encoders.step3_vl import Step3VisionConfig, Step3VisionEncoder
from refvl.encoders.step_vl import StepVLEncoder, StepVLVisionConfig
from refvl.encoders.vision_utils import (
    get_vision_encoder_info,
    get_vit_attn_backend,
    resolve_visual_encoder_outputs,
)
from refvl.pixels.slices import SliceGroup

__all__ = [
    "Glm4vVisionConfig", "Glm4vVisionTransformer", "GlmOcrVisionConfig", "GlmOcrVisionTransformer",
    "MiniCPMV2_0Encoder", "MiniCPMV2_5Encoder", "MiniCPMV2_6Encoder", "MiniCPMV4_0Encoder", "MiniCPMV4_5Encoder",
    "MiniCPMV4_6Encoder", "MiniCPMV4_6VisionConfig", "MiniCPMV4_7Encoder",
    "MiniCPMVEncoderConfig", "NaVitSiglip", "NaVitSiglipConfig", "Qwen2_5_VisionConfig", "Qwen2_5_VisionTransformer",
    "Qwen3VLVisionConfig", "Qwen3VLVisionTransformer", "Qwen3_5VisionConfig", "Qwen3_5VisionTransformer", "Resampler2",
    "Resampler2_5", "Resampler4_5", "SiglipViT", "SiglipViTConfig", "SliceGroup", "Step3VisionConfig",
    "Step3VisionEncoder", "StepVLEncoder", "StepVLVisionConfig", "get_vision_encoder_info", "get_vit_attn_backend",
    "resolve_visual_encoder_outputs",
]  # fmt: skip
