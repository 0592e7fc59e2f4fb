"""Timelines: the frames that each release of GLM samples from a video, two per grid step,
and the timestamps.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from refvl.positions.timestamps import VARIANTS, sample_video_frames
from refvl.viz.explorers.base import Control, Explorer, module
from refvl.viz.glm4v import RELEASES, plot_timelines

SECONDS = (0.2, 0.6, 1, 2, 3, 5, 8, 16, 24, 30, 31, 60, 120, 240, 300, 301, 400)  # rules change at 30 and at 300
RATES = (1, 4, 10, 25, 30, 60)  # frames per second
WORDS = {
    "glm4v": "2 per second; from a video longer than 300 s, 600 in all",
    "glm46v": "6 per second up to 30 s, 2 up to 300 s, then 1; at most 640 in all",
    "glmga": "2 per second, at most 640 in all",
}


class TimelineExplorer(Explorer):
    """The explorer of timelines.

    Item i is grid step i // 3 under rule i % 3, in the order of `VARIANTS`.
    """

    _esm = module("timeline")

    def __init__(self, duration: float, fps: float, variant: str):
        durations, rates = sorted({*SECONDS, duration}), sorted({*RATES, fps})
        long_enough = [(rate, seconds) for rate in rates for seconds in durations if rate * seconds >= 1]
        different = {(seconds, round(rate * seconds)): (rate, seconds) for rate, seconds in long_enough}
        states = sorted((different | {(duration, round(fps * duration)): (fps, duration)}).values())
        controls = [
            Control("fps", "frames per second", rates),
            Control("duration", "length, s", durations, kind="player", plays="make it longer"),
        ]
        shared = {
            "rules": [RELEASES[name] for name in VARIANTS],
            "words": [WORDS[name] for name in VARIANTS],
            "decimals": [0 if name == "glm4v" else 1 for name in VARIANTS],
        }
        rows = {state: self._row(*state) for state in states}
        selected = VARIANTS.index(variant)
        super().__init__(controls, rows, shared=shared, start=(fps, duration), selected=selected)

    def _row(self, fps: float, duration: float) -> dict:
        """Return the video's number of frames and, per rule, the sampled indices, two per step,
        and the timestamps in tenths of a second.
        """
        frames = max(1, round(duration * fps))
        sampled = []
        for name in VARIANTS:
            sample = sample_video_frames(name, fps=fps, total_num_frames=frames, duration=duration)
            tenths = np.rint(10 * np.array(sample.timestamps)).astype(int)
            sampled.append({"indices": np.array(sample.indices), "tenths": tenths})
        return {"frames": frames, "sampled": sampled}

    def figure(self) -> Figure:
        fps, duration = self.states[self.index]
        figure, ax = plt.subplots(figsize=(10.5, 3.6), layout="constrained")
        plot_timelines(duration, fps, ax=ax)
        return figure

    def describe(self) -> str:
        (fps, duration), row = self.states[self.index], self.row(self.index)
        each = ", ".join(
            f"{name} samples {len(set(sample['indices'].tolist()))} frames in {len(sample['tenths'])} grid steps"
            for name, sample in zip(VARIANTS, row["sampled"], strict=True)
        )
        return f"From the {row['frames']:,} frames of a video of {duration:g} s at {fps:g} frames per second, {each}."
