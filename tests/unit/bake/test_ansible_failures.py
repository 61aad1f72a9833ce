"""What a failed task says: recorded events of ansible-runner, with what no task may leave out or let out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from image_builder.bake import ansible

HIDDEN = "the output has been hidden due to the fact that 'no_log: true' was specified for this result"
FAILED = {"msg": "non-zero return code", "stdout": "out", "stderr": "err"}


def _event(module: str, **result: Any) -> dict[str, Any]:
    resolved = f"ansible.builtin.{module}"
    return {"task": "t", "resolved_action": resolved, "task_path": "/r.yml:3", "res": result}


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (_event("command", rc=1, cmd=["/bin/false", "a b"], **FAILED), "exit status 1: /bin/false 'a b'"),
        (_event("shell", rc=7, cmd="echo hi; exit 7", **FAILED), "exit status 7: echo hi; exit 7"),
        (_event("apt", rc=100, **FAILED), "exit status 100"),
        (_event("command", rc=-9, cmd=["sleep", "9"], **FAILED), "exit status -9: sleep 9"),
    ],
    ids=["command", "shell", "module", "signal"],
)
def test_a_failed_program_is_named_with_its_status(event: dict[str, Any], line: str) -> None:
    assert ansible._failure(event).splitlines() == ["task 't' (/r.yml:3)", line, FAILED["msg"], "err", "out"]


TASKS = """
- block:
    - name: Raw
      ansible.builtin.raw: exit {{ code }}
    - raw: |
        exit 4
    - name: Script
      script: {cmd: s.sh arg}
    - raw: !vault |
        $ANSIBLE_VAULT;1.1;AES256
        6162
    - action: raw x
"""


@pytest.mark.parametrize(
    ("module", "line", "command"),
    [
        ("raw", 3, ": exit {{ code }}"),
        ("raw", 5, ": exit 4"),
        ("script", 7, ": s.sh arg"),
        ("raw", 9, ""),
        ("raw", 12, ""),
        ("raw", 99, ""),
    ],
)
def test_what_results_leave_out_is_read_from_the_tasks_file(
    tmp_path: Path, module: str, line: int, command: str
) -> None:
    file = tmp_path / "main.yml"
    file.write_text(TASKS)
    event = {**_event(module, rc=3, **FAILED), "task_path": f"{file}:{line}"}
    assert ansible._failure(event).splitlines()[1] == f"exit status 3{command}"
    file.unlink()
    assert ansible._failure(event).splitlines()[1] == "exit status 3"


def test_no_arguments_of_tasks_are_printed(tmp_path: Path) -> None:
    """Ansible decrypts those that are vaulted before it prints them."""
    made = ansible._environment(tmp_path, [], [], tmp_path / "ansible.cfg", Path("/usr/bin/python3"))
    assert made["ANSIBLE_DISPLAY_ARGS_TO_STDOUT"] == "false"


def test_each_failed_item_of_a_loop_is_named() -> None:
    good = {"rc": 0, "cmd": ["true"], "item": "a", "failed": False}
    bad = {"rc": 4, "cmd": ["sh", "-c", "exit 4"], "item": "b", "failed": True, "msg": "no"}
    event = _event("command", msg="One or more items failed", results=[good, bad])
    assert ansible._failure(event).splitlines()[1:] == [
        "One or more items failed",
        "b: exit status 4: sh -c 'exit 4'; no",
    ]


@pytest.mark.parametrize("module", ["command", "raw"])
def test_what_no_log_hides_stays_hidden(module: str) -> None:
    assert ansible._failure(_event(module, censored=HIDDEN)).splitlines() == ["task 't' (/r.yml:3)"]
    event = _event(module, msg="One or more items failed", results=[{"failed": True, "censored": HIDDEN}])
    assert "exit status" not in ansible._failure(event)
