"""Figures are drawn without a screen, and closed after each test."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def ax():
    """Axes for one figure."""
    return plt.subplots(figsize=(6, 5))[1]
