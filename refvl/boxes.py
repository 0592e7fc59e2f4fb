"""Boxes in answers, in pixels of the image: the public door to `refvl.study.boxes`."""

from refvl.study.boxes import *  # noqa: F403
