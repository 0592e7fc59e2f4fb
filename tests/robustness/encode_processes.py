"""`refvl` in processes of its own."""

import os
import resource
import signal
import sys
import time
from itertools import count
from pathlib import Path

from forked import CONTEXT


def start(arguments, log: Path, **options):
    """A process that runs `refvl ARGUMENTS`, its output in `log`; options: see `_run`."""
    process = CONTEXT.Process(target=_run, args=([str(a) for a in arguments], log), kwargs=options, daemon=True)
    process.start()
    return process


def _run(
    arguments: list[str],
    log: Path,
    gate: Path | None = None,
    file_limit: int = -1,
    reader: bool = True,
    environment: dict[str, str] | None = None,
    errors: Path | None = None,
) -> None:
    """gate: a file that the third batch waits for; file_limit: bytes; reader: whether anybody reads the output.

    environment: variables beside those that there are; errors: where what goes to stderr is kept, if not in `log`.
    """
    import torch

    from refvl.model import VLM
    from refvl.tools.cli import main

    os.environ |= environment or {}
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell lets its background jobs ignore
    os.dup2(os.open(errors or log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if not reader:
        end, output = os.pipe()
        os.close(end)
    os.dup2(output, 1)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    encode, batches = VLM.encode, count(1)

    def wait_and_encode(*args, **kwargs):
        while next(batches) > 2 and gate is not None and not gate.exists():
            time.sleep(0.01)
        return encode(*args, **kwargs)

    VLM.encode = wait_and_encode  # type: ignore[method-assign]  # only in this process
    sys.argv = ["refvl", *arguments]
    main()


def wait_for(condition, process, seconds: float = 300) -> None:
    """Until `condition()` holds; fails when the process ends before."""
    until = time.monotonic() + seconds
    while not condition():
        assert process.is_alive() and time.monotonic() < until, "the process ended, or took too long"
        time.sleep(0.005)
