"""The meaning of a pod for its host's drain: nothing, a wait, or an eviction. Pure, based on the API's JSON."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from image_builder.drain.policy import Policy, Rule

# Our own mark, set on a pod by its owner: `evict` opts in even a pod with GPUs, `wait` and any other value protect it.
MARK = "image-builder/drain"
# Other projects' marks. https://cluster-api.sigs.k8s.io/tasks/automated-machine-management/machine_deletions,
# https://karpenter.sh/docs/concepts/disruption/#pod-level-controls,
# https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
CLUSTER_API = "cluster.x-k8s.io/drain"
KARPENTER = "karpenter.sh/do-not-disrupt"
AUTOSCALER = "cluster-autoscaler.kubernetes.io/safe-to-evict"
# When the pod's work ends, according to its owner: an ISO 8601 time.
ENDS = "image-builder/ends-at"
_MIRROR = "kubernetes.io/config.mirror"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
# GPUs of all vendors, and slices of them; RDMA under its device plugins' names.
_DEVICE = re.compile(
    r"(nvidia\.com|amd\.com|gpu\.intel\.com|rdma|mellanox\.com)/.+|.+/(gpu|rdma|hca|ib)[\w.-]*"
)
_GPU = re.compile(r"(nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|gpu\.intel\.com/.+)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|m|s)")
_UNIT_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


class Class(enum.Enum):
    IGNORED = "ignored"  # a host that has only such pods is empty
    WAIT = "wait"  # it must end by itself
    EVICT = "evict"  # it may be evicted


@dataclass(frozen=True)
class Owner:
    """The controller of an object."""

    api: str
    kind: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Pod:
    """The part of a pod that matters. ``deadline``: when its work ends, if known (seconds since the epoch)."""

    namespace: str
    name: str
    uid: str
    host: str
    owner: Owner | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    phase: str = "Running"
    started: float | None = None
    deadline: float | None = None
    is_leaving: bool = False
    has_devices: bool = False
    gpus: int = 0
    has_empty_dir: bool = False
    tolerates_cordons: bool = False
    group: str = ""
    # Its containers are started again whenever they end.
    restarts: bool = False

    @property
    def never_ends(self) -> bool:
        """Return whether it runs until somebody deletes it, such as a Deployment's."""
        return self.restarts and self.deadline is None and not self.is_leaving

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Verdict:
    """The class of a pod, and why."""

    kind: Class
    reason: str


def owner_of(document: Mapping[str, Any]) -> Owner | None:
    """Return the controller of an object, None for an object that nothing would recreate."""
    for reference in document["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return Owner(*(str(reference.get(key, "")) for key in ("apiVersion", "kind", "name", "uid")))
    return None


def pod_from(document: Mapping[str, Any]) -> Pod:
    """Return the part of a Pod object that matters."""
    meta, spec, status = document["metadata"], document["spec"], document.get("status") or {}
    annotations = meta.get("annotations") or {}
    started = moment(status.get("startTime"))
    seconds = spec.get("activeDeadlineSeconds")
    by_deadline = started + float(seconds) if started is not None and seconds is not None else None
    return Pod(
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta["uid"],
        host=spec.get("nodeName") or "",
        owner=owner_of(document),
        labels=meta.get("labels") or {},
        annotations=annotations,
        phase=status.get("phase") or "",
        started=started,
        deadline=moment(annotations.get(ENDS)) or by_deadline,
        is_leaving=bool(meta.get("deletionTimestamp")),
        has_devices=uses_devices(spec),
        gpus=_gpus(spec),
        has_empty_dir=any("emptyDir" in volume for volume in spec.get("volumes") or ()),
        tolerates_cordons=any(map(_tolerates_cordons, spec.get("tolerations") or ())),
        restarts=spec.get("restartPolicy", "Always") == "Always",
        # Kubernetes' own gangs, which the scheduler places together.
        group=str((spec.get("schedulingGroup") or {}).get("podGroupName") or ""),
    )


def moment(text: object) -> float | None:
    """Parse a time as the API writes it, into seconds since the epoch; return None for anything else."""
    try:
        parsed = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return parsed.timestamp() if parsed.tzinfo else None


def classify(pod: Pod, policy: Policy, now: float, *, overruled: bool = False) -> Verdict:
    """Return what a pod means for the drain of its host; ``now`` is in seconds since the epoch.

    Another project's mark may protect a pod with devices, but never release it: only our own mark, set by its owner,
    or a rule that names such pods can. Once owners are ``overruled``, only rules protect a pod.
    """
    if _MIRROR in pod.annotations:
        return Verdict(Class.IGNORED, "mirror of a static pod")
    if pod.phase in ("Succeeded", "Failed"):
        return Verdict(Class.IGNORED, "finished")
    if pod.owner and pod.owner.kind == "DaemonSet":
        return _of_daemon_set(pod, policy, now, overruled=overruled)
    if by_rule := _by_rules(pod, policy.rules):
        return by_rule
    verdict = _by_marks(pod, now) or _by_shape(pod)
    if overruled and verdict.kind is Class.WAIT:
        return Verdict(Class.EVICT, f"the deadline has passed, although: {verdict.reason}")
    return verdict


def _of_daemon_set(pod: Pod, policy: Policy, now: float, *, overruled: bool) -> Verdict:
    """Return what a DaemonSet's pod means: nothing, unless it is protected, or has devices and so does users' work.

    Evicting it is no use: it comes back to the same host. A rule for all pods doesn't mean those that run everywhere.
    """
    named = [rule for rule in policy.rules if rule.owner or rule.namespace or rule.labels]
    if by_rule := _by_rules(pod, named):
        return by_rule if by_rule.kind is Class.WAIT else Verdict(Class.IGNORED, by_rule.reason)
    verdict = _by_marks(pod, now)
    if verdict is None and pod.has_devices:
        verdict = Verdict(Class.WAIT, "of a DaemonSet, but has GPUs or other devices")
    if verdict is None or verdict.kind is not Class.WAIT:
        return Verdict(Class.IGNORED, "of a DaemonSet")
    return Verdict(Class.IGNORED, f"of a DaemonSet; {verdict.reason}") if overruled else verdict


_BY_RULE = {"ignore": Class.IGNORED, "wait": Class.WAIT, "evict": Class.EVICT}


def _by_rules(pod: Pod, rules: Iterable[Rule]) -> Verdict | None:
    for number, rule in enumerate(rules, 1):
        if pod.has_devices and not rule.gpus and rule.action != "wait":
            continue
        kind = pod.owner.kind if pod.owner else ""
        fits = rule.namespace in ("", pod.namespace) and rule.owner in ("", kind)
        if fits and rule.labels.items() <= pod.labels.items():
            return Verdict(_BY_RULE[rule.action], f"rule {number}")
    return None


def _by_marks(pod: Pod, now: float) -> Verdict | None:
    mark = pod.annotations.get(MARK)
    if mark not in (None, "evict"):
        unknown = "" if mark == "wait" else ", which is neither wait nor evict"
        return Verdict(Class.WAIT, f"{MARK}: {mark}{unknown}")
    # Marks that protect a pod are checked before marks that release it.
    if pod.labels.get(CLUSTER_API) == "wait-completed":
        return Verdict(Class.WAIT, f"{CLUSTER_API}: wait-completed")
    if (text := pod.annotations.get(KARPENTER)) and _is_protected(text, pod.started, now):
        return Verdict(Class.WAIT, f"{KARPENTER}: {text}")
    if pod.annotations.get(AUTOSCALER) == "false":
        return Verdict(Class.WAIT, f"{AUTOSCALER}: false")
    if mark == "evict":
        return Verdict(Class.EVICT, f"{MARK}: evict")
    if pod.has_devices:
        return None
    if pod.labels.get(CLUSTER_API) == "skip":
        return Verdict(Class.IGNORED, f"{CLUSTER_API}: skip")
    if pod.annotations.get(AUTOSCALER) == "true":
        return Verdict(Class.EVICT, f"{AUTOSCALER}: true")
    return None


def _is_protected(text: str, started: float | None, now: float) -> bool:
    """Return whether Karpenter's mark still protects: `true` always does, a duration counts from the pod's start."""
    parts = _DURATION.findall(text)
    if "".join(map("".join, parts)) != text or started is None:
        return text != "false"
    return now < started + sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


def _by_shape(pod: Pod) -> Verdict:
    if pod.has_devices:
        return Verdict(Class.WAIT, "has GPUs or other devices")
    if pod.owner is None:
        return Verdict(Class.WAIT, "nothing would recreate it")
    if pod.has_empty_dir:
        return Verdict(Class.WAIT, "has data in an emptyDir")
    return Verdict(Class.EVICT, "its controller recreates it")


def uses_devices(spec: Mapping[str, Any]) -> bool:
    """Return whether a pod has GPUs, RDMA devices, or resource claims of any kind."""
    containers = [*spec.get("containers", ()), *(spec.get("initContainers") or ())]
    names = {
        name
        for container in containers
        for kind in ("limits", "requests")
        for name in (container.get("resources") or {}).get(kind) or ()
    }
    return bool(spec.get("resourceClaims")) or any(map(_DEVICE.fullmatch, names))


def _gpus(spec: Mapping[str, Any]) -> int:
    """Return how many GPUs, or slices of them, a pod's containers have; claims don't state a number."""
    containers = spec.get("containers", ())
    return sum(count_gpus((container.get("resources") or {}).get("limits")) for container in containers)


def count_gpus(resources: Mapping[str, Any] | None) -> int:
    """Return how many GPUs, or slices of them, are among the resources of a container or a Node."""
    counts = [str(count) for name, count in (resources or {}).items() if _GPU.fullmatch(name)]
    return sum(int(count) for count in counts if count.isdecimal())


def _tolerates_cordons(toleration: Mapping[str, Any]) -> bool:
    key, effect = toleration.get("key", ""), toleration.get("effect", "")
    is_for_all = not key and toleration.get("operator") == "Exists"
    return (is_for_all or key == UNSCHEDULABLE) and effect in ("", "NoSchedule")
