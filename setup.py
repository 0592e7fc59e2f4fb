"""A wheel carries the course: shipped models, images, videos and notebooks, as refvl/course (`refvl.paths`)."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCourse(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("data", "notebooks"):
                ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".progress")
                shutil.copytree(name, Path(self.build_lib, "refvl/course", name), ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithCourse})
