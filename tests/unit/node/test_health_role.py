"""The agent accepts what the node_health role writes, and what it refuses is reported before a bake."""

from __future__ import annotations

import json
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.health import application
from image_builder.node.health.settings import Settings, parse
from tests.support.roles import templates

ROLE = "node_health"


def problems(**variables: Any) -> list[str]:
    found: list[str] = templates.value(ROLE, "__node_health_problems", **variables)
    return [" ".join(words.split()) for words in found]


def test_agent_takes_what_the_role_writes() -> None:
    assert parse(json.loads(templates.render(ROLE, "health.json.j2"))) == Settings()
    given: dict[str, Any] = {
        "node_health_registries": ["registry.test:443", "[2001:db8::1]:5000"],
        "node_health_intervals": {"gpu": 60},
        "node_health_severities": {"network.registry": "fail"},
        "node_health_condition": "",
        "node_health_kubeconfig": "",
        "node_health_imds": "",
    }
    assert problems(**given) == []
    found = parse(json.loads(templates.render(ROLE, "health.json.j2", **given)))
    assert found.registries == ("registry.test:443", "[2001:db8::1]:5000")
    assert found.intervals["gpu"] == 60 and found.intervals["nvme"] == 600
    assert found.condition == found.imds == found.kubeconfig == ""


def test_endpoint_takes_what_the_role_writes() -> None:
    written = json.loads(templates.render(ROLE, "health-endpoint.json.j2"))
    assert application.parse(written) == application.Settings()
    given = {
        "node_health_endpoint_port": 8080,
        "node_health_endpoint_phases": 4,
        "node_health_interval_minutes": 5,
    }
    found = application.parse(json.loads(templates.render(ROLE, "health-endpoint.json.j2", **given)))
    assert (found.port, found.phases, found.stale_seconds) == (8080, 4, 1020)
    with pytest.raises(
        NodeError,
        match='oops is not a known key; phases must be at least 1, not 0; port must be an integer, not "x"',
    ):
        application.parse({"port": "x", "oops": 1, "phases": 0})


def test_timer_has_the_declared_interval() -> None:
    lines = templates.render(ROLE, "node-health.timer.j2", node_health_interval_minutes=5).splitlines()
    assert "OnCalendar=*:0/5" in lines and "RandomizedDelaySec=299" in lines


def test_a_process_that_hangs_does_not_hold_up_the_next_look() -> None:
    lines = templates.render(ROLE, "node-health.service.j2").splitlines()
    assert "KillMode=process" in lines, "systemd would wait for it, four times 90 s"


def test_a_port_that_nobody_may_use_is_refused() -> None:
    (found,) = problems(node_health_endpoint_port=80)
    assert "1024 to 65535" in found
