"""Boxes in answers, in pixels of the image; this module re-exports the public names of `refvl.study.boxes`."""

from refvl.study.boxes import *  # noqa: F403
