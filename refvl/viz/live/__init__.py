"""The live page: a small model runs in the browser twice, intact and with one thing exchanged.

`live` shows the page in Jupyter, `page.page` returns it as one HTML file, and `make site`
writes it to `site/live.html`. The modules next to this file are plain JavaScript:

    model.js, math.js       the forward pass of both families, with a record of every stage
    lab.js, worker.js       two runs of one input, in a worker; evs.js: what EVS prunes
    pixels.js, tokenizer.js scenes, videos and Pillow's resize; text to ids and back
    breaks.js               what can be exchanged, and the boxes of the map
    change.js               how much every stage differs between the two records
    state.js, words.js      the reader's choices and the address; questions, and the text about
    a result
    panel.js, minis.js      a side, and a stage as a picture; card.js: the picture to share; numbers.js: formulas
    app.js                  the controls around them

Scripts can use `window.refvl`. `scene([{shape, color, place}, ...])` shows a scene, with places
0 to 8 in row-major order. Then `await ask(text)` resolves to `{text, margin, ms}`, and
`await broken(name, text)` resolves to `{text, p, reason}`; `reason` is null if the answer changed.
`breaks` contains the names; `clip(things, direction)`, `photo(name)`, `go(stage)` and `share()`
have the same effects as the controls.
"""


def live(checkpoint: str = "tiny-qwen2_5_vl"):
    """Show a model that runs in the browser, intact and with one thing exchanged.

    Needs anywidget.

    checkpoint: "tiny-qwen2_5_vl" or "tiny-qwen3_vl". The kernel sends the page on display, so a
    saved notebook does not contain the page. Raises ValueError for other checkpoints.
    """
    from refvl.viz.live.widget import LivePage

    return LivePage(checkpoint)
