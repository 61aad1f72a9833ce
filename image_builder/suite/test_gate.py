"""The gate: every boot is tested before the kubelet may start, and a machine that can't prove itself doesn't pass."""

from __future__ import annotations

from typing import Any

from suite import (
    Facts,
    booted,
    differences,
    load,
    named,
    needs,
    nothing,
    offline,
    output,
    read,
    starts_at_boot,
    statements,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
UNITS = "/etc/systemd/system"
UNIT = f"{UNITS}/preflight.service"
SETTINGS = "/etc/node-agent/preflight.json"
VERDICT = "/run/node/preflight.json"
# The units that the preflight queries start before it.
BEFORE_IT = (
    "network-online.target",
    "local-disk.service",
    "image-preload.service",
    "docker.service",
    "containerd.service",
)
PREPARED = {"disk", "seed", "preload", "promotion", "engine"}
DECLARED = (
    "hard",
    "reboot",
    "taint",
    "dns",
    "tcp",
    "engine",
    "wait_seconds",
    "gpu_tier",
    "gpu_seconds",
    "kubeconfig",
    "healthz",
    "jitter_seconds",
    "retest_days",
)

gate = needs("gate")


@offline
@booted
@gate
def test_every_boot_is_tested(host: Host, tree: Tree) -> None:
    """The preflight starts at boot, unconditionally, after the units that it queries and before the kubelet."""
    assert starts_at_boot(tree, "preflight.service")
    lines = statements(read(host, UNIT))
    expected = ("Type=oneshot", "RemainAfterExit=yes", "ExecStart=/usr/local/sbin/node-agent preflight")
    nothing(f"{UNIT} lacks {line}" for line in (*expected, "Before=kubelet.service") if line not in lines)
    nothing(
        line
        for line in lines
        if line.startswith(("Condition", "Assert", "SuccessExitStatus", "ExecCondition"))
    )
    after = named(lines, "After")
    nothing(f"it does not wait for {name}" for name in BEFORE_IT if name not in after)


@offline
@booted
@gate
def test_kubelet_waits_for_the_verdict(host: Host) -> None:
    """No kubelet, however installed, starts before this boot has a verdict, and re-tests don't stop a running one."""
    name = f"{UNITS}/kubelet.service.d/20-preflight.conf"
    lines = statements(read(host, name))
    nothing(
        f"{name} lacks {line}"
        for line in ("Wants=preflight.service", "After=preflight.service")
        if line not in lines
    )
    nothing(line for line in lines if line.startswith(("Requires=", "Requisite=", "BindsTo=", "PartOf=")))
    waits = [line for line in lines if line.startswith("ExecStartPre=") and "/run/node/" in line]
    assert len(waits) == 1 and "until test -e " in waits[0], f"{name} waits for no verdict: {waits}"


@offline
@booted
@gate
def test_unsettled_boot_is_tested_again(host: Host, tree: Tree) -> None:
    """A boot whose test failed to run, or was inconclusive, is tested again automatically."""
    lines = statements(read(host, UNIT))
    expected = ("Restart=on-failure", "StartLimitIntervalSec=0")
    nothing(f"{UNIT} lacks {line}" for line in expected if line not in lines)
    assert starts_at_boot(tree, "preflight-again.timer")
    service = f"{UNITS}/preflight-again.service"
    again = statements(read(host, service))
    expected = (
        "ConditionPathExists=/run/node/preflight.unsettled",
        "ExecStart=/usr/local/sbin/node-agent preflight --again",
    )
    nothing(f"{service} lacks {line}" for line in expected if line not in again)
    times = statements(read(host, f"{UNITS}/preflight-again.timer"))
    nothing(
        f"the timer lacks {line}"
        for line in ("OnActiveSec=2min", "OnUnitInactiveSec=30min")
        if line not in times
    )


@offline
@booted
@gate
def test_preflight_settings_are_declared_ones(host: Host, v: V) -> None:
    """The agent's preflight settings are those that the definition declares."""
    nothing(differences({name: v[f"gpu_preflight_{name}"] for name in DECLARED}, load(host, SETTINGS)))


@offline
@booted
@gate
def test_verdict_is_reported_where_somebody_hears_it(tree: Tree, v: V) -> None:
    """Where there is a cluster, and only there, the report starts at boot and declared re-tests are requested."""
    is_there = f"{UNITS}/preflight-report.service" in tree
    starts = starts_at_boot(tree, "preflight-report.service")
    assert is_there == starts == bool(v["gpu_preflight_kubeconfig"]), f"there: {is_there}, starts: {starts}"
    asks = starts_at_boot(tree, "preflight-retest.timer")
    assert asks == bool(v["__gpu_preflight_retests"]), (
        f"the node {'asks' if asks else 'does not ask'} for re-tests"
    )


@offline
@gate
def test_no_boot_is_judged_before_it_was(tree: Tree) -> None:
    """No reboot count is baked in, so each new machine may reboot itself once."""
    nothing(tree.matching(r"/var/lib/node-agent/preflight\.json"))


@booted
@gate
def test_this_boot_has_a_verdict(host: Host, facts: Facts) -> None:
    """The preflight succeeded and left a verdict, with its reasons, for this boot and this image."""
    states = output(host, "systemctl show --property=ActiveState,Result preflight.service").split()
    assert sorted(states) == ["ActiveState=active", "Result=success"], f"{states}"
    actual = load(host, VERDICT)
    boot = read(host, "/proc/sys/kernel/random/boot_id").strip()
    nothing(differences({"format": 1, "boot_id": boot, "image_build": facts.build_id[:12]}, actual))
    assert actual["state"] in ("passed", "failed", "inconclusive"), actual["state"]
    assert bool(actual["code"] and actual["reason"]) == (actual["state"] != "passed"), f"{actual}"
    assert actual["checks"], "nothing was tested"
    again = host.file("/run/node/preflight.unsettled").exists
    failed = {check["id"] for check in actual["checks"] if check["state"] == "failed"}
    # What other units prepare may be ready later.
    expected = actual["state"] == "inconclusive" or (bool(failed) and failed <= PREPARED)
    assert again == expected, f"{actual['state']}, and tested again: {again}"


@booted
@gate
def test_kubelet_would_register_out(host: Host, v: V) -> None:
    """The kubelet's arguments for this boot have the taint, whatever the verdict, and the verdict as a label."""
    arguments = read(host, "/run/node/kubelet.env").strip()
    assert f"{v['gpu_preflight_taint']}=pending:NoSchedule" in arguments, arguments
    is_passed = load(host, VERDICT)["state"] == "passed"
    assert (
        "--node-labels=" in arguments
        and f"image-builder/preflight={'ok' if is_passed else 'failed'}" in arguments
    ), arguments


@booted
@needs("gate", "gpu")
def test_gpus_that_can_not_be_tested_are_no_pass(host: Host) -> None:
    """GPUs are tested if there are any; without them, an image that has their driver doesn't pass."""
    vendors = host.run("grep -lx 0x10de /sys/bus/pci/devices/*/vendor").stdout.split()
    actual = load(host, VERDICT)
    tested = [check for check in actual["checks"] if check["id"] == "gpu"]
    assert len(tested) == 1, f"{len(tested)} checks are of the GPUs"
    if vendors:
        assert tested[0]["state"] != "skipped", f"{tested}"
        return
    size = load(host, "/run/node/gpu.json")["node"]["vm_size"]
    # If the platform answers all the same, it names a size that has no GPUs.
    expected = ("failed", "sku.unknown", "config") if size else ("inconclusive", "sku.unanswered", "none")
    assert tuple(tested[0][name] for name in ("state", "code", "action")) == expected, f"{tested}"
    assert tuple(actual[name] for name in ("state", "code", "action")) == expected, f"{actual}"
