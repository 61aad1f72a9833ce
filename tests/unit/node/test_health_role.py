"""The agent accepts what the node_health role writes, and what it refuses is reported before a bake."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, generate_ansible_template_vars, trust_as_template

from image_builder.node.errors import NodeError
from image_builder.node.health import application
from image_builder.node.health.settings import CHECKS, Settings, parse

ROLE = Path(__file__).resolve().parents[3] / "roles" / "node_health"


@cache
def role_file(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = DataLoader().load_from_file(str(ROLE / name), trusted_as_template=True)
    return loaded


def templar(**variables: Any) -> Templar:
    """Return a templar with the role's defaults, ``variables`` and the role's vars, lowest precedence first."""
    scope = {**role_file("defaults/main.yml"), **variables, **role_file("vars/main.yml")}
    return Templar(DataLoader(), scope)


def problems(**variables: Any) -> list[str]:
    text = trust_as_template("{{ __node_health_problems | to_json }}")
    found: list[str] = json.loads(templar(**variables).template(text))
    return [" ".join(words.split()) for words in found]


def rendered(name: str, **variables: Any) -> str:
    source = ROLE / "templates" / name
    engine = templar(**variables)
    extra = generate_ansible_template_vars(name, str(source))
    engine.available_variables = {**engine.available_variables, **extra}
    return str(engine.template(trust_as_template(source.read_text()), overrides={"trim_blocks": True}))


def test_agent_takes_what_the_role_writes() -> None:
    assert parse(json.loads(rendered("health.json.j2"))) == Settings()
    given: dict[str, Any] = {
        "node_health_registries": ["registry.test:443", "[2001:db8::1]:5000"],
        "node_health_intervals": {"gpu": 60},
        "node_health_severities": {"network.registry": "fail"},
        "node_health_condition": "",
        "node_health_kubeconfig": "",
        "node_health_imds": "",
    }
    assert problems(**given) == []
    found = parse(json.loads(rendered("health.json.j2", **given)))
    assert found.registries == ("registry.test:443", "[2001:db8::1]:5000")
    assert found.intervals["gpu"] == 60 and found.intervals["nvme"] == 600
    assert found.condition == found.imds == found.kubeconfig == ""


def test_endpoint_takes_what_the_role_writes() -> None:
    written = json.loads(rendered("health-endpoint.json.j2"))
    assert application.parse(written) == application.Settings()
    given = {
        "node_health_endpoint_port": 8080,
        "node_health_endpoint_phases": 4,
        "node_health_interval_minutes": 5,
    }
    found = application.parse(json.loads(rendered("health-endpoint.json.j2", **given)))
    assert (found.port, found.phases, found.stale_seconds) == (8080, 4, 1020)
    with pytest.raises(
        NodeError,
        match='oops is not a known key; phases must be at least 1, not 0; port must be an integer, not "x"',
    ):
        application.parse({"port": "x", "oops": 1, "phases": 0})


def test_timer_has_the_declared_interval() -> None:
    lines = rendered("node-health.timer.j2", node_health_interval_minutes=5).splitlines()
    assert "OnCalendar=*:0/5" in lines and "RandomizedDelaySec=299" in lines


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "thresholds": ({"full_warn_percent": 99}, "must not be above node_health_full_fail_percent"),
    "path": ({"paths": ["/", "mnt"]}, "mnt is not an absolute path"),
    "endpoint": ({"registries": ["registry.test"]}, "registry.test is not HOST:PORT"),
    "severity": ({"severities": {"network.dns": "bad"}}, "ignore, warn, fail"),
    "low port": ({"endpoint_port": 80}, "1024 to 65535"),
    "no phase": ({"endpoint_phases": 0}, "at least 1"),
    "no lease": ({"endpoint_lease_seconds": 0}, "at least 1"),
    "fewer than none": ({"endpoint_idle_gpu_users": -1}, "at least 0"),
    "check": ({"intervals": {"disk": 60}}, "there is no check disk"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_wrong_definitions_are_told(given: dict[str, Any], words: str) -> None:
    (found,) = problems(**{f"node_health_{name}": value for name, value in given.items()})
    assert words in found


def test_role_knows_every_check() -> None:
    assert set(role_file("vars/main.yml")["__node_health_names"]) == set(CHECKS)
