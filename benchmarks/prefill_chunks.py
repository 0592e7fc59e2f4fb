"""Memory and time to the first token against the size of a chunk: `python -m benchmarks.prefill_chunks`.

A clip of thirty seconds and one of ten minutes, a frame each second, from a file to the first token of the shipped
Qwen2.5-VL model, whose context is raised: what grows with the clip is the same as in a large one, only smaller. Memory
is the highest that a run takes on top of what was there before it, on CUDA as torch allocates it, on a CPU the
process's own pages as Linux counts them (RssAnon), looked at every few milliseconds. Of it the cache of keys and values
has to grow with the prompt; it is named beside. With --write the results go to
data/measurements/prefill_chunks_<cpu|cuda>.json.
"""

import ctypes
import gc
import re
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import typer

import refvl
from benchmarks.report import (
    Device,
    PrintedTable,
    Repeats,
    Write,
    announce,
    environment,
    resolve_device,
    write_measurement,
)
from refvl.paths import DATA
from refvl.study.costs import kv_cache_bytes_per_token

CLIPS = (30, 600)  # seconds
CHUNKS = (64, 256, 1024, None)  # None: the whole prompt at once
SIDE = 168  # pixels


def write_clip(path: Path, seconds: int) -> Path:
    """A clip of a drifting pattern, a frame each second."""
    import av

    y, x = np.mgrid[:SIDE, :SIDE]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1)
        stream.width = stream.height = SIDE
        for second in range(seconds):
            levels = ((x * 3 + y * 2 + second * 7) % 256).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(np.stack([levels, levels.T, 255 - levels], axis=-1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@contextmanager
def peak_bytes(device: str) -> Iterator[list[int]]:
    """A list that holds, at the end, the most memory that was taken at once on top of what was there before."""
    gc.collect()
    peak = list[int]()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.append(torch.cuda.max_memory_allocated() - before)
        return
    ctypes.CDLL(None).malloc_trim(0)  # else what earlier runs have freed is taken again, and not seen
    stop, before = threading.Event(), anonymous_bytes()
    seen = [before]

    def watch() -> None:
        while not stop.wait(0.003):
            seen.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()
        peak.append(max(seen) - before)


def anonymous_bytes() -> int:
    """What the process holds in memory that is no file's."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if not found:
        raise ValueError("device: on a CPU memory is measured on Linux only")
    return int(found[1]) * 1024


def measure(vlm: refvl.VLM, clip: Path, chunk: int | None, repeats: int, device: str) -> dict:
    """One row: medians of the runs after the first."""
    peaks, seconds = [], []
    part = {"type": "video", "video": str(clip), "fps": 1.0, "max_frames": 1024}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What moves?"}]}]
    for _ in range(repeats + 1):
        with peak_bytes(device) as peak:
            trace = vlm.trace(messages, max_new_tokens=1, prefill_chunk=chunk)
        peaks.append(peak[0])
        seconds.append(trace.ttft)
        tokens = len(trace.input_ids)
        del trace
    return {
        "chunk": chunk or "whole",
        "prompt_tokens": tokens,
        "ttft_ms": statistics.median(seconds[1:]) * 1e3,
        "peak_mb": statistics.median(peaks[1:]) / 1e6,
        "cache_mb": tokens * kv_cache_bytes_per_token(vlm.language_model.config, vlm.language_model.dtype) / 1e6,
    }


def run(device: Device = "auto", repeats: Repeats = 3, write: Write = False) -> None:
    """Memory and time to the first token against the size of a chunk."""
    device = resolve_device(device)
    announce(f"prefill_chunks_{device}", f"clips of {CLIPS} s in chunks of {CHUNKS} tokens", repeats + 1)
    vlm = refvl.load(DATA / "checkpoints" / "tiny-qwen2_5_vl", device=device, dtype="float32", progress=False)
    vlm.language_model.config.max_position_embeddings = 2**17
    columns = {
        "seconds": ">7",
        "chunk": ">6",
        "tokens": ">7",
        "first token": ">12",
        "peak": ">10",
        "of it cache": ">12",
    }
    table, rows = PrintedTable("highest memory and time to the first token", columns), []
    with tempfile.TemporaryDirectory() as folder:
        clips = {seconds: write_clip(Path(folder, f"{seconds}.mp4"), seconds) for seconds in CLIPS}
        for chunk in CHUNKS:
            for seconds, clip in clips.items():
                rows.append({"seconds": seconds} | (row := measure(vlm, clip, chunk, repeats, device)))
                memory = f"{row['peak_mb']:.1f} MB", f"{row['cache_mb']:.1f} MB"
                table.add(seconds, row["chunk"], row["prompt_tokens"], f"{row['ttft_ms']:.0f} ms", *memory)
    if write:
        write_measurement(f"prefill_chunks_{device}", environment(device) | {"repeats": repeats, "rows": rows})


if __name__ == "__main__":
    typer.run(run)
