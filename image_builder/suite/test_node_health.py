"""Passive health: a timer checks the node, and on a machine its results are recent and report no failure."""

from __future__ import annotations

import json
import time
from typing import Any

from suite import (
    assignments,
    booted,
    differences,
    load,
    needs,
    nothing,
    offline,
    output,
    read,
    starts_at_boot,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
TIMER = "node-health.timer"
UNITS = "/etc/systemd/system"
SETTINGS = "/etc/node-agent/health.json"
HEALTH = "/run/node/health.json"
ENDPOINT = "node-health-endpoint.service"
# Accepts a response of any status: a node that isn't up yet says so with 503.
ASK = """
import http.client, sys
asked = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=10)
asked.request("GET", "/health")
print(asked.getresponse().read().decode())
"""
# The parts of the sandbox that must not get lost: the service runs as root, every minute, while the node lives.
SANDBOX = {
    "Type": "oneshot",
    "ProtectSystem": "strict",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "CAP_SYSLOG CAP_SYS_ADMIN CAP_DAC_OVERRIDE",
    "CPUWeight": "20",
    "TimeoutStartSec": "50",
    # Jobs leave their leases in the second one.
    "RuntimeDirectory": "node node/busy",
}
# Anybody on the machine can query loopback, so the process that answers must have no privileges.
CONFINED = {
    "ExecStart": "/usr/local/sbin/node-agent health-endpoint",
    "DynamicUser": "yes",
    "ProtectSystem": "strict",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "IPAddressDeny": "any",
    "IPAddressAllow": "localhost",
    "RestrictAddressFamilies": "AF_INET",
}
# systemd options that would silently blind a check.
BLINDING = ("ProtectKernelLogs", "ProtectClock", "PrivateDevices", "PrivateNetwork", "PrivateTmp")

# An image without this role's layer doesn't have the role's variables either.
node = needs("gate")


@offline
@booted
@node
def test_node_is_looked_at(host: Host, tree: Tree, v: V) -> None:
    """The timer starts at boot and fires as often as declared."""
    assert starts_at_boot(tree, TIMER)
    actual = assignments(read(host, f"{UNITS}/{TIMER}"))
    nothing(differences({"OnCalendar": f"*:0/{v['node_health_interval_minutes']}"}, actual))


@offline
@booted
@node
def test_look_is_confined(host: Host) -> None:
    """The service runs the agent at low CPU weight and can write only its results."""
    actual = assignments(read(host, f"{UNITS}/node-health.service"))
    nothing(differences({**SANDBOX, "ExecStart": "/usr/local/sbin/node-agent health"}, actual))
    nothing(name for name in BLINDING if name in actual)


@offline
@booted
@node
def test_health_settings_are_declared_ones(host: Host, v: V) -> None:
    """The agent's health settings are those that the definition declares."""
    nothing(differences(v["__node_health_settings"], load(host, SETTINGS)))


@offline
@booted
@node
def test_metrics_have_a_directory(host: Host, v: V) -> None:
    """node-exporter's textfile collector has its directory, which only the directory's owner can write to."""
    actual = host.file(v["node_health_textfile_directory"])
    assert actual.is_directory, "there is no such directory"
    assert not actual.mode & 0o022, f"its mode is {actual.mode:o}"


@offline
@booted
@node
def test_endpoint_is_declared(host: Host, tree: Tree, v: V) -> None:
    """The endpoint for Azure's extension starts at boot if and only if declared, and has the declared settings."""
    assert starts_at_boot(tree, ENDPOINT) == v["node_health_endpoint"]
    actual = load(host, "/etc/node-agent/health-endpoint.json")
    nothing(differences(v["__node_health_endpoint_settings"], actual))


@offline
@booted
@node
def test_endpoint_is_confined(host: Host) -> None:
    """The endpoint runs as an unprivileged user and talks only to loopback."""
    nothing(differences(CONFINED, assignments(read(host, f"{UNITS}/{ENDPOINT}"))))


@booted
@needs("gate", node_health_endpoint=True)
def test_endpoint_answers_on_loopback(host: Host, v: V) -> None:
    """The endpoint reports a valid state to the extension, and its port is open on 127.0.0.1 and nowhere else."""
    port = v["node_health_endpoint_port"]
    actual = json.loads(output(host, "python3 -I -c %s %s", ASK, str(port)))
    # Other checks cover which state it is; the endpoint must give a reason for any state but Healthy.
    state = actual["ApplicationHealthState"]
    assert state in ("Initializing", "Healthy", "Unhealthy", "Unknown"), f"{actual}"
    assert state == "Healthy" or actual["reasons"], f"{actual}"
    assert set(json.loads(actual["customMetrics"])["rollingUpgrade"]) == {
        "PhaseOrderingNumber",
        "SkipUpgrade",
    }
    lines = output(host, "ss --no-header --listening --numeric --tcp").splitlines()
    places = [line.split()[3] for line in lines if line.split()[3].endswith(f":{port}")]
    assert places == [f"127.0.0.1:{port}"], f"{places}"


@booted
@node
def test_node_was_looked_at(host: Host, v: V) -> None:
    """The node was checked recently, every health check could run, and no finding fails the node."""
    wait = 150 * v["node_health_interval_minutes"]
    for _ in range(wait):
        if host.file(HEALTH).exists:
            break
        time.sleep(1)
    actual = load(host, HEALTH)
    age = int(output(host, "date +%s")) - actual["time"]
    assert age < wait, f"the last look was {age:.0f} s ago"
    # No platform answers in the lab; all other checks must work.
    blind = {name: finding["error"] for name, finding in actual["checks"].items() if name != "maintenance"}
    nothing(f"{name}: {error}" for name, error in blind.items() if error)
    nothing(
        f"{finding['code']}: {finding['detail']}"
        for finding in actual["findings"]
        if finding["severity"] == "fail"
    )


@booted
@node
def test_metrics_are_written(host: Host, v: V) -> None:
    """The metrics file for node-exporter is from this boot, and shows the agent's peak memory within its budget."""
    text = read(host, f"{v['node_health_textfile_directory']}/node_health.prom")
    actual = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    started = float(read(host, "/proc/stat").partition("btime ")[2].split()[0])
    assert float(actual["node_health_run_timestamp_seconds"]) > started, "they are of another boot"
    assert float(actual["node_health_run_peak_memory_bytes"]) <= 40e6, actual[
        "node_health_run_peak_memory_bytes"
    ]
