"""The simulated device as a fixture."""

import pytest
from simulated_cuda import simulated_cuda


@pytest.fixture
def machine(monkeypatch):
    """One simulated GPU while the test lasts."""
    with simulated_cuda() as machine:
        yield machine
        monkeypatch.undo()  # here: later it would bring functions of this machine back
