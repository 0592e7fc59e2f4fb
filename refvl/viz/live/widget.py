"""The live page in a notebook: a frame whose page the kernel sends when the frame asks for it."""

import base64

import anywidget
import traitlets

from refvl.viz.live.page import ALT, FOLDER, LIVE, STILL, check_checkpoint, page


class LivePage(anywidget.AnyWidget):
    """The live page of `checkpoint`; a saved notebook contains the checkpoint's name and
    a still image, but no weights.
    """

    _esm = (FOLDER / "widget.js").read_text(encoding="utf-8")
    checkpoint = traitlets.Unicode().tag(sync=True)

    def __init__(self, checkpoint: str):
        super().__init__(checkpoint=check_checkpoint(checkpoint))
        self.on_msg(self._send_page)

    def _send_page(self, *_) -> None:
        self.send({"page": self.checkpoint}, buffers=[page(self.checkpoint).encode()])

    def _repr_mimebundle_(self, **kwargs):
        """Return the frame, with a still image and a sentence for pages on which the frame cannot run."""
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        text = f"A small {LIVE[self.checkpoint]} in the browser. {ALT}."
        data |= {"text/plain": text}
        if STILL.is_file():
            data |= {"image/png": base64.b64encode(STILL.read_bytes()).decode()}
            metadata |= {"image/png": {"alt": text, "width": 700}}
        return data, metadata
