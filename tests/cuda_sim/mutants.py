"""Forty bugs that only a GPU would show, planted one at a time: which of them does the simulated device see?

    python tests/cuda_sim/mutants.py           plant each, run its test, print the score (`make test-cuda-sim`)
    python tests/cuda_sim/mutants.py 28-40     a part of the list, by number
    python tests/cuda_sim/mutants.py NAME ...  these alone, with what pytest says

The first eighteen are from a review of the GPU path, the others from reading it once more. Nothing is written: a
forked process, in which refvl has not been imported yet, compiles the changed source. A mutant without a test gives its
reason.
"""

import os
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WANTED = 36  # of them must be caught
OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "--no-header", "--tb=line"]


class Mutant(NamedTuple):
    """`old` becomes `new` in a file of `refvl/`; test: one of `tests/cuda_sim/` that should fail, or why none can."""

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def is_visible(self) -> bool:
        return self.test.startswith("test_")

    def source(self) -> str:
        """The changed file; ValueError unless `old` is there once."""
        text = (ROOT / "refvl" / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: expected {self.old!r} once in {self.file}, found it {text.count(self.old)} times"
            )
        return text.replace(self.old, self.new)


CUDA, MANAGER, BUFFERS = "graphs/cuda.py", "graphs/manager.py", "graphs/buffers.py"
TOWER, GPU, QWEN, ROTARY = "encoders/tower.py", "on_gpu.py", "encoders/qwen2_5_vl.py", "positions/rotary.py"
SOUND = "test_mistakes.py::test_without_a_mistake_all_is_well"
PLAN = "test_budgets.py::test_a_first_picture_copies_its_rows_and_its_plan_and_waits_for_nothing"
REPLAY = "test_budgets.py::test_a_replay_copies_rows_and_plan_and_waits_for_nothing[Qwen2.5-VL]"
BLOCK = "test_budgets.py::test_kernels_per_block[Qwen2.5-VL]"
POOL = "test_driver.py::test_all_graphs_share_a_pool_and_a_stream_that_is_not_the_current_one"
LEVELS = "test_budgets.py::test_of_a_picture_a_byte_a_value_travels_and_of_a_still_one_frame"
STREAMS = "test_order.py::test_threads_with_streams_of_their_own_share_a_manager"

MUTANTS = [
    Mutant(
        "a host read in forward",
        QWEN,
        "x_MD = self.merger(",
        "x_NE = x_NE * float(x_NE.isfinite().all())\n        x_MD = self.merger(",
        SOUND,
    ),
    Mutant(
        "a boolean mask in float16",
        QWEN,
        "    return torch.where(overflowed_N1, x_NE.clamp(-bound, bound), x_NE)",
        "    rows = overflowed_N1[:, 0]\n    x_NE[rows] = x_NE[rows].clamp(-bound, bound)\n    return x_NE",
        "test_journeys.py::test_old_gpus_answer_in_float16",
    ),
    Mutant(
        "cumulative lengths are not refilled",
        BUFFERS,
        "        if isinstance(buffer, Tensor):\n            yield",
        '        if isinstance(buffer, Tensor):\n            if field.name == "cu_seqlens":\n                continue\n            yield',  # noqa: E501
        SOUND,
    ),
    Mutant(
        "max_seqlen is too small",
        QWEN,
        "max_window_seqlen=min(side**2, max_tokens) * self.block_size",
        "max_window_seqlen=self.block_size",
        SOUND,
    ),
    Mutant(
        "moved weights are not noticed",
        MANAGER,
        "if self.captured and weights == self._weights:",
        "if self.captured:",
        "test_driver.py::test_weights_that_move_are_captured_anew_in_another_pool",
    ),
    Mutant("an output is not cloned", MANAGER, "[: batch.tokens].clone()", "[: batch.tokens]", SOUND),
    Mutant(
        "a CPU tensor in the plan",
        GPU,
        "lambda x: x if x.is_cuda else next(sent)",
        "lambda x: x if x.is_cuda else (next(sent), x)[x.dtype == torch.int64]",
        SOUND,
    ),
    Mutant("no wait before the warm-up", CUDA, "            self.stream.wait_stream(current)\n", "", SOUND),
    Mutant(
        "another buffer is kept than was captured",
        MANAGER,
        "CapturedBudget(graph, pixel_values, metadata",
        "CapturedBudget(graph, pixel_values.clone(), metadata",
        SOUND,
    ),
    Mutant(
        "no wait after the capture",
        CUDA,
        "                current.wait_stream(self.stream)\n",
        "                pass\n",
        "test_driver.py::test_a_failure_leaves_streams_modes_and_graphs_as_they_were[in the check]",
    ),
    Mutant(
        "a replay waits for no other stream",
        MANAGER,
        "                stream.wait_stream(self._last_stream)\n",
        "                pass\n",
        STREAMS,
    ),
    Mutant(
        "buffers are filled on a stream that nobody waits for",
        MANAGER,
        "        captured.fill(rows, metadata)\n",
        "        side = torch.cuda.Stream(self.encoder.device)\n        side.wait_stream(torch.cuda.current_stream(self.encoder.device))\n        with torch.cuda.stream(side):\n            captured.fill(rows, metadata)\n",  # noqa: E501
        SOUND,
    ),
    Mutant(
        "one pinned buffer for all rows",
        GPU,
        'rows = rows.to(dtype).pin_memory() if rows.device.type == "cpu" else rows',
        "rows = send_plan.__dict__.setdefault(rows.shape, torch.empty(rows.shape, dtype=dtype).pin_memory()).copy_(rows)",  # noqa: E501
        "test_order.py::test_rows_may_be_sent_again_at_once",
    ),
    Mutant(
        "a copy to the host is read at once",
        "serving/media_cache.py",
        "x.detach().cpu()",
        'x.detach().to("cpu", non_blocking=True)',
        "test_order.py::test_a_media_cache_between_streams",
    ),
    Mutant("rows are sent from pageable memory", GPU, "rows.to(dtype).pin_memory() if", "rows.to(dtype) if", PLAN),
    Mutant(
        "the stream of graphs belongs to the current device",
        MANAGER,
        "torch.cuda.Stream(self.encoder.device)",
        "torch.cuda.Stream()",
        "test_order.py::test_graphs_on_the_second_device",
    ),
    Mutant(
        "rotary frequencies in float64",
        ROTARY,
        "torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device)",
        "torch.arange(0, head_dim // 2, 2, dtype=torch.float64, device=device)",
        BLOCK,
    ),
    Mutant(
        "rotary factors are kept from the warm-up",
        QWEN,
        "        rotary = rotary_factors(*rotary_cos_sin(metadata.positions, metadata.frequencies))  # shared by all blocks\n",  # noqa: E501
        '        kept = self.__dict__.setdefault("kept", {})\n        key = len(metadata.positions)\n        if key not in kept:\n            kept[key] = rotary_factors(*rotary_cos_sin(metadata.positions, metadata.frequencies))\n        rotary = kept[key]\n',  # noqa: E501
        SOUND,
    ),
    Mutant(
        "graphs use the workspaces of the warm-up",
        CUDA,
        "    torch._C._cuda_clearCublasWorkspaces()\n    try:",
        "    try:",
        "test_driver.py::test_a_graph_keeps_its_workspaces_when_others_clear_theirs",
    ),
    Mutant(
        "the first output is the capture's",
        MANAGER,
        "captured.graph.replay()[",
        "(captured.graph.replay() if self._stats[batch.path].hits else captured.output)[",
        SOUND,
    ),
    Mutant(
        "captured on the current stream",
        CUDA,
        "pool, stream or torch.cuda.Stream()",
        "pool, torch.cuda.current_stream()",
        POOL,
    ),
    Mutant(
        "a capture forbids other threads the device",
        CUDA,
        'capture_error_mode="thread_local"',
        'capture_error_mode="global"',
        "test_driver.py::test_captures_mind_only_their_own_thread",
    ),
    Mutant("every graph has a pool of its own", CUDA, "self.graph, pool=self.pool,", "self.graph, pool=None,", POOL),
    Mutant(
        "a capture is not tried before",
        CUDA,
        "                    _check_capturable(function)\n",
        "",
        "test_driver.py::test_a_value_read_back_is_refused_before_the_driver_sees_it",
    ),
    Mutant(
        "the debug mode stays on",
        CUDA,
        "            torch.cuda.set_sync_debug_mode(mode)\n",
        "            pass\n",
        "test_driver.py::test_a_value_read_back_is_refused_before_the_driver_sees_it",
    ),
    Mutant(
        "a replay on the stream of the capture",
        CUDA,
        "        self.graph.replay()\n",
        "        with torch.cuda.stream(self.stream):\n            self.graph.replay()\n",
        SOUND,
    ),
    Mutant(
        "cumulative lengths end in zeros",
        BUFFERS,
        "fill.rest.copy_(fill.values[-1].expand_as(fill.rest))",
        "fill.rest.zero_()",
        SOUND,
    ),
    Mutant(
        "the metadata of a graph is freed",
        MANAGER,
        "        return CapturedBudget(graph, pixel_values, metadata, output)",
        "        return CapturedBudget(graph, pixel_values, encoder.plan_capacity(budget, self.limits[path].frames_of(budget)), output)",  # noqa: E501
        SOUND,
    ),
    Mutant("rotary leaves float32", GPU, "first, second, out=out).to(x_NHK.dtype)", "first, second)", SOUND),
    Mutant(
        "the host waits for every tensor of a plan",
        GPU,
        "sent = iter(_send_packed(there, device))",
        "sent = iter([x.to(device) for x in there])",
        PLAN,
    ),
    Mutant(
        "rows travel in float32",
        GPU,
        "        return rows.to(device, non_blocking=True)\n    N,",
        "        return rows.float().pin_memory().to(device, non_blocking=True).to(dtype)\n    N,",
        PLAN,
    ),
    Mutant("positions travel as int64", QWEN, "block_positions(grids, m).int()", "block_positions(grids, m)", PLAN),
    Mutant(
        "levels are normalised before they travel",
        TOWER,
        "        sent = [on_gpu.send_levels(item, device, encoder.dtype) for item in rows]",
        "        sent = [on_gpu.send_levels(item if isinstance(item, Tensor) else item.normalize(), device, encoder.dtype) for item in rows]",  # noqa: E501
        LEVELS,
    ),
    Mutant(
        "every call waits for the one",
        MANAGER,
        "            self._wait_for_other_streams()\n",
        "            self._wait_for_other_streams()\n            torch.cuda.synchronize()\n",
        REPLAY,
    ),
    Mutant(
        "padding is zeroed in every layer",
        "attention.py",
        "backend, pairs).flatten(1)",
        "backend, pairs).masked_fill(is_padding(cu_seqlens, len(q_NHK))[:, None, None], 0).flatten(1)",
        BLOCK,
    ),
    Mutant(
        "RMSNorm in float32 by hand",
        QWEN,
        "self.attn(self.norm1(x_NE), rotary",
        "self.attn((self.norm1.weight * F.normalize(x_NE.float(), dim=-1) * x_NE.shape[-1] ** 0.5).to(x_NE.dtype), rotary",  # noqa: E501
        BLOCK,
    ),
    Mutant(
        "a T4 runs flash kernels",
        "attention.py",
        "and head_dim <= 256 and is_ampere(device)",
        'and head_dim <= 256 and torch.device(device).type == "cuda"',
        "test_device.py::test_flash_attention_begins_with_ampere",
    ),
    Mutant(
        "cached embeddings are handed out unfinished",
        "serving/media_cache.py",
        "        torch.cuda.current_stream(copies[0].rows.device).synchronize()\n",
        "        pass\n",
        "test_order.py::test_a_media_cache_between_streams",
    ),
    Mutant(
        "small graphs are captured first",
        MANAGER,
        "for budget in limits.budgets[::-1]",
        "for budget in limits.budgets",
        "the pool takes more memory, which depends on how the allocator cuts blocks: `-m allocator` on a GPU",
    ),
    Mutant(
        "stages are timed without waiting",
        "trace.py",
        "        torch.cuda.synchronize(device)\n",
        "        pass\n",
        "only seconds change, and simulated work takes none",
    ),
]


def start(mutant: Mutant, quiet: bool = True) -> int:
    """Run the mutant's test in a forked process that has imported all but refvl; its exit status is pytest's."""
    source, target = mutant.source(), str(ROOT / "refvl" / mutant.file)
    child = os.fork()
    if child == 0:
        if quiet:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        get_code = SourceFileLoader.get_code

        def changed(loader, name):
            return compile(source, target, "exec") if loader.path == target else get_code(loader, name)

        SourceFileLoader.get_code = changed
        import pytest

        code = 2
        try:
            code = int(pytest.main([*OPTIONS, f"tests/cuda_sim/{mutant.test}"]))
        finally:
            os._exit(code)
    return child


def find_caught(mutants: list[Mutant], quiet: bool) -> set[str]:
    """The names of those whose test fails; as many run at once as there are processors."""
    caught, running = set[str](), dict[int, str]()
    for mutant in [*mutants, None]:
        while running and (mutant is None or len(running) >= (os.cpu_count() or 1)):
            child, status = os.wait()
            name = running.pop(child)
            if os.waitstatus_to_exitcode(status) == 1:
                caught.add(name)
        if mutant is not None:
            running[start(mutant, quiet)] = mutant.name
    return caught


def preload() -> None:
    import hypothesis
    import PIL.Image
    import pytest
    import tqdm.auto
    import transformers
    from torch.nn.attention import varlen

    transformers.AutoModel, transformers.AutoTokenizer, transformers.GenerationMixin, transformers.PreTrainedModel  # noqa: B018  # noqa: E501
    assert all((hypothesis, PIL.Image, pytest, tqdm.auto, varlen)) and "refvl" not in sys.modules


def choose(names: list[str]) -> list[Mutant]:
    """The mutants of these names, or of a range of numbers; ValueError if there are none."""
    part = re.fullmatch(r"(\d+)-(\d+)", " ".join(names))
    if part:
        chosen = MUTANTS[int(part[1]) - 1 : int(part[2])]
    else:
        chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if not chosen:
        raise ValueError(f"names: expected names of mutants or 1-{len(MUTANTS)}, got {names}")
    return chosen


def main(names: list[str]) -> int:
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    preload()
    chosen = choose(names)
    by_name = {mutant.name for mutant in chosen} == set(names)
    found = find_caught([mutant for mutant in chosen if mutant.is_visible], quiet=not by_name)
    missed = [mutant for mutant in chosen if mutant.name not in found]
    for mutant in missed:
        print(f"not caught: {mutant.name} ({'no test failed' if mutant.is_visible else mutant.test})", flush=True)
    caught = len(chosen) - len(missed)
    print(f"simulated CUDA: {caught} of {len(chosen)} planted bugs are caught", flush=True)
    return int(any(mutant.is_visible for mutant in missed) or (not names and caught < WANTED))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
