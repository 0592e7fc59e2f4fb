"""Every explorer, on pictures, clips and models that come with the repository: what the pages and the tests show."""

from collections.abc import Callable

from refvl.paths import DATA
from refvl.pixels.patches import PatchConfig
from refvl.viz.explorers.base import Explorer
from refvl.viz.windows import explore_windows

GALLERY: dict[str, Callable[[], Explorer]] = {
    "windows": lambda: explore_windows(
        {name: DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")}, PatchConfig()
    ),
}
