"""Where the repository keeps its data: pictures, clips, the tiny checkpoints, configs, measurements."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
