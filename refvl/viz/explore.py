"""The public function of every explorer: `explore_NAME(...)` checks its arguments and builds the
explorer.

explore_windows     patches, merge blocks and windows of an image
explore_resize      patches and merge blocks alone, as the pixel budget changes
explore_attention   what an answer attends to, and what each patch attends to
explore_positions   a prompt with an image and a video of several sizes, lengths and rates
explore_mrope       two tokens, their rotary angles and their score
explore_keep_mask   the keep mask and the positions, as the pruning rate changes
explore_evs         the keep mask, with a model's answer at every rate
explore_graph       a recorded graph step by step, with a buffer that is not refilled
explore_launches    when host and device work on each operation, eagerly and in a replay
explore_packing     how arriving images share replays
explore_assignment  the assignment for every number of items and ranks, by both rules
explore_deepstack   answers without some of the features of earlier blocks
explore_families    tokens, positions, memory and time in every family, one size after the other
explore_timeline    the timelines of all variants for many durations and frame rates
explore_slices      slices and crops of one photo at any size, and the queries' attention to
them
explore_crops       slices and crops without a model

Explorers draw with the `plot_*` functions of `refvl.viz`; modules with figures never import an
explorer. `refvl.viz` imports this file on first use, because explorers need anywidget, but figures
do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from refvl.checks import Grid
from refvl.families import load_processor, read_config
from refvl.model import VLM
from refvl.paths import DATA
from refvl.pixels.crops import RELEASED, CropConfig
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import SliceConfig
from refvl.positions.timestamps import VARIANTS
from refvl.viz.explorers.assignment import AssignmentExplorer
from refvl.viz.explorers.attention import AttentionExplorer
from refvl.viz.explorers.base import Explorer
from refvl.viz.explorers.deepstack import DeepstackExplorer
from refvl.viz.explorers.evs import EvsExplorer, clip_asked, clip_of_embeddings
from refvl.viz.explorers.families import FamiliesExplorer
from refvl.viz.explorers.graph import GraphExplorer
from refvl.viz.explorers.launches import LaunchesExplorer
from refvl.viz.explorers.mrope import MropeExplorer
from refvl.viz.explorers.packing import PackingExplorer
from refvl.viz.explorers.positions import PositionsExplorer
from refvl.viz.explorers.slices import SlicesExplorer
from refvl.viz.explorers.timeline import TimelineExplorer
from refvl.viz.explorers.windows import WindowsExplorer

PHOTO, CLIP = DATA / "pictures" / "coffee.jpg", DATA / "clips" / "bigbuckbunny.mp4"
SHIPPED = {"Qwen2.5-VL": "tiny-qwen2_5_vl", "Qwen3-VL": "tiny-qwen3_vl", "GLM-4.1V": "tiny-glm4v"}  # use M-RoPE


def explore_windows(
    image, config: PatchConfig, *, max_tokens: int = 512, window_sizes: Sequence[int] = (56, 112, 224, 448)
) -> Explorer:
    """Explore patches, merge blocks and windows by pixel budget and window size. Needs anywidget.

    image: anything `load_image` accepts, or a dict of images by name. max_tokens: the largest
    budget, in merged tokens. window_sizes: pixels; a size that gives the same windows as a smaller
    size is left out. If window_sizes is empty, only patches and merge blocks are shown.
    """
    images = image if isinstance(image, Mapping) else {"photo": image}
    return WindowsExplorer(images, config, max_tokens=max_tokens, window_sizes=window_sizes)


def explore_resize(image, config: PatchConfig, *, max_tokens: int = 512) -> Explorer:
    """Explore the resized image, its patches and its merge blocks by pixel budget,
    in merged tokens.
    """
    return explore_windows(image, config, max_tokens=max_tokens, window_sizes=())


def explore_attention(model, questions: Mapping[str, tuple[str, Any]]) -> Explorer:
    """Explore the attention of an answer by token, layer and head,
    and the attention of each patch by block. Needs anywidget.

    model: a model of the Qwen or GLM families. questions: name -> (prompt, image).
    """
    return AttentionExplorer(model, questions)


def explore_positions(
    second_per_grid: float = 1.0, side: int = 4, *, processors: Mapping[str, Any] | None = None,
    image=PHOTO, clip=CLIP,
) -> Explorer:  # fmt: skip
    """Explore t, h, w of every token in a prompt with an image and a video, by size, length and rate.

    The explorer starts near `second_per_grid` seconds per grid step, with frames about `side`
    merged tokens wide. processors: {name: processor} of models with M-RoPE, by default those of
    the shipped models. image, clip: inputs of `load_image` and `load_video`. The positions of
    released software are drawn over refvl's if the two differ. Needs anywidget.
    """
    if processors is None:
        folders = {name: DATA / "checkpoints" / folder for name, folder in SHIPPED.items()}
        processors = {name: load_processor(folder, read_config(folder)) for name, folder in folders.items()}
    return PositionsExplorer(processors, image, clip, second_per_grid=second_per_grid, side=side)


def explore_mrope() -> Explorer:
    """Explore two tokens at (t, h, w): the angle of every rotary pair, by the axis that rotates it,
    and the tokens' score.

    Controls set the key's position, theta and `mrope_section`, contiguous or interleaved. Needs
    anywidget.
    """
    return MropeExplorer()


def explore_keep_mask(frames: np.ndarray, embeds_MD: Tensor, merged_thw: Grid, *, q: float = 0.5) -> Explorer:
    """Explore the kept tokens and their positions by pruning rate, starting at q.

    Needs anywidget.

    frames, merged_thw: as in `plot_keep_mask`. embeds_MD: (M, D). `explore_evs` also shows answers
    of a model.
    """
    return EvsExplorer([clip_of_embeddings(frames, embeds_MD, merged_thw)], q=q)


def explore_evs(model, clips: Mapping[str, tuple[str, Any]], *, q: float = 0.5) -> Explorer:
    """Explore the answers to questions about videos at every pruning rate.
    clips: name -> (prompt, video).
    """
    return EvsExplorer([clip_asked(model, name, *clip) for name, clip in clips.items()], model=model, q=q)


def explore_graph(model: VLM, before, image, question: str) -> Explorer:
    """Explore the recording of a Qwen2.5-VL tower, operation by operation,
    with a buffer that is not refilled.

    before, image: two images, as `load_image` accepts them, which are replayed in this order; if
    their shapes are equal, only pixels can be stale. question: a question about `image`; the model
    answers it with the embeddings of every stale replay. Needs anywidget.
    """
    return GraphExplorer(model, before, image, question)


def explore_launches() -> Explorer:
    """Explore when a host launches operations and when a device runs them, eagerly and in a replay.

    Needs anywidget.

    `launch_timeline` computes the times from the cost of a launch and of an operation; nothing is
    measured.
    """
    return LaunchesExplorer()


def explore_packing(
    arrivals: Mapping[str, Sequence[int]] | Sequence[int], budgets: Sequence[int], *, max_items: int = 8
) -> Explorer:
    """Explore how arriving images share replays, for every number of captured graphs and both
    policies.

    arrivals: output tokens of the images in order of arrival, or several such patterns by name.
    budgets, max_items: as in `plan_batches`; a control sets how many of the largest are captured.
    Needs anywidget.
    """
    arrivals = arrivals if isinstance(arrivals, Mapping) else {"as given": arrivals}
    return PackingExplorer(arrivals, budgets, max_items=max_items)


def explore_assignment(sizes: Sequence[int], *, ranks: int = 4, max_ranks: int = 8, unit: str = "patches") -> Explorer:
    """Explore how arriving items are assigned to 1 to `max_ranks` ranks, by size and by count.

    sizes: the size of each item in order of arrival, in `unit`. ranks: the initial number of ranks.
    Needs anywidget. Raises ValueError for no sizes, and for ranks outside 1 to max_ranks.
    """
    if not sizes:
        raise ValueError("sizes: expected at least one size, got none")
    if not 1 <= ranks <= max_ranks:
        raise ValueError(f"ranks: expected 1 to {max_ranks} (max_ranks), got {ranks}")
    return AssignmentExplorer(sizes, ranks=ranks, max_ranks=max_ranks, unit=unit)


def explore_deepstack(model: VLM, questions: Mapping[str, tuple[str, Any]]) -> Explorer:
    """Explore the answers if any of the tower's DeepStack features are set to zero. Needs anywidget.

    model: a model of Qwen3-VL's family. questions: name -> (prompt, image or video); the first
    question is shown first. Raises ValueError for a model without such features.
    """
    if not getattr(model.encoder.config, "deepstack_visual_indexes", ()):
        got = f"{model.family.name}; load a Qwen3-VL, for example tiny-qwen3_vl"
        raise ValueError(f"model: expected a tower with DeepStack features, got {got}")
    return DeepstackExplorer(model, questions)


def explore_families(counted: Mapping) -> Explorer:
    """Explore tokens, positions, memory and time of one image or video in every family, by size.

    Needs anywidget.

    counted: data/measurements/families.json, written by `benchmarks/families.py`. Times are the
    counted operations divided by a device's peak rate.
    """
    return FamiliesExplorer(counted)


def explore_timeline(duration: float = 12.0, fps: float = 25.0, variant: str = "glm46v") -> Explorer:
    """Explore a video's length and frame rate: the frames that each variant samples, and the
    timestamp of each pair of frames.

    duration: seconds. fps: the frame rate of the video. Duration and fps are initial values.
    variant: the variant whose first step is selected. Needs anywidget. Raises ValueError for an
    unknown variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {VARIANTS}, got {variant!r}")
    return TimelineExplorer(duration, fps, variant)


def explore_slices(
    image,
    config: SliceConfig,
    *,
    crops: CropConfig = RELEASED,
    model: VLM | None = None,
    question: str = "What is in the picture?",
) -> Explorer:
    """Explore how MiniCPM-V and Step3-VL cut one photo,
    at every size from which at least one of them cuts the photo differently.

    image: anything `load_image` accepts; its middle is shown in several aspect ratios. crops:
    Step3-VL's config. model: a small MiniCPM-V that cuts like `config`, into slices that are
    smaller by a whole factor. If a model is given, the explorer also shows the attention of the
    model's queries to every slice, and the model's answer to `question`. Needs anywidget.
    """
    return SlicesExplorer(image, config, crops, model, question)


def explore_crops(image, config: CropConfig = RELEASED) -> Explorer:
    """Explore how Step3-VL and, with its released sizes, MiniCPM-V cut one photo:
    `explore_slices` without a model.
    """
    return explore_slices(image, SliceConfig(), crops=config)
