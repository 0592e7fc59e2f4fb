"""The tiny model in its form for training: refvl's tower, transformers' text model, and the questions of a scene in one
sequence.

A scene is encoded once. Its questions follow each other in one sequence, but each sees only the prefix
(system prompt and media) and itself, and each starts at the position where the prefix ends. So every question is
answered exactly as if it had been asked alone, at a fraction of the cost.

    prefix                                                  tail 1            tail 2
    <|im_start|>system ... <|vision_start|> media <|vision_end|>  Where is ...  What color ...

`TinyFamily` contains the differences between families (`tiny_family.py`).

Shape suffixes: B scenes, Q questions, P prefix tokens, T tokens of a tail, L = P + Q * T, M media tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedTokenizerFast

from data.training.relations import exchange_vectors
from data.training.tiny_family import TinyFamily
from refvl import VLM
from refvl.positions import MediaSpan, compute_retention_mask


class TinyModel(nn.Module):
    """refvl's tower, transformers' text model, and the output head."""

    def __init__(self, family: TinyFamily):
        super().__init__()
        self.family, config = family, family.config()
        text_config = family.hf_config(config).get_text_config()
        text_config._attn_implementation = "sdpa"
        self.visual = family.tower(config)
        self.model = AutoModel.from_config(text_config, dtype=torch.float32)
        self.lm_head = nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False)
        self._plans = {}

    def init_weights(self, seed: int, std: float = 0.05) -> None:
        """Initialise matrices with normal(0, std), biases with 0, norms with 1, and the rest as the family requires."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            with torch.no_grad():
                if parameter.ndim >= 2:
                    parameter.normal_(0, std, generator=generator)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.family.init_weights(self)

    def take_over(self, model: VLM) -> None:
        """Copy the weights of a loaded model."""
        self.visual.load_state_dict(model.encoder.state_dict())
        text = model.language_model.state_dict()
        self.model.load_state_dict({n.removeprefix("model."): w for n, w in text.items() if n.startswith("model.")})
        self.lm_head.weight.data.copy_(text["lm_head.weight"])

    def encode(
        self, pixels: Tensor, *, table: Sequence[int] | None = None, change: Callable | None = None, **shown
    ) -> Tensor:
        """Encode (B, frames, H, W, 3) uint8 of one size as (B, M, D), or wider with DeepStack features.

        table: for each patch, the index of its vector in the position table, the same for all items. change: a function
            from the tower's plan to the plan that is used. shown: other arguments of the family's `patchify`.
        """
        rows_NC, layouts = self.family.patchify(pixels, **shown)
        metadata = self.family.plan(self.visual, layouts, self._plans)
        if change is not None:
            metadata = change(metadata)
        if table is not None:
            metadata = exchange_vectors(metadata, table)
        return self.visual(rows_NC, metadata=metadata).unflatten(0, (len(pixels), -1))

    def forward(self, batch: "Batch", *, prune: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the logits (labelled positions, V) in the order of `batch.targets`, the media
        (B, M, D; None for a batch of text alone), and all tokens (B, L, D) before the last
        layer.

        prune: (B,) pruning rate of each video.
        """
        embeds_BLD, media_BMD, deeper = self.model.embed_tokens(batch.ids_BL), None, {}
        if batch.pixels is not None:
            media_BMD, tellings = self.encode(batch.pixels, **batch.shown), len(batch.ids_BL) // len(batch.pixels)
            width = embeds_BLD.shape[-1]
            rows_BLW = F.pad(embeds_BLD, (0, media_BMD.shape[-1] - width))
            rows_BLW = put_media(rows_BLW, media_BMD.repeat_interleave(tellings, 0), batch.spans)
            embeds_BLD, deeper = rows_BLW[..., :width], self.family.deeper_features(rows_BLW[..., width:])
        mask = batch.mask_LL[None, None]
        if prune is not None:
            kept_BM = self.kept(media_BMD, batch.grid, prune).repeat_interleave(tellings, 0)
            keep_BL = put_media(torch.ones_like(batch.ids_BL, dtype=torch.bool), kept_BM, batch.spans)
            # a dropped token may attend to itself, so no row of the mask is empty; no other token attends to it
            mask = mask & (keep_BL[:, None, None] | torch.eye(mask.shape[-1], dtype=torch.bool))
        positions = batch.positions_3L[:, None].expand(-1, len(embeds_BLD), -1)
        hidden_BLD = self.model(
            inputs_embeds=embeds_BLD,
            attention_mask=mask,
            position_ids=self.family.text_positions(positions),
            use_cache=False,
            output_hidden_states=True,
            **deeper,
        ).hidden_states
        answers_AD = hidden_BLD[-1][batch.target_rows, batch.target_columns]
        return self.lm_head(answers_AD), media_BMD, hidden_BLD[-2]

    def kept(self, media_BMD: Tensor, grid: tuple[int, int, int], prune: Tensor) -> Tensor:
        """Return (B, M) bool, the tokens that EVS keeps of each video at its own rate."""
        thw = self.family.merged(grid)
        with torch.no_grad():
            masks = [compute_retention_mask(m, thw, 1, q) for m, q in zip(media_BMD, prune.tolist(), strict=True)]
        return torch.stack(masks)

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Return tensors under the names and in the shapes of the released checkpoints."""
        return self.family.checkpoint_weights(self.state_dict())


def are_right(batch: "Batch", logits_AV: Tensor) -> list[bool]:
    """Return whether each question is answered correctly, teacher-forced.

    Greedy decoding gives the answer if and only if each of its tokens is the most likely one.
    """
    right = logits_AV.argmax(-1) == batch.targets
    return [bool(right[batch.question_of_target == i].all()) for i in range(int(batch.question_of_target.max()) + 1)]


def put_media(rows_BL: Tensor, media_BM: Tensor, spans: list[MediaSpan]) -> Tensor:
    """Return (B, L, ...) with the media (B, M, ...) in place of their spans, which are in order."""
    pieces, end = [], 0
    for span, media in zip(spans, media_BM.split([span.num_tokens for span in spans], dim=1), strict=True):
        pieces += [rows_BL[:, end : span.offset], media]
        end = span.offset + span.num_tokens
    return torch.cat([*pieces, rows_BL[:, end:]], dim=1)


@dataclass(eq=False)
class Batch:
    """Scenes of one size with their questions, ready for `TinyModel`, or questions alone."""

    pixels: Tensor | None  # (B, frames, H, W, 3) uint8
    grid: tuple[int, int, int] | None
    spans: list[MediaSpan]  # the item's indices in the sequence
    ids_BL: Tensor
    positions_3L: Tensor
    mask_LL: Tensor  # bool, True if a row may attend to a column
    target_rows: Tensor  # (A,) the scene of each answer token
    target_columns: Tensor  # (A,) the index in the sequence from which it is predicted
    targets: Tensor  # (A,) its id
    question_of_target: Tensor  # (A,) the number of the question, scene by scene
    shown: dict = field(default_factory=dict)  # arguments of `TinyModel.encode` that show the media
    seconds: Tensor | None = None  # (rows, t) timestamps of each step of a video
    told: Tensor | None = None  # (M,) place in the image, or step in the video, that each token's position indicates


class PromptBuilder:
    """Token ids of prefixes and tails, from the real chat template and tokenizer, with a cache."""

    def __init__(self, family: TinyFamily):
        self.family, self.tokenizer, self.config = family, family.tokenizer(), family.config()
        self.template = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, chat_template=family.chat_template())
        self.pad_id = family.hf_config(self.config).get_text_config().pad_token_id
        self._tails, self._prefixes, self._layouts = {}, {}, {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def split(self, question: str, answer: str | None, media: str | None) -> tuple[list[int], list[int]]:
        """Return the ids up to and including the end of the item (one placeholder), and the ids
        after it, up to the answer's end.

        media: None for text alone, which belongs entirely to the second part.
        """
        shown = [{"type": media}] if media else []
        messages = [{"role": "user", "content": [*shown, {"type": "text", "text": question}]}]
        text = self.template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text += f"{answer}{self.family.end_of_turn}" if answer is not None else ""
        ids = self.encode(text)
        cut = ids.index(self.tokenizer.token_to_id(self.family.end_of_media[media])) + 1 if media else 0
        return ids[:cut], ids[cut:]

    def tail(self, question: str, answer: str, media: str | None = "image") -> tuple[list[int], int]:
        """Return the ids of question and answer, and the number of those in the answer (with the end of the turn)."""
        key = (question, answer, media)
        if key not in self._tails:
            ids = self.split(question, answer, media)[1]
            self._tails[key] = ids, len(ids) - len(self.split(question, None, media)[1])
        return self._tails[key]

    def prefix(self, media: str, grid: tuple[int, int, int], seconds: tuple) -> tuple[list[int], list[MediaSpan]]:
        """Return the ids up to the end of the item, with all of its tokens, and the spans that
        these tokens fill.
        """
        key = (media, grid, seconds)
        if key not in self._prefixes:
            ids, token = self.split("?", "", media)[0], self.family.media_token(self.config, media)
            self._prefixes[key] = self.family.place_media(ids, token, grid, seconds, self.encode)
        return self._prefixes[key]

    def layout(self, length: int, spans: list[MediaSpan], num_tails: int, tail_length: int) -> tuple[Tensor, Tensor]:
        """Return (positions (3, L), mask (L, L)) of a sequence of tails after a prefix of `length` tokens."""
        key = (length, tuple(spans), num_tails, tail_length)
        if key not in self._layouts:
            positions = self.family.positions(length + tail_length, spans)
            positions = torch.cat([positions[:, :length], positions[:, length:].repeat(1, num_tails)], dim=1)
            self._layouts[key] = positions, row_mask(length, num_tails, tail_length)
        return self._layouts[key]

    def batch(
        self,
        pixels: np.ndarray | Tensor | None,
        questions: list[list],
        *,
        seconds: Sequence[Sequence[float]] | None = None,
        shown: dict | None = None,
    ) -> Batch:
        """Prepare scenes (B, frames, H, W, 3) uint8 with the same number of questions (`.text`, `.answer`) each.

        seconds: the timestamp of each step of each video; None for images. If there are k times as many entries of
        questions and timestamps as scenes, each scene is shown k times in succession. Raises ValueError if prompts of
        one batch differ in more than the names of their tokens. pixels: None for text alone. shown: see `Batch`.
        """
        if pixels is None:
            media, grid, prefixes = None, None, [([], [])] * len(questions)
        else:
            media, grid = "image" if seconds is None else "video", self.family.grid(pixels.shape)
            prefixes = [self.prefix(media, grid, tuple(row)) for row in seconds or [()] * len(questions)]
        spans, lengths = prefixes[0][1], {len(ids) for ids, _ in prefixes}
        if len(lengths) > 1 or any(other != spans for _, other in prefixes):
            raise ValueError(f"seconds: prompts of one batch must be alike, got lengths {sorted(lengths)}")
        tails = [[self.tail(q.text, q.answer, media and "image") for q in row] for row in questions]
        longest, [length] = max(len(ids) for row in tails for ids, _ in row), lengths
        positions, mask = self.layout(length, spans, len(tails[0]), longest)
        ids = np.full((len(tails), length + len(tails[0]) * longest), self.pad_id)
        ids[:, :length] = [prefix for prefix, _ in prefixes]
        rows, columns, numbers = [], [], []
        for b, row in enumerate(tails):
            for q, (tail, answer_length) in enumerate(row):
                begin = length + q * longest
                ids[b, begin : begin + len(tail)] = tail
                rows += [b] * answer_length
                columns += range(begin + len(tail) - answer_length - 1, begin + len(tail) - 1)
                numbers += [b * len(row) + q] * answer_length
        ids, rows, columns = torch.from_numpy(ids), torch.tensor(rows), torch.tensor(columns)
        if isinstance(pixels, np.ndarray):
            pixels = torch.from_numpy(np.require(pixels, requirements="W"))  # a copy if the original is read-only
        return Batch(
            pixels, grid, spans, ids, positions, mask,
            rows, columns, ids[rows, columns + 1], torch.tensor(numbers), shown or {},
            None if seconds is None else torch.tensor([list(row) for row in seconds]),
        )  # fmt: skip


def row_mask(prefix: int, num_tails: int, tail_length: int) -> Tensor:
    """Return (L, L) bool: causal, and a tail attends to the prefix and itself but to no other tail."""
    owner = torch.cat([torch.full((prefix,), -1), torch.arange(num_tails).repeat_interleave(tail_length)])
    causal = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    return causal & ((owner[None, :] == -1) | (owner[None, :] == owner[:, None]))
