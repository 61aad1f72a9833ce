"""Mutations for test_join.py."""

from __future__ import annotations

from tests.suite.offline import append, change, link, record, remove

UNITS = "/etc/systemd/system"
UNIT = f"{UNITS}/node-join.service"
SETTINGS = "/etc/node-agent/join.json"

record(
    "test_every_boot_joins",
    remove(f"{UNITS}/multi-user.target.wants/node-join.service"),
    link(UNIT, "/dev/null"),
    change(UNIT, "^ExecStart=.*$", "ExecStart=-/usr/local/sbin/node-agent join"),
    change(UNIT, " preflight.service", ""),
    append(UNIT, "\n[Unit]\nConditionFirstBoot=yes\n"),
    append(UNIT, "\n[Unit]\nBefore=kubelet.service\n"),
)
record("test_kubelet_is_started_when_it_is_told", remove(f"{UNITS}/multi-user.target.wants/kubelet.path"))
record(
    "test_join_settings_are_declared_ones",
    change(SETTINGS, '"engine": "[^"]*"', '"engine": "another"'),
    change(SETTINGS, '"imds": "[^"]*"', '"imds": "http://127.0.0.1"'),
    change(SETTINGS, '"clock_seconds": [0-9.]+', '"clock_seconds": 3000'),
)
