"""The next step for each host: idle-only, fence, ask, evict."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.drain.ladder import PATIENCE, Host, Tenant, decide
from image_builder.drain.pods import Class, Verdict, pod_from
from image_builder.drain.policy import Policy
from tests.unit.drain.manifests import pod_object

NOW = 1000.0


def tenant(kind: Class = Class.EVICT, *, name: str = "a", **parts: Any) -> Tenant:
    return Tenant(pod_from(pod_object(name, **parts.pop("pod", {}))), Verdict(kind, "why"), **parts)


def actions(
    *hosts: Host, elsewhere: dict[str, set[str]] | None = None, **policy: Any
) -> set[tuple[str, str]]:
    made = decide({host.name: host for host in hosts}, elsewhere or {}, Policy(**policy), NOW)
    return {(action.verb, action.host) for action in made}


def reasons(*hosts: Host, elsewhere: dict[str, set[str]] | None = None, **policy: Any) -> dict[str, str]:
    made = decide({host.name: host for host in hosts}, elsewhere or {}, Policy(**policy), NOW)
    return {action.host: action.reason for action in made if action.verb == "skip"}


def test_a_busy_host_is_fenced_in_every_mode_but_idle_only() -> None:
    host = Host("a", NOW, tenants=(tenant(),))
    for mode in ("fence", "ask", "evict"):
        assert actions(host, mode=mode) == {("fence", "a")}
    assert actions(host, mode="idle-only") == set()


def test_idle_only_takes_a_host_that_was_idle_for_long_enough() -> None:
    assert actions(Host("a", 0, idle_since=NOW - 29), mode="idle-only") == set()
    assert actions(Host("a", 0, idle_since=NOW - 30), mode="idle-only") == {("fence", "a")}


def test_idle_only_gives_back_a_host_that_became_busy_before_its_cordon() -> None:
    host = Host("a", 0, fenced=NOW - 1, tenants=(tenant(),))
    assert reasons(host, mode="idle-only") == {"a": "it became busy again"}


@pytest.mark.parametrize(("fenced", "idle"), [(NOW - 29, NOW - 900), (NOW - 900, NOW - 29)])
def test_a_host_is_empty_after_its_cordon_and_its_pods_have_settled(fenced: float, idle: float) -> None:
    assert actions(Host("a", 0, fenced, idle)) == set()
    assert actions(Host("a", 0, fenced - 1, idle - 1)) == {("empty", "a")}


def test_patience_counts_from_the_cordon() -> None:
    busy = Host("a", 0, fenced=NOW - 60, tenants=(tenant(),))
    assert reasons(busy, max_wait_seconds=60.0) == {"a": PATIENCE}
    assert reasons(busy, max_wait_seconds=61.0) == {}
    waiting = Host("a", NOW - 60, tenants=(tenant(),))
    assert reasons(waiting, max_wait_seconds=60.0) == {}
    assert reasons(waiting, max_wait_seconds=60.0, mode="idle-only") == {"a": PATIENCE}


def test_only_the_last_rung_evicts_and_only_what_may_be() -> None:
    pods = (
        tenant(name="may"),
        tenant(Class.WAIT, name="waits"),
        tenant(name="leaves", pod={"meta": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
    )
    host = Host("a", 0, fenced=NOW, tenants=pods)
    assert actions(host, mode="fence") == set()
    assert actions(host, mode="ask") == {("ask", "a")}
    (evict,) = decide({"a": host}, {}, Policy(mode="evict"), NOW)
    assert [t.pod.name for t in evict.tenants] == ["may"]


def test_evictions_come_after_the_time_to_save_work() -> None:
    policy: dict[str, Any] = {"mode": "evict", "checkpoint_seconds": 10.0}
    assert actions(Host("a", 0, fenced=NOW - 9, tenants=(tenant(),)), **policy) == {("ask", "a")}
    asked = tenant(is_asked=True)
    assert actions(Host("a", 0, fenced=NOW - 9, tenants=(asked,)), **policy) == set()
    assert actions(Host("a", 0, fenced=NOW - 10, tenants=(asked,)), **policy) == {("evict", "a")}


def test_what_is_refused_skips_its_host_at_once() -> None:
    host = Host("a", 0, fenced=NOW, tenants=(tenant(refusal="two budgets"),))
    assert reasons(host, mode="evict") == {"a": "work/a: two budgets"}


def test_a_gang_on_other_hosts_is_not_fenced_in_parts() -> None:
    host = Host("a", 0, tenants=(tenant(Class.WAIT, gang="g"),))
    elsewhere = {"g": {"a", "x"}}
    assert reasons(host, elsewhere=elsewhere) == {"a": "g also runs on x: drain them together"}
    assert actions(host, elsewhere={"g": {"a"}}) == {("fence", "a")}
    # A host that is already fenced waits for its own pods, wherever others are recreated.
    fenced = Host("a", 0, fenced=NOW, tenants=host.tenants)
    assert actions(fenced, elsewhere=elsewhere) == set()


def test_a_gangs_hosts_are_skipped_together() -> None:
    gang = (tenant(Class.WAIT, gang="g"),)
    hosts = (Host("a", 0, NOW, tenants=gang), Host("b", 0, NOW, tenants=gang, obstacle="cordoned"))
    assert reasons(*hosts, Host("c", 0)) == {"b": "cordoned", "a": "it shares a gang with b: cordoned"}


def test_of_a_gang_all_are_evicted_or_none() -> None:
    may, must_not = (tenant(gang="g"),), (tenant(Class.WAIT, gang="g"),)
    fenced = Host("a", 0, NOW, tenants=may)
    assert actions(fenced, Host("b", 0, NOW, tenants=may), mode="evict") == {("evict", "a"), ("evict", "b")}
    assert actions(fenced, Host("b", 0, NOW, tenants=must_not), mode="evict") == set()
    assert ("evict", "a") not in actions(fenced, Host("b", 0, tenants=may), mode="evict")
    assert actions(fenced, elsewhere={"g": {"x"}}, mode="evict") == set()


def test_the_most_that_is_fenced_and_busy() -> None:
    ending = tenant(pod={"annotations": {"image-builder/ends-at": "2026-01-02T00:00:00Z"}})
    hosts = (
        Host("a", 0, NOW, tenants=(tenant(),)),
        Host("b", 0, tenants=(tenant(),)),
        Host("c", 0, tenants=(ending,)),
        Host("d", 0),
    )
    # Idle hosts cost nothing; among busy ones, those with a known end come first.
    assert actions(*hosts, max_fenced=1) == {("fence", "d")}
    assert actions(*hosts, max_fenced=2) == {("fence", "c"), ("fence", "d")}
    assert actions(*hosts) == {("fence", "b"), ("fence", "c"), ("fence", "d")}
