"""Write the page for the demo's questions: `python -m data.training.demo_page`.

The split "demo" is used neither for training nor for measurements. The page is the first one of that split with little
noise and three boxes, one of them red.
"""

from PIL import Image

from data.training import pages
from refvl.paths import DATA

PICTURE = DATA / "pictures" / "page.png"


def demo_page() -> pages.Page:
    drawn = (pages.draw_page("demo", i) for i in range(10_000))
    return next(p for p in drawn if len(p.boxes) == 3 and p.noise < 1.5 and "red" in {b.color for b in p.boxes})


def main():
    Image.fromarray(pages.render(demo_page())).save(PICTURE, optimize=True)
    print(PICTURE.relative_to(DATA.parent), PICTURE.stat().st_size, "bytes")
    for kind, questions in pages.all_questions(demo_page()).items():
        for question in questions:
            print(f"  {kind}: {question.text} {question.answer}")


if __name__ == "__main__":
    main()
