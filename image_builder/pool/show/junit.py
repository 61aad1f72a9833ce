"""The report of a run as JUnit XML, for display in CI systems.

There is a suite for each wave and a case for each host. A run can be stopped without any failed host, for example by a
red control plane: so the first suite has a single case, the run itself, to keep such a run from being green.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from image_builder.pool.plan.model import Outcome
from image_builder.pool.run.state import HostStatus, Progress
from image_builder.pool.show.report import counts, is_skipped

# Characters that XML 1.0 can't represent, not even escaped: https://www.w3.org/TR/xml/#charsets
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(progress: Progress, report: Mapping[str, Any]) -> bytes:
    """Return the document; ``report`` is the run's report (``pool.show.report.report``).

    A host that failed is a ``failure``, with its signature as the type: hosts that failed for the same reason share it.
    A host that was skipped or has no class yet is ``skipped``. How long a roll's steps took, and which pods were
    evicted, is the ``system-out`` of their host.
    """
    root = Element("testsuites", name=_text("pools " + ", ".join(pool.name for pool in progress.plan.pools)))
    suites = [_run_suite(report)]
    for wave in progress.waves:
        statuses = [progress.hosts[name] for name in sorted(wave.present)]
        cases = (_case(status, _output(status, report)) for status in statuses)
        suites.append(_suite(wave.wave.name, wave.began, cases))
    for suite in suites:
        root.append(suite)
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    ElementTree.indent(root, " ")
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _suite(name: str, began: float | None, cases: Iterable[Element]) -> Element:
    """Return a suite; its time is the sum of its cases' times, as usual in JUnit."""
    suite = Element("testsuite", name=_text(name))
    suite.extend(cases)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("errors", "0")
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in suite):.3f}")
    if began is not None:
        suite.set("timestamp", datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%dT%H:%M:%S"))
    return suite


def _run_suite(report: Mapping[str, Any]) -> Element:
    case = Element("testcase", classname="run", name="all waves are over", time="0.000")
    state = report["state"]
    if state in ("stopped", "interrupted"):
        why = report["reason"] or "the process that drove it no longer runs"
        SubElement(case, "failure", type=state, message=_text(why))
    elif state != "finished":
        SubElement(case, "skipped", message=state)
    if hours := report.get("idle_hours"):
        lines = f"empty for {hours['hosts']:.1f} host-hours, {hours['gpus']:.1f} GPU-hours"
        SubElement(case, "system-out").text = lines
    return _suite("run", None, [case])


def _output(status: HostStatus, report: Mapping[str, Any]) -> str:
    """Return what a roll did with a host: how long its steps took, and what was evicted."""
    if "evicted" not in report:
        return ""
    lines = [f"{step}: {took:.1f} s" for step, took in status.seconds.items()]
    lines += [f"evicted: {pod}" for pod in report["evicted"].get(status.host.name, ())]
    return "\n".join(lines)


def _case(status: HostStatus, output: str) -> Element:
    host = status.host
    seconds = sum(status.seconds.values())
    case = Element(
        "testcase",
        classname=_text(f"{host.pool}.{host.scale_set}"),
        name=_text(host.name),
        time=f"{seconds:.3f}",
    )
    if status.outcome is None:
        (state,) = (name for name, count in counts([status]).items() if count)
        SubElement(case, "skipped", message=state)
    elif is_skipped(status):
        SubElement(case, "skipped", message=_text(status.outcome.detail))
    elif not status.outcome.ok:
        case.append(_failure(status, status.outcome))
    if output:
        SubElement(case, "system-out").text = _text(output)
    return case


def _failure(status: HostStatus, outcome: Outcome) -> Element:
    failure = Element("failure", type=_text(outcome.signature), message=_text(outcome.detail or outcome.kind))
    host = status.host
    failure.text = _text(
        f"{outcome.signature}\n{outcome.detail}\n"
        f"{host.address} port {host.port}, {host.vm_size}, zone {host.zone or 'none'}, image {host.image}"
    )
    return failure


def _text(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)
