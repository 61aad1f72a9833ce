"""The documented way to run slices as a Kubernetes Job: its commands and its Job, without a cluster.

The run itself boots a machine and takes ten minutes: `.venv/bin/python -m tests.e2e.slices`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support import slices_howto

pytestmark = pytest.mark.root


def test_the_documented_commands_are_shell(tmp_path: Path) -> None:
    """The Job has an index for each slice, and their Secret."""
    start, take_in = slices_howto.commands()
    for text in (start, take_in):
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    (tmp_path / "job.yaml").write_text(slices_howto.manifest())
    for name in ("0", "1", "2"):
        (tmp_path / "slices" / name).mkdir(parents=True)
    (line,) = (line for line in start.splitlines() if line.strip().startswith("sed "))
    script = line.rpartition("|")[0]
    done = subprocess.run(["sh", "-euc", script], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    job = yaml.safe_load(done.stdout)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    volumes = job["spec"]["template"]["spec"]["volumes"]
    (secret,) = (volume["secret"]["secretName"] for volume in volumes if "secret" in volume)
    assert f"create secret generic {secret} " in start and f"delete secret {secret}" in take_in
