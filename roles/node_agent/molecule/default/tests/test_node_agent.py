"""The role's effect on a host, seen by the program itself."""

from __future__ import annotations

import json
from typing import Any

PROGRAM = "/usr/local/sbin/node-agent"


def test_program_runs(host: Any) -> None:
    file = host.file(PROGRAM)
    assert (file.user, file.mode) == ("root", 0o755)
    assert "promote" in host.check_output(f"{PROGRAM} --help")


def test_status_of_a_host_that_was_not_booted(host: Any) -> None:
    done = host.run(f"{PROGRAM} status --json")
    assert done.rc == 1
    assert json.loads(done.stdout)["ready"] is False


def test_program_is_compiled(host: Any) -> None:
    listed = host.check_output(f"python3 -m zipfile -l {PROGRAM}")
    assert "image_builder/node/store.pyc" in listed
