"""DeepStack: features of earlier tower blocks in the text model,
and the model's answers if some features are left out.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from refvl.model import VLM
from refvl.pixels.media import is_video, load_image
from refvl.study.report import Trace
from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.style import HIGHLIGHT, KEPT

WORDS, NEW_TOKENS = 4, 16  # the number of first words to draw; the most tokens in an answer
ALL, NONE = "all features", "no features"


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A question about one image or one video."""

    prompt: str
    medium: dict[str, Any]  # `images=` or `videos=` of `VLM.trace`
    frames: list[Image.Image]  # one per step of the grid
    trace: Trace


class DeepstackExplorer(Explorer):
    """The explorer of a Qwen3-VL model's answers if any of its DeepStack features are set to zero.

    Items are the tokens of the image or video, in reading order.
    """

    _esm = module("deepstack")

    def __init__(self, model: VLM, questions: Mapping[str, tuple[str, Any]]):
        self.model, self.asked = model, {name: ask(model, *question) for name, question in questions.items()}
        config: Any = model.encoder.config
        self.blocks, self.width = list(config.deepstack_visual_indexes), model.language_model.config.hidden_size
        self.subsets = {name_of(kept, self.blocks): kept for kept in subsets(len(self.blocks))}
        tried = {name: [self.answer(a, kept) for kept in self.subsets.values()] for name, a in self.asked.items()}
        rows, shown = [], []
        for number, (name, answers) in enumerate(tried.items()):
            likely = torch.stack([chances for _, chances in answers]).amax(0).topk(WORDS).indices
            for kept, (text, chances) in zip(self.subsets.values(), answers, strict=True):
                picked = [round(float(p), 4) for p in chances[likely]]
                rows.append({"question": number, "kept": list(kept), "answer": text, "chances": picked})
            shown.append(self._shown(self.asked[name], likely) | {"answers": [text for text, _ in answers]})
        controls = [
            Control("question", "question", list(questions), kind="menu"),
            Control("kept", "features used", list(self.subsets), kind="menu"),
        ]
        shared = {
            "questions": shown, "blocks": self.blocks, "depth": config.depth,
            "layers": model.language_model.config.num_hidden_layers,
        }  # fmt: skip
        super().__init__(controls, rows, shared=shared, start=(next(iter(questions)), NONE))
        self.selected = int(shown[0]["norms"][1:].sum(0).argmax())  # the token to which features add most

    def answer(self, asked: Asked, kept: tuple[bool, ...]) -> tuple[str, Tensor]:
        """Return the answer with only the `kept` features,
        and (V,) probabilities of its first token.
        """
        run, model = asked.trace, self.model
        factors = run.deepstack.new_tensor(kept).repeat_interleave(self.width)
        changed = replace(run, deepstack=run.deepstack * factors)
        with torch.inference_mode():
            logits = model.language_model(
                inputs_embeds=run.inputs_embeds[None], position_ids=run.positions[:, None].to(model.device),
                deepstack_embeds=changed.deepstack[None], logits_to_keep=1,
            ).logits  # fmt: skip
        [text] = model.answers([changed], max_new_tokens=NEW_TOKENS)
        return text, logits[0, -1].float().softmax(-1).cpu()

    def _shown(self, asked: Asked, likely: Tensor) -> dict[str, Any]:
        """Return the data shared by a question's states. norms (1 + k, M): the norms of each
        token's embedding and features.
        """
        encoder: Any = self.model.encoder
        main, deeper = encoder.split(asked.trace.embeds[0])
        tokenizer = self.model.processor.tokenizer
        return {
            "prompt": asked.prompt, "thw": list(asked.trace.patches[0].media_tokens.thw),
            "frames": [photo(frame, side=200) for frame in asked.frames],
            "norms": torch.stack([main, *deeper]).float().norm(dim=-1),
            "words": [tokenizer.decode([token]).replace(" ", "␣") for token in likely.tolist()],
        }  # fmt: skip

    def figure(self) -> Figure:
        row, shown = self.row(self.index), self.shared["questions"][self.row(self.index)["question"]]
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        left.imshow(np.asarray(list(self.asked.values())[row["question"]].frames[-1]))
        left.set(xticks=[], yticks=[], title=shown["prompt"])
        wrong = row["answer"] != shown["answers"][0]
        right.barh(shown["words"], row["chances"], color=HIGHLIGHT if wrong else KEPT)
        right.invert_yaxis()
        right.set(xlim=(0, 1), xlabel="probability of the first word", title=f"{self.options['kept']}: {row['answer']}")
        return figure

    def describe(self) -> str:
        row = self.row(self.index)
        shown = self.shared["questions"][row["question"]]
        return (
            f'Asked "{shown["prompt"]}", the model answers "{row["answer"]}" with {self.options["kept"]} from '
            f'DeepStack, and "{shown["answers"][0]}" with {ALL}.'
        )


def ask(model: VLM, prompt: str, medium) -> Asked:
    """Trace the answer to `prompt` about `medium`, an image or a video as in `is_video`."""
    shows_video = is_video(medium)
    given: dict[str, Any] = {"videos": [medium]} if shows_video else {"images": [medium]}
    trace = model.trace(prompt, **given)
    if not shows_video:
        return Asked(prompt, given, [load_image(medium).convert("RGB")], trace)
    video: Any = model.processor.decode(model.processor.messages("", (), [medium]))[0]
    every = -(-len(video.frames) // trace.patches[0].media_tokens.thw[0])
    return Asked(prompt, given, [Image.fromarray(frame) for frame in video.frames[::every]], trace)


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Return every choice of kept features out of `count`: all features first, none last."""
    return list(itertools.product([True, False], repeat=count))


def name_of(kept: tuple[bool, ...], blocks: list[int]) -> str:
    """Return the label of a choice for the control."""
    left = [f"block {block}" for block, is_kept in zip(blocks, kept, strict=True) if is_kept]
    return ALL if all(kept) else f"only {' and '.join(left)}" if left else NONE
