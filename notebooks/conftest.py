"""Nobody waits long for a notebook: on a quiet machine of two cores each takes less than a minute.

`make test` allows three of processor time, which waiting for others does not stretch, but a slow or shared core does.
"""

import resource

import pytest

MOST = 180  # seconds
BEFORE = pytest.StashKey[float]()


def pytest_collection_modifyitems(items):
    """The last notebooks first: 13 trains models and takes longest, and nothing else should wait for it at the end."""
    items.sort(key=lambda item: item.name, reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of kernels that have ended
    seconds = used.ru_utime + used.ru_stime
    if call.when == "setup":
        item.stash[BEFORE] = seconds
    elif call.when == "call" and report.passed and (took := seconds - item.stash[BEFORE]) >= MOST:
        report.outcome, report.longrepr = "failed", f"{item.name}: {took:.0f} processor seconds, allowed are {MOST:.0f}"
    return report
