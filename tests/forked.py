"""Processes forked from one that has imported everything: a start costs no import.

The server they are forked from starts once and imports what it was told to until then, whoever
asks: one list for all.
"""

import multiprocessing
from collections.abc import Callable, Iterable

from torch.distributed import TCPStore

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["refvl.tools.cli", "refvl.loading", "refvl.serving.export", "refvl.serving.parallel", "refvl.encoders",
     "refvl.graphs", "transformers.generation", "hypothesis"]
)  # fmt: skip


def exit_codes(target: Callable, arguments: Iterable[tuple]) -> list[int | None]:
    """Call `target` in one process for each tuple of arguments, all at once; return their exit codes."""
    processes = [CONTEXT.Process(target=target, args=of_one) for of_one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)  # slow is not wrong
    return [process.exitcode for process in processes]


def torchrun_variables(count: int) -> list[dict[str, str]]:
    """The environment that torchrun gives each of `count` processes on one machine."""
    store = TCPStore("127.0.0.1", 0, is_master=True)  # asks for a free port
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    del store
    group |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
