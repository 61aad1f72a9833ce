"""A play's watch: what it shows while a task runs, and when it ends a play; the environment of plays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import image_builder.bake.ansible as plays
from image_builder.definition import engine

MINUTE = 60.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_tasks_minutes_are_shown_once_each(clock: Clock) -> None:
    shown: list[str] = []
    watch = plays.Watch(shown.append, 60, clock)
    watch.start("apt: Install")
    for _ in range(14):
        clock.now += 10
        assert not watch.is_over()
    watch.start("next")
    clock.now += 59
    assert not watch.is_over()
    assert shown == ["apt: Install", "apt: Install (1 min)", "apt: Install (2 min)", "next"]


def test_a_play_that_hangs_is_ended(clock: Clock) -> None:
    watch = plays.Watch(lambda _: None, 2, clock)
    watch.start("Compile")
    clock.now += 2 * MINUTE
    watch.hear("ASYNC POLL on node")
    clock.now += 2 * MINUTE
    assert not watch.is_over() and not watch.end
    clock.now += 1
    assert watch.is_over()
    assert "'Compile'" in watch.end and "2:01 min" in watch.end
    assert "--idle-limit" in str(watch.hint)


def test_a_play_that_hangs_before_its_first_task_is_ended(clock: Clock) -> None:
    watch = plays.Watch(lambda _: None, 0.5, clock)
    clock.now += 31
    assert watch.is_over()


@pytest.mark.parametrize(
    "said",
    [
        "[WARNING]: Not waiting for response to prompt as stdin is not interactive",
        "[WARNING]: Not prompting as we are not in interactive mode",
    ],
)
def test_a_play_that_asks_is_ended(clock: Clock, said: str) -> None:
    watch = plays.Watch(lambda _: None, 60, clock)
    watch.start("Ask")
    watch.hear(f'ok: [node] => {{"msg": "{said}"}}')
    assert not watch.is_over()
    watch.hear(f"\n{said}")
    assert watch.is_over()
    assert "asked a question in task 'Ask'" in watch.end


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        ("object of type 'dict' has no attribute 'memtotal_mb'", "ansible_memtotal_mb"),
        ("'ansible_memtotal_mb' is undefined", "ansible_memtotal_mb"),
        ("object of type 'dict' has no attribute 'other'", None),
        ("'mount_points' is undefined", "mount_points"),
    ],
)
def test_a_withheld_fact_has_a_hint(tmp_path: Path, failure: str, name: str | None) -> None:
    withheld = tmp_path / "withheld"
    assert plays._hint([failure], withheld) is None
    withheld.write_text("ansible_memtotal_mb\nmount_points\n")
    hint = plays._hint(["task 'a'", failure], withheld)
    assert (hint is None) if name is None else (name in str(hint))


def test_plugins_are_those_that_the_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "ansible.cfg"
    config.write_text(f"[defaults]\nfilter_plugins = {tmp_path / 'mine'}\n")
    monkeypatch.setenv("ANSIBLE_LOOKUP_PLUGINS", "/planted")
    found = engine.plugin_settings(config, Path("/nowhere"))
    assert found.pop("ANSIBLE_FILTER_PLUGINS") == str(tmp_path / "mine")
    assert {
        "ANSIBLE_ACTION_PLUGINS",
        "ANSIBLE_LIBRARY",
        "ANSIBLE_MODULE_UTILS",
        "ANSIBLE_LOOKUP_PLUGINS",
    } <= found.keys()
    assert set(found.values()) == {"/nowhere"}


def test_a_play_gets_nothing_of_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are compared, so that a new one of ansible-runner's or ours is noticed here."""
    planted = {"PYTHONPATH": "/planted", "SITE_TOKEN": "hunter2", "AWX_LIB_DIRECTORY": "/planted"}
    for name, value in {**planted, "ANSIBLE_FILTER_PLUGINS": "/planted", "SSH_AUTH_SOCK": "/planted"}.items():
        monkeypatch.setenv(name, value)
    made = plays._environment(
        tmp_path, [tmp_path], [tmp_path], tmp_path / "ansible.cfg", Path("/usr/bin/python3")
    )
    assert "/planted" not in str(made) and "hunter2" not in str(made)
    config = plays._configuration(tmp_path / "play.yml", [], tmp_path, made, Path("/usr/bin/python3"))
    assert config.env.keys() == made.keys() | {"ANSIBLE_STDOUT_CALLBACK", "AWX_ISOLATED_DATA_DIR"}
    assert "/planted" not in str(config.env) and "hunter2" not in str(config.env)
    assert os.environ["SITE_TOKEN"] == "hunter2"
