"""A pytest plugin that records which lines of refvl each test reaches: the map that `run.py` chooses tests by.

`run.py map` starts it as `-p lines`; MUTANTS_MAP names the folder that takes `lines*` (coverage's data) and
`tests*.json` (seconds and outcome of each test).
"""

import json
import os
import sys
from pathlib import Path

import coverage
import pytest
from hypothesis import settings

FOLDER = Path(os.environ["MUTANTS_MAP"])


class Lines:
    def __init__(self, config):
        self.worker = getattr(config, "workerinput", {}).get("workerid", "alone")
        self.coverage = coverage.Coverage(
            data_file=str(FOLDER / f"lines.{self.worker}"), source_pkgs=["refvl"], config_file=False
        )
        self.tests: dict[str, dict] = {}

    def pytest_collection_modifyitems(self, items):
        """Hypothesis with few examples: which lines are reached, not with which values."""
        for item in items:
            function = getattr(item, "obj", None)
            if getattr(function, "is_hypothesis_test", False):
                function = getattr(function, "__func__", function)
                few = settings(function._hypothesis_internal_use_settings, max_examples=3)
                function._hypothesis_internal_use_settings = few

    def pytest_collection_finish(self, session):
        """What a process imports before the first test, refvl and the tree's own modules left out."""
        root = str(session.config.rootpath)
        files = {name: str(getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())}
        names = [
            name for name, file in files.items() if file and ("site-packages" in file or not file.startswith(root))
        ]
        (FOLDER / "modules.json").write_text(json.dumps([name for name in names if name.split(".")[0] != "refvl"]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self):
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report):
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
        test["seconds"] += report.duration
        test["passed"] &= report.passed

    def pytest_sessionfinish(self):
        self.coverage.stop()
        self.coverage.save()
        (FOLDER / f"tests.{self.worker}.json").write_text(json.dumps(self.tests))


def pytest_configure(config):
    controls = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not controls:
        config.pluginmanager.register(Lines(config))
