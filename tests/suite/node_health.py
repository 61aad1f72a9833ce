"""Mutations for test_node_health.py."""

from __future__ import annotations

from tests.suite.booted import record_booted
from tests.suite.offline import append, change, chmod, given, link, record, remove

SERVICE = "/etc/systemd/system/node-health.service"
TIMER = "/etc/systemd/system/node-health.timer"
SETTINGS = "/etc/node-agent/health.json"
ENDPOINT = "/etc/systemd/system/node-health-endpoint.service"

record(
    "test_node_is_looked_at",
    remove("/etc/systemd/system/timers.target.wants/node-health.timer"),
    change(TIMER, "^OnCalendar=.*$", "OnCalendar=daily"),
    link(TIMER, "/dev/null"),
)
record(
    "test_look_is_confined",
    change(SERVICE, "^ProtectSystem=.*$", "ProtectSystem=no"),
    change(SERVICE, "^CapabilityBoundingSet=.*$", ""),
    change(SERVICE, "^ExecStart=.*$", "ExecStart=/bin/true"),
    change(SERVICE, "^RuntimeDirectory=.*$", "RuntimeDirectory=node"),
    append(SERVICE, "\n[Service]\nProtectClock=yes\n"),
)
record(
    "test_health_settings_are_declared_ones",
    change(SETTINGS, '"condition": "[A-Za-z]*"', '"condition": "Other"'),
    change(SETTINGS, '"imds": "[^"]*"', '"imds": "http://192.0.2.1"'),
    change(SETTINGS, '"flaps": [0-9]*', '"flaps": 1000'),
)
record(
    "test_metrics_have_a_directory",
    given(lambda v: chmod(v["node_health_textfile_directory"], 0o777)),
    given(lambda v: chmod(v["node_health_textfile_directory"], 0o775)),
)
record(
    "test_endpoint_is_declared",
    remove("/etc/systemd/system/multi-user.target.wants/node-health-endpoint.service"),
    link(ENDPOINT, "/dev/null"),
    change("/etc/node-agent/health-endpoint.json", '"port": [0-9]*', '"port": 1'),
    change("/etc/node-agent/health-endpoint.json", '"stale_seconds": [0-9]*', '"stale_seconds": 86400'),
)
record(
    "test_endpoint_is_confined",
    change(ENDPOINT, "^DynamicUser=.*$", ""),
    change(ENDPOINT, "^IPAddressDeny=.*$", ""),
    change(ENDPOINT, "^CapabilityBoundingSet=.*$", "CapabilityBoundingSet=CAP_SYS_ADMIN"),
)
record_booted(
    "test_endpoint_answers_on_loopback",
    "systemctl stop node-health-endpoint.service",
    mend="systemctl start node-health-endpoint.service",
)
record_booted(
    "test_node_was_looked_at",
    'systemctl stop node-health.timer node-health.service; sed -i \'s/"time": [0-9.]*/"time": 1/\' /run/node/health.json',
    mend="systemctl start node-health.service node-health.timer",
)
record_booted(
    "test_metrics_are_written",
    "systemctl stop node-health.timer node-health.service; rm /var/lib/prometheus/node-exporter/node_health.prom",
    mend="systemctl start node-health.service node-health.timer",
)
