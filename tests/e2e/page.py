"""The table and the plot of ``pending_pods``, made from its record and written into docs/explanation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from image_builder.settings import REPO_ROOT
from tests.e2e.facts import stories
from tests.e2e.pods import PODS, STALLED, Story
from tests.support import provenance

PAGE = REPO_ROOT / "docs/explanation/pending-pods.md"
PLOT = REPO_ROOT / "docs/explanation/pending-pods.svg"
_BEGIN, _END = "<!-- results: begin -->", "<!-- results: end -->"
_MACHINES = ("before", "ours")


def write(record: Mapping[str, Any]) -> None:
    """Write the plot, and the results between the page's marks."""
    PLOT.write_text(plot(record), encoding="utf-8")
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


def with_results(text: str, record: Mapping[str, Any]) -> str:
    """Return the page with the record's results between its marks; raises ValueError for a page without them."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no {_BEGIN} … {_END}")
    return f"{head}{begin}\n{results(record)}\n{end}{tail}"


def results(record: Mapping[str, Any]) -> str:
    """Return the results in Markdown."""
    before, ours = record["before"], record["ours"]
    told = stories(record, "before")
    emulated = " (emulated)" if before["accelerator"] == "tcg" else ""
    rates = [_rate(before[f"{name}_bytes_per_second"]) for name in ("link", "connection")]
    failures = {name: _failures(record, name) for name in _MACHINES}
    sandbox = next(t.message for t in told["quota"].failed_sandboxes)
    cancelled = next(t for t in told[STALLED.name].failed_pulls)
    stood = cancelled.seconds - before["stall"]["start"]
    rows: list[tuple[str, object, object]] = [
        *((f"`{name}`", value, ours["settings"][name]) for name, value in before["settings"].items()),
        ("seconds in which the registry refused", before["refused_seconds"], ours["refused_seconds"]),
        ("seconds in which the link stood still", _stood(before), _stood(ours)),
        ("load of the host meanwhile", before["load"], ours["load"]),
        ("bytes over the link", _mb(before), _mb(ours)),
        ("requests for the pause image", before["requests"]["pause"], ours["requests"]["pause"]),
        ("sandboxes that could not be made", failures["before"][0], failures["ours"][0]),
        ("pulls that failed", failures["before"][1], failures["ours"][1]),
    ]
    return "\n".join(
        [
            *provenance.note(ours, provenance.PENDING_PODS),
            f"Measured {ours['date']}: QEMU machines of 2 cores{emulated} on a host of {before['cores']}; a link of "
            f"{rates[0]}, {rates[1]} for each connection. Until all was started, *before* took "
            f"{before['booted_seconds']:.0f} s and *ours* {ours['booted_seconds']:.0f} s.",
            "",
            "![Seconds of each pod, before and ours](pending-pods.svg)",
            "",
            table(record),
            "",
            "| | before | ours |",
            "| --- | --- | --- |",
            *(f"| {name} | {_shown(was)} | {_shown(now)} |" for name, was, now in rows),
            "",
            f"What the kubelet of *before* says when the link has stood still for {stood:.0f} s:",
            "",
            _quoted(cancelled.message),
            "",
            "and while the registry refuses the pause image:",
            "",
            _quoted(sandbox),
            *_notes(record),
        ]
    )


def table(record: Mapping[str, Any]) -> str:
    """Return Pending-to-Running of each pod, side by side, in Markdown."""
    before, ours = (stories(record, name) for name in _MACHINES)
    lines = [
        "| pod | what is special | before | of it pulling | ours | of it pulling |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for pod in PODS:
        cells = (
            f"{value:.1f} s"
            for story in (before[pod.name], ours[pod.name])
            for value in (story.running, story.pulling)
        )
        lines.append(f"| `{pod.name}` | {pod.shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value / 1e6:g} MB/s"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mb(seen: Mapping[str, Any]) -> str:
    return f"{sum(seen['bytes'].values()) / 1e6:.0f} MB"


def _stood(seen: Mapping[str, Any]) -> int:
    return round(float(seen["stall"]["end"]) - float(seen["stall"]["start"]))


def _failures(record: Mapping[str, Any], machine: str) -> tuple[int, int]:
    """Return how many sandboxes and how many pulls failed."""
    found = stories(record, machine).values()
    return sum(len(s.failed_sandboxes) for s in found), sum(len(s.failed_pulls) for s in found)


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a record's notes on how it was taken, if that differed from what the command does."""
    for name in _MACHINES:
        if notes := record[name].get("notes"):
            yield from ("", f"Of the measurement of *{name}*:", "", *(f"- {note}" for note in notes))


def _quoted(message: str) -> str:
    return f"```\n{message.strip()}\n```"


# -- the plot --------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT, _TOP = 860, 230, 70, 64
_BAR, _GAP, _BLOCK = 16, 5, 66
_KINDS = {"waiting": "waits", "pulling": "pulls its image", "running": "runs"}
# The plot has its own background, light or dark, so that it is readable on any page.
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.bold { font-weight: 600 }
.ground { fill: #ffffff } .grid { stroke: #d1d9e0 } .mark { stroke: #b42318; stroke-width: 2.5; fill: none }
.waiting { fill: #afb8c1 } .pulling { fill: #2f81d0 } .running { fill: #2f9e54 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .ground { fill: #0d1117 } .grid { stroke: #30363d } .mark { stroke: #ff7b72 }
  .waiting { fill: #6e7681 } .pulling { fill: #4493f8 } .running { fill: #3fb950 }
}
"""


def plot(record: Mapping[str, Any]) -> str:
    """Return the plot as SVG: two bars for each pod, in seconds since the node got it."""
    told = {name: stories(record, name) for name in _MACHINES}
    step, longest = _axis(max(s.running for found in told.values() for s in found.values()))
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    bottom = _TOP + len(PODS) * _BLOCK
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 58}" role="img" '
        f'aria-label="Seconds from Pending to Running of four pods, before and ours">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{bottom + 58}" rx="6"/>',
        *_legend(),
    ]
    for tick in range(0, longest + 1, step):
        x = _LEFT + tick * scale
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}"/>')
        lines.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(
        f'<text class="small" x="{middle}" y="{bottom + 38}" text-anchor="middle">'
        "seconds since the node was given the pod</text>"
    )
    for row, pod in enumerate(PODS):
        top = _TOP + row * _BLOCK
        lines.append(f'<text class="bold" x="16" y="{top + 14}">{pod.name}</text>')
        lines += [
            f'<text class="small" x="16" y="{top + 30 + 14 * n}">{escape(words)}</text>'
            for n, words in enumerate(_wrapped(pod.shown))
        ]
        for number, machine in enumerate(_MACHINES):
            y = top + number * (_BAR + _GAP)
            lines += _bar(told[machine][pod.name], machine, y, scale, longest)
    return "\n".join([*lines, "</svg>", ""])


def _axis(seconds: float) -> tuple[int, int]:
    """Return the distance between two ticks and the last tick, for an axis of at least ``seconds``."""
    step = next((s for s in (10, 20, 30, 60, 120, 300) if seconds / s <= 10), 600)
    return step, step * math.ceil(seconds * 1.05 / step)


def _legend() -> Iterator[str]:
    x = _LEFT
    for kind, words in _KINDS.items():
        yield f'<rect class="{kind}" x="{x}" y="20" width="14" height="14" rx="2"/>'
        yield f'<text x="{x + 20}" y="32">{words}</text>'
        x += 44 + 7 * len(words)
    yield _cross(x + 7, 27)
    yield f'<text x="{x + 20}" y="32">pull fails</text>'


def _cross(x: float, y: float) -> str:
    return f'<path class="mark" d="M{x - 5:.1f} {y - 5}l10 10m0 -10l-10 10"/>'


def _wrapped(words: str, width: int = 24) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _bar(story: Story, machine: str, y: int, scale: float, longest: int) -> Iterator[str]:
    yield f'<text class="small" x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{machine}</text>'
    spans = [(span.kind, span.start, span.end) for span in story.spans]
    for kind, start, end in [*spans, ("running", story.running, longest)]:
        width = max((end - start) * scale, 0.5)
        title = f"{story.pod}, {machine}: {_KINDS[kind]} from {start:.1f} s"
        yield (
            f'<rect class="{kind}" x="{_LEFT + start * scale:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}">'
            f"<title>{escape(title)}</title></rect>"
        )
    for trouble in story.failed_pulls:
        yield _cross(_LEFT + trouble.seconds * scale, y + _BAR // 2)
    yield f'<text x="{_WIDTH - _RIGHT + 8}" y="{y + 13}">{story.running:.0f} s</text>'
