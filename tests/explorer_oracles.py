"""What every explorer of the gallery has to show in a state, computed again by refvl's functions without its table."""

from refvl.pixels.media import load_image
from refvl.pixels.patches import plan_grid
from refvl.positions import get_window_index, merge_block_coordinates
from refvl.viz.patches import with_token_budget


def windows(explorer, state: tuple) -> dict:
    name, budget, size = state
    picture = load_image(explorer.images[name])
    grid = plan_grid(picture.height, picture.width, with_token_budget(explorer.config, budget))
    index, lengths = get_window_index([grid], window_size=size)
    return {
        "photo": list(explorer.images).index(name), "grid": grid[1:], "patches": merge_block_coordinates([grid]),
        "window_index": index, "cu_window_seqlens": lengths,
    }  # fmt: skip


ORACLES = {"windows": windows}
