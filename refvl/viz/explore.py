"""Every explorer's public function: `explore_NAME(...)` checks what it is given and makes the explorer.

explore_windows     patches, merge blocks and windows of an image
explore_resize      patches and merge blocks alone, while the pixel budget changes
explore_attention   where an answer looks, and where each patch does
explore_tower       one patch from its pixels to its token
explore_positions   a prompt with an image and a video, at sizes, lengths and rates
explore_mrope       two tokens, their rotary angles and their score
explore_keep_mask   the keep mask and the positions while the pruning rate changes
explore_evs         the same with a model's answer at every rate
explore_graph       the recording step by step, with a buffer that is not refilled
explore_packing     images arrive and share replays
explore_assignment  the assignment for every number of items and ranks, by both rules
explore_families    tokens, positions, memory and time in every family, one size after the other
explore_timeline    the timelines of all variants for many durations and frame rates
explore_slices      slices and crops of one photo of any size, and what the queries read
explore_crops       the same without a model

Explorers draw with the `plot_*` functions of `refvl.viz`, so no module of figures imports an explorer. Each function
here imports its explorer when it is called, because explorers need anywidget and figures do not.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from refvl.checks import Grid
from refvl.paths import DATA, check_clone
from refvl.pixels.crops import RELEASED, CropConfig
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import SliceConfig
from refvl.positions.timestamps import VARIANTS

if TYPE_CHECKING:
    from refvl.serving.model import VLM
    from refvl.viz.explorers.assignment import AssignmentExplorer
    from refvl.viz.explorers.attention import AttentionExplorer
    from refvl.viz.explorers.evs import EvsExplorer
    from refvl.viz.explorers.families import FamiliesExplorer
    from refvl.viz.explorers.graph import GraphExplorer
    from refvl.viz.explorers.mrope import MropeExplorer
    from refvl.viz.explorers.packing import PackingExplorer
    from refvl.viz.explorers.positions import PositionsExplorer
    from refvl.viz.explorers.slices import SlicesExplorer
    from refvl.viz.explorers.timeline import TimelineExplorer
    from refvl.viz.explorers.tower import TowerExplorer
    from refvl.viz.explorers.windows import WindowsExplorer

# those of the repository with M-RoPE
SHIPPED = {"Qwen2.5-VL": "tiny-qwen2_5_vl", "Qwen3-VL": "tiny-qwen3_vl", "GLM-4.1V": "tiny-glm4v"}


def explore_windows(
    image, config: PatchConfig, *, max_tokens: int = 512, window_sizes: Sequence[int] = (56, 112, 224, 448)
) -> "WindowsExplorer":
    """Patches, merge blocks and windows while the pixel budget and the side of a window change. Needs anywidget.

    image: anything `load_image` takes, or a dict of several by name. max_tokens: the largest budget, in merged tokens.
    window_sizes: pixels; a size that gives the same windows as a smaller one is left out. Without any, patches and
    merge blocks are shown alone.
    """
    from refvl.viz.explorers.windows import WindowsExplorer

    images = image if isinstance(image, Mapping) else {"photo": image}
    return WindowsExplorer(images, config, max_tokens=max_tokens, window_sizes=window_sizes)


def explore_resize(image, config: PatchConfig, *, max_tokens: int = 512) -> "WindowsExplorer":
    """The resized image, its patches and merge blocks while the pixel budget, in merged tokens, changes."""
    return explore_windows(image, config, max_tokens=max_tokens, window_sizes=())


def explore_attention(model, questions: Mapping[str, tuple[str, Any]]) -> "AttentionExplorer":
    """Where an answer looks, by token, layer and head, and where each patch does, by block and head. Needs anywidget.

    model: one of Qwen's or GLM's families. questions: name -> (prompt, image).
    """
    from refvl.viz.explorers.attention import AttentionExplorer

    return AttentionExplorer(model, questions)


def explore_tower(model, questions: Mapping[str, tuple[str, Any]]) -> "TowerExplorer":
    """One patch from its pixels through every block to its token. Arguments as of `explore_attention`."""
    from refvl.viz.explorers.tower import TowerExplorer

    return TowerExplorer(model, questions)


def explore_positions(
    second_per_grid: float = 1.0, side: int = 4, *, processors: Mapping[str, Any] | None = None,
    image=None, clip=None,
) -> "PositionsExplorer":  # fmt: skip
    """A prompt with an image and a video of several sizes, lengths and rates: t, h, w of every token, and delta.

    It starts near `second_per_grid` seconds per grid step and frames `side` merged tokens wide. processors: by name, of
    models that count in three dimensions; image, clip: what `load_image` and `load_video` take; by default those of the
    repository. Conventions of released software lie over ours where they differ. Needs anywidget.
    Raises FileNotFoundError without processors if the shipped data is not installed.
    """
    from refvl.viz.explorers.positions import PositionsExplorer

    if processors is None:
        from refvl.families import load_processor, read_config

        check_clone("explore_positions without processors")
        folders = {name: DATA / "checkpoints" / folder for name, folder in SHIPPED.items()}
        processors = {name: load_processor(folder, read_config(folder)) for name, folder in folders.items()}
    image = DATA / "pictures" / "coffee.jpg" if image is None else image
    clip = DATA / "clips" / "bigbuckbunny.mp4" if clip is None else clip
    return PositionsExplorer(processors, image, clip, second_per_grid=second_per_grid, side=side)


def explore_mrope() -> "MropeExplorer":
    """Two tokens on (t, h, w): the angle of every rotary plane, by the axis that turns it, and their score.

    Sliders for the key's place, theta and `mrope_section`, in runs and interleaved. Needs anywidget.
    """
    from refvl.viz.explorers.mrope import MropeExplorer

    return MropeExplorer()


def explore_keep_mask(frames: np.ndarray, embeds_MD: Tensor, merged_thw: Grid, *, q: float = 0.5) -> "EvsExplorer":
    """The tokens that stay, and their positions, while the pruning rate changes; it starts at q. Needs anywidget.

    frames, merged_thw: as in `plot_keep_mask`; embeds_MD: (M, D). `explore_evs` shows the answer as well.
    """
    from refvl.viz.explorers.evs import EvsExplorer, clip_of_embeddings

    return EvsExplorer([clip_of_embeddings(frames, embeds_MD, merged_thw)], q=q)


def explore_evs(model, clips: Mapping[str, tuple[str, Any]], *, q: float = 0.5) -> "EvsExplorer":
    """The same for clips and a question about each, name -> (prompt, clip), with the answer at every rate."""
    from refvl.viz.explorers.evs import EvsExplorer, clip_asked

    return EvsExplorer([clip_asked(model, name, *clip) for name, clip in clips.items()], model=model, q=q)


def explore_graph(model: "VLM", before, image, question: str) -> "GraphExplorer":
    """The recording of a Qwen2.5-VL tower, operation by operation, and a buffer of it that is not refilled.

    before, image: anything `load_image` takes, replayed one after the other; where their shapes are equal, only pixels
    can be stale. question: about `image`; the model answers it with the embeddings of every stale replay. Needs
    anywidget.
    """
    from refvl.viz.explorers.graph import GraphExplorer

    return GraphExplorer(model, before, image, question)


def explore_packing(
    arrivals: Mapping[str, Sequence[int]] | Sequence[int], budgets: Sequence[int], *, max_items: int = 8
) -> "PackingExplorer":
    """Images arrive one by one and share replays, for every number of captured graphs and both policies.

    arrivals: output tokens of the images as they come, or several such patterns by name. budgets, max_items: as in
    `plan_batches`; of the budgets, the largest one, two, ... are captured. Needs anywidget.
    """
    from refvl.viz.explorers.packing import PackingExplorer

    arrivals = arrivals if isinstance(arrivals, Mapping) else {"these images": arrivals}
    return PackingExplorer(arrivals, budgets, max_items=max_items)


def explore_assignment(
    sizes: Sequence[int], *, ranks: int = 4, max_ranks: int = 8, unit: str = "patches"
) -> "AssignmentExplorer":
    """Items arrive one by one and are dealt out to 1 to `max_ranks` ranks, by size and by count.

    sizes: of the items as they come, in `unit`. ranks: how many it starts with. Needs anywidget.
    Raises ValueError for no sizes, and for ranks outside 1 to max_ranks.
    """
    from refvl.viz.explorers.assignment import AssignmentExplorer

    if not sizes:
        raise ValueError("sizes: expected at least one, got none")
    if not 1 <= ranks <= max_ranks:
        raise ValueError(f"ranks: expected 1 to {max_ranks} (max_ranks), got {ranks}")
    return AssignmentExplorer(sizes, ranks=ranks, max_ranks=max_ranks, unit=unit)


def explore_families(counted: Mapping) -> "FamiliesExplorer":
    """Tokens, positions, memory and time of one image or video in every family, while it grows. Needs anywidget.

    counted: data/measurements/families.json, which `benchmarks/families.py` writes. Times are its arithmetic at a
    device's peak.
    """
    from refvl.viz.explorers.families import FamiliesExplorer

    return FamiliesExplorer(counted)


def explore_timeline(duration: float = 12.0, fps: float = 25.0, variant: str = "glm46v") -> "TimelineExplorer":
    """A video's length and rate: the frames that each variant samples, and the second written for every two.

    duration: seconds. fps: of the video. Both are where it starts, and offered beside others. variant: the one whose
    first step is selected. Needs anywidget. Raises ValueError for an unknown variant.
    """
    from refvl.viz.explorers.timeline import TimelineExplorer

    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {VARIANTS}, got {variant!r}")
    return TimelineExplorer(duration, fps, variant)


def explore_slices(
    image,
    config: SliceConfig,
    *,
    crops: CropConfig = RELEASED,
    model: "VLM | None" = None,
    question: str = "What is in the picture?",
) -> "SlicesExplorer":
    """What MiniCPM-V and Step3-VL cut out of one photo, at every size where one of them cuts it in another way.

    image: anything `load_image` takes; its middle is shown in several shapes. crops: Step3-VL's side. model: a small
    MiniCPM-V that cuts as `config` does, but a whole number of times smaller: what its queries read of every slice is
    drawn, and its answer to `question`. Needs anywidget.
    """
    from refvl.viz.explorers.slices import SlicesExplorer

    return SlicesExplorer(image, config, crops, model, question)


def explore_crops(image, config: CropConfig = RELEASED) -> "SlicesExplorer":
    """`explore_slices` without a model: what Step3-VL and, with its released sizes, MiniCPM-V cut out of one photo."""
    return explore_slices(image, SliceConfig(), crops=config)
