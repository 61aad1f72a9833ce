"""Gangs: pods that belong together."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.drain.gangs import gang_of, units
from image_builder.drain.pods import Owner, pod_from
from tests.unit.drain.manifests import pod_object

GPUS = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}
JOBSET = {"uid-Job": Owner("jobset.x-k8s.io/v1", "JobSet", "big", "uid-big")}


@pytest.mark.parametrize(
    ("parts", "gang"),
    [
        ({}, ""),
        ({"owner": "StatefulSet"}, ""),
        ({"owner": "Job"}, "work/Job x"),
        ({"owner": "StatefulSet", "spec": GPUS}, "work/StatefulSet x"),
        ({"owner": "ReplicaSet", "spec": GPUS}, ""),
        *(
            ({"owner": kind, "labels": labels}, f"work/{kind} x")
            for kind in ("PyTorchJob", "MPIJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob")
            for labels in ({}, {"training.kubeflow.org/job-name": "x"})
        ),
        ({"owner": "TrainJob"}, "work/TrainJob x"),
        ({"labels": {"training.kubeflow.org/job-name": "t"}}, "work/PyTorchJob t"),
        (
            {
                "labels": {
                    "training.kubeflow.org/job-name": "t",
                    "training.kubeflow.org/operator-name": "tfjob-controller",
                }
            },
            "work/TFJob t",
        ),
        (
            {  # The second MPI operator's launcher, whose Job is gone.
                "owner": "Job",
                "labels": {
                    "training.kubeflow.org/job-name": "pi",
                    "training.kubeflow.org/operator-name": "mpi-operator",
                },
            },
            "work/MPIJob pi",
        ),
        ({"owner": "RayCluster"}, "work/RayCluster x"),
        ({"owner": "Job", "labels": {"jobset.sigs.k8s.io/jobset-name": "set"}}, "work/JobSet set"),
        (
            {
                "owner": "StatefulSet",
                "labels": {
                    "leaderworkerset.sigs.k8s.io/name": "serve",
                    "leaderworkerset.sigs.k8s.io/group-index": "3",
                },
            },
            "work/LeaderWorkerSet serve-3",
        ),
        ({"labels": {"kueue.x-k8s.io/pod-group-name": "g"}, "owner": ""}, "work/PodGroup g"),
        ({"labels": {"scheduling.x-k8s.io/pod-group": "g"}, "owner": "Job"}, "work/PodGroup g"),
        ({"annotations": {"scheduling.k8s.io/group-name": "g"}}, "work/PodGroup g"),
        ({"spec": {"schedulingGroup": {"podGroupName": "g"}}}, "work/PodGroup g"),
    ],
)
def test_the_gang_of_a_pod(parts: dict[str, Any], gang: str) -> None:
    assert gang_of(pod_from(pod_object(**parts)), {}) == gang


def test_the_outermost_owner_counts() -> None:
    assert gang_of(pod_from(pod_object(owner="Job")), JOBSET) == "work/JobSet big"


def test_an_mpi_job_and_its_launcher_are_one_gang() -> None:
    labels = {"training.kubeflow.org/job-name": "x"}
    parents = {"uid-Job": Owner("kubeflow.org/v2beta1", "MPIJob", "x", "uid-mpi")}
    launcher, worker = pod_object(owner="Job", labels=labels), pod_object(owner="MPIJob", labels=labels)
    assert gang_of(pod_from(launcher), parents) == gang_of(pod_from(worker), {}) == "work/MPIJob x"


def test_a_job_of_a_controller_that_is_no_gang_is_one_itself() -> None:
    cron = {"uid-Job": Owner("batch/v1", "CronJob", "nightly", "uid-c")}
    assert gang_of(pod_from(pod_object(owner="Job")), cron) == "work/Job x"


def test_hosts_that_share_a_gang_are_one_unit() -> None:
    made = units(["a", "b", "c", "d"], {"g": ["a", "b"], "h": ["b", "x"], "i": ["y"]})
    assert sorted(map(sorted, made)) == [["a", "b", "x"], ["c"], ["d"]]
