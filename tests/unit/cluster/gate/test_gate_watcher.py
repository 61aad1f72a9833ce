"""The watch of all nodes: one whose object can't be read doesn't stop it, and stays out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from image_builder.cluster.gate import watcher
from image_builder.cluster.gate.decide import Action, decide
from image_builder.cluster.gate.model import Node, Rules, node_from

RULES = Rules()
TAINT = {"key": RULES.taint, "value": "pending", "effect": "NoSchedule"}


def nodes(monkeypatch: pytest.MonkeyPatch) -> tuple[watcher.Watcher[Node], list[Node], list[str]]:
    """Return a watcher with which nodes that have annotations can't be read, what changed and was told."""

    def read(item: Mapping[str, Any], rules: Rules) -> Node:
        if odd := item["metadata"].get("annotations"):
            raise ZeroDivisionError(odd["odd"])
        return node_from(item, rules)

    monkeypatch.setattr(watcher, "node_from", read)
    changed: list[Node] = []
    said: list[str] = []
    client: Any = None
    return watcher.watch_nodes(client, RULES, changed.append, lambda _: None, said.append), changed, said


def event(kind: str, name: str, odd: str = "", **spec: Any) -> dict[str, Any]:
    meta = {"name": name, "resourceVersion": "1", **({"annotations": {"odd": odd}} if odd else {})}
    return {"type": kind, "object": {"metadata": meta, "spec": spec}}


def test_a_node_that_cannot_be_read_is_one_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, changed, said = nodes(monkeypatch)
    watched._event(event("ADDED", "odd", "a\nb"))
    watched._event(event("ADDED", "good", taints=[TAINT]))
    assert [node.name for node in changed] == ["odd", "good"]
    # It was admitted before, and has no taint any more: it gets one.
    assert decide(watched.objects["odd"], RULES) is Action.GATE
    watched._event(event("MODIFIED", "odd", "a\nb", taints=[TAINT]))
    assert decide(watched.objects["odd"], RULES) is Action.NONE
    assert said == ["odd can't be read, and counts as one that says nothing: ZeroDivisionError: a\ufffdb"]


def test_each_problem_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _, said = nodes(monkeypatch)
    for kind, odd in (
        ("ADDED", "a"),
        ("MODIFIED", "a"),
        ("MODIFIED", "b"),
        ("MODIFIED", ""),
        ("MODIFIED", "b"),
    ):
        watched._event(event(kind, "n", odd))
    assert [line[-1] for line in said] == ["a", "b", "b"]
    watched._event(event("DELETED", "n", "b"))
    assert not watched.objects and not watched._unreadable


def test_an_object_without_a_stand_in_is_none() -> None:
    def read(_: Mapping[str, Any]) -> str:
        raise ValueError("x")

    said: list[str] = []
    client: Any = None
    watched = watcher.Watcher(client, "/", {}, read, lambda _: None, lambda _: None, said.append)
    watched._event(event("ADDED", "n"))
    watched._event(event("MODIFIED", "n"))
    assert watched.objects == {} and len(said) == 1
