"""Boxes in answers, in pixels of the picture: the public door to `refvl.study.boxes`."""

from refvl.study.boxes import *  # noqa: F403
