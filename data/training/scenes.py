"""Scenes for questions to small models: coloured shapes on a 3 x 3 grid of places.

An image has 84 x 84 px; with patch size 14 and merge size 2, these are 3 x 3 tokens of 28 px, one per place. A video
has six such frames, which make three temporal patches; one object waits during the first two frames and then moves. A
scene depends only on (split, index). Every split has its own stream of random numbers, so a held-out scene is never
drawn in training, and any scene can be drawn again. Some times of video frames are also kept out of training, by a rule
(`is_held_out`).

Models that read timestamps get a third sort of scene: a video of eight frames with unpredictable timestamps, in which
one object changes its colour.

>>> scene = draw_scene("test", 0)
>>> render(scene).shape
(84, 84, 3)
"""

import io
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

SIDE, CELL, FRAMES, FPS = 84, 28, 6, 2.0
SECONDS = tuple(i * 2 / FPS for i in range(FRAMES // 2))  # the timestamps of a video's temporal patches
SPLITS = {"train": 0, "select": 1, "test": 2, "demo": 3}  # the recipe was chosen on "select" and is measured on "test"
SEED = 20260
SORTS = ("picture", "motion", "change")
EDGE = 0.1  # as a share of a token: an object whose centre is this close to a token's side counts for both tokens
STEPS, LAST_SECOND = 4, 29  # in videos of a changing colour: the temporal patches, and the latest last timestamp

COLORS = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 80, 215),
    "yellow": (235, 205, 40),
    "purple": (145, 50, 185),
    "black": (35, 35, 40),
}
SHAPES = ("circle", "square", "triangle", "cross", "star")
PLACES = (
    "top left", "top center", "top right",
    "middle left", "center", "middle right",
    "bottom left", "bottom center", "bottom right",
)  # fmt: skip
TRANSPOSED = np.arange(9).reshape(3, 3).T.flatten()  # the place that each place becomes if h and w are swapped
CORNERS = (0, 2, 6, 8)  # the places of an image's quarters, in reading order
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # (dx, dy), where y points down
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
PROGRESS = (0, 0, 0.25, 0.5, 0.75, 1)  # the moving object's offset in each frame: it waits during the first two frames
HELP = "Ask me about the color, shape, place or motion of an object."  # the answer to all other questions


@dataclass(frozen=True, slots=True)
class Thing:
    """One object: its name, the place where it starts (0-8, reading order), and how it is drawn (px, degrees)."""

    shape: str
    color: str
    place: int
    center: tuple[float, float]
    radius: float
    angle: float
    rgb: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Scene:
    """Objects on a background.

    In a video, the first object moves `distance` px in `direction` after two frames, or it changes into
    `becomes` between the two frames of temporal patch `step`. The `seconds` are the timestamps of the temporal
    patches.
    """

    things: tuple[Thing, ...]
    background: tuple[float, float, float]
    slope: tuple[float, float]  # the rise in brightness across the image, along x and y
    noise: float  # standard deviation, on a scale of 0 to 255
    noise_seed: int
    jpeg_quality: int | None  # lossy compression, as in files from other sources
    direction: str | None = None  # None for an image
    distance: float = 0.0
    becomes: Thing | None = None
    step: int = 0
    seconds: tuple[int, ...] = ()
    size: tuple[int, int] = (SIDE, SIDE)  # (width, height)

    @property
    def sort(self) -> str:
        return "change" if self.becomes else "motion" if self.direction else "picture"


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its answer. kind: one of `MEASURED`, or a kind of helper question."""

    kind: str
    text: str
    answer: str


def scene_rng(split: str, index: int) -> np.random.Generator:
    """Return the random generator of one scene; generators of different splits or indices are independent."""
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {tuple(SPLITS)}, got {split!r}")
    return np.random.default_rng([SEED, SPLITS[split], index])


def draw_scene(
    split: str, index: int, *, clip: bool = False, objects: tuple[int, int] = (1, 4), alike: bool = False
) -> Scene:
    """Draw scene number `index` of a split: an image, or a video, with a number of objects in the given range.

    alike: whether to draw objects that are easily confused. They have at most three shapes and three colours, and in an
    image as many as possible are in one row or one column.
    """
    return _draw(scene_rng(split, 2 * index + clip), clip, objects, alike)


def draw_change(split: str, index: int, *, objects: tuple[int, int] = (1, 4), alike: bool = False) -> Scene:
    """Draw video number `index` of a split, in which the first object changes its colour, with unpredictable
    timestamps.
    """
    scene_rng(split, index)  # refuses unknown splits
    rng = np.random.default_rng([SEED, SPLITS[split], index, SORTS.index("change")])
    scene = _draw(rng, False, objects, alike)
    color = str(rng.choice([c for c in COLORS if c != scene.things[0].color]))
    becomes, step = replace(scene.things[0], color=color, rgb=_shade(rng, color)), int(rng.integers(STEPS))
    return replace(scene, becomes=becomes, step=step, seconds=draw_seconds(rng, STEPS, held_out=split != "train"))


def places_of_slices(order) -> np.ndarray:
    """Return (9,): the place that slices indicate for each true place if slice i shows the quarter order[i]."""
    places = np.arange(len(PLACES))
    places[np.array(CORNERS)[order]] = CORNERS
    return places


def is_held_out(tenths) -> bool:
    """Return whether a video with these times (tenths of a second, one for each step or frame) is kept out of training.

    The order does not count. The usual two frames per second (0, 1 and 2 s) are held out.
    """
    return sum(tenths) % 9 == 3


def draw_seconds(rng: np.random.Generator, count: int, *, held_out: bool) -> tuple[int, ...]:
    """Draw `count` different whole seconds, sorted, for a held-out video or for a training video."""
    while True:
        seconds = tuple(sorted(rng.choice(LAST_SECOND + 1, count, replace=False).tolist()))
        if is_held_out(10 * second for second in seconds) == held_out:
            return seconds


def draw_sort(sort: str, split: str, index: int, **how) -> Scene:
    """Draw scene number `index` of one of `SORTS`."""
    if sort not in SORTS:
        raise ValueError(f"sort: expected one of {SORTS}, got {sort!r}")
    if sort == "change":
        return draw_change(split, index, **how)
    return draw_scene(split, index, clip=sort == "motion", **how)


def _draw(rng: np.random.Generator, clip: bool, objects: tuple[int, int], alike: bool) -> Scene:
    count = int(rng.integers(objects[0], objects[1] + 1))
    direction = str(rng.choice(list(DIRECTIONS))) if clip else None
    places, room = _draw_places(rng, count, direction, alike)
    shapes, colors = rng.permutation(len(SHAPES)), rng.permutation(len(COLORS))
    pairs = np.add.outer(shapes[: 3 if alike else None] * len(COLORS), colors[: 3 if alike else None]).flatten()
    pairs = rng.permutation(pairs)[:count]
    things = tuple(_draw_thing(rng, int(pair), int(place)) for pair, place in zip(pairs, places, strict=True))
    base = rng.uniform(195, 245)
    return Scene(
        things=things,
        background=tuple(float(v) for v in base + rng.uniform(-12, 12, 3)),
        slope=tuple(float(v) for v in rng.uniform(-18, 18, 2)),
        noise=float(rng.uniform(0, 5)),
        noise_seed=int(rng.integers(2**31)),
        jpeg_quality=int(rng.integers(40, 95)) if rng.random() < 0.25 else None,
        direction=direction,
        distance=float(rng.uniform(26, 28 * room)) if clip else 0.0,
    )


def _draw_places(rng, count: int, direction: str | None, alike: bool) -> tuple[list[int], int]:
    """Draw distinct places, the moving object's first, and the number of free cells that it may cross."""
    if direction is None:
        places, line = rng.permutation(9), int(rng.integers(3))
        lined_up = (places // 3 == line) if rng.random() < 0.5 else (places % 3 == line)
        order = np.argsort(~lined_up, kind="stable") if alike else slice(None)
        return list(places[order][:count]), 0
    dx, dy = DIRECTIONS[direction]
    along, across = int(rng.integers(2)), int(rng.integers(3))  # cells from the object to the edge behind it; its lane
    start = along if dx + dy > 0 else 2 - along
    column, row = (start, across) if dx else (across, start)
    room = 2 - along
    path = [(row + i * dy) * 3 + column + i * dx for i in range(room + 1)]
    free = [place for place in rng.permutation(9) if place not in path]
    return [path[0], *free[: count - 1]], room


def _draw_thing(rng, pair: int, place: int) -> Thing:
    shape, color = SHAPES[pair // len(COLORS)], list(COLORS)[pair % len(COLORS)]
    row, column = divmod(place, 3)
    jitter = rng.uniform(-2, 2, 2)
    return Thing(
        shape=shape,
        color=color,
        place=place,
        center=(CELL * (column + 0.5) + float(jitter[0]), CELL * (row + 0.5) + float(jitter[1])),
        radius=float(rng.uniform(9, 11.5)),
        angle=float(rng.uniform(-10, 10)),
        rgb=_shade(rng, color),
    )


def _shade(rng, color: str) -> tuple[float, float, float]:
    return tuple(float(v) for v in np.clip(np.array(COLORS[color]) + rng.uniform(-18, 18, 3), 0, 255))


def render(scene: Scene) -> np.ndarray:
    """Render a scene as uint8 RGB: (84, 84, 3) for an image, (6 or 8, 84, 84, 3) for a video.

    The same scene always gives the same pixels.
    """
    x, y = (np.linspace(-0.5, 0.5, side, dtype=np.float32) for side in scene.size)
    canvas = np.float32(scene.background) + (scene.slope[0] * x[None, :] + scene.slope[1] * y[:, None])[..., None]
    if scene.noise:
        noise_rng = np.random.default_rng(scene.noise_seed)
        canvas = canvas + scene.noise * noise_rng.standard_normal(canvas.shape, dtype=np.float32)
    still = scene.things if scene.sort == "picture" else scene.things[1:]
    for thing in still:
        _paint(canvas, thing, thing.center)
    if scene.sort == "picture":
        return _finish(canvas, scene)
    frames = []
    for thing, center in _first_in_frames(scene):
        frame = canvas.copy()
        _paint(frame, thing, center)
        frames.append(_finish(frame, scene))
    return np.stack(frames)


def _first_in_frames(scene: Scene) -> list[tuple[Thing, tuple[float, float]]]:
    """Return the first object and its centre in each frame of a video."""
    first = scene.things[0]
    if scene.sort == "motion":
        return [(first, center) for center in mover_centers(scene)]
    return [(first if i <= 2 * scene.step else scene.becomes, first.center) for i in range(2 * STEPS)]


def mover_centers(scene: Scene) -> list[tuple[float, float]]:
    """Return the centre (x, y) of the moving object in each of the six frames; it waits during the first two frames."""
    (x, y), (dx, dy) = scene.things[0].center, DIRECTIONS[scene.direction]
    return [(x + dx * scene.distance * p, y + dy * scene.distance * p) for p in PROGRESS]


def packs_of(frames, times, size: int) -> list[list[int]]:
    """Group frames into packs of `size` that share tokens (the last may be smaller), each in the order of its times."""
    pairs = list(zip(times, frames, strict=True))
    return [[frame for _, frame in sorted(pairs[i : i + size])] for i in range(0, len(pairs), size)]


def way_of_pack(pack: list[int]) -> float:
    """Return how far the moving object advances during a pack, in the order of its times.

    A negative number means backwards.
    """
    return PROGRESS[pack[-1]] - PROGRESS[pack[0]]


def retell(scene: Scene, packs: list[list[int]]) -> Scene:
    """Return the scene with the motion that packs of its frames show: the opposite one if the packs run backwards."""
    back = sum(map(way_of_pack, packs)) < 0
    return replace(scene, direction=OPPOSITE[scene.direction]) if back else scene


def cell_labels(scene: Scene, cells: tuple[int, int] = (3, 3)) -> np.ndarray:
    """Return (t, 9, 3) int64: shape, color and movement in each place at each temporal patch; 0 means none.

    If a colour changes during a patch, the new colour counts, and the change counts as a movement.

    An object counts for the place in which its centre lies on average during the two frames of the patch. cells: rows
    and columns of a scene that was resized to a different number of tokens. The result is then (t, rows * columns, 3),
    and an object on an edge counts for the tokens on both sides.
    """
    count = {"picture": 2, "motion": FRAMES, "change": 2 * STEPS}[scene.sort]
    centers = np.array([[thing.center] * count for thing in scene.things])  # (things, frames, 2)
    if scene.sort == "motion":
        centers[0] = mover_centers(scene)
    centers = centers.reshape(len(centers), count // 2, 2, 2).mean(2)
    moves = [_movement(scene, t) for t in range(count // 2)]
    return _labels(scene, centers, moves, cells)


def pack_labels(scene: Scene, packs: list[list[int]]) -> np.ndarray:
    """Return `cell_labels` of a video with packs of frames, with objects at their locations at the end of each pack."""
    centers = np.array([[thing.center] * FRAMES for thing in scene.things])
    centers[0] = mover_centers(scene)
    told = [retell(scene, [pack]) if way_of_pack(pack) else None for pack in packs]
    moves = [1 + list(DIRECTIONS).index(t.direction) if t else 0 for t in told]
    return _labels(scene, centers[:, [pack[-1] for pack in packs]], moves)


def slice_labels(scene: Scene, order) -> np.ndarray:
    """Return (36, 3) int64: the labels of an image's four slices, nine tokens each; slice i shows the quarter order[i].

    An object in a corner is whole in one slice, and labels that slice's middle token; other objects are cut.
    """
    labels = np.zeros((4, 9, 3), dtype=np.int64)
    for thing in (thing for thing in scene.things if thing.place in CORNERS):
        number = list(order).index(CORNERS.index(thing.place))
        labels[number, 4] = 1 + SHAPES.index(thing.shape), 1 + list(COLORS).index(thing.color), 0
    return labels.reshape(36, 3)


def _labels(scene: Scene, centers: np.ndarray, moves: list, cells: tuple[int, int] = (3, 3)) -> np.ndarray:
    """Return the labels of `cell_labels`. centers: (things, t, 2) px. moves: the first object's movement per step."""
    rows, columns = cells
    found = centers / (SIDE / columns, SIDE / rows)  # in tokens
    reach = 0 if cells == (3, 3) else EDGE
    labels = np.zeros((len(moves), rows, columns, 3), dtype=np.int64)
    for i, thing in enumerate(scene.things):
        for t, move in enumerate(moves):
            now = scene.becomes if i == 0 and scene.becomes and t >= scene.step else thing
            (left, top), (right, bottom) = (
                (found[i, t] + side).clip(0, (columns - 1, rows - 1)).astype(int) for side in (-reach, reach)
            )
            name = 1 + SHAPES.index(now.shape), 1 + list(COLORS).index(now.color), 0 if i else move
            labels[t, top : bottom + 1, left : right + 1] = name
    return labels.reshape(len(moves), rows * columns, 3)


def _movement(scene: Scene, t: int) -> int:
    """Return the first object's movement in temporal patch t: none (0), a direction (1-4), a change of colour (5)."""
    if scene.sort == "motion" and PROGRESS[2 * t] != PROGRESS[2 * t + 1]:
        return 1 + list(DIRECTIONS).index(scene.direction)
    return 1 + len(DIRECTIONS) if scene.sort == "change" and t == scene.step else 0


def _paint(canvas: np.ndarray, thing: Thing, center: tuple[float, float]) -> None:
    """Blend a shape into the float canvas (H, W, 3), with a soft edge of one pixel."""
    (x0, y0), covered = coverage(thing, center, canvas.shape[1::-1])
    patch = canvas[y0 : y0 + len(covered), x0 : x0 + covered.shape[1]]
    patch += covered[..., None] * (np.float32(thing.rgb) - patch)


def coverage(thing: Thing, center: tuple[float, float], size: tuple[int, int]) -> tuple[tuple[int, int], np.ndarray]:
    """Return (x, y) of the part of a (width, height) image that contains the shape, and its share of each pixel."""
    reach = thing.radius * 1.5 + 2
    sides = zip(center, size, strict=True)
    (x0, x1), (y0, y1) = (tuple(int(np.clip(c + s, 0, side)) for s in (-reach, reach)) for c, side in sides)
    x, y = np.arange(x0, x1, dtype=np.float32) + 0.5 - center[0], np.arange(y0, y1, dtype=np.float32) + 0.5 - center[1]
    cos, sin = np.cos(np.deg2rad(thing.angle)), np.sin(np.deg2rad(thing.angle))
    u, v = cos * x[None, :] + sin * y[:, None], cos * y[:, None] - sin * x[None, :]
    return (x0, y0), np.clip(0.5 - signed_distance(thing.shape, u, v, thing.radius), 0, 1)


def signed_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Return the approximate distance in px to the outline, negative inside.

    From the centre of the shape, x points right and y down.
    """
    match shape:
        case "circle":
            return np.hypot(x, y) - radius
        case "square":
            return np.maximum(abs(x), abs(y)) - 0.88 * radius
        case "triangle":
            return np.maximum(0.894 * abs(x) - 0.447 * (y + radius), y - 0.8 * radius)
        case "cross":
            return np.minimum(
                np.maximum(abs(x) - radius, abs(y) - radius / 3), np.maximum(abs(y) - radius, abs(x) - radius / 3)
            )
        case "star":
            outer, inner, step = 1.15 * radius, 0.5 * radius, np.pi / 5
            from_tip = abs((np.arctan2(x, -y) + step) % (2 * step) - step)  # angle to the nearest tip, 0 to 36 degrees
            distance = np.hypot(x, y)
            along, across = distance * np.cos(from_tip), distance * np.sin(from_tip)
            edge = np.array([inner * np.cos(step) - outer, inner * np.sin(step)])
            return (edge[1] * (along - outer) - edge[0] * across) / np.hypot(*edge)
        case "ring":  # no shipped model has seen this shape: see adapt.py
            return abs(np.hypot(x, y) - 0.75 * radius) - 0.25 * radius
    raise ValueError(f"shape: expected one of {SHAPES}, got {shape!r}")


def _finish(canvas: np.ndarray, scene: Scene) -> np.ndarray:
    pixels = np.clip(canvas + 0.5, 0, 255).astype(np.uint8)
    if scene.jpeg_quality is None:
        return pixels
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=scene.jpeg_quality)
    return np.asarray(Image.open(buffer))


# ---------------------------------------------------------------------------------------------- questions

# The first phrase of each kind is the canonical one; {x} is the name of the object.
PHRASES = {
    "color": ("What color is the {x}?", "What is the color of the {x}?", "Which color does the {x} have?"),
    "shape": ("What shape is the {x}?", "What is the shape of the {x}?", "Which shape does the {x} have?"),
    "place": ("Where is the {x}?", "In which place is the {x}?", "Where can you see the {x}?"),
    "motion": ("Which way does the {x} move?", "In which direction does the {x} move?", "Where does the {x} go?"),
    "row": ("Which row is the {x} in?",),
    "column": ("Which column is the {x} in?",),
    "color_at": ("What color is in the {x}?", "What color is the object in the {x}?"),
    "shape_at": ("What shape is in the {x}?", "What shape is the object in the {x}?"),
    "thing_at": ("What is in the {x}?",),
    "mover": ("What moves?", "Which object moves?"),
    "count": ("How many objects are there?",),
    "what": ("What is in the picture?", "What does the picture show?", "What can you see in the picture?"),
    "what_clip": ("What is in the clip?", "What does the clip show?", "What can you see in the clip?"),
}
TIMED_PHRASES = {  # for videos in which a colour changes; {x} is "the circle", "the object" or "it"
    "change": ("When does {x} change color?", "At which second does {x} change color?", "When does {x} change?"),
    "becomes": ("Which color does {x} change to?",),
    "begin": ("When does the clip begin?",),
    "end": ("When does the clip end?",),
    "changer": ("What changes color?", "Which object changes color?"),
}
MEASURED = {"color": "picture", "shape": "picture", "place": "picture", "motion": "motion", "change": "change"}
COUNTS = ("no", "one", "two", "three", "four")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")


def names_of(thing: Thing, things: tuple[Thing, ...], *, hide: str | None = None) -> list[str]:
    """Return the names of one object that fit no other object: "circle", "red object", "red circle".

    hide="color" excludes names that contain the colour, "shape" names that contain the shape.
    """
    others = [t for t in things if t is not thing]
    names = []
    if hide != "shape" and all(t.shape != thing.shape for t in others):
        names.append(thing.shape)
    if hide != "color" and all(t.color != thing.color for t in others):
        names.append(f"{thing.color} object")
    if hide is None:
        names.append(f"{thing.color} {thing.shape}")
    return names


def all_questions(scene: Scene) -> dict[str, list[Question]]:
    """Return every unambiguous question about a scene, by kind; a kind without questions is absent."""
    if scene.sort == "change":
        return _change_questions(scene)
    found: dict[str, list[Question]] = {}

    def ask(kind, names, answer):
        for name in names:
            found.setdefault(kind, []).extend(Question(kind, phrase.format(x=name), answer) for phrase in PHRASES[kind])

    things = scene.things
    for thing in things:
        ask("color", names_of(thing, things, hide="color"), thing.color)
        ask("shape", names_of(thing, things, hide="shape"), thing.shape)
        if scene.direction is None:
            names = names_of(thing, things)
            ask("place", names, PLACES[thing.place])
            ask("row", names, ROWS[thing.place // 3])
            ask("column", names, COLUMNS[thing.place % 3])
            ask("color_at", [PLACES[thing.place]], thing.color)
            ask("shape_at", [PLACES[thing.place]], thing.shape)
            ask("thing_at", [PLACES[thing.place]], f"a {thing.color} {thing.shape}")
    if scene.direction is None:
        ask("count", [""], COUNTS[len(things)])
        ask("what", [""], f"{summary(things)}. {HELP}")
    else:
        ask("what_clip", [""], f"{summary(things)}. {HELP}")
        ask("motion", [*names_of(things[0], things), "object"], scene.direction)
        ask("mover", [""], f"the {things[0].color} {things[0].shape}")
    if scene.seconds:
        found |= _when_it_was_taken(scene)
    return found


def missing_question(scene: Scene | None, rng: np.random.Generator) -> Question:
    """Draw a question about an object that does not exist, often with a colour and a shape that do.

    If `scene` is None, the question refers to no scene.
    """
    things = scene.things if scene else ()
    shapes, colors = ({getattr(thing, part) for thing in things} for part in ("shape", "color"))
    pairs = {(thing.color, thing.shape) for thing in things}
    likely = [(c, s) for c in sorted(colors) for s in sorted(shapes) if (c, s) not in pairs]
    rest = [(c, s) for c in COLORS for s in SHAPES if (c, s) not in pairs]
    is_timed, sort = scene is not None and scene.sort == "change", scene.sort if scene else "picture"
    names = {
        "color": [s for s in SHAPES if s not in shapes],
        "shape": [] if is_timed else [f"{c} object" for c in COLORS if c not in colors],
        "both": [] if is_timed else [" ".join(p) for p in (likely if likely and rng.random() < 0.6 else rest)],
    }
    asks = {"picture": ("place", "place", "color", "shape"), "motion": ("motion", "motion", "color", "shape")}
    kind = str(rng.choice(asks.get(sort, ("color",))))
    if kind in ("color", "shape"):
        pool = names[kind]
    else:
        pool = names[str(rng.choice(["color", "shape", "both", "both"]))]
    name = pool[int(rng.integers(len(pool)))] if pool else " ".join(rest[int(rng.integers(len(rest)))])
    text = PHRASES[kind][int(rng.integers(len(PHRASES[kind])))].format(x=name)
    return Question("missing", text, f"There is no {name}.")


def unfit_question(scene: Scene, rng: np.random.Generator) -> Question:
    """Draw a question that fits only different sorts of scenes, such as the motion of an object in an image."""
    kinds = {"picture": ("motion", "mover"), "motion": ("place", "row", "column", "count")}
    kind = str(rng.choice(kinds.get(scene.sort, ("place", "motion", "mover", "count"))))
    thing = scene.things[int(rng.integers(len(scene.things)))]
    names, phrases = names_of(thing, scene.things), PHRASES[kind]
    if scene.sort != "change" and rng.random() < 0.25:
        phrases = [phrase for phrases in TIMED_PHRASES.values() for phrase in phrases]
        names = [f"the {name}" for name in names]
    text = str(rng.choice(phrases)).format(x=str(rng.choice(names)))
    return Question("unfit", text, HELP)


def _change_questions(scene: Scene) -> dict[str, list[Question]]:
    """Return questions about a change; they name objects by shape, because a colour may be the old or the new one."""
    first = scene.things[0]
    shapes = [thing.shape for thing in scene.things]
    names = [*([f"the {first.shape}"] if shapes.count(first.shape) == 1 else []), "the object", "it"]
    found = _when_it_was_taken(scene)
    answers = {
        "change": str(scene.seconds[scene.step]), "becomes": scene.becomes.color,
        "changer": f"the {first.shape}",
    }  # fmt: skip
    for kind, answer in answers.items():
        texts = [p.format(x=x) for x in names for p in TIMED_PHRASES[kind]]
        found[kind] = [Question(kind, text, answer) for text in dict.fromkeys(texts)]
    for thing in scene.things[1:]:
        if shapes.count(thing.shape) == 1:
            texts = [phrase.format(x=thing.shape) for phrase in PHRASES["color"]]
            found.setdefault("color", []).extend(Question("color", text, thing.color) for text in texts)
    return found


def _when_it_was_taken(scene: Scene) -> dict[str, list[Question]]:
    answers = {"begin": str(scene.seconds[0]), "end": str(scene.seconds[-1])}
    return {kind: [Question(kind, text, said) for text in TIMED_PHRASES[kind]] for kind, said in answers.items()}


def summary(things: tuple[Thing, ...]) -> str:
    """Name one or two objects in reading order, or give the number of more objects."""
    if len(things) > 2:
        return f"{COUNTS[len(things)]} objects"
    return " and ".join(f"a {t.color} {t.shape}" for t in sorted(things, key=lambda t: t.place))


def draw_questions(scene: Scene, kinds: list[str], rng: np.random.Generator) -> list[Question]:
    """Draw one question of each requested kind, in order; if a kind has no questions, draw one of a different kind."""
    questions = all_questions(scene)
    drawn = []
    for kind in kinds:
        pool = questions.get(kind) or questions["color" if "color" in questions else min(questions)]
        drawn.append(pool[int(rng.integers(len(pool)))])
    return drawn
