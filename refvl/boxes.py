"""Boxes in answers, in pixels of the image: the public names of `refvl.study.boxes`."""

from refvl.study.boxes import *  # noqa: F403
