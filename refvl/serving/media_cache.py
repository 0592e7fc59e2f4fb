"""A media cache: embeddings are keyed by the content they come from, so a cached image or video is not encoded again.

    rows, layout, weights -> key    SHA-256 over all inputs of the tower, for each item separately
    the key is cached               a hit: return a copy of its embeddings
    the key is not cached           a miss: encode, store a copy, drop the least recently used entries

A key covers the pixels as the tower reads them, and their layout. The key covers a frame's time
only if the tower uses that time (MiniCPM-V 4.5). It does not cover names, token ids or other
parts of the prompt, so entries from a different question, batch or turn can be hits. Pruning
happens later, so hits can be pruned at any rate. If a prompt is read in chunks, the cache
stores pieces of media.

The key also covers the tower: the values of the weights, even if torch counts no change
(`weight.data`, a step of a fused optimiser), and the class and attributes of each module. The key
does not cover hooks, or replaced methods of a class; call `clear` after such a change. While a
module of the tower is in training mode, results may be random (dropout), so nothing is stored in
the cache or read from it.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from refvl.checks import check_positive_int
from refvl.model import VLM
from refvl.pixels.patches import Levels

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
NO_SETTING = vars(nn.Module()).keys()  # weights, submodules, hooks and the training mode


class Embeddings(NamedTuple):
    """One entry of the cache."""

    rows: Tensor  # (M, W), not a view of other memory
    seconds: float  # the time that encoding took, which every hit saves


@dataclass(frozen=True, slots=True)
class MediaCacheStats:
    """Counters since `clear`, and the size of the current contents."""

    hits: int = 0
    misses: int = 0
    seconds_saved: float = 0.0
    items: int = 0
    tokens: int = 0
    bytes: int = 0


@torch.inference_mode()
def state_of(encoder: nn.Module) -> bytes:
    """Return the SHA-256 of an encoder's weights, and of the classes and attributes of its modules."""
    modules, weights = dict(encoder.named_modules()), [*encoder.parameters(), *encoder.buffers()]
    storage = [(x.data_ptr(), x.dtype, x.shape, x.stride(), 0 if x.is_inference() else x._version) for x in weights]
    values = torch.stack([sum_of_bits(x) for x in weights]).tolist()
    classes = [(name, id(type(module))) for name, module in modules.items()]
    settings = [{name: x for name, x in vars(m).items() if name not in NO_SETTING} for m in modules.values()]
    return hashlib.sha256(str((storage, values, classes, settings)).encode()).digest()


def sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers; it changes with the values, even if torch counts no change."""
    # summing 64 bits at a time is ten times as fast as 32
    wide = x.is_contiguous() and (x.storage_offset() * x.itemsize | x.nbytes) % 8 == 0
    return x.flatten().view(torch.int64 if wide else INTEGERS[x.itemsize]).sum()


class MediaCache:
    """The embeddings of the most recently used media, up to `max_tokens` tokens; threads and models may share a cache.

    The tensors that `fetch` returns belong to the caller, who may change them.
    """

    def __init__(self, max_tokens: int):
        """Set the limit. An item that is larger than the limit is encoded, but not cached."""
        self.max_tokens = check_positive_int(max_tokens, "media_cache")
        self._kept: OrderedDict[bytes, Embeddings] = OrderedDict()  # the least recently used entry comes first
        self._counts: Any = Counter()
        self._lock = Lock()

    def __reduce__(self) -> tuple:
        """Return the recipe for a copy or a pickle: an empty cache with the same limit."""
        return type(self), (self.max_tokens,)

    def __repr__(self) -> str:
        return f"MediaCache(max_tokens={self.max_tokens}), {self.stats()}"

    def keys(self, encoder: Any, rows: Sequence[Levels | Tensor], layouts: Sequence) -> list[bytes]:
        """Return a key for each item. rows, layouts: as in `VLM.encode_rows`."""
        tower = state_of(encoder)
        kind = encoder.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return [content_key(of_medium, layout, tower, cast) for of_medium, layout in zip(rows, layouts, strict=True)]

    def fetch(
        self, keys: Sequence[bytes], make: Callable[[list[int]], list[Embeddings]]
    ) -> tuple[list[Embeddings], list[bool]]:
        """Return the embeddings for each key, and whether each one is a hit.

        make: a function that encodes the items at the given indices. Two threads that miss the same
        item both encode it.
        """
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            for key in found:
                self._kept.move_to_end(key)
        hits = [key in found or key in keys[:i] for i, key in enumerate(keys)]
        if missing := [i for i, hit in enumerate(hits) if not hit]:
            made = copied(make(missing))  # new embeddings may be views of a batch, or of a buffer that will be reused
            found |= {keys[i]: entry for i, entry in zip(missing, made, strict=True)}
        copies = copied([found[key] for key in keys])
        saved = sum(copy.seconds for copy, hit in zip(copies, hits, strict=True) if hit)
        with self._lock:
            self._kept |= {keys[i]: found[keys[i]] for i in missing if len(found[keys[i]].rows) <= self.max_tokens}
            while self._tokens() > self.max_tokens:
                self._kept.popitem(last=False)
            self._counts.update(hits=sum(hits), misses=len(missing), seconds_saved=saved)
        return copies, hits

    def _tokens(self) -> int:
        return sum(len(entry.rows) for entry in self._kept.values())

    def stats(self) -> MediaCacheStats:
        """Return hits, misses and the seconds saved since `clear`, and the items, tokens and bytes stored now."""
        with self._lock:
            size = sum(entry.rows.nbytes for entry in self._kept.values())
            return MediaCacheStats(**self._counts, items=len(self._kept), tokens=self._tokens(), bytes=size)

    def clear(self) -> None:
        """Drop all embeddings and reset the counters."""
        with self._lock:
            self._kept.clear()
            self._counts.clear()


def copied(entries: Iterable[Embeddings]) -> list[Embeddings]:
    """Copy entries and wait, because on a GPU, other threads may read a copy, or free its original, too early."""
    copies = [entry._replace(rows=entry.rows.clone()) for entry in entries]
    if copies and copies[0].rows.is_cuda:
        torch.cuda.current_stream(copies[0].rows.device).synchronize()
    return copies


def content_key(rows: Levels | Tensor, layout: Any, *read: Any) -> bytes:
    """Return the SHA-256 of the tower's inputs for an item: rows, their layout, and everything else in `read`."""
    of_rows = (rows.values, rows.table) if isinstance(rows, Levels) else (rows,)
    shapes = [(tuple(x.shape), x.dtype) for x in of_rows]
    digest = hashlib.sha256(repr((shapes, getattr(rows, "frames", None), layout, read)).encode())
    for x in of_rows:
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


class CachedVLM(VLM):
    """A `VLM` with a media cache in front of its tower; every method that encodes goes through `encode_rows`."""

    def __init__(self, config, processor, encoder, language_model, media_cache: MediaCache):
        super().__init__(config, processor, encoder, language_model)
        self.media_cache: MediaCache | None = media_cache

    def encode_rows(self, trace: Any, rows: Sequence, layouts: Sequence, *, progress: bool = True) -> None:
        """Set the fields of `VLM.encode_rows`, plus `cached` and `seconds_saved`; the plans are those of the misses.

        A tower in training mode runs without the cache.
        """
        if self.media_cache is None or any(module.training for module in self.encoder.modules()):
            return super().encode_rows(trace, rows, layouts, progress=progress)
        trace.device = self.device  # timers then wait for this device; they measure the time that a hit saves
        encode = super().encode_rows

        def make(new: list[int]) -> list[Embeddings]:
            before = sum(trace.seconds.values())
            encode(trace, [rows[i] for i in new], [layouts[i] for i in new], progress=progress)
            seconds = (sum(trace.seconds.values()) - before) / max(1, sum(len(rows[i]) for i in new))
            trace.graph_batches = [replace(b, indices=tuple(new[i] for i in b.indices)) for b in trace.graph_batches]
            return [Embeddings(e, seconds * len(rows[i])) for i, e in zip(new, trace.embeds, strict=True)]

        with trace.stage("look up"):
            keys = self.media_cache.keys(self.encoder, rows, layouts)
        with torch.inference_mode():
            found, trace.cached = self.media_cache.fetch(keys, make)
        trace.embeds = [embeddings.rows for embeddings in found]
        trace.seconds_saved = sum(e.seconds for e, hit in zip(found, trace.cached, strict=True) if hit)
