"""Random crops of the shipped photographs and video, which the tiny models memorise.

There are only five photographs and one video, so the models learn to recognise these media, but learn nothing
about cats in general.
"""

from functools import cache
from types import SimpleNamespace

import numpy as np
from PIL import Image

from data.training.scenes import PHRASES
from refvl.paths import DATA
from refvl.pixels.media import load_image, load_video

PICTURES = {
    "astronaut.jpg": "an astronaut",
    "chelsea.jpg": "a cat",
    "coffee.jpg": "a cup of coffee",
    "hubble_deep_field.jpg": "galaxies",
    "rocket.jpg": "a rocket",
}
CLIP, CLIP_ANSWER = "bigbuckbunny.mp4", "a rabbit"
SIZES = ((84, 112), (112, 112), (112, 84), (84, 84))  # (height, width) of most images after they are resized
CLIP_SIZE, CLIP_FRAMES, CLIP_STEP = (84, 140), (6, 8, 10), 13  # every 13th frame of 25 per second, about 2 per second


def seconds(frames: int) -> tuple[float, ...]:
    """Return the timestamps of the temporal patches in `frames` frames of the video."""
    return tuple(i * CLIP_STEP / 25 for i in range(0, frames, 2))


@cache
def picture(name: str) -> Image.Image:
    return load_image(DATA / "pictures" / name)


@cache
def clip_frames() -> list[Image.Image]:
    """Return all frames of the video, at the size to which the processor resizes them."""
    frames = load_video(DATA / "clips" / CLIP, fps=25.0).frames
    return [Image.fromarray(frame).resize((160, 90), Image.Resampling.BICUBIC) for frame in frames]


def draw_pictures(rng: np.random.Generator, count: int) -> tuple[np.ndarray, list[list]]:
    """Draw `count` crops of one size: pixels (B, 1, H, W, 3) uint8, and a question about each."""
    height, width = SIZES[int(rng.integers(len(SIZES)))]
    names = [str(name) for name in rng.choice(list(PICTURES), count)]
    pixels = np.stack([_crop([picture(name)], (height, width), rng) for name in names])
    return pixels, [[_question("what", PICTURES[name], rng)] for name in names]


def draw_clip(rng: np.random.Generator) -> tuple[np.ndarray, list[list]]:
    """Draw one crop of the video from a random frame on: pixels (1, frames, H, W, 3) uint8, and a question."""
    frames, count = clip_frames(), int(rng.choice(CLIP_FRAMES))
    first = int(rng.integers(len(frames) - CLIP_STEP * (count - 1)))
    chosen = frames[first : first + CLIP_STEP * count : CLIP_STEP]
    return _crop(chosen, CLIP_SIZE, rng)[None], [[_question("what_clip", CLIP_ANSWER, rng)]]


def _question(kind: str, answer: str, rng):
    return SimpleNamespace(kind=kind, text=PHRASES[kind][int(rng.integers(len(PHRASES[kind])))], answer=answer)


def _crop(images: list[Image.Image], size: tuple[int, int], rng) -> np.ndarray:
    """Return a random crop of each image, (T, H, W, 3): at least 70 % of either side, mirrored half of the time."""
    (width, height), (keep_x, keep_y) = images[0].size, rng.uniform(0.7, 1, 2)
    keep_x, keep_y = (1.0, 1.0) if rng.random() < 0.2 else (keep_x, keep_y)
    left, top = rng.uniform(0, 1 - keep_x) * width, rng.uniform(0, 1 - keep_y) * height
    box = (left, top, left + keep_x * width, top + keep_y * height)
    mirror = rng.random() < 0.5
    resized = [image.resize(size[::-1], Image.Resampling.BICUBIC, box=box) for image in images]
    if mirror:
        resized = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in resized]
    return np.stack([np.asarray(image) for image in resized])
