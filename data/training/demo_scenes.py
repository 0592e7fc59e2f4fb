"""Write the scenes and the page for the demo and the notebooks: `python -m data.training.demo_scenes`.

The split "demo" is used neither for training nor for measurements. The scenes are the first image of four objects and
the first video of three objects in which exactly one is a circle. In the video, the circle moves across the grid. The
page is the first one with little noise and three boxes, one of them red.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from data.training import pages, scenes
from refvl.paths import DATA
from refvl.pixels.media import load_video

PICTURE, PAGE = DATA / "pictures" / "scene.png", DATA / "pictures" / "page.png"
CLIP = DATA / "clips" / "scene.mp4"


def demo_picture() -> scenes.Scene:
    return next(s for s in _drawn(clip=False) if len(s.things) == 4 and _circles(s) == 1)


def demo_clip() -> scenes.Scene:
    found = (s for s in _drawn(clip=True) if len(s.things) == 3 and _circles(s) == 1)
    return next(s for s in found if s.things[0].shape == "circle" and s.distance > 40)


def demo_page() -> pages.Page:
    drawn = (pages.draw_page("demo", i) for i in range(10_000))
    return next(p for p in drawn if len(p.boxes) == 3 and p.noise < 1.5 and "red" in {b.color for b in p.boxes})


def _drawn(clip: bool):
    return (scenes.draw_scene("demo", i, clip=clip) for i in range(10_000))


def _circles(scene: scenes.Scene) -> int:
    return sum(thing.shape == "circle" for thing in scene.things)


def write_clip(frames: np.ndarray, path: Path) -> None:
    """Encode (T, H, W, 3) uint8 frames as H.264, at the frame rate of the scenes; height and width must be even."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=int(scenes.FPS), options={"crf": "15", "threads": "1"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def main():
    Image.fromarray(scenes.render(demo_picture())).save(PICTURE, optimize=True)
    Image.fromarray(pages.render(demo_page())).save(PAGE, optimize=True)
    write_clip(scenes.render(demo_clip()), CLIP)
    frames = load_video(CLIP, num_frames=6).frames
    Image.fromarray(frames.reshape(-1, *frames.shape[2:])).save(CLIP.with_suffix(".png"), optimize=True)
    for found in (*map(scenes.all_questions, (demo_picture(), demo_clip())), pages.all_questions(demo_page())):
        print(*(f"{question.text} {question.answer}" for row in found.values() for question in row), sep="\n")


if __name__ == "__main__":
    main()
