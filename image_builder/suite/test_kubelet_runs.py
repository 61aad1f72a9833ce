"""The kubelet of a booted machine is healthy, and runs the static pods that it was given."""

from __future__ import annotations

import json
from typing import Any

from suite import assignments, booted, differences, is_held_back, is_member, load, needs, nothing, output
from testinfra.host import Host

V = dict[str, Any]


@booted
@needs("kubernetes")
def test_kubelet_runs(host: Host, v: V) -> None:
    """The kubelet is active and was never restarted, unless it has yet to join; without a cluster it is healthy.

    A member's kubelet that starts only if the GPUs passed may have been restarted.
    """
    is_standalone = v["kubelet_mode"] == "standalone"
    if not is_standalone and not is_member(host, v):
        return
    actual = assignments(output(host, "systemctl show -p ActiveState,NRestarts kubelet.service"))
    expected = {"ActiveState": "active"}
    if not is_held_back(host, v):
        expected["NRestarts"] = "0"
    nothing(differences(expected, actual))
    if not is_standalone:
        return  # where it answers is up to the cluster
    ask = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read().decode())"
    assert output(host, "python3 -c %s http://127.0.0.1:10248/healthz", ask) == "ok"


# Queries a server without credentials or certificate verification; prints the HTTP status, or that nothing listens.
_STATUS = """
import ssl, sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(sys.argv[1], timeout=20, context=ssl._create_unverified_context())
    print(answer.status)
except urllib.error.HTTPError as error:
    print(error.code)
except urllib.error.URLError as error:
    print("refused" if isinstance(error.reason, ConnectionRefusedError) else error.reason)
"""


@booted
@needs("kubernetes")
def test_kubelet_answers_no_stranger(host: Host) -> None:
    """A client without credentials gets nothing from the kubelet's API, and there is no read-only port."""
    running = output(host, "systemctl show -p ActiveState --value kubelet.service") == "active"
    expected = {
        "https://127.0.0.1:10250/pods": ("401", "403") if running else ("refused",),
        "http://127.0.0.1:10255/pods": ("refused",),
    }
    answers = {address: output(host, "python3 -c %s %s", _STATUS, address) for address in expected}
    nothing(
        f"{address}: {answers[address]}" for address, good in expected.items() if answers[address] not in good
    )


@booted
@needs("kubernetes", kubelet_mode="standalone")
def test_static_pods_run(host: Host, v: V) -> None:
    """Every container of every static pod runs in the image's engine."""
    expected = set()
    for path in output(host, "find %s -type f -not -name '.*'", v["kubelet_static_pod_path"]).split():
        pod = load(host, path)
        expected |= {(pod["metadata"]["name"], container["name"]) for container in pod["spec"]["containers"]}
    assert expected, "there is no static pod to run"
    running = _docker_containers(host) if v["container_runtime_engine"] == "docker" else _cri_containers(host)
    # The kubelet appends the node's name to the name of a static pod.
    nothing(
        f"{pod}/{container}"
        for pod, container in sorted(expected)
        if not any(name.startswith(f"{pod}-") and container == other for name, other in running)
    )


def _docker_containers(host: Host) -> set[tuple[str, str]]:
    """Return the (pod, container) pairs that Docker runs for the kubelet."""
    form = '{{.Label "io.kubernetes.pod.name"}} {{.Label "io.kubernetes.container.name"}}'
    lines = output(host, "docker ps --filter status=running --format %s", form).splitlines()
    return {(fields[0], fields[1]) for fields in map(str.split, lines) if len(fields) == 2}


def _cri_containers(host: Host) -> set[tuple[str, str]]:
    """Return the (pod, container) pairs that containerd runs for the kubelet."""
    tasks = [line.split() for line in output(host, "ctr --namespace k8s.io tasks list").splitlines()[1:]]
    actual = set()
    for name in (fields[0] for fields in tasks if fields[-1] == "RUNNING"):
        labels = json.loads(output(host, "ctr --namespace k8s.io containers info %s", name)).get("Labels", {})
        actual.add((labels.get("io.kubernetes.pod.name", ""), labels.get("io.kubernetes.container.name", "")))
    return actual
