"""Encoder graphs: budgets, capture, replay, packing. Knows encoders only through plan, forward and metadata fields."""

from refvl.graphs.budgets import Batch, Limits, generate_budgets, infer_limits, padding_waste, plan_batches
from refvl.graphs.dual import DualPathGraphManager, PairedBatch, PathBatch, plan_paired_batches
from refvl.graphs.manager import EncoderGraphManager, GraphEncoder, GraphStats
from refvl.graphs.recorder import CaptureError, TraceGraph

__all__ = [
    "Batch",
    "CaptureError",
    "DualPathGraphManager",
    "EncoderGraphManager",
    "GraphEncoder",
    "GraphStats",
    "Limits",
    "PairedBatch",
    "PathBatch",
    "TraceGraph",
    "generate_budgets",
    "infer_limits",
    "padding_waste",
    "plan_batches",
    "plan_paired_batches",
]
