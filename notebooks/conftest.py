"""A limit on the CPU time of each notebook; a notebook takes less than a minute on a quiet machine with two cores.

The tests allow three minutes of CPU time, because a slow or shared core takes longer. Waiting for other processes
does not count.
"""

import resource

import pytest
from nbclient import NotebookClient

NotebookClient.shutdown_kernel.default_value = "immediate"  # a regular exit takes three seconds, because of torch
MOST = 180  # seconds
BEFORE = pytest.StashKey[float]()


def pytest_collection_modifyitems(items):
    """Run notebooks before tests, in reverse order: notebook 13 trains models, so it must not
    be the last to run.
    """
    items.sort(key=lambda item: item.name if item.path.suffix == ".ipynb" else "", reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # by kernels that have ended
    seconds = used.ru_utime + used.ru_stime
    if call.when == "setup":
        item.stash[BEFORE] = seconds
    elif call.when == "call" and report.passed and (took := seconds - item.stash[BEFORE]) >= MOST:
        report.outcome, report.longrepr = "failed", f"{item.name}: {took:.0f} s of CPU time; the limit is {MOST:.0f} s"
    return report
