"""The environment of programs that run with an image's content: nothing of the host's gets in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.ansible import _environment
from image_builder.system import process
from image_builder.verify import runner


def test_a_task_becomes_another_user_by_what_every_image_has(tmp_path: Path) -> None:
    found = _environment(tmp_path, [], [], tmp_path / "ansible.cfg", tmp_path / "bin/python")
    assert found["ANSIBLE_BECOME_METHOD"] == "su"
    assert found["PATH"].split(":")[0] == f"{tmp_path}/bin"


def test_a_verification_loads_no_plugins_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest reads this variable: https://docs.pytest.org/en/stable/reference/reference.html#environment-variables."""
    given: list[Any] = []

    def run(argv: object, *, env: dict[str, str], **_: object) -> process.Completed:
        given.append(env)
        raise InterruptedError

    monkeypatch.setattr(process, "run", run)
    with pytest.raises(InterruptedError):
        runner.observe_suite(
            "/", tmp_path / "facts.json", tmp_path, marker="offline", python=tmp_path, log=tmp_path / "log"
        )
    assert [env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] for env in given] == ["1"]
