"""Encoder graphs: budgets, capture, replay, packing. Knows encoders only through plan, forward and metadata fields."""

from refvl.contracts import GraphEncoder
from refvl.graphs.budgets import Batch, Limits, generate_budgets, infer_limits, padding_waste, plan_batches
from refvl.graphs.dual import DualGraphPlan, DualPathGraphManager, PairedBatch, plan_paired_batches
from refvl.graphs.manager import EncoderGraphManager, GraphPlan, GraphStats
from refvl.graphs.recorder import CaptureError, TraceGraph


def manager_class(encoder) -> type[EncoderGraphManager] | type[DualPathGraphManager]:
    """Return the manager for `encoder`: one for each of its `paths`, where it has several."""
    return DualPathGraphManager if hasattr(encoder, "paths") else EncoderGraphManager


__all__ = [
    "Batch", "CaptureError", "DualGraphPlan", "DualPathGraphManager", "EncoderGraphManager", "GraphEncoder",
    "GraphPlan", "GraphStats", "Limits", "PairedBatch", "TraceGraph", "generate_budgets", "infer_limits",
    "manager_class", "padding_waste", "plan_batches", "plan_paired_batches",
]  # fmt: skip
