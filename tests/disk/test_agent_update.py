"""An agent that is replaced while it runs goes on with its own code and tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from image_builder.node import files, zipapp

pytestmark = pytest.mark.root

# It imports a module and reads a table after it was told to go on.
MAIN = """
import importlib.resources, os, subprocess, sys
PADDING = {padding!r}
def main():
    print("started", flush=True)
    if sys.argv[1:]:
        return 0
    sys.stdin.readline()
    from image_builder.node import later
    print(later.VERSION, importlib.resources.files("image_builder.node").joinpath("table.json").read_text(), flush=True)
    pid = os.fork()
    if pid == 0:
        os.closerange(3, 256)  # as a check of the node's health does
        from image_builder.node import latest
        print(latest.VERSION, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    # As the GPU test starts its workers.
    return subprocess.run([sys.executable, "-I", later.__spec__.loader.archive, "worker"]).returncode
"""


def agent(package: Path, version: str, padding: str) -> bytes:
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(MAIN.format(padding=padding))
    (package / "table.json").write_text(version)
    for name in ("later", "latest"):
        (package / f"{name}.py").write_text(f"VERSION = {version!r}\n")
    return zipapp.compiled(zipapp.archive(package))


def test_a_replaced_agent_goes_on_with_its_own_files(tmp_path: Path) -> None:
    program = tmp_path / "node-agent"
    files.write(program, agent(tmp_path / "one", "one", ""), 0o755)
    with subprocess.Popen(
        [sys.executable, "-I", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as running:
        assert running.stdin and running.stdout
        assert running.stdout.readline() == "started\n"
        files.write(program, agent(tmp_path / "two", "two", os.urandom(3000).hex()), 0o755)
        rest, _ = running.communicate("go on\n", timeout=60)
    assert (running.returncode, rest.split()) == (0, ["one", "one", "one", "started"])
