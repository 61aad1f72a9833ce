"""``node-agent health``: one look at the running node, and what follows from it."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

from image_builder.node import files, status
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError
from image_builder.node.health import (
    alarms,
    clock,
    gpu,
    kernel_log,
    maintenance,
    memory,
    network,
    physical_host,
    report,
    storage,
)
from image_builder.node.health.model import Finding, Look, Outcome, Places, Sample
from image_builder.node.health.settings import Settings, parse
from image_builder.node.net.retry import backoff

FORMAT = 1
LOCK_SECONDS = 20.0
# A timer is never exact: a check that is almost due counts as due.
_SLACK_SECONDS = 5.0
Check = Callable[[Look], Outcome]


def checks() -> dict[str, Check]:
    """Return every check by its name.

    Those that fork come first: the checks of the network and the platform may leave a thread behind.
    """
    return {
        "nvme": storage.check_drives,
        "gpu": gpu.check,
        "filesystems": storage.check_filesystems,
        "arrays": storage.check_arrays,
        "kernel_log": partial(kernel_log.check, judge=kernel_log.catalogue()),
        "clock": clock.check,
        "infiniband": network.check_infiniband,
        "network": network.check_network,
        "maintenance": maintenance.check,
    }


def run(
    *,
    as_json: bool = False,
    places: Places = Places(),  # noqa: B008 (frozen)
    directory: Path = settings_files.DIRECTORY,
) -> int:
    """Look, report what changed, and write the result; print it with ``as_json``.

    Return 0, whatever was found; 1 if the metrics could not be written. Raises NodeError (``settings``), OSError.
    """
    settings = parse(settings_files.load("health", directory))
    places.run.mkdir(parents=True, exist_ok=True)
    boot_id = status.boot_id(places.proc / status.BOOT_ID.relative_to("/proc"))
    path = places.run / "health-state.json"
    # Less than the unit's timeout: a look that is waiting for a late one must not be killed.
    with files.lock(places.run / "health.lock", LOCK_SECONDS):
        before, trouble = memory.load(path, boot_id)
        if trouble:
            status.tell(f"health: {trouble}")
        after = look_at_all(before, checks(), settings, places)
        _report_changes(before, after)
        image = settings_files.build_id()
        node_condition = report.condition(alarms.counting(after.alarms), boot_id, image)
        results = document(after, settings, node_condition, image)
        files.write_json(places.run / "health.json", results, durable=False)
        files.write_json(path, memory.as_json(after), durable=False)
        host, kubelet = physical_host.name(places.kvp), _invocation(places.kubelet)
        reported = report_condition(after.reported, node_condition, host, kubelet, settings)
        if reported != after.reported:
            after = replace(after, reported=reported)
            files.write_json(path, memory.as_json(after), durable=False)
        done = write_metrics(after, settings)
    if as_json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 0 if done else 1


def look_at_all(
    before: memory.Memory, looks: Mapping[str, Check], settings: Settings, places: Places
) -> memory.Memory:
    """Return what is known after every check that is due has looked."""
    records: dict[str, memory.Last] = {}
    findings_by_check: dict[str, tuple[Finding, ...]] = {}
    for name, check in looks.items():
        last = before.checks.get(name, memory.Last())
        if name in settings.disabled:
            continue
        if not is_due(last, settings.intervals.get(name, 0.0), time.monotonic()):
            records[name] = last
            continue
        records[name], findings = _look(check, last, settings, places)
        if findings is not None:
            findings_by_check[name] = findings
    counted = alarms.step(before.alarms, findings_by_check, time.monotonic(), time.time(), settings)
    return memory.Memory(before.boot_id, records, counted, before.reported)


def is_due(last: memory.Last, interval: float, now: float) -> bool:
    """Return whether a check is due."""
    return last.at < 0 or (now >= last.not_before and now - last.at >= interval - _SLACK_SECONDS)


def _look(
    check: Check, last: memory.Last, settings: Settings, places: Places
) -> tuple[memory.Last, tuple[Finding, ...] | None]:
    """Look once; one check's error, even a bug, doesn't affect the others."""
    began, unix = time.monotonic(), time.time()
    try:
        outcome = check(Look(settings, places, began, last.memory))
    except NodeError as error:
        message = f"{error.code}: {error.message}"
    except (
        Exception
    ) as error:  # a bug in one check: the others look all the same, and its message is reported
        message = f"{type(error).__name__}: {error}"
    else:
        return memory.after(last, outcome, began, unix, time.monotonic() - began), outcome.findings
    seconds = time.monotonic() - began
    return replace(last, at=began, unix=unix, seconds=seconds, error=message[:500], samples=()), None


def _report_changes(before: memory.Memory, after: memory.Memory) -> None:
    """Log what began and what is over; a look that changes nothing logs nothing."""
    old = {alarm.finding.key: alarm for alarm in alarms.counting(before.alarms)}
    new = {alarm.finding.key: alarm for alarm in alarms.counting(after.alarms)}
    for key in new.keys() - old.keys():
        finding = new[key].finding
        status.tell(f"health: {finding.severity} {finding.code}: {finding.detail}")
    for key in old.keys() - new.keys():
        status.tell(f"health: cleared: {key[0]}: {key[1]}")
    for name, last in after.checks.items():
        if last.error and last.error != before.checks.get(name, memory.Last()).error:
            status.tell(f"health: check {name} failed to run: {last.error}")


def document(
    latest: memory.Memory, settings: Settings, node_condition: report.Condition, image: str
) -> dict[str, Any]:
    """Return ``health.json``."""
    return {
        "format": FORMAT,
        "boot_id": latest.boot_id,
        "image_build": image,
        "time": round(time.time(), 3),
        "state": alarms.state(latest.alarms),
        "condition": {"type": settings.condition, **asdict(node_condition)},
        "findings": [
            {
                **{name: value for name, value in asdict(alarm.finding).items() if name != "patient"},
                "check": alarm.check,
                "since": round(alarm.since, 3),
            }
            for alarm in alarms.counting(latest.alarms)
        ],
        "checks": {
            name: {"time": round(last.unix, 3), "seconds": round(last.seconds, 4), "error": last.error}
            for name, last in latest.checks.items()
        },
    }


def _invocation(link: Path) -> str:
    """Return the id of a unit's last start; empty if it isn't running or starting.

    systemd sets it when the unit begins to start, before ExecStartPre, and so at each automatic restart.
    """
    try:
        return os.readlink(link)
    except OSError:
        return ""


def report_condition(
    reported: report.Reported, node_condition: report.Condition, host: str, kubelet: str, settings: Settings
) -> report.Reported:
    """Set the node's condition and its physical host if either changed, or if a new Node may lack them.

    Return what to remember about it.
    """
    now = time.monotonic()
    # No kubeconfig: the node has not joined yet, which isn't a failure.
    if not settings.condition or not report.due(reported, node_condition, host, kubelet, now):
        return reported
    if not settings.kubeconfig or not Path(settings.kubeconfig).exists():
        return reported
    from image_builder.node.net import kube  # only on a change: TLS takes as long to load as everything else

    try:
        client, node = kube.as_kubelet(Path(settings.kubeconfig), settings.node_name)
        since = report.since(reported, node_condition, kube.stamp(datetime.now(UTC)))
        with client:
            client.patch_condition(
                node,
                settings.condition,
                node_condition.status,
                node_condition.reason,
                node_condition.message,
                annotations={status.PHYSICAL_HOST: host or None},
                since=since,
            )
    except NodeError as error:
        after: float | None = getattr(error, "retry_after", None)
        wait = backoff(reported.failures, retry_after=after, base=report.FIRST_WAIT, cap=report.LONGEST_WAIT)
        if not reported.failures:
            status.tell(f"health: {settings.condition} could not be set: {error.message}")
        return report.after_failure(reported, now, wait)
    status.tell(f"health: {settings.condition} is {node_condition.status}: {node_condition.reason}")
    return report.after_success(node_condition, host, kubelet, since, now)


def write_metrics(latest: memory.Memory, settings: Settings) -> bool:
    """Write the metrics for node-exporter to collect; return whether that succeeded."""
    path = Path(settings.textfile_directory) / "node_health.prom"
    try:
        files.write(path, report.metrics(samples(latest)).encode(), durable=False)
    except OSError as error:
        status.tell(f"health: {path} could not be written: {error.strerror}")
        return False
    return True


def samples(latest: memory.Memory) -> list[Sample]:
    """Return all metrics: those of the checks, and those of this program."""
    state = alarms.state(latest.alarms)
    values = [Sample("state", float(name == state), {"state": name}) for name in get_args(alarms.State)]
    for alarm in alarms.counting(latest.alarms):
        finding = alarm.finding
        labels = {
            "code": finding.code,
            "subject": finding.subject,
            "severity": finding.severity,
            "action": finding.action,
        }
        values.append(Sample("finding", 1, labels))
    for name, last in latest.checks.items():
        labels = {"check": name}
        values += [
            Sample("check_success", float(not last.error), labels),
            Sample("check_timestamp_seconds", round(last.unix, 3), labels),
            Sample("check_duration_seconds", round(last.seconds, 6), labels),
            *last.samples,
        ]
    return [*values, *_own(latest)]


def _peak_kib() -> int:
    """Return this program's peak memory. Unlike getrusage(2), this excludes the process that started it."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(text.partition("VmHWM:")[2].split()[0])


def _own(latest: memory.Memory) -> Sequence[Sample]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return (
        Sample("run_timestamp_seconds", round(time.time(), 3)),
        Sample("run_cpu_seconds", round(sum(usage.ru_utime + usage.ru_stime for usage in used), 4)),
        Sample("run_peak_memory_bytes", max(_peak_kib(), used[1].ru_maxrss) * 1024),
        Sample("condition_failures", latest.reported.failures),
    )
