"""`make test` holds each notebook to a minute, in processor time of its kernel, which waiting for others does not
stretch. Sharing a core does: two threads of one core each get a little more than half of it."""

import resource

import pytest

MOST = 60 / 0.6  # seconds, where both threads of a core are busy
BEFORE = pytest.StashKey[float]()


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
