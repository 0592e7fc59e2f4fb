"""Blocks that torch compiles: one graph for all sizes."""

import random

import pytest
import torch
from closeness import assert_agree
from graph_families import FAMILIES, GRIDS, build, draw_layouts, make_case

from refvl.attention import Segments, cumulative_lengths
from refvl.encoders.glm4v import SwiGLU
from refvl.graphs.recorder import refuse_read_back
from refvl.positions.rotary import rotary_factors
from refvl.serving.linear import fuse_layers

DISTINCT = ("Qwen2.5-VL", "Qwen3-VL", "GLM-4.1V", "GLM-OCR", "MiniCPM-V 4.5", "Step3-VL")


@pytest.fixture(autouse=True)
def nothing_compiled():
    yield
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.parametrize("family", DISTINCT)
def test_blocks_of_all_sizes_share_one_graph_without_a_break(family):
    """With the varlen attention of a GPU, which torch traces here, but does not
    run: zeros stand for its results."""
    encoder, graphs = build(family).bfloat16(), []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *args: (torch.zeros(rows, width, dtype=torch.bfloat16),)

    width = getattr(encoder.config, "vision", encoder.config).hidden_size
    fuse_layers(encoder)  # as `load` does on a GPU
    with torch.inference_mode():
        for block in encoder.blocks:
            block.compile(dynamic=True, fullgraph=True, backend=keep)
        for lengths in ([9, 9], [37], [4, 5, 20], [70] * 3):
            rows = sum(lengths)
            rotary = rotary_factors(*torch.ones(2, rows, encoder.head_dim // 2))
            segments = Segments(cumulative_lengths(lengths), None, max(lengths))
            context = (rotary, segments) if family in GRIDS else (segments,)
            for block in encoder.blocks:
                block(torch.zeros(rows, width, dtype=torch.bfloat16), *context, "varlen")
    assert len(graphs) == 1
    assert sum("flash_attention" in str(node.target) for node in graphs[0].graph.nodes) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_tower_is_one_graph(family):
    """Oracle: the tower as it is written."""
    encoder = build(family)
    case = make_case(encoder, draw_layouts(family, random.Random(0)))
    plan = {"metadata": encoder.plan(case.layouts), "attention": "sdpa"}
    with torch.inference_mode():
        compiled = torch.compile(encoder, fullgraph=True, backend="eager")
        assert_agree(compiled(case.rows, **plan), encoder(case.rows, **plan), encoder)


def test_the_check_before_a_capture_leaves_compiled_code_in_place():
    """Inside of it the code runs as it was written, and behind it as it was compiled."""
    runs, layer, x = [], SwiGLU(5, 5, bias=False), torch.ones(2, 5)
    layer.compile(backend=lambda graph, inputs: lambda *args: runs.append(1) or graph(*args))
    with torch.no_grad():
        layer(x)
        with refuse_read_back():
            layer(x)
        layer(x)
    assert len(runs) == 2
