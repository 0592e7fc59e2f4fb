"""Figures of data-parallel encoding. Oracle: the assignments that they show."""

from refvl import viz
from refvl.serving.parallel import get_load_balance_assignment

SIZES = [40, 10, 25, 30, 5, 12]


def bars(ax, hatched: bool):
    """(left, width, row) of the bars that are items, or those that are waiting or padding; outlines are neither."""
    found = [bar for bar in ax.patches if bool(bar.get_hatch()) == hatched and bar.get_facecolor()[3]]
    return [(round(b.get_x(), 6), b.get_width(), round(b.get_y() + b.get_height() / 2, 6)) for b in found]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_assignment_shows_every_item_and_the_waiting(ax):
    order, counts, loads = assignment = get_load_balance_assignment(SIZES, 3)
    assert (order, counts, loads) == ([0, 3, 1, 2, 5, 4], [1, 2, 3], [40, 40, 42])
    viz.plot_assignment(SIZES, assignment, title="by size", ax=ax)
    assert bars(ax, hatched=False) == [(0, 40, 0), (0, 30, 1), (30, 10, 1), (0, 25, 2), (25, 12, 2), (37, 5, 2)]
    assert bars(ax, hatched=True) == [(40, 2, 0), (40, 2, 1), (42, 0, 2)]
    reports = ["1 item, 40 patches", "2 items, 40 patches", "3 items, 42 patches"]
    assert texts(ax) == ["0", reports[0], "3", "1", reports[1], "2", "5", "4", reports[2]]
    assert ax.get_title() == "by size: 2.9 times as fast on 3 ranks"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]


def test_gather_shows_padding_and_both_orders(ax):
    viz.plot_gather(SIZES, get_load_balance_assignment(SIZES, 3), ax=ax)
    gathered = [bar for bar in bars(ax, hatched=False) if bar[2] == 0]
    returned = [bar for bar in bars(ax, hatched=False) if bar[2] == 1.1]
    assert [bar[:2] for bar in gathered] == [(0, 40), (42, 30), (72, 10), (84, 25), (109, 12), (121, 5)]
    assert [bar[:2] for bar in returned] == [(0, 40), (40, 10), (50, 25), (75, 30), (105, 5), (110, 12)]
    assert bars(ax, hatched=True) == [(40, 2, 0), (82, 2, 0), (126, 0, 0)]
    assert ax.get_title() == "126 rows sent for 122 tokens, 3% padding"


def test_speed_up_draws_the_ideal_and_each_line(ax):
    viz.plot_speed_up({"by size": {1: 1.0, 2: 1.9, 4: 3.1}, "by count": {1: 1.0, 2: 1.5, 4: 1.8}}, ax=ax)
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}
    assert lines == {
        "ideal": ([1, 2, 4], [1, 2, 4]),
        "by size": ([1, 2, 4], [1.0, 1.9, 3.1]),
        "by count": ([1, 2, 4], [1.0, 1.5, 1.8]),
    }
    assert ax.get_xlabel() == "ranks" and "speed-up" in ax.get_ylabel() and ax.get_ylim()[0] == 0
