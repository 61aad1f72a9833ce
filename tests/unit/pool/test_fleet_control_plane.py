"""An API server's report about itself, as a reading for the gate."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.net import kube
from image_builder.pool.steps.control_plane import (
    REQUESTS,
    SHOWN_NODES,
    SIGNER,
    Answered,
    Kubernetes,
    count_requests,
    not_ready,
    pending_ages,
    since,
)

# Some lines of a kube-apiserver 1.33, shortened.
METRICS = """\
# HELP apiserver_request_total [STABLE] Counter of apiserver requests.
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="nodes",verb="GET"} 120
apiserver_request_total{code="201",component="apiserver",dry_run="",group="",resource="events",verb="POST"} 1.5e+03
apiserver_request_total{code="429",component="apiserver",dry_run="",group="",resource="pods",verb="LIST"} 7
apiserver_request_total{code="503",component="apiserver",dry_run="",group="",resource="pods",verb="LIST"} 2
apiserver_request_total{code="500",component="apiserver",dry_run="",group="",resource="pods",verb="LIST"} 1
apiserver_request_terminations_total{code="503",component="apiserver"} 99
"""
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()


@pytest.fixture
def plane(tmp_path: Path) -> Kubernetes:
    config = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "a", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    return Kubernetes(tmp_path / "config")


def test_requests_are_counted_by_status() -> None:
    assert count_requests(METRICS) == {"200": 120, "201": 1500, "429": 7, "503": 2, "500": 1}
    assert count_requests("") == {}


def test_a_reading_is_what_came_since_the_last_one() -> None:
    before = count_requests(METRICS)
    now = before | {"200": 220, "429": 17, "504": 4}
    assert since(before, now) == Answered(all=114, throttled=10, errors=4)
    assert since(None, now) == Answered(), "there is nothing to compare the first one with"
    assert since(now, before) == Answered(), "a server that was started again counts from nothing"


def item(created: str, signer: str = SIGNER, **conditions: str) -> dict[str, Any]:
    return {"created": created, "signer": signer, "conditions": conditions}


def test_requests_that_nobody_decided_on() -> None:
    requests = [
        item("2026-01-02T03:04:00Z"),
        item("2026-01-02T03:03:05Z"),
        item("2026-01-01T00:00:00Z", Approved="True"),
        item("2026-01-01T00:00:00Z", Denied="True"),
    ]
    assert pending_ages(requests, NOW) == (5.0, 60.0)
    assert pending_ages([], NOW) == ()
    assert pending_ages([item("2026-01-02T03:05:00Z")], NOW) == (0.0,), "its clock is ahead of ours"


@pytest.mark.parametrize("signer", ["kubernetes.io/kubelet-serving", "kubernetes.io/kube-apiserver-client"])
def test_requests_that_wait_for_a_person_hold_up_nobody(signer: str) -> None:
    assert pending_ages([item("2026-01-01T00:00:00Z", signer)], NOW) == ()


def table(*rows: tuple[str, str]) -> dict[str, Any]:
    """Return nodes as a kube-apiserver 1.33 shows them, by status and age."""
    names = ("Name", "Status", "Roles", "Age", "Version", "Internal-IP")
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": "7"},
        "columnDefinitions": [{"name": name, "type": "string"} for name in names],
        "rows": [
            {"cells": [f"n{n}", status, "<none>", age, "v1.33.0", "10.0.0.1"], "object": None}
            for n, (status, age) in enumerate(rows)
        ],
    }


def test_nodes_that_just_join_are_no_alarm() -> None:
    nodes = table(
        ("NotReady", "4m59s"),
        ("NotReady", "5m"),
        ("NotReady", "<invalid>"),
        ("Ready", "2y10d"),
        ("Ready,SchedulingDisabled", "6m"),
        ("NotReady", "5m1s"),
        ("Unknown", "3h"),
        ("NotReady,SchedulingDisabled", "2d4h"),
    )
    assert not_ready(nodes) == ("n5", "n6", "n7")
    assert len(not_ready(nodes, joining_seconds=100.0)) == 5
    assert not_ready(table()) == () == not_ready(table() | {"rows": None})


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "NodeList", "items": []},
        {},
        [],
        {"kind": "Table"},
        table(("NotReady", "soon")),
        table(("NotReady", "")),
        table() | {"columnDefinitions": [{"name": "Name"}]},
        table() | {"rows": [{"cells": ["n"]}]},
        table() | {"rows": [{"cells": ["n", None, "", "5m"]}]},
    ],
)
def test_what_is_no_table_of_nodes_is_no_reading(
    answer: Any, plane: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = '{"metadata":{"resourceVersion":"1"},"items":[]}'
    answers = {"/metrics": METRICS, REQUESTS: requests, SHOWN_NODES: json.dumps(answer)}
    monkeypatch.setattr(kube.Client, "text", lambda _, path, *_accept: answers[path])
    assert "not understood" in plane.read().unread
    answers[SHOWN_NODES] = json.dumps(table(("NotReady", "9m")))
    assert (plane.read().fallen, plane.read().nodes) == (("n0",), 1)


@pytest.mark.parametrize(
    "answer",
    [
        '{"items":[]}',
        '{"metadata":{"resourceVersion":"1"},"items":[{}]}',
        '{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"creationTimestamp":"soon"}}]}',
        '{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"creationTimestamp":null}}]}',
        '{"metadata":[],"items":[]}',
    ],
)
def test_an_answer_that_is_no_api_servers_is_no_reading(
    answer: str, plane: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube.Client, "text", lambda _, path: METRICS if path == "/metrics" else answer)
    assert "not understood" in plane.read().unread
