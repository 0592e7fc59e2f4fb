"""Data-parallel encoding: the public door to `refvl.serving.parallel`."""

from refvl.serving.parallel import *  # noqa: F403
