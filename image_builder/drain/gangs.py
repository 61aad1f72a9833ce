"""Gangs: pods that belong together, since a gang loses its work if it loses any of its members. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from image_builder.drain.pods import Owner, Pod

# Pod groups: a scheduler places all their pods together or none. Kueue and coscheduling (current and older name) use
# labels, Volcano an annotation.
_GROUP_LABELS = (
    "kueue.x-k8s.io/pod-group-name",
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
)
_GROUP_ANNOTATIONS = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
# Owners that are gangs. If other owners are between a pod and its gang, the pod has the gang's name as a label.
# https://github.com/kubeflow/trainer: the first operator's jobs own their pods, an MPIJob's launcher is a Job of its,
# and a TrainJob is a JobSet.
_KUBEFLOW = frozenset({"JAXJob", "MPIJob", "PaddleJob", "PyTorchJob", "TFJob", "XGBoostJob"})
_GANG_KINDS = frozenset({"Job", "JobSet", "TrainJob", "RayCluster", *_KUBEFLOW})
_NAMES = {
    "JobSet": "jobset.sigs.k8s.io/jobset-name",
    "RayCluster": "ray.io/cluster",
}
_KUBEFLOW_NAME, _KUBEFLOW_OPERATOR = "training.kubeflow.org/job-name", "training.kubeflow.org/operator-name"
# Each replica of a LeaderWorkerSet is a gang.
_WORKERS, _WORKERS_INDEX = "leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/group-index"

# The controller of a Job, by the Job's uid.
Parents = Mapping[str, Owner]


def gang_of(pod: Pod, parents: Parents) -> str:
    """Return the gang that a pod belongs to, empty if it belongs to none.

    A pod group takes precedence over owners: it states itself what is placed together. Of nested owners, the outermost
    counts: a JobSet's Jobs are one gang. A StatefulSet is one if its pods have devices: it then trains or serves as a
    whole, and any other replaces its pods one by one.
    """
    for group in (
        pod.group,
        *(pod.labels.get(key) for key in _GROUP_LABELS),
        *(pod.annotations.get(key) for key in _GROUP_ANNOTATIONS),
    ):
        if group:
            return f"{pod.namespace}/PodGroup {group}"
    if name := pod.labels.get(_WORKERS):
        return f"{pod.namespace}/LeaderWorkerSet {name}-{pod.labels.get(_WORKERS_INDEX, '')}"
    owner = pod.owner
    if owner and (parent := parents.get(owner.uid)) and parent.kind in _GANG_KINDS:
        return f"{pod.namespace}/{parent}"
    for kind, label in _NAMES.items():
        if name := pod.labels.get(label):
            return f"{pod.namespace}/{kind} {name}"
    kind = owner.kind if owner else ""
    if (name := pod.labels.get(_KUBEFLOW_NAME)) and kind not in _KUBEFLOW:
        operator = pod.labels.get(_KUBEFLOW_OPERATOR, "")
        kinds = {"mpi-operator": "MPIJob"} | {f"{each.lower()}-controller": each for each in _KUBEFLOW}
        return f"{pod.namespace}/{kinds.get(operator, 'PyTorchJob')} {name}"
    is_gang = kind in _GANG_KINDS or (kind == "StatefulSet" and pod.has_devices)
    return f"{pod.namespace}/{owner}" if is_gang else ""


def units(hosts: Collection[str], spread: Mapping[str, Iterable[str]]) -> list[frozenset[str]]:
    """Group hosts into sets that share no gang; ``spread`` has all hosts of each gang, also others than ``hosts``."""
    sets = [frozenset({host}) for host in hosts]
    for members in map(frozenset, spread.values()):
        joined = [unit for unit in sets if unit & members]
        if joined:
            sets = [unit for unit in sets if not unit & members] + [members.union(*joined)]
    return sets
