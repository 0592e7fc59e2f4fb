"""Measure memory and time to the first token by chunk size: `python -m benchmarks.prefill_chunks`.

Two videos, of thirty seconds and of ten minutes at one frame per second, run from a file to the first token of the
shipped Qwen2.5-VL model, whose context limit is raised. Costs grow with the video as in a large model, at a smaller
scale. Memory is the peak of a run minus the memory in use before it. On CUDA it is the memory that torch allocates; on
a CPU it is the process's own pages as Linux counts them (RssAnon), sampled every few milliseconds. The size of the
key-value cache, which has to grow with the prompt, is printed next to it. With --write the results are written to
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
    """Write a video of a drifting pattern, with one frame per second."""
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
    """Yield a list that receives, at the end, the peak of memory minus the memory in use before."""
    gc.collect()
    peak = list[int]()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.append(torch.cuda.max_memory_allocated() - before)
        return
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the run could reuse freed memory, which would not be counted
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
    """Return the bytes of the process's memory that belong to no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if not found:
        raise ValueError("device: the memory of a CPU process can be measured only on Linux")
    return int(found[1]) * 1024


def measure(vlm: refvl.VLM, clip: Path, chunk: int | None, repeats: int, device: str) -> dict:
    """Return one row: the medians of all runs except the first."""
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
    """Measure memory and time to the first token by chunk size."""
    device = resolve_device(device)
    announce(f"prefill_chunks_{device}", f"videos of {CLIPS} s in chunks of {CHUNKS} tokens", repeats + 1)
    vlm = refvl.load(DATA / "checkpoints" / "tiny-qwen2_5_vl", device=device, dtype="float32", progress=False)
    vlm.language_model.config.max_position_embeddings = 2**17
    columns = {
        "seconds": ">7",
        "chunk": ">6",
        "tokens": ">7",
        "first token": ">12",
        "peak": ">10",
        "of which cache": ">14",
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
