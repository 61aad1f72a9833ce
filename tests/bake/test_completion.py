"""Shells complete what is typed: bash, zsh and fish at a terminal, set up as docs/how-to/install.md describes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from image_builder.settings import LAUNCHER, REPO_ROOT

pytestmark = pytest.mark.root

# First for every shell, then for zsh.
SET_UP = re.findall(
    "^```sh\n(.*)\n```$",
    (REPO_ROOT / "docs/how-to/install.md").read_text().partition("\n## Shell completion\n")[2],
    re.MULTILINE,
)
INVENTORY = """\
images:
  hosts:
    alpha:
hosts_of_ours:
  hosts:
    node-1:
"""
TYPED = {
    "image-builder val": "image-builder validate",
    "image-builder init --ci az": "image-builder init --ci azure",
    "image-builder --annotations gi": "image-builder --annotations github",
    "image-builder build --lock": "image-builder build --locked",
    "image-builder build mini": "image-builder build minimal",
    "image-builder build -i inven": "image-builder build -i inventory.yml",
    "image-builder build -i inventory.yml al": "image-builder build -i inventory.yml alpha",
    "image-builder pool plan -i inventory.yml hosts": "image-builder pool plan -i inventory.yml hosts_of_ours",
    "image-builder pool render -i inventory.yml no": "image-builder pool render -i inventory.yml node-1",
}
TAB, HOME, END, ENTER = "\t", "\x01", "\x05", "\r"


class Shell(NamedTuple):
    """An interactive shell at a terminal, with a home directory of its own."""

    process: subprocess.Popen[str]
    home: Path

    def type(self, keys: str) -> None:
        """Type keys."""
        assert self.process.stdin
        self.process.stdin.write(keys)
        self.process.stdin.flush()

    def wait_for(self, file: str) -> str:
        """Return what a command wrote to a file in the home directory."""
        deadline = time.monotonic() + 120
        while not (text := (self.home / file).read_text() if (self.home / file).exists() else ""):
            assert self.process.poll() is None and time.monotonic() < deadline, f"{file} remains empty"
            time.sleep(0.05)
        return text


@contextmanager
def interactive(shell: str, home: Path) -> Iterator[Shell]:
    """Start a shell that ends with the block."""
    environment = {"HOME": os.fspath(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "TERM": "xterm"}
    with subprocess.Popen(
        ["script", "--quiet", "--return", "--command", f"{shell} -i", "/dev/null"],
        cwd=home,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        running = Shell(process, home)
        running.type(f"echo ready >ready{ENTER}")
        running.wait_for("ready")
        yield running
        (home / "ready").unlink()
        running.type(f"exit{ENTER}")


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zsh", "fish"))]
)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/image-builder").symlink_to(LAUNCHER)
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    # Otherwise, zsh asks a new user questions, and fish reads all manual pages in the background.
    (tmp_path / ".zshrc").touch()
    (tmp_path / ".local/share/fish/generated_completions").mkdir(parents=True)
    with interactive(shell, tmp_path) as first:
        for command in SET_UP if shell == "zsh" else SET_UP[:1]:
            first.type(f"{command}{ENTER}")
        first.type(f"echo done >installed{ENTER}")
        first.wait_for("installed")
    with interactive(shell, tmp_path) as second:
        lines = {}
        for number, line in enumerate(TYPED):
            second.type(f"{line}{TAB}{HOME}echo {END} >line{number}{ENTER}")
            lines[line] = second.wait_for(f"line{number}").rstrip()
    assert lines == TYPED
