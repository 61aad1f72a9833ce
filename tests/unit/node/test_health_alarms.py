"""Alarms: when a finding counts, when Kubernetes is told, and what is remembered. Decisions without a clock."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.definition.engine import Evaluator
from image_builder.node.errors import NodeError
from image_builder.node.health import alarms, command, memory, report
from image_builder.node.health import settings as health_settings
from image_builder.node.health.alarms import Alarm
from image_builder.node.health.model import Finding, Outcome, Sample
from image_builder.node.health.settings import Settings, endpoint, parse

REPO = Path(__file__).resolve().parents[3]
SETTINGS = Settings()
PATIENT = Finding("network.route", "default", "fail", "there is no default route", patient=True)
AT_ONCE = Finding("filesystem.read-only", "/", "fail", "/: read-only", action="replace")
WARNING = Finding("network.api", "192.0.2.1:6443", "warn", "refused", patient=True)


class Node:
    """A node that looks once a minute, as the timer does, and counts its patches to Kubernetes."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings, self.now, self.patches = settings, 0.0, 0
        self.alarms: tuple[Alarm, ...] = ()
        self.reported = report.Reported()

    def look(self, *found: Finding, could_look: bool = True) -> str:
        self.now += 60
        looked = {"check": found} if could_look else {}
        self.alarms = alarms.step(self.alarms, looked, self.now, self.now, self.settings)
        current = report.condition(alarms.counting(self.alarms), "boot", "")
        if report.due(self.reported, current, "", "", self.now):
            self.patches += 1
            self.reported = report.after_success(current, "", "", "", self.now)
        return alarms.state(self.alarms)


def test_what_may_pass_counts_when_it_stays() -> None:
    node = Node()
    assert [node.look(PATIENT) for _ in range(3)] == ["ok", "ok", "failed"]
    node = Node()
    assert [node.look(PATIENT), node.look(PATIENT), node.look(), node.look(PATIENT)] == ["ok"] * 4


def test_what_can_t_pass_counts_at_once_and_is_over_after_a_while() -> None:
    node = Node()
    assert node.look(AT_ONCE) == "failed"
    assert [node.look() for _ in range(5)] == ["failed"] * 4 + ["ok"]
    assert node.patches == 2


def test_a_check_that_can_t_look_changes_nothing() -> None:
    node = Node()
    node.look(AT_ONCE)
    assert [node.look(could_look=False) for _ in range(100)] == ["failed"] * 100
    assert node.look() == "ok" and node.patches == 2


def test_flapping_is_told_a_few_times_an_hour() -> None:
    """A finding that comes and goes, in any pattern, causes at most 4 patches an hour, however fast it flaps."""
    for period in range(2, 40):
        node = Node()
        first = 0
        for minute in range(24 * 60):
            node.look(*([AT_ONCE] if minute % period < max(1, period // 2) else []))
            first = node.patches if minute == 120 else first
        assert first <= 9, f"every {period} minutes: {first} patches in two hours"
        assert node.patches <= 24 * 4, f"every {period} minutes: {node.patches} patches a day"


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_bounded_and_what_stays_is_always_told(seed: int) -> None:
    chance = random.Random(seed)
    node = Node()
    for _ in range(24 * 60):
        node.look(*([AT_ONCE] if chance.random() < 0.2 else []))
    assert node.patches <= 60
    for _ in range(3):
        node.look(AT_ONCE)
    assert node.reported.status == "False"
    for _ in range(61):
        node.look()
    assert node.reported.status == "True"


def test_message_alone_is_no_change() -> None:
    node = Node()
    for percent in range(97, 100):
        node.look(replace(AT_ONCE, detail=f"/ is {percent}% full"))
    assert node.patches == 1


def test_warnings_are_not_told_to_kubernetes() -> None:
    node = Node()
    node.look()
    assert [node.look(WARNING) for _ in range(5)][-1] == "degraded"
    assert node.patches == 1 and node.reported.status == "True"


def test_settings_weigh_findings() -> None:
    node = Node(Settings(severities={"network.api": "fail", "filesystem.read-only": "ignore"}))
    for _ in range(3):
        node.look(WARNING, AT_ONCE)
    assert [one.finding.code for one in alarms.counting(node.alarms)] == ["network.api"]
    assert node.reported == report.Reported("False", "NetworkApi", codes=("network.api",), sent=180.0)


def test_disabled_check_takes_its_alarms_along() -> None:
    node = Node()
    node.look(AT_ONCE)
    node.settings = Settings(disabled=("check",))
    assert node.look(could_look=False) == "ok"


def test_reference_lists_every_metric_code_and_setting() -> None:
    text = (REPO / "docs/reference/node-health.md").read_text(encoding="utf-8")
    assert [name for name in report.HELP if f"`node_health_{name}`" not in text] == []
    source = "".join(path.read_text() for path in (REPO / "image_builder/node/health").glob("*.py"))
    codes = set(
        re.findall(
            r'"((?:filesystem|drive|array|network|clock|maintenance|gpu|infiniband)\.[a-z-]+)"', source
        )
    )
    assert len(codes) > 20
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []
    assert [name for name in Settings.__dataclass_fields__ if f"`{name}`" not in text] == []


def state(alarm: Alarm) -> memory.Memory:
    last = memory.after(
        memory.Last(), Outcome((AT_ONCE,), (Sample("state", 1, {"a": "b"}),), {"n": [1]}), 1.0, 2.0, 0.5
    )
    return memory.Memory("boot", {"check": last}, (alarm,), report.Reported("True", "X", 2, 5.0))


def test_memory_survives_json(tmp_path: Path) -> None:
    known = state(Alarm("check", AT_ONCE, 2, 3.0, (1.0, 2.0), 9.0))
    (tmp_path / "x").write_text(json.dumps(memory.as_json(known)))
    assert memory.load(tmp_path / "x", "boot") == (known, "")
    assert memory.load(tmp_path / "x", "next boot") == (memory.Memory("next boot"), "")
    assert memory.load(tmp_path / "none", "boot") == (memory.Memory("boot"), "")


def test_damaged_memory_is_none_and_is_told(tmp_path: Path) -> None:
    whole = json.dumps(memory.as_json(state(Alarm("check", AT_ONCE, 2, 3.0, (1.0,), 9.0))))
    path = tmp_path / "x"
    damaged: Sequence[str] = [
        *(whole[:cut] for cut in range(0, len(whole), 7)),
        "[]",
        "null",
        whole.replace('"alarms": [', '"alarms": [1, '),
        whole.replace('"samples": [', '"samples": [{"nonsense": 1}, '),
        whole.replace('"reported": {', '"reported": {"nonsense": 1, '),
    ]
    for text in damaged:
        path.write_text(text)
        found, trouble = memory.load(path, "boot")
        assert found == memory.Memory("boot") and "damaged" in trouble, text
    path.write_bytes(b"\xff\xfe\x00")
    assert "damaged" in memory.load(path, "boot")[1]


def test_slow_checks_wait_for_their_turn() -> None:
    assert command.is_due(memory.Last(), 600.0, 0.0)
    last = memory.Last(at=100.0)
    assert not command.is_due(last, 600.0, 690.0) and command.is_due(last, 600.0, 696.0)
    assert command.is_due(last, 0.0, 101.0)
    assert not command.is_due(replace(last, not_before=500.0), 0.0, 400.0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "check": ({"disabled": ["disk"]}, "disabled[0] must be one of the checks"),
    "interval": ({"intervals": {"gpu": -1}}, "intervals.gpu must be 0 to 86400, not -1"),
    "interval of nothing": ({"intervals": {"disk": 1}}, "intervals.disk must be one of the checks"),
    "code": ({"severities": {"dns": "warn"}}, "severities.dns must be a code"),
    "relative": ({"paths": ["mnt"]}, 'paths[0] must be an absolute path, not "mnt"'),
    "thresholds": ({"full_warn_percent": 98}, "full_warn_percent must be 1 to full_fail_percent"),
    "port": ({"registries": ["registry.test"]}, 'registries[0] must be HOST:PORT, not "registry.test"'),
    "number": ({"raise_looks": 0}, "raise_looks must be at least 1, not 0"),
    "https": ({"imds": "https://x"}, "imds must be an http address"),
    "name": ({"names": ["a..b"]}, "names[0] must be of letters"),
    "condition": ({"condition": "Node Healthy"}, "condition must be of letters"),
}


@pytest.mark.parametrize(("found", "words"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(found: dict[str, Any], words: str) -> None:
    with pytest.raises(NodeError) as caught:
        parse(found)
    assert caught.value.code == "settings" and words in caught.value.message


def test_endpoints() -> None:
    assert endpoint("registry.test:5000") == ("registry.test", 5000)
    assert endpoint("[2001:db8::1]:443") == ("2001:db8::1", 443)
    assert endpoint("192.0.2.1:6443") == ("192.0.2.1", 6443)
    for wrong in (
        "registry.test",
        "registry.test:0",
        "registry.test:70000",
        "registry.test:²",
        "[x]:1",
        "a b:1",
        ":1",
        "2001:db8::1:443",
    ):
        assert endpoint(wrong) is None, wrong


def test_role_writes_the_agents_names_and_defaults() -> None:
    role = REPO / "roles/node_health"
    names = yaml.safe_load((role / "vars/main.yml").read_text())["__node_health_settings"]
    assert set(Settings.__dataclass_fields__) - set(names) == {"node_name", "connect_seconds"}
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    evaluate = Evaluator(defaults).evaluate
    assert parse({name: evaluate(defaults[f"node_health_{name}"]) for name in names}) == Settings()


def test_every_check_has_an_interval_and_a_choice_in_the_role() -> None:
    assert set(command.checks()) == set(health_settings.CHECKS) == set(Settings().intervals)
    specs = yaml.safe_load((REPO / "roles/node_health/meta/argument_specs.yml").read_text())
    options = specs["argument_specs"]["main"]["options"]
    assert set(options["node_health_disabled"]["choices"]) == set(health_settings.CHECKS)
