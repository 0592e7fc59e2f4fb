"""`make test` runs each notebook within a minute: of processor time of its kernel, which other programs do not stretch,
and which on one thread is the time that passes where nothing else runs."""

import resource

import pytest

MOST = 60  # seconds
BEFORE = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of kernels that have ended
    seconds = used.ru_utime + used.ru_stime
    if call.when == "setup":
        item.stash[BEFORE] = seconds
    elif call.when == "call" and report.passed and (took := seconds - item.stash[BEFORE]) >= MOST:
        report.outcome, report.longrepr = "failed", f"{item.name}: {took:.0f} processor seconds, allowed are {MOST}"
    return report
