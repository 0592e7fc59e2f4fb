"""Videos whose display matrix rotates or mirrors them, and FFmpeg's own filters as the oracle of what they show."""

import struct
from pathlib import Path

import numpy as np

UNITY = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
QUARTER_TURNS = [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)] + [(0, b, c, 0) for b in (1, -1) for c in (1, -1)]


def with_matrix(data: bytes, a: float, b: float, c: float, d: float) -> bytes:
    """An MP4 file that is shown by the matrix [a b; c d] in the header of its track."""
    at = data.index(UNITY, data.index(b"tkhd"))
    numbers = [int(65536 * x) for x in (a, b, 0, c, d, 0, 0, 0)]
    return data[:at] + struct.pack(">9i", *numbers, 1 << 30) + data[at + 36 :]


def shown_by_ffmpeg(path: Path) -> np.ndarray:
    """(T, H, W, 3): all frames through the filters that the program `ffmpeg`
    chooses for the matrix ("autorotate")."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return np.stack([_filtered(frame, stream, av.filter.Graph()) for frame in container.decode(stream)])


def _filtered(frame, stream, graph) -> np.ndarray:
    nodes = [graph.add_buffer(template=stream)]
    nodes += [graph.add(name, arguments) for name, arguments in _filters(frame)]
    nodes.append(graph.add("buffersink"))
    graph.link_nodes(*nodes).configure()
    graph.push(frame)
    return graph.pull().to_ndarray(format="rgb24")


def _filters(frame) -> list[tuple[str, str]]:
    """As `configure_input_video_filter` of ffmpeg chooses; the angle is libavutil's."""
    if "DISPLAYMATRIX" not in frame.side_data:
        return []
    matrix = np.frombuffer(frame.side_data["DISPLAYMATRIX"], np.int32)
    match 90 * round(-frame.rotation / 90) % 360:  # within a degree of a quarter turn
        case 90:
            return [("transpose", "cclock_flip" if matrix[3] > 0 else "clock")]
        case 180:
            return [("hflip", "")] * bool(matrix[0] < 0) + [("vflip", "")] * bool(matrix[4] < 0)
        case 270:
            return [("transpose", "clock_flip" if matrix[3] < 0 else "cclock")]
    return [("vflip", "")] * bool(matrix[4] < 0)
