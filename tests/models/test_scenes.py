"""The scenes that the small models are trained on and asked about.

Oracle: the pixels that are drawn.
"""

import hashlib
from dataclasses import replace
from itertools import pairwise

import numpy as np

from data.training import scenes


def test_every_name_fits_exactly_one_object():
    """Oracle: the words of the name against each object's own."""

    def fits(name, thing):
        words = set(name.split()) - {"object"}
        return words <= {thing.shape, thing.color}

    for index in range(300):
        things = scenes.draw_scene("test", index).things
        for thing in things:
            for hide in (None, "color", "shape"):
                for name in scenes.names_of(thing, things, hide=hide):
                    assert [fits(name, other) for other in things].count(True) == 1
                    assert fits(name, thing)
                    assert hide is None or getattr(thing, hide) not in name


def test_place_and_direction_are_what_is_drawn():
    """Oracle: where pixels differ from the background, for scenes of one object."""
    for index in range(40):
        scene = scenes.draw_scene("test", index, objects=(1, 1))
        y, x = _center_of_ink(scenes.render(scene))
        assert scenes.PLACES[int(y // 28) * 3 + int(x // 28)] == scenes.all_questions(scene)["place"][0].answer
        clip = scenes.draw_scene("test", index, clip=True, objects=(1, 1))
        (y0, x0), (y1, x1), (y5, x5) = (_center_of_ink(frame) for frame in scenes.render(clip)[[0, 1, 5]])
        assert abs(y1 - y0) + abs(x1 - x0) < 0.5, "it waits during the first temporal patch"
        dx, dy = scenes.DIRECTIONS[scenes.all_questions(clip)["motion"][0].answer]
        assert (x5 - x0) * dx + (y5 - y0) * dy > 20
        assert abs((x5 - x0) * dy) + abs((y5 - y0) * dx) < 2


def _center_of_ink(picture: np.ndarray) -> tuple[float, float]:
    ink = abs(picture.astype(float) - np.median(picture, axis=(0, 1))).max(-1) > 70
    y, x = np.nonzero(ink)
    return y.mean(), x.mean()


def test_exactly_one_object_changes_and_only_when_the_scene_says():
    """Oracle: the frames.

    Only the place of the first object differs, and from the second frame of the step on.
    """
    for index in range(40):
        scene = scenes.draw_change("test", index)
        assert scene == scenes.draw_change("test", index)
        frames = scenes.render(replace(scene, jpeg_quality=None)).astype(int)
        assert frames.shape == (2 * scenes.STEPS, 84, 84, 3)
        changed = [int(abs(b - a).max()) > 0 for a, b in pairwise(frames)]
        assert [i for i, is_new in enumerate(changed) if is_new] == [2 * scene.step]
        y, x, _ = np.nonzero(frames[-1] - frames[0])
        assert int(y.mean() // 28) * 3 + int(x.mean() // 28) == scene.things[0].place
        assert scene.becomes.color != scene.things[0].color
        assert scene.becomes.shape == scene.things[0].shape


def test_scenes_are_still_those_that_the_first_checkpoint_was_trained_on():
    """Oracle: a checksum taken before there were clips in which a colour changes, of all but the
    questions."""
    expected = {False: "a665223a58950193", True: "9ffb6aaee939d432"}
    for clip, start in expected.items():
        digest = hashlib.sha256()
        for split in scenes.SPLITS:
            for index in range(50):
                s = scenes.draw_scene(split, index, clip=clip)
                look = [s.background, s.slope, s.noise, s.noise_seed, s.jpeg_quality]
                drawn = [s.things, *look, s.direction, s.distance]
                for part in (repr(drawn).encode(), scenes.cell_labels(s).tobytes()):
                    digest.update(part)
        assert digest.hexdigest().startswith(start)
