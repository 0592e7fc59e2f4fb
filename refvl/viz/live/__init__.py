"""The live page: a small model that runs in the browser, and the path of an image through it,
from pixels to a word.

`live` shows it in Jupyter; `page.page` is the same as one HTML file, and `make site` writes it to
`site/live.html`. The modules next to this file are plain JavaScript:

    model.js, math.js     the forward pass of both families, with a record of every stage; it runs in a worker
    pixels.js             scenes, videos, Pillow's resize
    tokenizer.js          text to ids and back
    layout.js, stage.js   the location of everything in each chapter, and the motion; seeing.js, reading.js: the rest
    state.js, app.js      the reader's choices, and the controls around the stage; numbers.js has the formulas

Scripts can use `window.refvl`: `scene([{shape, color, place}, ...])` with places 0 to 8, row by
row, then `await ask(text)`, which resolves to `{text, margin, ms}`. `clip(things, direction)`,
`photo(name)`, `break(names)` and `go(chapter)` do what the controls do, and `state.res` is the
record of the last answer.
"""


def live(checkpoint: str = "tiny-qwen2_5_vl"):
    """Paint a scene, ask a model that runs in the browser, and follow the image to the word.

    Needs anywidget.

    checkpoint: "tiny-qwen2_5_vl" or "tiny-qwen3_vl". The kernel sends the page when it is shown, so
    a saved notebook does not contain it. Raises ValueError for other checkpoints, FileNotFoundError
    without a clone of refvl.
    """
    from refvl.viz.live.widget import LivePage

    return LivePage(checkpoint)
