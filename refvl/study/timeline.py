"""The times of operations on a device whose kernels one host launches, computed from launch costs, not measured."""

from collections.abc import Sequence


def launch_timeline(device_us: Sequence[float], launch_us: float) -> list[tuple[float, float]]:
    """Return the start and end of each operation on the device, in microseconds.

    Operations run in order, each one after its launch. device_us: the duration of each operation. launch_us: the host's
    time per launch; launches follow each other without gaps.
    """
    times, end = [], 0.0
    for number, duration in enumerate(device_us, 1):
        start = max(number * launch_us, end)
        end = start + duration
        times.append((start, end))
    return times
