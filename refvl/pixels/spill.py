"""A temporary file for frames that are too large for memory; the system may drop its pages and read them again."""

import math
import os
import tempfile

import numpy as np


def frames_on_disk(shape: tuple[int, ...], what: str) -> np.ndarray:
    """Return an uninitialised uint8 array in a temporary file without a name. what: the video, for the error message.

    Raises OSError if the disk has too little space.
    """
    size = math.prod(shape)
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):  # so a full disk raises an error here instead of crashing a write
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
            return np.memmap(file, np.uint8, "r+", shape=shape)
    except OSError as error:
        where = tempfile.gettempdir()
        failed = f"cannot store {size:,} bytes of frames in {where} ({error.strerror})"
        raise OSError(f"{what}: {failed}; set TMPDIR to a different folder") from error
