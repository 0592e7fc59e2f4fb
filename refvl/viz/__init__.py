"""Figures: static `plot_*(..., ax=None) -> Axes` and interactive `explore_*(...)`. viz computes nothing itself."""
