"""The report of a run, as data and as text: counts, durations, failures by signature, the times of waves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from image_builder.pool.plan.model import CLASSES, STEPS, Step, quantile
from image_builder.pool.run.records import Gated, Opened, Passed, Record, Result, Turned, Unplanned
from image_builder.pool.run.state import HostStatus, Progress
from image_builder.text import printable, short_list

FORMAT = 1
PLAN_AGAIN = "image-builder pool snapshot, then make a new plan"
_SLOWEST = 20
# Names for hosts that have no class yet.
_NOT_ENDED = ("not started", "in work")
# What is listed last of the hosts that aren't fine: those of which nothing is wrong.
_URGENCY = {"skipped": 1, "waiting": 2, "ready": 2, "resting": 2, "deferred": 2}


def state(progress: Progress, *, running: bool) -> str:
    """Return a run's state in one word: `finished`, `stopped`, `running`, `interrupted` or `not started`.

    ``running`` says whether a process has its journal open now.
    """
    if not progress.records:
        return "not started"
    if progress.finished:
        return "finished"
    if running:
        return "running"
    return "stopped" if progress.stopped else "interrupted"


def counts(statuses: Iterable[HostStatus]) -> dict[str, int]:
    """Return how many hosts ended in each class, and how many haven't ended yet; vanished ones are left out."""
    totals: Counter[str] = Counter()
    for status in statuses:
        if status.state == "gone":
            continue
        if status.state == "ended" and status.outcome:
            totals[status.outcome.kind] += 1
        else:
            totals["not started" if status.started is None or _untouched(status) else "in work"] += 1
    return {name: totals[name] for name in (*CLASSES, *_NOT_ENDED)}


def _untouched(status: HostStatus) -> bool:
    return status.state in ("waiting", "ready", "resting", "deferred") and not status.touched


def report(progress: Progress, records: Sequence[Record], *, running: bool = False) -> dict[str, Any]:
    """Return the report of a run as one JSON object."""
    plan = progress.plan
    steps = STEPS[plan.policy.mode]
    statuses = [s for s in progress.hosts.values() if s.state != "gone"]
    document = {
        "format": FORMAT,
        "state": state(progress, running=running),
        "reason": progress.stopped,
        "plan": plan.digest,
        "pools": [pool.model_dump(mode="json") for pool in plan.pools],
        "hosts": len(statuses),
        "vanished": sorted(s.host.name for s in progress.hosts.values() if s.state == "gone"),
        "counts": counts(statuses),
        "builds": builds(records),
        "verified": sum(s.verified for s in statuses),
        "budget": {"failed": progress.failed, "allowed": plan.budget},
        "unavailable": {"now": progress.unavailable, "allowed": plan.max_unavailable},
        "seconds": durations(records),
        "failures": failures(statuses),
        "slowest": slowest(statuses),
        "waves": waves(progress, records),
        "gates": gates(records),
        "results": {s.host.name: _result(s, steps) for s in sorted(statuses, key=lambda s: s.host.name)},
    }
    if plan.target:
        document["target"] = plan.target.model_dump(mode="json", include={"version", "build", "unproven"})
    if plan.policy.mode == "roll":
        document["skipped"] = {
            s.host.name: s.outcome.detail for s in statuses if is_skipped(s) and s.outcome is not None
        }
        document["skip_budget"] = plan.skip_budget
        document["deadline"] = plan.deadline
        document["evicted"] = evicted(records)
        document["idle_hours"] = idle(records)
        document["restored"] = {s.host.name: s.restored for s in statuses if s.restored is not None}
        document["unturned"] = next((r.problem for r in reversed(records) if isinstance(r, Turned)), "")
        # Hosts that have the new image, or may have it, and aren't fine with it, or that couldn't be freed.
        document["cordoned"] = sorted(s.host.name for s in statuses if _is_cordoned(s))
        document["unplanned"] = instances = unplanned(records)
        document["outdated"] = [
            name
            for name, version in instances.items()
            if progress.finished and plan.target and version.lower() != plan.target.version.lower()
        ]
    return document


def is_skipped(status: HostStatus) -> bool:
    """Return whether a host was left as it was."""
    return status.outcome is not None and status.outcome.kind == "skipped"


def _is_cordoned(status: HostStatus) -> bool:
    if status.outcome is None or not status.outcome.is_failure or status.restored:
        return False
    # One that couldn't be freed ends with that, instead of with what it would have ended with.
    return status.touched or (status.tries["free"] > 0 and status.outcome != status.last)


def _result(status: HostStatus, steps: Sequence[Step]) -> dict[str, Any]:
    outcome = status.outcome.model_dump(mode="json") if status.outcome else None
    return {
        "wave": status.wave,
        "state": status.state,
        "outcome": outcome,
        "tries": {step: status.tries[step] for step in steps},
        "seconds": {step: round(value, 3) for step, value in status.seconds.items()},
        "phases": status.phases,
    }


def builds(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the builds that hosts of each image were verified against: several if processes used different ones."""
    pairs = {pair for record in records if isinstance(record, Opened) for pair in record.builds.items()}
    return {image: sorted(build for name, build in pairs if name == image) for image in sorted(dict(pairs))}


def durations(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Return p50, p95 and p99 of each step that succeeded, and of each phase that hosts reported."""
    seconds_of: dict[str, list[float]] = {}
    for record in records:
        if isinstance(record, Result) and record.outcome.ok:
            seconds_of.setdefault(record.step, []).append(record.seconds)
            for phase, seconds in record.phases.items():
                seconds_of.setdefault(f"{record.step}.{phase}", []).append(seconds)
    return {
        name: {f"p{round(100 * q)}": round(quantile(values, q), 3) for q in (0.5, 0.95, 0.99)}
        for name, values in sorted(seconds_of.items())
    }


def evicted(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the pods that were evicted from each host."""
    pods: dict[str, list[str]] = {}
    for record in records:
        if isinstance(record, Result) and record.emptied.evicted:
            pods.setdefault(record.host, []).extend(record.emptied.evicted)
    return pods


def idle(records: Sequence[Record]) -> dict[str, float]:
    """Return for how many hours hosts and their GPUs were empty: from the end of a drain until freed or restored."""
    empty: dict[str, Result] = {}
    spans: list[tuple[Result, float]] = []
    for record in records:
        if not isinstance(record, Result) or not record.outcome.ok:
            continue
        if record.step == "drain":
            empty.setdefault(record.host, record)
        elif record.step in ("free", "restore") and (drain := empty.pop(record.host, None)):
            spans.append((drain, record.at))
    spans += [(drain, records[-1].at) for drain in empty.values()]
    hours = [(drain.emptied.gpus, max(0.0, until - drain.at) / 3600) for drain, until in spans]
    return {
        "hosts": round(sum(time for _, time in hours), 3),
        "gpus": round(sum(gpus * time for gpus, time in hours), 3),
    }


def unplanned(records: Iterable[Record]) -> dict[str, str]:
    """Return the instances that aren't among a roll's hosts, and their versions, as its last process recorded them."""
    instances: Mapping[str, str] = {}
    for record in records:
        if isinstance(record, Opened | Unplanned):
            instances = record.instances if isinstance(record, Unplanned) else {}
    return dict(sorted(instances.items()))


def _instance(path: str, version: str) -> str:
    """Return an instance as readable text: its scale set, its number in it, and the name of its version."""
    scale_set, _, number = path.partition("/virtualMachines/")
    name = scale_set.rpartition("/")[2] + (f"/{number}" if number else "")
    return f"{name} ({version.rpartition('/')[2] or 'not known'})"


def failures(statuses: Iterable[HostStatus]) -> list[dict[str, Any]]:
    """Return the failures by signature, most frequent first, and what their hosts have in common."""
    alike: dict[str, list[HostStatus]] = {}
    for status in statuses:
        if status.outcome and status.outcome.is_failure:
            alike.setdefault(status.outcome.signature, []).append(status)
    return [
        {
            "signature": signature,
            "count": len(hosts),
            "vm_sizes": dict(Counter(s.host.vm_size for s in hosts)),
            "zones": dict(Counter(s.host.zone for s in hosts)),
            "scale_sets": dict(Counter(s.host.scale_set for s in hosts)),
            "hosts": sorted(s.host.name for s in hosts),
            "detail": hosts[0].outcome.detail if hosts[0].outcome else "",
        }
        for signature, hosts in sorted(alike.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def slowest(statuses: Iterable[HostStatus]) -> list[dict[str, Any]]:
    """Return the hosts that took longest, with the total seconds of their steps."""
    sums = [(sum(s.seconds.values()), s.host.name) for s in statuses if s.seconds]
    return [{"host": name, "seconds": round(t, 3)} for t, name in sorted(sums, reverse=True)[:_SLOWEST]]


def waves(progress: Progress, records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the waves, with times in seconds since 1970."""
    stragglers = {r.wave: r.stragglers for r in records if isinstance(r, Passed)}
    return [
        {
            "name": wave.wave.name,
            "hosts": sum(map(len, wave.at.values())),
            "began": wave.began,
            "passed": wave.passed,
            "stragglers": stragglers.get(number, 0),
            "failed": wave.failed,
            "budget": wave.wave.budget,
            "verified": sum(progress.hosts[name].verified for name in wave.present),
            "counts": counts(progress.hosts[name] for name in wave.present),
        }
        for number, wave in enumerate(progress.waves)
    ]


def gates(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the readings that changed the verdict."""
    verdicts: list[dict[str, Any]] = []
    for record in records:
        if isinstance(record, Gated) and (not verdicts or verdicts[-1]["verdict"] != record.verdict):
            verdicts.append(record.model_dump(mode="json", exclude={"kind"}))
    return verdicts


def left_behind(report: Mapping[str, Any]) -> int:
    """Return how many hosts of a report aren't fine; skipped ones alone count if they are more than may be."""
    bad: int = sum(count for name, count in report["counts"].items() if name != "ok")
    return 0 if report["counts"]["skipped"] == bad <= report.get("skip_budget", 0) else bad


def rows(report: Mapping[str, Any], most: int | None = None) -> list[tuple[str, str]]:
    """Return each host and how it ended, or its state: all of them, or at most so many of those that aren't fine."""
    results = [(name, result["outcome"], result["state"]) for name, result in report["results"].items()]
    lines = [(name, outcome["kind"] if outcome else state) for name, outcome, state in results]
    if most is None:
        return lines
    lines = sorted([line for line in lines if line[1] != "ok"], key=lambda line: _URGENCY.get(line[1], 0))
    return (
        lines if len(lines) <= most else [*lines[:most], (f"and {len(lines) - most} more hosts: --all", "")]
    )


def text(report: dict[str, Any]) -> str:
    """Return a report as text for people."""
    ended = ", ".join(f"{count} {name}" for name, count in report["counts"].items() if count)
    lines = [
        f"{report['state']}{': ' + report['reason'] if report['reason'] else ''}",
        f"{report['hosts']} hosts: {ended}; {report['verified']} verified",
        f"{report['budget']['failed']} failed of {report['budget']['allowed']} allowed, "
        f"{report['unavailable']['now']} unavailable of {report['unavailable']['allowed']}",
    ]
    if unproven := report.get("target", {}).get("unproven"):
        lines.append(f"{report['target']['version']} is unproven: {unproven}")
    if report.get("deadline"):
        pods = [pod for on_host in report["evicted"].values() for pod in on_host]
        lines.append(f"deadline {report['deadline']}: {len(pods)} pods evicted")
        lines += _some(
            [f"  evicted {', '.join(on_host)} from {host}" for host, on_host in report["evicted"].items()]
        )
    if hours := report.get("idle_hours"):
        lines.append(f"empty for {hours['hosts']:.1f} host-hours, {hours['gpus']:.1f} GPU-hours")
    for wave in report["waves"]:
        if wave["began"] is None:
            continue
        ends = ", ".join(f"{count} {name}" for name, count in wave["counts"].items() if count)
        lines.append(f"  {wave['name']}: {'over' if wave['passed'] else 'running'}, {ends}")
    skipped = sorted(report.get("skipped", {}).items())
    lines += _some([f"  skipped {name}: {detail}" for name, detail in skipped])
    back = sorted(name for name, is_restored in report.get("restored", {}).items() if is_restored)
    for title, names in (("previous image again", back), ("still cordoned", report.get("cordoned", []))):
        lines += [f"  {title}: {short_list(names)}"] if names else []
    if problem := report.get("unturned"):
        lines.append(f"  scale sets may still name the new version: {problem}")
    if problem := report.get("left"):
        lines.append(f"  scale sets may still be claimed, and their services suspended: {problem}")
    lines += _unplanned_lines(report)
    lines += [f"  {f['count']} x {f['signature']}: {short_list(f['hosts'])}" for f in report["failures"]]
    return "\n".join(map(printable, lines))


def _some(lines: list[str]) -> list[str]:
    if len(lines) <= _SLOWEST:
        return lines
    return [*lines[: _SLOWEST - 1], f"  and {len(lines) - _SLOWEST + 1} more hosts: --json has all"]


def _unplanned_lines(report: Mapping[str, Any]) -> list[str]:
    instances = {path: _instance(path, version) for path, version in report.get("unplanned", {}).items()}
    outdated = [instances[path] for path in report.get("outdated", ())]
    others = [text for text in instances.values() if text not in outdated]
    lines = [f"  not in the plan: {short_list(others)}"] if others else []
    if outdated:
        lines.append(f"  not in the plan, and not of its version: {short_list(outdated)}; {PLAN_AGAIN}")
    return lines
