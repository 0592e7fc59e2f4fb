"""Encoder graphs: budgets, capture, replay, packing.

Graphs use only an encoder's plan, its forward and its metadata fields.
"""

from refvl.graphs.budgets import (
    Batch,
    Limits,
    PairedBatch,
    generate_budgets,
    infer_limits,
    padding_waste,
    plan_batches,
    plan_paired_batches,
)
from refvl.graphs.manager import EncoderGraphManager, GraphPlan, GraphStats
from refvl.graphs.recorder import CaptureError, TraceGraph

__all__ = [
    "Batch", "CaptureError", "EncoderGraphManager", "GraphPlan", "GraphStats", "Limits", "PairedBatch",
    "TraceGraph", "generate_budgets", "infer_limits", "padding_waste", "plan_batches", "plan_paired_batches",
]  # fmt: skip
