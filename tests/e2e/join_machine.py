"""The machine of ``join``: booted, watched through the API server and SSH until its pod runs, and inspected."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from image_builder.lab import software
from image_builder.node.net.kube import KubeError
from image_builder.node.preflight.model import CONDITION
from tests.boot.node import Instance
from tests.e2e.join_lab import POOL, JoinLab
from tests.support.control_plane import gates

_POD_LABEL = "join-work"
_PODS = f"/api/v1/namespaces/default/pods?labelSelector=app%3D{_POD_LABEL}"
_CSRS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
# For an emulated machine on a busy host, from power-on to its pod.
_POD_SECONDS = 2400.0
_BACK_SECONDS = 900.0
_STEP = 1.0
# The files that a run of the agent may write; any change to them shows.
_WRITTEN = (
    "find /etc/kubernetes /etc/node-agent /run/node/provision.json /run/node/kubelet.env /var/lib/kubelet/pki "
    "-type f -printf '%p %T@ %s %m %i\\n' | sort"
)
_AGAIN = "cut -d' ' -f1 /proc/uptime; node-agent join && echo 0 || echo $?; cut -d' ' -f1 /proc/uptime"
# The ids of running containers, by engine.
_RUNNING = {
    "docker": "docker ps --no-trunc --quiet",
    "containerd": "ctr --namespace k8s.io tasks ls | awk '$3 == \"RUNNING\" {print $1}'",
}

Say = Callable[[str], None]


def deployment() -> dict[str, Any]:
    """Return a workload that waits for a node of this pool: a container of a preloaded image, with an address."""
    labels = {"app": _POD_LABEL}
    container = {
        "name": "main",
        "image": software.LARGE_REFERENCE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
    }
    spec = {
        "nodeSelector": {"node.example/pool": POOL},
        "tolerations": [{"key": "node.example/team", "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": _POD_LABEL},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def running(pods: list[dict[str, Any]], node: str, since: datetime) -> dict[str, Any] | None:
    """Return the pod that is ready on a node and whose container was started after ``since``."""
    for pod in pods:
        if "deletionTimestamp" in pod["metadata"] or pod["spec"].get("nodeName") != node:
            continue
        for container in pod["status"].get("containerStatuses", []):
            started = container["state"].get("running", {}).get("startedAt", "")
            if container["ready"] and started and datetime.fromisoformat(started) >= since:
                return pod
    return None


@dataclass
class Watched:
    """The states of the node that the API server reported, with the seconds since power-on when each first appeared."""

    seconds: dict[str, float] = field(default_factory=dict)
    registered_taints: list[str] = field(default_factory=list)

    def note(self, node: Mapping[str, Any] | None, at: float, boot_id: str | None = None) -> None:
        """Record a reading of the Node object, None while there is none. ``boot_id``: that of an earlier boot."""
        if node is None or node["status"].get("nodeInfo", {}).get("bootID") in (None, "", boot_id):
            return
        taints = [taint["key"] for taint in node["spec"].get("taints", [])]
        if "registered" not in self.seconds:
            self.registered_taints = taints
        conditions = _conditions(node)
        is_in = conditions.get(CONDITION) == "True" and gates.TAINT["key"] not in taints
        for name, holds in {
            "registered": True,
            "ready": conditions.get("Ready") == "True",
            "admitted": is_in,
        }.items():
            if holds:
                self.seconds.setdefault(name, round(at, 1))


class Member:
    """The instance and what the cluster knows about it."""

    def __init__(self, lab: JoinLab, instance: Instance, say: Say) -> None:
        self.lab, self.instance, self.say = lab, instance, say
        # A machine of the lab has the name of its image.
        self.name = str(instance.image.told["image"]).replace("_", "-")
        self._last_boot: str | None = None

    def boot(self) -> dict[str, Any]:
        """Power on, wait until the node is admitted and a pod runs on it, and return all observations."""
        since = datetime.now(UTC).replace(microsecond=0)
        pod: dict[str, Any] | None = None

        def has_pod() -> bool:
            nonlocal pod
            pod = running(self.lab.admin.request("GET", _PODS)["items"], self.name, since)
            return pod is not None

        # A pod of an earlier boot is already assigned to the node, and may run before the gate learns of this boot.
        watched = self._wait({"pod": has_pod})
        assert pod is not None
        return {**self._seen(pod), "seconds": watched.seconds, "registered_taints": watched.registered_taints}

    def enter(self) -> dict[str, Any]:
        """Power on, wait until the node is Ready and admitted by the gate; return the node as the cluster sees it."""
        watched = self._wait({})
        node = self.node()
        assert node is not None
        return {**_of_node(node), "seconds": watched.seconds}

    def _wait(self, more: Mapping[str, Callable[[], bool]]) -> Watched:
        """Power on, wait until the node is Ready and admitted and the conditions in ``more`` hold; return the times."""
        watched, deadline = self._switch_on(), time.monotonic() + _POD_SECONDS
        while not {"ready", "admitted", *more} <= watched.seconds.keys():
            before = set(watched.seconds)
            watched.note(self.node(), self.instance.vm.seconds, self._last_boot)
            for name, holds in more.items():
                if name not in watched.seconds and holds():
                    watched.seconds[name] = round(self.instance.vm.seconds, 1)
            for name in watched.seconds.keys() - before:
                self.say(f"{name} after {watched.seconds[name]:.0f} s")
            self._still_on(deadline)
            time.sleep(_STEP)
        return watched

    def _switch_on(self) -> Watched:
        vm = self.instance.vm
        vm.power_on()
        vm.wait_for_ssh(total_seconds=900, quiet_seconds=300)
        self.say(f"SSH after {vm.seconds:.0f} s")
        return Watched()

    def node(self) -> dict[str, Any] | None:
        """Return the Node object, None if there is none."""
        try:
            return self.lab.admin.request("GET", f"/api/v1/nodes/{self.name}")
        except KubeError as error:
            if error.status != 404:
                raise
            return None

    def _still_on(self, deadline: float) -> None:
        vm = self.instance.vm
        assert vm.running, "the machine ended"
        if time.monotonic() < deadline:
            return
        said = self.instance.shell(
            "node-agent join --status; journalctl -b -u node-join -u kubelet -u preflight -u preflight-report "
            "-n 60 --no-pager -o cat",
            ok=range(256),
        )
        raise AssertionError(f"it was not in time; the node says:\n{said}")

    def _seen(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        node = self.node()
        assert node is not None
        self._last_boot = node["status"]["nodeInfo"]["bootID"]
        # The pod may start before systemd has started the last unit.
        self.instance.wait_until_started()
        return {
            "node": _of_node(node),
            "pod": self._of_pod(pod),
            "requests": [_of_request(one) for one in self.lab.admin.request("GET", _CSRS)["items"]],
            "tokens": len(self.lab.tokens),
            "provision": json.loads(self.instance.shell("cat /run/node/provision.json")),
            "failed_units": self.instance.shell("systemctl list-units --failed --plain --no-legend").split(),
            "token_is_in": self._token_is_in(),
            "disk": self.instance.status()["disk"]["action"],
            "second_run": self._second_run(),
        }

    def _of_pod(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        name = pod["metadata"]["name"]
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{name}"
        events = self.lab.admin.request("GET", path)["items"]
        (container,) = pod["status"]["containerStatuses"]
        return {
            "name": name,
            "ip": pod["status"]["podIP"],
            "image": container["image"],
            "container": container["containerID"],
            "pulled": sorted({e["message"] for e in events if e["reason"] == "Pulled"}),
            "pulling": len([e for e in events if e["reason"] == "Pulling"]),
        }

    def _token_is_in(self) -> list[str]:
        """Return the files of the node that contain any issued token, including "journal" if the journal does."""
        patterns = "".join(f"{token.partition('.')[2]}\n" for token in self.lab.tokens)
        # `|| true`: grep exits with 1 if it finds nothing, and with 2 for a file that disappeared in the meantime.
        script = (
            "cat > /dev/shm/patterns; "
            "grep -rlIF -f /dev/shm/patterns /etc /run /var/lib/kubelet /var/lib/node-agent /var/log "
            "--exclude-dir=shm || true; "
            "journalctl -b --no-pager -o cat | grep -qF -f /dev/shm/patterns && echo journal; "
            "rm /dev/shm/patterns"
        )
        return self.instance.ssh.run(["sh", "-c", script], input=patterns, timeout=600).stdout.split()

    def _second_run(self) -> dict[str, Any]:
        """Run the agent's join once more; return what that changed, and the time it took."""
        before = self.instance.shell(_WRITTEN), self._kubelet()
        start, *_, status, end = self.instance.shell(_AGAIN).splitlines()
        after = self.instance.shell(_WRITTEN), self._kubelet()
        changed = set(before[0].splitlines()) ^ set(after[0].splitlines())
        return {
            "status": int(status),
            "seconds": round(float(end) - float(start), 1),
            "changed": sorted({line.split()[0] for line in changed}),
            "kubelet_restarted": before[1] != after[1],
        }

    def _kubelet(self) -> str:
        return self.instance.shell("systemctl show -P MainPID -P NRestarts kubelet")

    def deallocate(self, disks: list[Any]) -> None:
        """Cut the power; the instance keeps its OS disk and gets other local disks."""
        self.instance.insert(disks, self.instance.folder.parent)

    def without_api(self, seconds: float) -> dict[str, Any]:
        """Stop the API server for a while; return what happened to the node and the pod during and after the outage."""
        pod, kubelet = self._current_pod(), self._kubelet()
        stopped = time.monotonic()
        self.lab.plane.stop_api()
        time.sleep(seconds)
        engine, _, container = pod["containerID"].partition("://")
        containers = self.instance.shell(_RUNNING[engine]).split()
        self.lab.plane.start_api()
        self.lab.admin.close()
        back, back_at = time.monotonic(), datetime.now(UTC)
        while not self._is_heard(back_at):
            self._still_on(back + _BACK_SECONDS)
            time.sleep(_STEP)
        after = self._current_pod()
        return {
            "away_seconds": round(back - stopped, 1),
            "heard_after_seconds": round(time.monotonic() - back, 1),
            "container_ran_on": container in containers,
            "same_container": after["containerID"] == pod["containerID"],
            "restarts": after["restartCount"] - pod["restartCount"],
            "kubelet_restarted": self._kubelet() != kubelet,
            "taints": [taint["key"] for taint in (self.node() or {})["spec"].get("taints", [])],
        }

    def _current_pod(self) -> dict[str, Any]:
        for pod in self.lab.admin.request("GET", _PODS)["items"]:
            if pod["status"].get("containerStatuses") and "deletionTimestamp" not in pod["metadata"]:
                found: dict[str, Any] = pod["status"]["containerStatuses"][0]
                return found
        raise AssertionError("there is no pod any more")

    def _is_heard(self, since: datetime) -> bool:
        """Return whether the node has renewed its lease after ``since`` and is Ready."""
        try:
            lease = self.lab.admin.request("GET", f"{_LEASES}/{self.name}")
        except KubeError:
            return False
        ready = _conditions(self.node() or {"status": {}}).get("Ready")
        return datetime.fromisoformat(lease["spec"]["renewTime"]) > since and ready == "True"


def _conditions(node: Mapping[str, Any]) -> dict[str, str]:
    return {c["type"]: c["status"] for c in node["status"].get("conditions", [])}


def _of_node(node: Mapping[str, Any]) -> dict[str, Any]:
    meta, spec, status = node["metadata"], node["spec"], node["status"]
    info = status["nodeInfo"]
    names = ("bootID", "kubeletVersion", "containerRuntimeVersion", "osImage", "kernelVersion")
    return {
        "uid": meta["uid"],
        "labels": meta["labels"],
        "taints": spec.get("taints", []),
        "provider_id": spec.get("providerID", ""),
        "addresses": {one["type"]: one["address"] for one in status["addresses"]},
        "conditions": _conditions(node),
        "max_pods": status["capacity"]["pods"],
        "info": {name: info[name] for name in names},
    }


def _of_request(found: Mapping[str, Any]) -> dict[str, Any]:
    spec, status = found["spec"], found["status"]
    return {
        "name": found["metadata"]["name"],
        "signer": spec["signerName"],
        "username": spec["username"],
        "groups": spec["groups"],
        "conditions": [[one["type"], one["reason"]] for one in status.get("conditions", [])],
        "issued": bool(status.get("certificate")),
    }
