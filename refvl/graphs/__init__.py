"""Encoder graphs: budgets, capture, replay, packing. Knows encoders only through plan, forward and metadata fields."""

from refvl.contracts import GraphEncoder
from refvl.graphs.budgets import Batch, Limits, generate_budgets, infer_limits, padding_waste, plan_batches
from refvl.graphs.dual import DualGraphPlan, DualPathGraphManager, PairedBatch, plan_paired_batches
from refvl.graphs.manager import EncoderGraphManager, GraphPlan, GraphStats
from refvl.graphs.recorder import CaptureError, TraceGraph
from refvl.graphs.stale import StaleReplay, replay_stale

__all__ = [
    "Batch",
    "CaptureError",
    "DualGraphPlan",
    "DualPathGraphManager",
    "EncoderGraphManager",
    "GraphEncoder",
    "GraphPlan",
    "GraphStats",
    "Limits",
    "PairedBatch",
    "StaleReplay",
    "TraceGraph",
    "generate_budgets",
    "infer_limits",
    "padding_waste",
    "plan_batches",
    "plan_paired_batches",
    "replay_stale",
]
