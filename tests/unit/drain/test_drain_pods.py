"""The meaning of a pod for the drain of its host."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from image_builder.drain.pods import AUTOSCALER, CLUSTER_API, ENDS, KARPENTER, MARK, Class, classify, pod_from
from image_builder.drain.policy import Policy, Rule
from tests.unit.drain.manifests import pod_object

START = datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp()


def gpus(resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    return {"containers": [{"name": "main", "resources": {"limits": {resource: "1"}}}]}


EMPTY_DIR = {"volumes": [{"name": "scratch", "emptyDir": {}}]}


def class_of(policy: Policy | None = None, now: float = START, **parts: Any) -> str:
    return classify(pod_from(pod_object(**parts)), policy or Policy(), now).kind.value


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({}, "evict"),
        ({"annotations": {"kubernetes.io/config.mirror": "x"}, "owner": "Node", "spec": gpus()}, "ignored"),
        ({"owner": "DaemonSet", "spec": gpus()}, "wait"),
        ({"owner": "DaemonSet", "spec": gpus(), "status": {"phase": "Failed"}}, "ignored"),
        ({"owner": "DaemonSet", "spec": gpus(), "annotations": {MARK: "evict"}}, "ignored"),
        ({"owner": "DaemonSet", "annotations": {MARK: "evict"}}, "ignored"),
        ({"owner": "DaemonSet", "annotations": {MARK: "wait"}}, "wait"),
        ({"owner": "DaemonSet", "annotations": {KARPENTER: "true"}}, "wait"),
        ({"owner": "DaemonSet", "annotations": {AUTOSCALER: "false"}}, "wait"),
        ({"owner": "DaemonSet", "annotations": {AUTOSCALER: "true"}}, "ignored"),
        ({"owner": "DaemonSet", "labels": {CLUSTER_API: "wait-completed"}}, "wait"),
        ({"owner": "DaemonSet", "spec": EMPTY_DIR}, "ignored"),
        ({"status": {"phase": "Succeeded"}, "spec": gpus()}, "ignored"),
        ({"status": {"phase": "Failed"}}, "ignored"),
        ({"owner": ""}, "wait"),
        ({"spec": EMPTY_DIR}, "wait"),
        ({"spec": gpus()}, "wait"),
        ({"spec": gpus("nvidia.com/mig-1g.10gb")}, "wait"),
        ({"spec": gpus("amd.com/gpu")}, "wait"),
        ({"spec": gpus("rdma/hca_shared_devices_a")}, "wait"),
        ({"spec": {"resourceClaims": [{"name": "gpu"}]}}, "wait"),
        ({"spec": {"initContainers": [*gpus()["containers"]]}}, "wait"),
        ({"spec": gpus("cpu")}, "evict"),
    ],
)
def test_the_shape_of_a_pod(parts: dict[str, Any], kind: str) -> None:
    assert class_of(**parts) == kind


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"annotations": {MARK: "evict"}, "spec": gpus()}, "evict"),
        ({"annotations": {MARK: "evict"}, "owner": ""}, "evict"),
        ({"annotations": {MARK: "wait"}}, "wait"),
        *(({"annotations": {MARK: mark}}, "wait") for mark in ("waitt", "Wait", "true", "no", "Evict", "")),
        ({"annotations": {MARK: "waitt"}, "spec": gpus()}, "wait"),
        ({"annotations": {MARK: "false"}, "spec": gpus()}, "wait"),
        # A mark that protects a pod comes before one that gives it away.
        ({"annotations": {MARK: "evict", KARPENTER: "true"}}, "wait"),
        ({"labels": {CLUSTER_API: "wait-completed"}}, "wait"),
        ({"labels": {CLUSTER_API: "skip"}}, "ignored"),
        ({"annotations": {AUTOSCALER: "false"}}, "wait"),
        ({"annotations": {AUTOSCALER: "true"}, "spec": EMPTY_DIR}, "evict"),
        # Marks of other tools give no GPUs away.
        ({"labels": {CLUSTER_API: "skip"}, "spec": gpus()}, "wait"),
        ({"annotations": {AUTOSCALER: "true"}, "spec": gpus()}, "wait"),
    ],
)
def test_marks(parts: dict[str, Any], kind: str) -> None:
    assert class_of(**parts) == kind


@pytest.mark.parametrize(
    ("text", "seconds", "kind"),
    [
        ("true", 1e9, "wait"),
        ("false", 0, "evict"),
        ("1h30m", 5399, "wait"),
        ("1h30m", 5400, "evict"),
        ("soon", 1e9, "wait"),
    ],
)
def test_karpenters_mark_protects_for_ever_or_for_a_while(text: str, seconds: float, kind: str) -> None:
    assert class_of(now=START + seconds, annotations={KARPENTER: text}) == kind


def test_the_first_rule_that_matches_counts() -> None:
    policy = Policy(
        rules=(
            Rule(action="ignore", namespace="work", labels={"app": "cache"}),
            Rule(action="evict", owner="", namespace="work"),
        )
    )
    assert class_of(policy, labels={"app": "cache", "more": "1"}) == "ignored"
    assert class_of(policy, owner="") == "evict"
    assert class_of(Policy(rules=(Rule(action="evict", namespace="other"),)), owner="") == "wait"


def test_a_rule_counts_for_gpus_only_where_it_says_so() -> None:
    assert class_of(Policy(rules=(Rule(action="evict"),)), spec=gpus()) == "wait"
    assert class_of(Policy(rules=(Rule(action="evict", gpus=True),)), spec=gpus()) == "evict"
    assert class_of(Policy(rules=(Rule(action="ignore"),)), spec=gpus()) == "wait"


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"spec": gpus()}, "evict"),
        ({"owner": ""}, "evict"),
        ({"annotations": {MARK: "wait"}}, "evict"),
        ({"annotations": {KARPENTER: "true"}}, "evict"),
        ({"owner": "DaemonSet"}, "ignored"),
        ({"labels": {CLUSTER_API: "skip"}}, "ignored"),
        ({"labels": {"app": "keep"}}, "wait"),
    ],
)
def test_what_is_evicted_after_a_deadline(parts: dict[str, Any], kind: str) -> None:
    """Owners are overruled; rules, which come from the same person as the deadline, aren't."""
    policy = Policy(rules=(Rule(action="wait", labels={"app": "keep"}),))
    verdict = classify(pod_from(pod_object(**parts)), policy, START, overruled=True)
    assert verdict.kind.value == kind
    assert ("deadline" in verdict.reason) == (kind == "evict")


def test_gpus_are_counted() -> None:
    assert pod_from(pod_object(spec=gpus())).gpus == 1
    assert pod_from(pod_object(spec=gpus("rdma/hca"))).gpus == pod_from(pod_object()).gpus == 0


def test_when_its_work_ends() -> None:
    pod = pod_from(pod_object(spec={"activeDeadlineSeconds": 60}))
    assert pod.deadline == START + 60
    assert pod_from(pod_object(annotations={ENDS: "2026-01-02T00:00:00Z"})).deadline == START + 86400
    assert pod_from(pod_object(annotations={ENDS: "tomorrow"})).deadline is None


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "example.com/a", "operator": "Exists"}, False),
    ],
)
def test_who_tolerates_cordons(toleration: dict[str, str], *, tolerates: bool) -> None:
    assert pod_from(pod_object(spec={"tolerations": [toleration]})).tolerates_cordons is tolerates


def test_every_class_is_one_of_three() -> None:
    assert {kind.value for kind in Class} == {"ignored", "wait", "evict"}


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ({"action": "wait", "owner": "DaemonSet"}, "wait"),
        ({"action": "wait", "owner": "DaemonSet", "gpus": True}, "wait"),
        ({"action": "wait", "namespace": "work"}, "wait"),
        ({"action": "wait", "namespace": "other"}, "ignored"),
        # It doesn't name them: no host would ever be empty.
        ({"action": "wait"}, "ignored"),
        # It would come back.
        ({"action": "evict", "owner": "DaemonSet"}, "ignored"),
        ({"action": "ignore", "owner": "DaemonSet"}, "ignored"),
    ],
)
def test_a_rule_that_names_pods_of_daemon_sets_counts(rule: dict[str, Any], kind: str) -> None:
    assert class_of(Policy(rules=(Rule(**rule),)), owner="DaemonSet") == kind
    if rule["action"] == "wait" and kind == "wait":
        # Not even a deadline overrules a rule.
        pod = pod_from(pod_object(owner="DaemonSet"))
        assert classify(pod, Policy(rules=(Rule(**rule),)), 0.0, overruled=True).kind is Class.WAIT


def test_who_serves_with_gpus_on_every_node_may_be_let_go_of() -> None:
    for action in ("ignore", "evict"):
        rule = Rule(action=action, owner="DaemonSet", gpus=True)
        assert class_of(Policy(rules=(rule,)), owner="DaemonSet", spec=gpus()) == "ignored"
    rule = Rule(action="ignore", owner="DaemonSet")
    assert class_of(Policy(rules=(rule,)), owner="DaemonSet", spec=gpus()) == "wait"


def test_a_value_that_means_nothing_is_named() -> None:
    pod = pod_from(pod_object(annotations={MARK: "waitt"}))
    assert f"{MARK}: waitt" in classify(pod, Policy(), 0.0).reason
