"""What a failed task says: recorded events of ansible-runner, with what no task may leave out or let out."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.bake import ansible

HIDDEN = "the output has been hidden due to the fact that 'no_log: true' was specified for this result"
FAILED = {"msg": "non-zero return code", "stdout": "out", "stderr": "err"}


def _event(module: str, arguments: str, **result: Any) -> dict[str, Any]:
    resolved = f"ansible.builtin.{module}"
    return {
        "task": "t",
        "resolved_action": resolved,
        "task_path": "/r.yml:3",
        "task_args": arguments,
        "res": result,
    }


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (_event("command", "", rc=1, cmd=["/bin/false", "a b"], **FAILED), "exit status 1: /bin/false 'a b'"),
        (_event("shell", "", rc=7, cmd="echo hi; exit 7", **FAILED), "exit status 7: echo hi; exit 7"),
        (_event("raw", "_raw_params=exit 3", rc=3, **FAILED), "exit status 3: exit 3"),
        (_event("script", "_raw_params=s.sh arg", rc=6, **FAILED), "exit status 6: s.sh arg"),
        (_event("apt", "name=['x']", rc=100, **FAILED), "exit status 100"),
        (_event("command", "", rc=-9, cmd=["sleep", "9"], **FAILED), "exit status -9: sleep 9"),
    ],
    ids=["command", "shell", "raw", "script", "module", "signal"],
)
def test_a_failed_program_is_named_with_its_status(event: dict[str, Any], line: str) -> None:
    assert ansible._failure(event).splitlines() == ["task 't' (/r.yml:3)", line, FAILED["msg"], "err", "out"]


def test_each_failed_item_of_a_loop_is_named() -> None:
    good = {"rc": 0, "cmd": ["true"], "item": "a", "failed": False}
    bad = {"rc": 4, "cmd": ["sh", "-c", "exit 4"], "item": "b", "failed": True, "msg": "no"}
    event = _event("command", "", msg="One or more items failed", results=[good, bad])
    assert ansible._failure(event).splitlines()[1:] == [
        "One or more items failed",
        "b: exit status 4: sh -c 'exit 4'; no",
    ]


@pytest.mark.parametrize("module", ["command", "raw"])
def test_what_no_log_hides_stays_hidden(module: str) -> None:
    assert ansible._failure(_event(module, HIDDEN, censored=HIDDEN)).splitlines() == ["task 't' (/r.yml:3)"]
    event = _event(
        module, HIDDEN, msg="One or more items failed", results=[{"failed": True, "censored": HIDDEN}]
    )
    assert "exit status" not in ansible._failure(event)
