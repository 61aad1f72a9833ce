"""The page of ``join``, made from its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from image_builder.settings import REPO_ROOT
from tests import provenance
from tests.e2e.join_facts import facts
from tests.e2e.results import held, machine

PAGE = REPO_ROOT / "docs/reference/join-results.md"
_HEAD = """\
# A node joins a cluster: last results

A machine of the lab's image `worker_join` before a control plane of the lab (etcd, API server, controller manager,
scheduler, with the gate's controller). User data of `pool render` tell it what to join; it gets a bootstrap token from
a broker and its certificate by TLS bootstrap, passes its preflight, and runs a pod of a preloaded image with an address
of the pods' network. Then it is deallocated: the same OS disk, a blank local one. In the end the API server is away for
a while. Metadata service and broker are local servers; their answers have the documented shape. What another run of
the agent takes where nothing is emulated is one of the [benchmarks](benchmarks.md).

Made by `.venv/bin/python -m tests.e2e.join --update-docs`; how to use it is in
[let nodes join by themselves](../how-to/join-nodes.md).
"""
_MOMENTS = {
    "registered": "the API server has the node",
    "ready": "it is Ready",
    "admitted": "the gate has let it in",
    "pod": "the pod runs",
}


def text(record: Mapping[str, Any]) -> str:
    """Return the page."""
    return f"{_HEAD}\n{results(record)}\n"


def write(record: Mapping[str, Any]) -> None:
    PAGE.write_text(text(record), encoding="utf-8")


def results(record: Mapping[str, Any]) -> str:
    """Return the results in Markdown."""
    return "\n".join(
        [
            *provenance.note(record, provenance.JOIN),
            _machine(record),
            "",
            "| seconds since the power came | first boot | after the deallocation |",
            "|---|---|---|",
            *(f"| {words} | {_moment(record, name)} |" for name, words in _MOMENTS.items()),
            "",
            "| seconds of `node-agent join` | first boot | another run | after the deallocation | another run |",
            "|---|---|---|---|---|",
            *_phases(record),
            f"| the whole command | | {_second_run(record, 'first')} | | {_second_run(record, 'again')} |",
            "",
            f"Without the API server for {record['away']['away_seconds']:.0f} s: heard of again after "
            f"{record['away']['heard_after_seconds']:.0f} s, {_throughout(record['away'])}.",
            "",
            *held("what was asked of the API server and the machine", facts(record)),
        ]
    )


def _throughout(away: Mapping[str, Any]) -> str:
    return (
        "and never called anything but Ready"
        if away["was_ready_throughout"]
        else "called NotReady in between"
    )


def _machine(record: Mapping[str, Any]) -> str:
    info = record["first"]["node"]["info"]
    return machine(record, info, f", kernel {info['kernelVersion']}")


def _moment(record: Mapping[str, Any], name: str) -> str:
    return " | ".join(f"{record[boot]['seconds'][name]:.0f}" for boot in ("first", "again"))


def _second_run(record: Mapping[str, Any], boot: str) -> str:
    return f"{record[boot]['second_run']['seconds']:.1f}"


def _phases(record: Mapping[str, Any]) -> list[str]:
    runs = [
        {phase["name"]: phase for phase in record[boot][run]["phases"]}
        for boot in ("first", "again")
        for run in ("provision", "second_run")
    ]
    return [f"| `{name}` | {' | '.join(_phase(run[name]) for run in runs)} |" for name in runs[0]]


def _phase(phase: Mapping[str, Any]) -> str:
    return f"{phase['seconds']:.1f}" if phase["state"] != "skipped" else "skipped"
