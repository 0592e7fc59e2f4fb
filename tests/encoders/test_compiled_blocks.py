"""Blocks that torch compiles: one graph for all sizes, few kernels, the same numbers."""

import re

import pytest
import torch
from closeness import assert_agree
from graph_families import GRIDS, build, make_case

from refvl.attention import Segments, cumulative_lengths
from refvl.encoders.glm4v import SwiGLU
from refvl.graphs.recorder import refuse_read_back
from refvl.positions.rotary import rotary_matrices

LAYOUTS = {  # others: a grid; windows of one length, because sdpa runs once for each length
    "Qwen2.5-VL": (1, 8, 8), "MiniCPM-V 4.5": ((5, 6),), "Step3-VL": (0, 0)
}  # fmt: skip
KERNELS = {"Qwen2.5-VL": 11, "Qwen3-VL": 10, "GLM-4.1V": 11, "GLM-OCR": 11, "MiniCPM-V 4.5": 9, "Step3-VL": 8}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.parametrize("family", KERNELS)
def test_blocks_of_all_sizes_share_one_graph_without_a_break(family):
    """With the varlen attention of a GPU, which torch traces here, but does not run: zeros stand for its results."""
    encoder, graphs = build(family).bfloat16(), []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *args: (torch.zeros(rows, width, dtype=torch.bfloat16),)

    width = getattr(encoder.config, "vision", encoder.config).hidden_size
    with torch.inference_mode():
        for block in encoder.blocks:
            block.compile(dynamic=True, fullgraph=True, backend=keep)
        for lengths in ([9, 9], [37], [4, 5, 20], [70] * 3):
            rows = sum(lengths)
            rotary = rotary_matrices(*torch.ones(2, rows, encoder.head_dim // 2)), None
            segments = Segments(cumulative_lengths(lengths), None, max(lengths))
            context = (rotary, segments) if family in GRIDS else (segments,)
            for block in encoder.blocks:
                block(torch.zeros(rows, width, dtype=torch.bfloat16), *context, "varlen")
    assert len(graphs) == 1
    assert sum("flash_attention" in str(node.target) for node in graphs[0].graph.nodes) == 1


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


@pytest.mark.slow
@pytest.mark.parametrize("family", KERNELS)
@torch.inference_mode()
def test_a_compiled_block_is_a_dozen_kernels_at_most(family):
    """Kernels that inductor writes for the CPU, matrix products and attention: what the code of a block calls.

    Oracle of the numbers: the eager tower.
    """
    from torch._inductor.utils import run_and_get_code

    encoder = build(family)
    layout = LAYOUTS.get(family, (1, 6, 6))
    case = make_case(encoder, [layout])
    encoder.compile_blocks()
    out, codes = run_and_get_code(encoder, case.rows, [layout])
    called = [
        re.findall(r"(?:extern_kernels|torch\.ops|cpp_fused)[\w.]*\(", code.partition("def call(")[2]) for code in codes
    ]
    assert called and all(5 < len(kernels) <= KERNELS[family] for kernels in called)
    assert_agree(out, case.wanted[0], encoder)
