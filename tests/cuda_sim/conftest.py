"""The simulated device as a fixture."""

import pytest
from simulated_cuda import simulated_cuda


@pytest.fixture
def machine():
    """One simulated GPU while the test lasts."""
    with simulated_cuda() as machine:
        yield machine
