"""Figures of GLM's tables and clips. Oracles: the position table read without merge blocks, and the frame sampler."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from closeness import assert_agree
from matplotlib.colors import to_hex
from PIL import Image

from refvl import viz
from refvl.positions import MediaSpan, interpolate_position_table
from refvl.positions.timestamps import VARIANTS, sample_video_frames
from refvl.viz.glm4v import VARIANT_COLORS
from refvl.viz.style import HIGHLIGHT, PRUNED, TOKEN_COLORS

TABLE = torch.randn(36, 5, generator=torch.Generator().manual_seed(0))
PICTURES = [(Image.new("RGB", (60, 40)), (4, 6)), (Image.new("RGB", (30, 90)), (6, 2))]


def test_table_panels_show_what_each_patch_reads():
    """Oracle: the same table read in reading order."""
    axes = viz.plot_position_table(TABLE, PICTURES, channel=3)
    assert axes.shape == (2, 3)
    for row, (image, (h, w)) in zip(axes, PICTURES, strict=True):
        for panel, mode in zip(row[1:], ("bicubic", "nearest"), strict=True):
            want = interpolate_position_table(TABLE[:, [3]], [(1, h, w)], spatial_merge_size=1, mode=mode)
            shown = torch.tensor(panel.images[0].get_array(), dtype=torch.float32)
            assert_agree(shown, want.view(h, w), 2, scale=8 * len(TABLE) ** 0.5)  # as in test_tables
            assert panel.images[0].get_clim() == (float(TABLE[:, 3].min()), float(TABLE[:, 3].max()))
        dots = row[0].collections[0].get_offsets()
        assert dots[0].tolist() == [image.width / w / 2, image.height / h / 2] and len(dots) == h * w
        assert len(row[0].lines) == 2 * 7


def test_patch_values_stand_where_the_patches_stand():
    """By hand, 2 x 4 patches: two blocks side by side, each read row by row."""
    ax = plt.subplots()[1]
    assert viz.plot_patch_values(torch.arange(8), (2, 4), ax=ax) is ax
    assert ax.images[0].get_array().tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ValueError, match="values_N: dimension 0 must be 8, got 7"):
        viz.plot_patch_values(torch.arange(7), (2, 4))


@pytest.mark.parametrize(("duration", "fps"), [(0.1, 30), (2.6, 25), (12, 25), (400, 24)])
def test_timelines_show_the_frames_and_seconds_of_the_sampler(duration, fps):
    ax = viz.plot_timelines(duration, fps)
    total, written = max(1, round(duration * fps)), iter(ax.texts)
    bars = iter(ax.collections)
    for variant in VARIANTS:
        sample = sample_video_frames(variant, fps=fps, total_num_frames=total, duration=duration)
        drawn = [next(bars), next(bars)]
        times = sorted(t for events in drawn for t in events.get_positions())
        np.testing.assert_array_equal(times, sorted(index / fps for index in sample.indices))
        assert {to_hex(events.get_color()) for events in drawn} == {VARIANT_COLORS[variant]}
        shown = sample.timestamps[:: -(-len(sample.timestamps) // 16)]
        assert [next(written).get_text() for _ in shown] == [str(second) for second in shown]
        assert next(written).get_text().endswith(f"{len(sample.timestamps)} steps")
    assert f"{total:,} frames" in [label.get_text() for label in ax.get_yticklabels()]


def test_clip_prompt_has_a_box_per_token_and_fades_what_is_pruned():
    """By hand: two steps of two tokens, `[ v v ] 0` and `[ v v ] 1 0`, the last step pruned."""
    begin, end, token, digit = 1, 2, 3, 10
    ids = [9, 8, begin, token, token, end, digit, begin, token, token, end, digit + 1, digit, 7, 9]
    keep = torch.ones(len(ids), dtype=torch.bool)
    keep[8:10] = False
    trace = SimpleNamespace(full_ids=torch.tensor(ids), keep=keep, spans=[MediaSpan(3, 1, 1, 2), MediaSpan(8, 1, 1, 2)])
    tokenizer = SimpleNamespace(decode=lambda found: str(found[0] - digit))
    processor = SimpleNamespace(config=SimpleNamespace(video_end_token_id=7), tokenizer=tokenizer)
    ax = viz.plot_clip_prompt(trace, processor, title="q = 0.5")
    text, video = TOKEN_COLORS["text"], TOKEN_COLORS["video"]
    boxes = [to_hex(box.get_facecolor()) for box in ax.patches]
    assert boxes == [text, video, video, text, HIGHLIGHT, text, PRUNED, PRUNED, text, HIGHLIGHT, HIGHLIGHT]
    assert [t.get_text() for t in ax.texts] == ["[", "", "", "]", "0", "[", "", "", "]", "1", "0"]
    assert ax.get_title() == "q = 0.5: 2 of 4 video tokens kept"
