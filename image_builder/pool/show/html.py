"""The report of a run as one HTML file: it loads nothing, and trusts nothing that comes from a host.

Names and details come from inventories and hosts. They are escaped; should that ever fail, a content security policy
with the hashes of the page's own script and style blocks everything else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from image_builder.pool.plan.model import STEPS, Class, Mode
from image_builder.pool.plan.plan import Plan
from image_builder.pool.run.records import Record, Result
from image_builder.pool.run.state import HostStatus, Progress
from image_builder.pool.show.report import is_skipped, left_behind
from image_builder.pool.show.timeline import LABELS, ROW, TOP, WIDTH, timeline
from image_builder.text import human_seconds

_TEMPLATES = Path(__file__).with_name("templates")
# A symbol next to each color: no information is conveyed only by color.
_SIGNS: Mapping[str, str] = {
    "finished": "✓",
    "running": "▶",
    "stopped": "✗",
    "interrupted": "!",
    "not started": "·",
}
MEANINGS: Mapping[Class, str] = {
    "ok": "joined, and verified if it is in the sample",
    "refused": "connection refused",
    "timeout": "nothing answered in time",
    "bastion": "no way through a bastion; nothing is known about the host",
    "auth": "no login with this key",
    "host key": "shows a different host key than the known one",
    "sudo": "logged in, but no rights",
    "dropped": "the connection broke",
    "failed": "the host reports which phase failed",
    "unknown": "told to join, or to take another image; whether it did is unknown",
    "skipped": "never idle, missing, kept by somebody else or a policy, or the run stopped; left unchanged",
}
_BAR = 240.0


@dataclass(frozen=True)
class _Duration:
    """Quantiles of a step or of one of its phases. The widths are in pixels, relative to the largest p95."""

    step: str
    phase: str
    p50: str
    p95: str
    p99: str
    p50_width: float
    p95_width: float


@dataclass(frozen=True)
class _Row:
    """A row of the host table. ``number`` is its place; ``good`` is None if the host was skipped or has no class."""

    number: int
    name: str
    scale_set: str
    zone: str
    vm_size: str
    wave: str
    result: str
    good: bool | None
    tries: str
    seconds: float
    time: str
    detail: str


@dataclass(frozen=True)
class _Drain:
    """A row about work on a host: it was evicted, or is the reason why the host was skipped or deferred."""

    host: str
    event: str
    detail: str


def _left(report: Mapping[str, Any]) -> str:
    """Return why a run whose waves are over is no success; empty if it is one, or if they aren't over."""
    if report["state"] != "finished":
        return ""
    if bad := left_behind(report):
        return f"{bad} of {report['hosts']} hosts are not up"
    return "instances that are not in the plan have another version" if report.get("outdated") else ""


def page(progress: Progress, records: Sequence[Record], report: Mapping[str, Any]) -> str:
    """Return the page of a run; ``report`` is its report (``pool.show.report.report``)."""
    rows = list(_rows(progress, report))
    style, script = ((_TEMPLATES / name).read_text("utf-8") for name in ("report.css", "report.js"))
    return _template().render(
        report=report,
        sign=_SIGNS["interrupted" if (left := _left(report)) else report["state"]],
        left=left,
        kind=_kind(progress.plan),
        pools=", ".join(pool["name"] for pool in report["pools"]),
        facts=list(_facts(progress, records, report)),
        meanings=MEANINGS,
        drawing=timeline(report, [wave.wave.soak_seconds for wave in progress.waves], records),
        width=WIDTH,
        labels=LABELS,
        top=TOP,
        row_height=ROW,
        durations=list(_durations(progress.plan.policy.mode, report["seconds"])),
        bar=_BAR,
        rows=rows,
        steps=STEPS[progress.plan.policy.mode],
        drains=list(_drains(progress, records, report)),
        number={row.name: row.number for row in rows},
        classes=sorted({row.result for row in rows}),
        style=style,
        script=script,
        policy=_policy(style, script),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=human_seconds, moment=moment, share=_share, listed=_listed)
    return environment.get_template("report.html.j2")


def _policy(style: str, script: str) -> str:
    """Return a content security policy that allows this style and this script, and nothing else."""
    own = {"style": style, "script": script}
    allowed = [
        f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, text in own.items()
    ]
    # Without an icon of the page's own, a browser would request one from a server.
    return "; ".join(
        ["default-src 'none'", *allowed, "img-src data:", "base-uri 'none'", "form-action 'none'"]
    )


def moment(at: float | None) -> str:
    """Return a moment in UTC: ``2026-11-21 14:03:20``, or a dash if there is none."""
    return "\u2013" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _share(count: int, total: int) -> str:
    """Return a share in percent that is never rounded to 0% or 100%."""
    if count in (0, total):
        return "100%" if count else "0%"
    return f"{min(99.9, max(0.1, 100 * count / total)):.1f}%"


def _listed(counts: Mapping[str, int]) -> str:
    """Return what hosts have in common, most frequent first: ``gpu-17 (3), gpu-02 (1)``."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name or 'none'} ({count})" for name, count in ordered)


def _kind(plan: Plan) -> str:
    if plan.policy.mode != "roll":
        return "Rollout"
    return "Rollback" if plan.target and plan.target.undoes else "Roll"


def _facts(
    progress: Progress, records: Sequence[Record], report: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    yield "Pools", ", ".join(f"{pool.name} ({pool.hosts} hosts)" for pool in progress.plan.pools)
    if target := progress.plan.target:
        definition, _, version = target.version.partition("/versions/")
        yield "Image", f"{definition.rpartition('/')[2]} {version} (build {target.build})"
    if records:
        first, last = records[0].at, max(record.at for record in records)
        yield "From (UTC)", moment(first)
        yield ("To (UTC)" if progress.finished else "Last record (UTC)"), moment(last)
        yield "Duration", human_seconds(last - first)
    yield "Failed", f"{report['budget']['failed']} of {report['budget']['allowed']} allowed"
    yield "Unavailable", f"{report['unavailable']['now']} of {report['unavailable']['allowed']} allowed"
    yield "Verified", f"{report['verified']} of {report['hosts']} hosts"
    yield "Waves", f"{sum(w['passed'] is not None for w in report['waves'])} of {len(report['waves'])} over"
    if hours := report.get("idle_hours"):
        yield "Idle", f"{hours['gpus']:.1f} GPU-hours, {hours['hosts']:.1f} host-hours"
    if deadline := report.get("deadline"):
        yield "Deadline", f"{deadline}: {sum(map(len, report['evicted'].values()))} pods evicted"
    if progress.opened > 1:
        yield "Resumed", f"{progress.opened - 1} times"
    yield "Plan", report["plan"][:16]


def _durations(mode: Mode, seconds: Mapping[str, Mapping[str, float]]) -> Iterator[_Duration]:
    """Yield the steps in their order, each followed by its phases."""
    most = max((values["p95"] for values in seconds.values()), default=0.0) or 1.0
    for step in STEPS[mode]:
        for name, values in seconds.items():
            of, _, phase = name.partition(".")
            if of == step:
                yield _Duration(
                    step,
                    phase,
                    human_seconds(values["p50"]),
                    human_seconds(values["p95"]),
                    human_seconds(values["p99"]),
                    p50_width=round(_BAR * values["p50"] / most, 1),
                    p95_width=round(_BAR * values["p95"] / most, 1),
                )


def _drains(progress: Progress, records: Sequence[Record], report: Mapping[str, Any]) -> Iterator[_Drain]:
    """Yield what a roll did about work on hosts, and which hosts were busy for its whole patience, and how long."""
    events = [(host, "skipped", detail) for host, detail in report.get("skipped", {}).items()]
    events += [(host, "evicted", ", ".join(pods)) for host, pods in report.get("evicted", {}).items()]
    for record in records:
        if isinstance(record, Result) and record.step in ("drain", "await") and record.outcome.kind == "busy":
            busy = f"{record.outcome.detail} ({human_seconds(record.seconds)})"
            events.append((record.host, "deferred" if record.step == "drain" else "never idle", busy))
    yield from (_Drain(*event) for event in sorted(events) if progress.hosts[event[0]].state != "gone")


def _rows(progress: Progress, report: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield the hosts, failed ones first."""

    def place(name: str) -> tuple[int, str]:
        good = _good(progress.hosts[name])
        return (0 if good is False else 1 if good is None else 2), name

    for number, name in enumerate(sorted(report["results"], key=place)):
        status, result = progress.hosts[name], report["results"][name]
        seconds = sum(result["seconds"].values())
        yield _Row(
            number=number,
            name=name,
            scale_set=status.host.scale_set,
            zone=status.host.zone,
            vm_size=status.host.vm_size,
            wave=progress.waves[status.wave].wave.name,
            result=status.outcome.signature if status.outcome else status.state,
            good=_good(status),
            tries="/".join(str(result["tries"][step]) for step in STEPS[progress.plan.policy.mode]),
            seconds=round(seconds, 1),
            time=human_seconds(seconds) if seconds else "",
            detail=status.outcome.detail if status.outcome else "",
        )


def _good(status: HostStatus) -> bool | None:
    return status.outcome.ok if status.outcome and not is_skipped(status) else None
