"""The program as a wheel, and as installed from it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from image_builder.settings import PROJECT_VARIABLE, REPO_ROOT


def build_wheel(folder: Path) -> Path:
    """Build the wheel in a folder, with the build backend of the configured package index."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPO_ROOT], check=True)
    (wheel,) = folder.glob("image_builder-*.whl")
    return wheel


@dataclass(frozen=True)
class Installed:
    """A venv that contains only the wheel and its requirements."""

    venv: Path

    @property
    def program(self) -> Path:
        """Return the command's path."""
        return self.venv / "bin/image-builder"

    @property
    def root(self) -> Path:
        """Return the folder with the files of a checkout."""
        return next(self.venv.glob("lib/python3*/site-packages/image-builder"))

    def run(
        self, *argv: str | Path, cwd: Path, prefix: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command in a directory, through ``prefix``, with these variables added."""
        environment = {name: value for name, value in os.environ.items() if name != PROJECT_VARIABLE}
        return subprocess.run(
            [*prefix, self.program, *argv],
            cwd=cwd,
            env={**environment, "CI": "true", **variables},
            capture_output=True,
            text=True,
            check=False,
        )


def install(wheel: Path, venv: Path) -> Installed:
    """Install a wheel and its requirements into a new venv."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin/pip", "--disable-pip-version-check", "install", "--quiet", wheel], check=True)
    return Installed(venv)
