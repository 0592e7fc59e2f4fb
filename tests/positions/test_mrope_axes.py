"""Which axis turns which rotary pair. Oracle: transformers' rotary embeddings, asked about each axis alone."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from refvl.positions import mrope_axis_of_pairs


def rope(section, share=1.0) -> dict:
    return {
        "rope_type": "default", "rope_theta": 100.0, "mrope_section": section, "mrope_interleaved": True,
        "partial_rotary_factor": share,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "rotary", "section", "head_dim", "share"),
    [
        ("qwen3_vl_text", Qwen3VLTextRotaryEmbedding, [24, 20, 20], 128, 1.0),
        ("qwen3_vl_text", Qwen3VLTextRotaryEmbedding, [6, 5, 5], 32, 1.0),
        ("qwen3_5_text", Qwen3_5TextRotaryEmbedding, [11, 11, 10], 256, 0.25),
    ],
)
def test_interleaved_pairs_equal_transformers(model_type, rotary, section, head_dim, share):
    """A position on one axis turns the pairs of that axis and leaves the others at angle 0."""
    config = AutoConfig.for_model(model_type, head_dim=head_dim, rope_parameters=rope(section, share))
    axes = mrope_axis_of_pairs(section, interleaved=True)
    for axis in range(3):
        positions = torch.eye(3, dtype=torch.int64)[axis].view(3, 1, 1)
        _, sin = rotary(config)(torch.zeros(1), positions)
        assert ((sin[0, 0, : len(axes)] != 0) == (axes == axis)).all()


@pytest.mark.parametrize(
    ("model_type", "rotary", "section", "share", "pairs"),
    [
        ("qwen2_5_vl_text", Qwen2_5_VLRotaryEmbedding, [16, 24, 24], 1.0, slice(64)),  # their halves lie apart
        ("glm4v_text", Glm4vTextRotaryEmbedding, [8, 12, 12], 0.5, slice(0, None, 2)),  # side by side
    ],
)
def test_runs_equal_transformers(model_type, rotary, section, share, pairs):
    """The same; older releases give the angles of all axes, and cut them into runs where they are applied."""
    text = {"hidden_size": 256, "num_attention_heads": 2, "rope_parameters": rope(section, share)}
    embedding = rotary(AutoConfig.for_model(model_type, **text))
    axes = mrope_axis_of_pairs(section, interleaved=False)
    for axis in range(3):
        positions = torch.eye(3, dtype=torch.int64)[axis].view(3, 1, 1)
        sin = embedding(torch.zeros(1), positions)[1][..., pairs]
        if sin.ndim == 4:
            sin = torch.cat([part[i] for i, part in enumerate(sin.split(section, -1))], -1)
        assert ((sin.flatten() != 0) == (axes == axis)).all()


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [([1, 2], ValueError, r"section: expected \(t, h, w\)"), ([1, 2, 0.5], TypeError, "section: expected integers")],
)
def test_other_sections_are_refused(section, error, message):
    with pytest.raises(error, match=message):
        mrope_axis_of_pairs(section, interleaved=True)
