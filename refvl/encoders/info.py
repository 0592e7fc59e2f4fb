"""What can be said of a vision tower before it runs: how many tokens a picture becomes, which attention it gets.

Upstream: `VisionEncoderInfo` and its kin, `get_vit_attn_backend` (vLLM).
"""

import logging
from dataclasses import dataclass

import torch

from refvl.attention import available_backends, choose_backend
from refvl.checks import check_positive_int

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VisionEncoderInfo:
    """A tower that resizes every picture to one square: as many tokens as patches, whatever the picture."""

    image_size: int  # pixels: the square's side, Pixtral: of the longer side
    patch_size: int  # pixels along one side of what becomes a token

    @classmethod
    def from_hf(cls, hf_config) -> "VisionEncoderInfo":
        """From the config of a whole model; the sizes stand in its `vision_config`."""
        vision = hf_config.vision_config
        sizes = {name: check_positive_int(getattr(vision, name), name) for name in ("image_size", "patch_size")}
        return cls(**sizes)

    def get_image_size(self) -> int:
        """Pixels along a side."""
        return self.image_size

    def get_patch_size(self) -> int:
        """Pixels along a token's side."""
        return self.patch_size

    def get_patch_grid_length(self) -> int:
        """Whole tokens along a side of the largest picture."""
        return self.image_size // self.patch_size

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Tokens that the tower gives for a picture of this size in pixels."""
        check_positive_int(image_width, "image_width")
        check_positive_int(image_height, "image_height")
        return self._num_tokens(image_width, image_height)

    def _num_tokens(self, width: int, height: int) -> int:
        return self.get_patch_grid_length() ** 2


class SiglipEncoderInfo(VisionEncoderInfo):
    """SigLIP: patches alone."""

    __slots__ = ()


class CLIPEncoderInfo(VisionEncoderInfo):
    """CLIP: patches and a class token in front."""

    __slots__ = ()

    def _num_tokens(self, width: int, height: int) -> int:
        return self.get_patch_grid_length() ** 2 + 1


class PixtralHFEncoderInfo(VisionEncoderInfo):
    """Pixtral: pictures keep their ratio; a model that merges patches (Mistral 3) has larger tokens.

    The longer side is brought down to image_size where it is longer, both sides are rounded up to whole tokens.
    """

    __slots__ = ()

    @classmethod
    def from_hf(cls, hf_config) -> "PixtralHFEncoderInfo":
        info = super().from_hf(hf_config)
        return cls(info.image_size, info.patch_size * getattr(hf_config, "spatial_merge_size", 1))

    def get_patch_grid_size(self, *, image_width: int, image_height: int) -> tuple[int, int]:
        """(tokens across, tokens down)."""
        ratio = max(image_width / self.image_size, image_height / self.image_size, 1.0)
        sides = (max(1, int(side / ratio)) for side in (image_width, image_height))  # a thread keeps one pixel
        across, down = (-(-side // self.patch_size) for side in sides)
        return across, down

    def _num_tokens(self, width: int, height: int) -> int:
        across, down = self.get_patch_grid_size(image_width=width, image_height=height)
        return across * down


ENCODER_INFOS = {
    "clip_vision_model": CLIPEncoderInfo,
    "siglip_vision_model": SiglipEncoderInfo,
    "pixtral": PixtralHFEncoderInfo,
}


def get_vision_encoder_info(hf_config) -> VisionEncoderInfo:
    """The info of a model's vision tower, by the `model_type` of its `vision_config`; ValueError lists the known ones.

    >>> from transformers import LlavaConfig
    >>> get_vision_encoder_info(LlavaConfig()).get_num_image_tokens(image_width=640, image_height=480)  # CLIP, 336 px
    577
    """
    vision = getattr(hf_config, "vision_config", None)
    if vision is None:
        raise ValueError(f"hf_config: expected a model's config with a vision_config, got {type(hf_config).__name__}")
    if vision.model_type not in ENCODER_INFOS:
        raise ValueError(f"vision_config: model_type must be one of {list(ENCODER_INFOS)}, got {vision.model_type!r}")
    return ENCODER_INFOS[vision.model_type].from_hf(hf_config)


def get_vit_attn_backend(head_size: int, dtype: torch.dtype, device, *, requested: str = "auto") -> str:
    """The backend of `refvl.attention` that a tower gets; the reason is logged (logger "refvl.encoders.info", INFO).

    requested: a backend by name, which then must run there; "auto" takes the fastest that can.
    Raises ValueError for an unknown backend, or one that cannot run.
    """
    check_positive_int(head_size, "head_size")
    backend = choose_backend(requested, device, dtype, head_size)
    available = available_backends(device, dtype, head_size)
    reason = f"the fastest of {available}" if requested == "auto" else f"as requested, of {available}"
    logger.info("vision attention: %s, %s for %s heads of %d on %s", backend, reason, dtype, head_size, device)
    return backend
