"""The tiny model as it is trained: refvl's tower, transformers' text model, and the questions of a scene in one row.

A scene is encoded once. Its questions stand one behind the other in one sequence, but each sees only the prefix
(system prompt and media) and itself, and each starts at the position where the prefix ends. So every question is
answered exactly as if it had been asked alone, at a fraction of the cost.

    prefix                                                  tail 1            tail 2
    <|im_start|>system ... <|vision_start|> media <|vision_end|>  Where is ...  What color ...

Shape suffixes: B scenes, Q questions, P prefix tokens, T tokens of a tail, L = P + Q * T, M media tokens, D width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen2_5_VLTextModel, Qwen2TokenizerFast

from data.tiny_checkpoint import CHAT_TEMPLATE, CLIP_MEAN, CLIP_STD, hf_config
from refvl.encoders import Qwen2_5_VisionTransformer
from refvl.positions import MediaSpan, compute_retention_mask, get_mrope_input_positions

IGNORE = -100


class TinyModel(nn.Module):
    """The three parts under their checkpoint names."""

    def __init__(self, config: dict):
        super().__init__()
        self.config, hf = config, hf_config(config)
        hf.text_config._attn_implementation = "sdpa"
        self.visual = Qwen2_5_VisionTransformer.from_config(config["vision_config"], attention="sdpa")
        self.model = Qwen2_5_VLTextModel(hf.text_config)
        self.lm_head = nn.Linear(hf.text_config.hidden_size, hf.text_config.vocab_size, bias=False)
        self._plans = {}

    def init_weights(self, seed: int, std: float = 0.05) -> None:
        """Matrices normal(0, std), biases zero, norms one."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            with torch.no_grad():
                if parameter.ndim >= 2:
                    parameter.normal_(0, std, generator=generator)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def encode(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """(B, frames, H, W, 3) uint8 of one size, grid (t, h, w) of each -> (B, M, D)."""
        key = (len(pixels), grid)
        if key not in self._plans:
            self._plans[key] = self.visual.plan([grid] * len(pixels))
        rows_NC = patch_rows(pixels)
        return self.visual(rows_NC, metadata=self._plans[key]).unflatten(0, (len(pixels), -1))

    def forward(self, batch: "Batch", *, prune: Tensor | None = None) -> Tensor:
        """Logits (labelled positions, V), in the order of `batch.targets`. prune: (B,) pruning rate of each clip."""
        media_BMD = self.encode(batch.pixels, batch.grid)
        embeds_BLD = self.model.embed_tokens(batch.ids_BL)
        start, count = batch.media_start, media_BMD.shape[1]
        embeds_BLD = torch.cat([embeds_BLD[:, :start], media_BMD, embeds_BLD[:, start + count :]], dim=1)
        mask = batch.mask_LL[None, None]
        if prune is not None:
            keep_BL = torch.ones_like(batch.ids_BL, dtype=torch.bool)
            keep_BL[:, start : start + count] = self.kept(media_BMD, batch.grid, prune)
            # a token that is not kept may see itself, so that no row of the mask is empty; nobody else sees it
            mask = mask & (keep_BL[:, None, None] | torch.eye(mask.shape[-1], dtype=torch.bool))
        positions = batch.positions_3L[:, None].expand(-1, len(embeds_BLD), -1)
        hidden_BLD = self.model(
            inputs_embeds=embeds_BLD, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        return self.lm_head(hidden_BLD[batch.target_rows, batch.target_columns]), media_BMD

    def kept(self, media_BMD: Tensor, grid, prune: Tensor) -> Tensor:
        """(B, M) bool: what EVS keeps of each clip at its own rate."""
        merge = self.config["vision_config"]["spatial_merge_size"]
        with torch.no_grad():
            masks = [compute_retention_mask(m, grid, merge, q) for m, q in zip(media_BMD, prune.tolist(), strict=True)]
        return torch.stack(masks)

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Tensors under the names and shapes of the released checkpoints."""
        weights = {n: w for n, w in self.state_dict().items() if not n.startswith("probe")}
        c = self.config["vision_config"]
        name = "visual.patch_embed.proj.weight"
        weights[name] = weights[name].unflatten(
            1, (c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"])
        )
        return weights


def patch_rows(pixels: Tensor, patch: int = 14, merge: int = 2, frames: int = 2) -> Tensor:
    """(B, frames, H, W, 3) uint8 -> (N, C*Tp*P*P) float32 in merge-block order; a single frame is repeated."""
    mean, std = torch.tensor(CLIP_MEAN), torch.tensor(CLIP_STD)
    x = pixels * (1 / (255 * std)) - mean / std
    if x.shape[1] == 1:
        x = x.expand(-1, frames, -1, -1, -1)
    batch, count, height, width, channels = x.shape
    h, w = height // (patch * merge), width // (patch * merge)
    x = x.reshape(batch, count // frames, frames, h, merge, patch, w, merge, patch, channels)
    return x.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8).reshape(-1, channels * frames * patch**2)


@dataclass(eq=False)
class Batch:
    """Scenes of one size with their questions, ready for `TinyModel`."""

    pixels: Tensor  # (B, frames, H, W, 3) uint8
    grid: tuple[int, int, int]
    media_start: int
    ids_BL: Tensor
    positions_3L: Tensor
    mask_LL: Tensor  # bool, True where a row may see a column
    target_rows: Tensor  # (A,) scene of each answer token
    target_columns: Tensor  # (A,) place in the sequence from which it is predicted
    targets: Tensor  # (A,) its id
    question_of_target: Tensor  # (A,) number of the question, scene-major


class PromptBuilder:
    """Token ids of prefixes and tails, made with the real chat template and tokenizer, and kept."""

    def __init__(self, tokenizer: Tokenizer, config: dict):
        self.tokenizer, self.config = tokenizer, config
        self.template = Qwen2TokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
        self._tails, self._layouts = {}, {}

    def split(self, question: str, answer: str | None, media: str) -> tuple[list[int], list[int]]:
        """Ids up to and with <|vision_end|> (one placeholder), and the ids behind it, ended by <|im_end|>."""
        messages = [{"role": "user", "content": [{"type": media}, {"type": "text", "text": question}]}]
        text = self.template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text += f"{answer}<|im_end|>" if answer is not None else ""
        ids = self.tokenizer.encode(text).ids
        cut = ids.index(self.config["vision_end_token_id"]) + 1
        return ids[:cut], ids[cut:]

    def tail(self, question: str, answer: str) -> tuple[list[int], int]:
        """Ids of question and answer, and how many of them are the answer's (with <|im_end|>)."""
        key = (question, answer)
        if key not in self._tails:
            ids = self.split(question, answer, "image")[1]
            self._tails[key] = ids, len(ids) - len(self.split(question, None, "image")[1])
        return self._tails[key]

    def layout(self, media: str, grid: tuple[int, int, int], seconds_per_grid: float, num_tails: int, tail_length: int):
        """(prefix ids, media start, positions (3, L), mask (L, L)) of a row of tails behind one medium."""
        key = (media, grid, seconds_per_grid, num_tails, tail_length)
        if key not in self._layouts:
            token = self.config[f"{media}_token_id"]
            ids, _ = self.split("?", "", media)
            start, merge = ids.index(token), self.config["vision_config"]["spatial_merge_size"]
            factor = self.config["vision_config"]["tokens_per_second"] * seconds_per_grid if media == "video" else 1.0
            span = MediaSpan(start, grid[0], grid[1] // merge, grid[2] // merge, factor)
            prefix = [*ids[:start], *[token] * span.num_tokens, *ids[start + 1 :]]
            positions, _ = get_mrope_input_positions(len(prefix) + tail_length, [span])
            tail_positions = positions[:, len(prefix) :]
            positions = torch.cat([positions[:, : len(prefix)], tail_positions.repeat(1, num_tails)], dim=1)
            self._layouts[key] = prefix, start, positions, row_mask(len(prefix), num_tails, tail_length)
        return self._layouts[key]

    def batch(
        self, pixels: np.ndarray | Tensor, questions: list[list], *, seconds_per_grid: float | None = None
    ) -> Batch:
        """Scenes (B, frames, H, W, 3) uint8, each with the same number of questions (`.text`, `.answer`)."""
        media = "image" if seconds_per_grid is None else "video"
        frames, height, width = pixels.shape[1:4]
        grid = (max(1, frames // 2), height // 14, width // 14)
        tails = [[self.tail(q.text, q.answer) for q in row] for row in questions]
        longest = max(len(ids) for row in tails for ids, _ in row)
        prefix, start, positions, mask = self.layout(media, grid, seconds_per_grid or 0.0, len(tails[0]), longest)
        pad = self.config["text_config"]["pad_token_id"]
        ids = np.full((len(tails), len(prefix) + len(tails[0]) * longest), pad)
        ids[:, : len(prefix)] = prefix
        rows, columns, numbers = [], [], []
        for b, row in enumerate(tails):
            for q, (tail, answer_length) in enumerate(row):
                begin = len(prefix) + q * longest
                ids[b, begin : begin + len(tail)] = tail
                rows += [b] * answer_length
                columns += range(begin + len(tail) - answer_length - 1, begin + len(tail) - 1)
                numbers += [b * len(row) + q] * answer_length
        ids, rows, columns = torch.from_numpy(ids), torch.tensor(rows), torch.tensor(columns)
        return Batch(
            torch.as_tensor(pixels), grid, start, ids, positions, mask,
            rows, columns, ids[rows, columns + 1], torch.tensor(numbers),
        )  # fmt: skip


def row_mask(prefix: int, num_tails: int, tail_length: int) -> Tensor:
    """(L, L) bool: causal, and a tail sees the prefix and itself but no other tail."""
    owner = torch.cat([torch.full((prefix,), -1), torch.arange(num_tails).repeat_interleave(tail_length)])
    causal = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    return causal & ((owner[None, :] == -1) | (owner[None, :] == owner[:, None]))
