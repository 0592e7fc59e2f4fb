"""Tables for the command line."""

from rich.table import Table


def stage_table(run) -> Table:
    """Return a `Trace` as a table of stages, shapes and seconds."""
    table = Table("stage", "shapes", title="the path")
    table.add_column("max |x|", justify="right")
    table.add_column("seconds", justify="right")
    for stage, shapes, seconds in run.rows():
        table.add_row(stage, shapes, run.magnitude(stage), f"{seconds:.4f}")
    return table
