"""Write the scenes for the questions of the demo and the notebooks: `python -m data.training.demo_scenes`.

The split "demo" is used neither for training nor for measurements. The scenes are the first image of four objects and
the first video of three objects in which exactly one is a circle. In the video, the circle moves across the grid.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from data.training import scenes
from refvl.paths import DATA

PICTURE, CLIP = DATA / "pictures" / "scene.png", DATA / "clips" / "scene.mp4"


def demo_picture() -> scenes.Scene:
    return next(s for s in _drawn(clip=False) if len(s.things) == 4 and _circles(s) == 1)


def demo_clip() -> scenes.Scene:
    found = (s for s in _drawn(clip=True) if len(s.things) == 3 and _circles(s) == 1)
    return next(s for s in found if s.things[0].shape == "circle" and s.distance > 40)


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
    write_clip(scenes.render(demo_clip()), CLIP)
    for path, scene in ((PICTURE, demo_picture()), (CLIP, demo_clip())):
        print(path.relative_to(DATA.parent), path.stat().st_size, "bytes")
        for kind, questions in scenes.all_questions(scene).items():
            for question in questions:
                print(f"  {kind}: {question.text} {question.answer}")


if __name__ == "__main__":
    main()
