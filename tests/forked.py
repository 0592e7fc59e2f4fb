"""Processes forked from one that has imported everything: a start costs no import.

The server they are forked from starts once and imports what it was told to until then, whoever asks: one list for all.
"""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["refvl.tools.cli", "refvl.loading", "refvl.tools.export", "refvl.parallel", "refvl.encoders", "refvl.graphs",
     "transformers.generation", "hypothesis"]
)  # fmt: skip
