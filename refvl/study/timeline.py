"""When operations run on a device that one host feeds: by launch costs, not measured."""

from collections.abc import Sequence


def launch_timeline(device_us: Sequence[float], launch_us: float) -> list[tuple[float, float]]:
    """Return when each operation starts and ends on the device, in microseconds: in order, and not before its launch.

    device_us: how long each operation runs. launch_us: the host's time per launch; it launches one after the other.
    """
    times, end = [], 0.0
    for number, duration in enumerate(device_us, 1):
        start = max(number * launch_us, end)
        end = start + duration
        times.append((start, end))
    return times
