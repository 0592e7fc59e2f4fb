"""Data-parallel encoding; this module re-exports the public names of `refvl.serving.parallel`."""

from refvl.serving.parallel import *  # noqa: F403
