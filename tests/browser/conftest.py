"""A Chromium for the tests, a JupyterLab server, and a place for screenshots: outputs/browser/."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("anywidget")

from explorers_in import OUT

from refvl.paths import DATA

MINUTES = 60_000  # ms; on a busy machine JupyterLab takes some until it is there
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="session")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no browser: these tests need Chromium on the PATH (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="no browser: pip install -c constraints.txt '.[browser]'")
    OUT.mkdir(parents=True, exist_ok=True)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory, chromium):
    """A JupyterLab server of its own; returns its folder of notebooks and its address."""
    home, root = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebooks")
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none"},  # all cells stay on the page
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},  # nothing in front of it
    }
    for name, values in settings.items():
        file = home / "config/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    places["PYTHONPATH"] = str(DATA.parent)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", f"--port={port}", f"--notebook-dir={root}"]
    command += ["--IdentityProvider.token=", "--ServerApp.open_browser=False", "--allow-root"]
    with (OUT / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | places, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api/status")
        yield Lab(root, address, os.environ | places)
    finally:
        server.terminate()
        server.wait(120)


class Lab:
    def __init__(self, root: Path, address: str, environment: dict):
        self.root, self.address, self.environment = root, address, environment

    def open(self, browser, name: str):
        """A page with the notebook `name`, in a workspace of its own."""
        page = browser.new_context(viewport={"width": 1300, "height": 1000}).new_page()
        page.set_default_timeout(5 * MINUTES)
        page.goto(f"{self.address}/lab/workspaces/{name.removesuffix('.ipynb')}/tree/{name}?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        for _ in range(600):
            if self._is_ready(name):
                break
            page.wait_for_timeout(500)
        page.wait_for_timeout(2000)  # until the page has heard of it, too
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        return page

    def _is_ready(self, name: str) -> bool:
        """The notebook's kernel is idle and connected, says the server; the page's own sign comes too
        early.
        """
        with urllib.request.urlopen(f"{self.address}/api/sessions") as answer:
            kernels = [session["kernel"] for session in json.load(answer) if session["path"] == name]
        return any(kernel["execution_state"] == "idle" and kernel["connections"] for kernel in kernels)

    def trust(self, name: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "jupyter", "trust", name], cwd=self.root, env=self.environment, check=True
        )


def _wait_for(address: str, seconds: float = 180) -> None:
    for _ in range(int(seconds * 4)):
        try:
            with urllib.request.urlopen(address):
                return
        except OSError:
            time.sleep(0.25)
    raise TimeoutError(f"{address} did not answer; see {OUT / 'lab.log'}")
