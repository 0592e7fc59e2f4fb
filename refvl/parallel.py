"""Data-parallel encoding: the public door to `refvl.serving.parallel`."""

from refvl.serving.parallel import (
    get_count_assignment,
    get_load_balance_assignment,
    get_speed_up,
    rank_and_world_size,
    restore_order,
    run_dp_sharded_mrope_vision_model,
    run_dp_sharded_vision_model,
    torchrun_ranks,
)

__all__ = [
    "get_count_assignment", "get_load_balance_assignment", "get_speed_up", "rank_and_world_size", "restore_order",
    "run_dp_sharded_mrope_vision_model", "run_dp_sharded_vision_model", "torchrun_ranks",
]  # fmt: skip
