"""Mutations for test_gate.py."""

from __future__ import annotations

from tests.suite.booted import edited, record_booted
from tests.suite.offline import append, change, given, link, record, remove, write

UNITS = "/etc/systemd/system"
UNIT = f"{UNITS}/preflight.service"
REPORT = "preflight-report.service"
RETEST = "preflight-retest.timer"
SETTINGS = "/etc/node-agent/preflight.json"
WAITS = f"{UNITS}/kubelet.service.d/20-preflight.conf"

record(
    "test_every_boot_is_tested",
    remove(f"{UNITS}/multi-user.target.wants/preflight.service"),
    link(UNIT, "/dev/null"),
    change(UNIT, "^Before=kubelet.service$", ""),
    change(UNIT, "^ExecStart=.*$", "ExecStart=-/usr/local/sbin/node-agent preflight"),
    append(UNIT, "\n[Unit]\nConditionPathExists=/dev/nvidia0\n"),
    change(UNIT, " docker.service", ""),
)
record(
    "test_kubelet_waits_for_the_verdict",
    remove(WAITS),
    change(WAITS, "^Wants=", "Requires="),
    change(WAITS, "^After=.*$", ""),
    change(WAITS, "^ExecStartPre=.*$", ""),
)
record(
    "test_unsettled_boot_is_tested_again",
    remove(f"{UNITS}/multi-user.target.wants/preflight-again.timer"),
    change(UNIT, "^Restart=.*$", ""),
    change(f"{UNITS}/preflight-again.service", "^ConditionPathExists=.*$", ""),
    change(f"{UNITS}/preflight-again.timer", "^OnUnitInactiveSec=.*$", ""),
)
record(
    "test_preflight_settings_are_declared_ones",
    change(SETTINGS, '"taint": "[^"]*"', '"taint": "other/taint"'),
    change(SETTINGS, '"gpu_tier": "[^"]*"', '"gpu_tier": "none"'),
    change(SETTINGS, '"reboot": true', '"reboot": false'),
    change(SETTINGS, '"wait_seconds": [0-9.]+', '"wait_seconds": 1'),
    change(SETTINGS, '"healthz": "[^"]*"', '"healthz": ""'),
    change(SETTINGS, '"retest_days": [0-9.]+', '"retest_days": 0'),
)
record(
    "test_verdict_is_reported_where_somebody_hears_it",
    given(
        lambda v: (
            remove(f"{UNITS}/multi-user.target.wants/{REPORT}")
            if v["gpu_preflight_kubeconfig"]
            else write(
                f"{UNITS}/{REPORT}", "[Service]\nExecStart=/usr/local/sbin/node-agent preflight --report\n"
            )
        )
    ),
    given(
        lambda v: (
            remove(f"{UNITS}/timers.target.wants/{RETEST}")
            if v["__gpu_preflight_retests"]
            else link(f"{UNITS}/timers.target.wants/{RETEST}", "/usr/lib/x")
        )
    ),
)
record(
    "test_no_boot_is_judged_before_it_was",
    write("/var/lib/node-agent/preflight.json", '{"build": "", "reboots": 1, "boot_id": ""}\n'),
)

# The order matters: the last one must still find a verdict.
record_booted(
    "test_this_boot_has_a_verdict",
    **edited("/run/node/preflight.json", 's/"boot_id": "[^"]*/"boot_id": "00000000/'),
)
record_booted(
    "test_kubelet_would_register_out",
    **edited("/run/node/kubelet.env", "s/^NODE_AGENT_KUBELET_ARGS=.*/NODE_AGENT_KUBELET_ARGS=/"),
)
record_booted(
    "test_gpus_that_can_not_be_tested_are_no_pass",
    **edited("/run/node/preflight.json", 's/"state": "(inconclusive|failed)"/"state": "passed"/'),
)
