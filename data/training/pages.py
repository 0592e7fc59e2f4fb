"""Pages with small print, for the tiny Step3: coloured boxes, each with a white letter of 5 x 5 px.

A page is 224 x 224 px: 4 x 4 windows of 56 px for crops, and 2.7 times as wide as the overview of 84 px. A page
contains one to three boxes, in different quarters. The overview shows where a box is and which colour it has; only a
crop shows which letter it contains. Every letter has nine white pixels, so all letters brighten the blurred box
equally. A page is a function of (split, index) alone.

>>> render(draw_page("test", 0)).shape
(224, 224, 3)
"""

from dataclasses import dataclass

import numpy as np

SIDE, WINDOW, CELL, BOX = 224, 56, 14, 9  # px: sides of a page, a crop, a patch, and a box, which lies inside one patch
WINDOWS = SIDE // WINDOW
SPLITS = {"train": 0, "select": 1, "test": 2, "demo": 3}  # the recipe was chosen on "select" and is measured on "test"
SEED = 20263

LETTERS = {
    "J": ("....#", "....#", "#...#", "#...#", ".###."),
    "L": ("#....", "#....", "#....", "#....", "#####"),
    "T": ("#####", "..#..", "..#..", "..#..", "..#.."),
    "V": ("#...#", "#...#", ".#.#.", ".#.#.", "..#.."),
    "X": ("#...#", ".#.#.", "..#..", ".#.#.", "#...#"),
    "Y": ("#...#", "##.##", "..#..", "..#..", "..#.."),
}
COLORS = {"red": (210, 30, 30), "green": (20, 150, 40), "blue": (35, 60, 220), "black": (25, 25, 30)}
WHITE = 250
PLACES = ("top left", "top right", "bottom left", "bottom right")
PHRASES = {  # {x} is a colour, or a place if the question is about the colour
    "letter": ("Which letter is in the {x} box?", "What letter does the {x} box hold?"),
    "place": ("Where is the {x} box?",),
    "color": ("What color is the box in the {x}?",),
}
HELP = "Ask me about the letter, color or place of a box."  # the answer to all other questions


@dataclass(frozen=True, slots=True)
class Box:
    """A box on a page. letter: one of `LETTERS`; color: one of `COLORS`; corner: (x, y) of its top left pixel."""

    letter: str
    color: str
    corner: tuple[int, int]
    rgb: tuple[float, float, float]

    @property
    def window(self) -> int:
        """The number of the crop that shows the box, in row-major order."""
        x, y = self.corner
        return y // WINDOW * WINDOWS + x // WINDOW

    @property
    def place(self) -> str:
        x, y = self.corner
        return PLACES[2 * (y >= SIDE // 2) + (x >= SIDE // 2)]


@dataclass(frozen=True, slots=True)
class Page:
    boxes: tuple[Box, ...]
    background: tuple[float, float, float]
    noise: float  # standard deviation, 0-255 scale
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Question:
    kind: str  # a key of `PHRASES`
    text: str
    answer: str


def draw_page(split: str, index: int, *, crowded: bool = False) -> Page:
    """Draw page number `index` of a split.

    crowded: whether to put a box into most windows, so that a tower learns to read crops.
    """
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {tuple(SPLITS)}, got {split!r}")
    rng = np.random.default_rng([SEED, SPLITS[split], index, crowded])
    if crowded:
        windows = [w for w in range(WINDOWS**2) if rng.random() < 0.7]
        colors = rng.choice(list(COLORS), len(windows))
    else:
        quarters = rng.permutation(4)[: int(rng.integers(1, 4))]  # a different quarter for each of one to three boxes
        windows = [
            2 * (q // 2) * WINDOWS + 2 * (q % 2) + int(rng.choice([0, 1, WINDOWS, WINDOWS + 1])) for q in quarters
        ]
        colors = rng.permutation(list(COLORS))
    base = rng.uniform(215, 250)
    return Page(
        boxes=tuple(_draw_box(rng, int(w), str(c)) for w, c in zip(windows, colors, strict=False)),
        background=tuple(float(v) for v in base + rng.uniform(-5, 5, 3)),
        noise=float(rng.uniform(1, 5)),
        noise_seed=int(rng.integers(2**31)),
    )


def _draw_box(rng: np.random.Generator, window: int, color: str) -> Box:
    """Draw a box anywhere in a window, but within one patch."""
    row, column = divmod(window, WINDOWS)
    cell_x, cell_y = rng.integers(0, WINDOW // CELL, 2)
    dx, dy = rng.integers(0, CELL - BOX + 1, 2)
    corner = (column * WINDOW + int(cell_x) * CELL + int(dx), row * WINDOW + int(cell_y) * CELL + int(dy))
    rgb = np.clip(np.array(COLORS[color]) + rng.uniform(-15, 15, 3), 0, 255)
    return Box(str(rng.choice(list(LETTERS))), color, corner, tuple(float(v) for v in rgb))


def render(page: Page) -> np.ndarray:
    """Render a page as (224, 224, 3) uint8; the same page always gives the same pixels."""
    noise = np.random.default_rng(page.noise_seed).standard_normal((SIDE, SIDE, 3), dtype=np.float32)
    canvas = np.float32(page.background) + page.noise * noise
    for box in page.boxes:
        x, y = box.corner
        canvas[y : y + BOX, x : x + BOX] = box.rgb
        ink = np.array([[pixel == "#" for pixel in row] for row in LETTERS[box.letter]])
        canvas[y + 2 : y + 7, x + 2 : x + 7][ink] = WHITE
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


def crop_labels(page: Page) -> np.ndarray:
    """Return (16, 2) int64: the letter and the colour in each window, 0 for none."""
    labels = np.zeros((WINDOWS**2, 2), dtype=np.int64)
    for box in page.boxes:
        labels[box.window] = 1 + list(LETTERS).index(box.letter), 1 + list(COLORS).index(box.color)
    return labels


def quarter_labels(page: Page) -> np.ndarray:
    """Return (4, 2) int64: the letter and the colour in each quarter of a page that is not crowded."""
    labels = np.zeros((4, 2), dtype=np.int64)
    for box in page.boxes:
        labels[PLACES.index(box.place)] = (
            1 + list(LETTERS).index(box.letter),
            1 + list(COLORS).index(box.color),
        )
    return labels


def all_questions(page: Page) -> dict[str, list[Question]]:
    """Return every question about a page, by kind; "missing" questions are about boxes that do not exist."""
    found: dict[str, list[Question]] = {kind: [] for kind in (*PHRASES, "missing")}
    for box in page.boxes:
        said = {"letter": (box.color, box.letter), "place": (box.color, box.place)}
        said |= {"color": (box.place, box.color)}
        for kind, (x, answer) in said.items():
            found[kind] += [Question(kind, phrase.format(x=x), answer) for phrase in PHRASES[kind]]
    colors, places = ({getattr(box, part) for box in page.boxes} for part in ("color", "place"))
    absent = [(kind, c, f"There is no {c} box.") for kind in ("letter", "place") for c in COLORS if c not in colors]
    absent += [("color", place, f"There is no box in the {place}.") for place in PLACES if place not in places]
    for kind, x, answer in absent:
        found["missing"] += [Question("missing", phrase.format(x=x), answer) for phrase in PHRASES[kind]]
    return found


def draw_questions(page: Page, kinds: list[str], rng: np.random.Generator) -> list[Question]:
    """Draw one question of each requested kind, in order."""
    questions = all_questions(page)
    return [questions[kind][int(rng.integers(len(questions[kind])))] for kind in kinds]
