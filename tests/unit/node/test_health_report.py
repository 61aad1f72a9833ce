"""A look's report to others: the condition in Kubernetes, and the metrics."""

from __future__ import annotations

import json
from pathlib import Path

from image_builder.node.health import memory, report
from image_builder.node.health.alarms import Alarm
from image_builder.node.health.model import Finding, Sample


def test_condition_names_the_worst_and_fits() -> None:
    many = [
        Alarm("check", Finding("drive.io-errors", f"sd{n}", "fail", "x" * 150), 1, 0.0, (0.0,), 1.0)
        for n in range(20)
    ]
    found = report.condition(many, "b" * 36, "i" * 64)
    assert found.status == "False" and found.reason == "DriveIoErrors"
    assert len(found.message.encode()) <= 1024 and found.message.startswith("20 findings: ")
    assert found.message.endswith(f"... (boot {'b' * 36}, image {'i' * 64})")


def test_api_server_that_doesn_t_listen_is_asked_later_and_later() -> None:
    reported, current = report.Reported(), report.Condition("False", "X", "")
    assert report.due(reported, current, "", "", 0.0)
    reported = report.after_failure(reported, 0.0, 50.0)
    assert not report.due(reported, current, "", "", 49.0) and report.due(reported, current, "", "", 50.0)
    assert reported.failures == 1 and report.after_success(current, "", "", "", 0.0).failures == 0


def _failed(*codes: str) -> report.Condition:
    """Return the condition of a node with these findings, each on two devices."""
    findings = [Finding(code, subject, "fail", "x") for code in codes for subject in ("a", "b")]
    counting = [Alarm("check", finding, 1, 0.0, (0.0,), 1.0) for finding in findings]
    return report.condition(counting, "b" * 36, "")


def test_each_code_that_comes_or_goes_is_reported_once() -> None:
    """The gate may ignore the first one, so it must learn of the others."""
    clock, both = _failed("clock.off"), _failed("clock.off", "gpu.lost")
    assert clock.reason == both.reason and both.codes == ("clock.off", "gpu.lost")
    for before, now in ((clock, both), (both, clock)):
        reported = report.after_success(before, "", "", "", 0.0)
        assert report.due(reported, now, "", "", 0.0) and not report.due(reported, before, "", "", 0.0)


def test_only_another_code_or_status_gets_a_new_time() -> None:
    """The gate takes out a node that a person admitted if its condition is younger than that."""
    clock, both, none = _failed("clock.off"), _failed("clock.off", "gpu.lost"), report.condition([], "b", "")
    for before, now, expected in (
        (both, both, "old"),
        (both, clock, "old"),
        (clock, both, "new"),
        (clock, none, "new"),
        (none, none, "old"),
        (none, clock, "new"),
    ):
        assert report.since(report.after_success(before, "", "", "old", 0.0), now, "new") == expected
    assert report.since(report.after_success(both, "", "", "", 0.0), both, "new") == "new"


def test_a_kubelet_that_starts_over_and_over_is_reported_every_ten_minutes() -> None:
    """Held back by the preflight, or crashing: each attempt to start has a new id."""
    current, reported, sent = report.condition([], "b", ""), report.Reported(), []
    for clock in range(60, 3660, 60):
        if report.due(reported, current, "", f"start {clock}", clock):
            sent.append(clock)
            reported = report.after_success(current, "", f"start {clock}", "", clock)
    assert sent == [60, 660, 1260, 1860, 2460, 3060]
    assert report.due(reported, _failed("clock.off"), "", reported.kubelet, sent[-1] + 60)


def test_a_kubelet_that_starts_after_a_quiet_time_is_reported_at_once() -> None:
    """It may have registered a new Node, without the condition."""
    current = report.condition([], "b", "")
    reported = report.after_success(current, "", "1", "", 60.0)
    assert [report.due(reported, current, "", kubelet, 6000.0) for kubelet in ("1", "", "2")] == [
        False,
        False,
        True,
    ]


def test_what_an_earlier_agent_remembers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "health-state.json"
    for now in (_failed("clock.off"), report.condition([], "b", "")):
        saved = memory.as_json(memory.Memory("b", reported=report.after_success(now, "", "", "", 0.0)))
        path.write_text(json.dumps(saved))
        assert not report.due(memory.load(path, "b")[0].reported, now, "", "", 0.0)
        del saved["reported"]["codes"], saved["reported"]["sent"]
        path.write_text(json.dumps(saved))
        found, trouble = memory.load(path, "b")
        assert trouble == "" and found.reported.status == now.status
        assert report.due(found.reported, now, "", "", 0.0) == bool(now.codes)


def test_metrics_are_prometheus_text() -> None:
    text = report.metrics(
        [
            Sample("finding", 1, {"code": "x.y", "subject": 'a "b"\\\n'}),
            Sample("drive_errors_total", 3, {"device": "sda"}),
            Sample("drive_errors_total", 4, {"device": "sdb"}),
            Sample("drive_errors_total", 5, {"device": "sda"}),
            Sample("clock_offset_seconds", -1.5e-07),
        ]
    )
    assert text.splitlines() == [
        f"# HELP node_health_clock_offset_seconds {report.HELP['clock_offset_seconds']}",
        "# TYPE node_health_clock_offset_seconds gauge",
        "node_health_clock_offset_seconds -1.5e-07",
        f"# HELP node_health_drive_errors_total {report.HELP['drive_errors_total']}",
        "# TYPE node_health_drive_errors_total counter",
        'node_health_drive_errors_total{device="sda"} 5',
        'node_health_drive_errors_total{device="sdb"} 4',
        f"# HELP node_health_finding {report.HELP['finding']}",
        "# TYPE node_health_finding gauge",
        'node_health_finding{code="x.y",subject="a \\"b\\"\\\\\\n"} 1',
    ]


def test_metrics_have_names_as_prometheus_wants_them() -> None:
    """Base units, `_total` only for counters, no type in a name (prometheus.io/docs/practices/naming)."""
    for name, words in report.HELP.items():
        assert name == name.lower() and name.replace("_", "").isalnum(), name
        assert not name.endswith(("_ms", "_percent", "_kilobytes", "_gauge", "_count", "_bytes_total")), name
        assert words.endswith(".") and "\n" not in words, name
