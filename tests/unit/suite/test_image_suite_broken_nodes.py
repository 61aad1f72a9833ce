"""Nodes that are broken in what a check covers, with the answers of their programs: each turns the check red.

The check passes on the healthy node. The answers come from a table; the mutations of real images show whether real
programs answer like that."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from image_builder.settings import SUITE

# Stands for the time that a correct clock gives when it is queried, long after this module was loaded.
NOW = "now"
Answer = str | tuple[int, str] | tuple[int, str, str]


class Node:
    """A node that answers a command by the first text of a table that the command contains; all else fails."""

    def __init__(self, answers: Mapping[str, Answer], files: Mapping[str, Any] | None = None) -> None:
        self._table, self._files = answers, files or {}
        self.backend = SimpleNamespace(NAME="table")

    def run(self, command: str, *args: str) -> SimpleNamespace:
        asked = command % args if args else command
        for text, answer in self._table.items():
            if text in asked:
                return _result(str(int(time.time())) if answer is NOW else answer)
        return _result((1, "", f"unknown: {asked[:200]}"))

    def file(self, path: str) -> Any:
        return self._files[path]


def _result(answer: Answer) -> SimpleNamespace:
    rc, printed, *errors = answer if isinstance(answer, tuple) else (0, answer)
    return SimpleNamespace(rc=rc, stdout=printed, stderr="".join(errors), stdout_bytes=str(printed).encode())


@pytest.fixture
def suite() -> Iterator[Callable[[str], ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.fspath(SUITE))
        for name in ("answers", "questions", "suite"):
            patch.setattr(importlib.import_module(name), "files", lambda _: {})
        patch.setattr(time, "sleep", lambda _: None)
        yield importlib.import_module


# -- what sound nodes answer -------------------------------------------------------------------------------------

FLAGS = ["--config=/etc/kubernetes/kubelet.yaml", "--node-labels=a=b", "$NODE_AGENT_KUBELET_ARGS"]
CONFIG = {
    "readOnlyPort": 0,
    "address": "127.0.0.1",
    "authentication": {"anonymous": {"enabled": False}},
}
KUBELET = {
    "__kubelet_binary": "/usr/local/bin/kubelet",
    "__kubelet_flags": FLAGS,
    "__kubelet_config": CONFIG,
    "__kubelet_taints": [],
    "kubelet_mode": "standalone",
}
OPEN = "--anonymous-auth=true --authorization-mode=AlwaysAllow --read-only-port=10255 --address=0.0.0.0"


def kubelet_node(*more: str, config: str = FLAGS[0]) -> dict[str, Answer]:
    words = " ".join(["/usr/local/bin/kubelet", config, *more, *FLAGS[1:]])
    unit = f"EnvironmentFile=-/run/node/kubelet.env\nExecStart={words}"
    return {
        "systemd-analyze cat-config": f"# /etc/systemd/system/kubelet.service\n{unit}\n",
        "cat /etc/kubernetes/kubelet.yaml": json.dumps(CONFIG),
        "cat /etc/node-agent/kubelet.json": json.dumps({"taints": []}),
    }


def docker_node(start: str, listen: str = "/run/docker.sock") -> dict[str, Answer]:
    return {
        "systemd-analyze cat-config": (
            f"# /usr/lib/systemd/system/docker.service\n[Service]\nExecStart=/usr/sbin/dockerd {start}\n"
            f"# /usr/lib/systemd/system/docker.socket\n[Socket]\nListenStream={listen}\n"
        ),
        "getent group docker": "docker:x:999:",
    }


def docker_storage(**features: bool) -> dict[str, Answer]:
    """Return a node with Docker's file, and the given feature flags in it."""
    flags = (
        {"features": {name.replace("_", "-"): is_on for name, is_on in features.items()}} if features else {}
    )
    return {"cat /etc/docker/daemon.json": json.dumps({"storage-driver": "overlay2", **flags})}


IMAGE = {
    "ref": "registry.test/app:1",
    "id": "sha256:aa",
    "diff_ids": ["sha256:1", "sha256:2"],
    "digest": "sha256:d",
    "manifest": "sha256:m",
    "pin": False,
}
LAYERS = {
    "cat /opt/preloaded_docker_images.json": json.dumps({"format": 1, "images": [IMAGE]}),
    "docker image inspect": json.dumps(
        [
            {
                "RootFS": {"Layers": IMAGE["diff_ids"]},
                "GraphDriver": {"Data": {"UpperDir": "/d/top", "LowerDir": "/d/low"}},
            }
        ]
    ),
    "preloaded_docker_images.tar": json.dumps([[1, "app", "22"], [0, "bin/sh", "11"]]),
}
BARE_LAYERS = {
    **{name: answer for name, answer in LAYERS.items() if not name.endswith(".tar")},
    "mount -t erofs": "",
    "umount": "",
    "/run/store-check/layers": LAYERS["preloaded_docker_images.tar"],
}
STORE = {
    "cat /opt/preload/store.json": json.dumps(
        {
            "file": "/opt/preload/store.erofs",
            "bytes": 8192,
            "verity": {"root_hash": "ab" * 32, "hash_offset": 4096, "salt": "cd" * 32},
        }
    )
}


def store_node(root_hash: str = "ab" * 32, *, stored: bool = True) -> dict[str, Answer]:
    return {**STORE, "store.erofs": json.dumps({"root_hash": root_hash, "stored": stored})}


def unchecked_node(sha256: str, recorded: str | None = "ab" * 32) -> dict[str, Answer]:
    manifest = {"file": "/opt/preload/store.erofs", "bytes": 8192, "verity": None, "sha256": recorded}
    return {
        "cat /opt/preload/store.json": json.dumps(manifest),
        "sha256sum": f"{sha256}  /opt/preload/store.erofs\n",
    }


def archive_node(*, file: bool, listed: bool) -> dict[str, Answer]:
    content: dict[str, Any] = {"format": 1, "archive": {} if listed else None, "images": [IMAGE]}
    return {
        "cat /opt/preloaded_docker_images.json": json.dumps(content),
        "test -e /opt/preloaded_docker_images.tar": "" if file else (1, ""),
    }


def manifest_node(mode: str, *layers: str) -> dict[str, Answer]:
    manifest = {"images": [{**IMAGE, "mode": mode}], "layers": [{"diff_id": layer} for layer in layers]}
    return {
        "cat /opt/preload/store.json": json.dumps(manifest),
        "cat /opt/preloaded_docker_images.json": json.dumps({"format": 1, "images": [IMAGE]}),
    }


def status_node(source: str, mode: str = "reference") -> dict[str, Answer]:
    known = {"layers": {"broken": 0}, "images": [{"ref": IMAGE["ref"], "mode": mode, "source": source}]}
    return {"node-agent status --json": json.dumps(known)}


def preload_node(state: str, code: str = "") -> dict[str, Answer]:
    """Return a node whose preload loaded its one image."""
    known = {
        "state": state,
        "code": code,
        "problems": [],
        "images": 1,
        "loaded": {IMAGE["ref"]: "it was not there"},
    }
    return {
        "systemctl show -p ActiveState,Result": "ActiveState=active\nResult=success\n",
        "cat /run/node/status.json": json.dumps({"preload": known}),
    }


# What grep prints about the serial of a disk that only machines of `image-builder boot` have.
LAB: dict[str, Answer] = {"/sys/block/*/serial": "/sys/block/vda/serial:image-builder-seed"}
VXLAN = "udp UNCONN 0 0 0.0.0.0:8472 0.0.0.0:*"  # the kernel's own: ss lists no program


def clock_node(synchronised: str) -> dict[str, Answer]:
    return {
        "date +%s": NOW,
        "systemctl show --property=Id": "Id=chrony.service\nActiveState=active\nNRestarts=0\n",
        "systemd-detect-virt": "kvm",
        "timedatectl": synchronised,
    }


def network_node(answering: str) -> dict[str, Answer]:
    return {
        "ip -json route": json.dumps([{"dst": "default"}]),
        "test -e /run/systemd/resolve/resolv.conf": "",
        "/run/systemd/resolve/resolv.conf": answering,
        "cat /etc/resolv.conf": "nameserver 192.0.2.1\n",
        "systemd-detect-virt": "kvm",
    }


def ports_node(*lines: str) -> dict[str, Answer]:
    sshd = 'tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=1,fd=3))'
    return {"ss --no-header": "\n".join([sshd, *lines])}


def listener(program: str, port: int = 10250) -> str:
    return f'tcp LISTEN 0 5 0.0.0.0:{port} 0.0.0.0:* users:(("{program}",pid=9,fd=3))'


def member_node(group: str) -> dict[str, Answer]:
    ports = ports_node(listener("kubelet"), listener("kube-proxy", 10256), VXLAN)
    return {**ports, "cat /proc/9/cgroup": f"0::/{group}\n"}


# What `test -e` answers about a kubeconfig that the node has.
MEMBER: dict[str, Answer] = {"test -e /etc/kubernetes/kubelet.conf": ""}
CLUSTER = {"kubelet_mode": "cluster", "kubelet_kubeconfig": "/etc/kubernetes/kubelet.conf"}
HARD = {**CLUSTER, "gpu_preflight_hard": True}


def unit_node(state: str = "active", restarts: int = 0) -> dict[str, Answer]:
    return {"systemctl show": f"ActiveState={state}\nNRestarts={restarts}"}


def restarted_node(kind: str, state: str, name: str = "node-join") -> dict[str, Answer]:
    unit = f"Id={name}.service\nType={kind}\nActiveState={state}\nNRestarts=1\n"
    return {"systemctl show": f"Id=ssh.service\nType=notify\nActiveState=active\nNRestarts=0\n\n{unit}"}


def journal_node(*lines: str, start: str = "Linux version") -> dict[str, Answer]:
    """Return a node on which grep finds these lines in the journal, and its start, unless that has been deleted."""
    return {
        f"--quiet --max-count=1 {start}": "",
        "--quiet": (1, ""),
        "journalctl": (0, "\n".join(lines)) if lines else (1, ""),
        "boot_id": "b",
        "systemd-detect-virt": "kvm",
    }


# As Linux 6.12 prints them.
OUT_OF_MEMORY = (
    "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=968",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri-1.scope,mems_allowed=0,"
    "oom_memcg={group},task_memcg={group},task=python3,pid=9,uid=0",
    "Memory cgroup out of memory: Killed process 9 (python3) total-vm:1kB, anon-rss:1kB",
)
POD, SERVICE = (
    [line.format(group=group) for line in OUT_OF_MEMORY] for group in ("/kubepods.slice/p", "/system.slice")
)


def cgroup_node(*mounts: str) -> dict[str, Answer]:
    return {"cat /proc/mounts": "".join(f"none {mount} rw 0 0\n" for mount in ("/ ext4", *mounts))}


def zombie_node(group: str) -> dict[str, Answer]:
    """Return a node whose zombie's parent reaps nothing, as ps lists it."""
    return {"ps -e": f"Ss 1 systemd 0::/init.scope\nZ 9 sh <defunct> 0::/{group}\n"}


def capable_node(**attributes: str) -> dict[str, Answer]:
    return {"security.capability": json.dumps({f"/usr/bin/{name}": a for name, a in attributes.items()})}


def session_node(memlock: str) -> dict[str, Answer]:
    return {"ulimit -l": memlock, "ulimit -n": "1048576"}


# As iptables 1.8.9 prints them.
_GUARD = (
    '-d 169.254.169.254/32 -p {protocol} -m multiport --dports {port} -m comment --comment "x" -c 0 0 -j DROP'
)
# The node's own accounting, and rules that others may have there and that let nothing through.
_COUNTED = (
    '-A traffic-out -d 10.0.0.0/8 -m comment --comment "x traffic=internal-out" -c 1 2 -j RETURN',
    "-A traffic-out -c 11 3454 -j RETURN",
    "-A FORWARD -c 12 3456 -j traffic-out",
)
_HARMLESS = (
    "-A FORWARD -p tcp -m tcp --tcp-flags SYN,RST SYN -c 0 0 -j TCPMSS --clamp-mss-to-pmtu",
    "-A FORWARD -i eth0 -c 0 0 -j MARK --set-xmark 0x10/0xff",
    "-A FORWARD -d 10.0.0.0/8 -c 0 0 -j ACCEPT",
    "-A FORWARD -p udp -m udp --dport 53 -c 0 0 -j ACCEPT",
    "-A FORWARD -p tcp -m multiport --dports 443,8000:9000 -c 0 0 -j ACCEPT",
    "-A FORWARD ! -d 169.254.0.0/16 -c 0 0 -j ACCEPT",
    "-A others -p tcp -m tcp ! --dport 80 -c 0 0 -j ACCEPT",
    "-A others -s 10.1.0.0/16 -c 0 0 -g deeper",
    "-A FORWARD -c 0 0 -j others",
)


def guard_node(
    *before: str, protocol: str = "tcp", port: int = 80, more: str = "", chains: tuple[str, ...] = ()
) -> dict[str, Answer]:
    rule = _GUARD.format(protocol=protocol, port=port)
    names = (f"-N {name}" for name in ("traffic-out", *chains))
    lines = ["-P FORWARD ACCEPT -c 0 0", *names, *_COUNTED, *before, f"-A FORWARD {more}{rule}"]
    return {"--list-rules": "\n".join(lines)}


LIMITS = [
    {"domain": "root", "type": "-", "item": "memlock", "value": "unlimited"},
    {"domain": "root", "type": "-", "item": "nofile", "value": 1048576},
]


@dataclass(frozen=True)
class Case:
    """A check, the image's variables, the answers of a healthy node, and those of broken ones."""

    module: str
    check: str
    sound: Mapping[str, Answer]
    broken: Mapping[str, Mapping[str, Answer]]
    variables: Mapping[str, Any] = field(default_factory=dict)


WITHOUT_CLUSTER = {
    "kubelet_mode": "standalone",
    "container_runtime_engine": "docker",
    "container_runtime_pause_image": "registry.test/pause:1",
    "image_preload_archive": True,
}
DOCKER = {**WITHOUT_CLUSTER, **CLUSTER}


DISK = {
    "local_disk_mount_point": "/mnt/local",
    "local_disk_directories": [{"path": "scratch", "mode": "1777"}],
    "local_disk_cache_path": "cache",
    "local_disk_cache_quota_bytes": 500_000_000_000,
    "local_disk_binds": [{"source": "kubelet/pods", "target": "/var/lib/kubelet/pods"}],
}


def furnished_node(**changes: Answer) -> dict[str, Answer]:
    """Return a node with what its local disk must have."""
    answers: dict[str, Answer] = {
        "directory": "2065 1777",
        "cache": "2065",
        "quota": "#0 1 0 0 00 [------]\n#1 12 0 488281250 00 [------]\n",
        "bind": "/kubelet/pods\n",
        "pods": "2065",
        **changes,
    }
    asked = {
        "directory": "/mnt/local/scratch",
        "cache": "/mnt/local/cache",
        "quota": "xfs_quota",
        "bind": "findmnt --noheadings --output FSROOT",
        "pods": "/var/lib/kubelet/pods",
    }
    return {**{asked[name]: answer for name, answer in answers.items()}, "/mnt/local": "2065"}


def listed_node(*present: str, pin: bool) -> dict[str, Answer]:
    """Return a node whose list has one image, and what Docker lists."""
    return {
        "cat /opt/preloaded_docker_images.json": json.dumps({"format": 1, "images": [{**IMAGE, "pin": pin}]}),
        "docker image ls": "\n".join(present),
    }


CASES = (
    *(
        Case("test_kubelet", check, kubelet_node(), {"open by flags": kubelet_node(OPEN), **more}, KUBELET)
        for check, more in (
            ("test_kubelet_lets_no_stranger_in", {}),
            ("test_kubelet_heeds_the_node_agent", {}),
            (
                "test_kubelet_has_no_other_settings",
                {"another file": kubelet_node(config="--config=/etc/kubernetes/other.yaml")},
            ),
        )
    ),
    Case(
        "test_kubelet_runs",
        "test_kubelet_answers_no_stranger",
        {"systemctl show": "active", "10250": "401", "10255": "refused"},
        {
            "the API answers": {"systemctl show": "active", "10250": "200", "10255": "refused"},
            "a read-only port": {"systemctl show": "active", "10250": "401", "10255": "200"},
        },
    ),
    Case(
        "test_kubelet_runs",
        "test_kubelet_runs",
        {**MEMBER, **unit_node()},
        {
            "stopped": {**MEMBER, **unit_node("inactive")},
            "between two crashes": {**MEMBER, **unit_node("activating")},
            "after a crash": {**MEMBER, **unit_node(restarts=1)},
        },
        CLUSTER,
    ),
    Case(
        "test_kubelet_runs",
        "test_kubelet_runs",
        {**MEMBER, **unit_node(restarts=9)},  # the GPUs passed in the end
        {"held back": {**MEMBER, **unit_node("activating", restarts=9)}},
        HARD,
    ),
    Case(
        "test_kubelet_runs",
        "test_kubelet_runs",
        unit_node("inactive"),  # a machine that has not joined
        {"a member": {**MEMBER, **unit_node("inactive")}},
        CLUSTER,
    ),
    Case(
        "test_kubelet_runs",
        "test_kubelet_runs",
        {**unit_node(), "/healthz": "ok"},
        {
            "stopped": {**unit_node("inactive"), "/healthz": "ok"},
            "unhealthy": {**unit_node(), "/healthz": "no"},
        },
        {"kubelet_mode": "standalone"},
    ),
    Case(
        "test_container_runtime",
        "test_docker_stores_layers_with_overlay2",
        docker_storage(cdi=True, containerd_snapshotter=False),
        {
            "containerd's store by default": docker_storage(),
            "and where other features are set": docker_storage(cdi=True),
            "containerd's store by its flag": docker_storage(containerd_snapshotter=True),
        },
        {"__container_runtime_docker_features": ["validate", "containerd_store"]},
    ),
    Case(
        "test_container_runtime",
        "test_docker_stores_layers_with_overlay2",
        docker_storage(cdi=True),
        {"containerd's store by its flag": docker_storage(containerd_snapshotter=True)},
        {"__container_runtime_docker_features": ["validate"]},
    ),
    Case(
        "test_container_runtime",
        "test_docker_listens_on_its_socket_alone",
        docker_node("-H fd:// --containerd=/run/containerd/containerd.sock"),
        {
            "TCP without a scheme": docker_node("-H fd:// -H 0.0.0.0:2375"),
            "TCP": docker_node("-H fd:// -H tcp://0.0.0.0:2375"),
            "a long option": docker_node("-H fd:// --host=:2375"),
            "systemd's socket": docker_node("-H fd://", "2375"),
        },
    ),
    Case(
        "test_preload",
        "test_preloaded_layers_are_in_docker",
        {**LAYERS, "sha256sum": "22 -\n11 -\n"},
        {
            "every layer is empty": {**LAYERS, "sha256sum": "e3b0 -\ne3b0 -\n"},
            "a layer is empty": {**LAYERS, "sha256sum": "22 -\ne3b0 -\n"},
        },
        WITHOUT_CLUSTER,
    ),
    Case(
        "test_preload",
        "test_preloaded_layers_are_in_docker",
        {**BARE_LAYERS, "sha256sum": "22 -\n11 -\n"},
        {
            "a layer is empty": {**BARE_LAYERS, "sha256sum": "22 -\ne3b0 -\n"},
            "the store has no file": {**BARE_LAYERS, "/run/store-check/layers": "[]", "sha256sum": ""},
        },
        {**WITHOUT_CLUSTER, "image_preload_archive": False},
    ),
    *(
        Case(
            "test_preload",
            check,
            {**MEMBER, **listed_node(pin=False)},  # the kubelet deleted it
            {
                "a pinned one": {**MEMBER, **listed_node(pin=True)},
                "no node of a cluster": listed_node(pin=False),
                **more,
            },
            DOCKER,
        )
        for check, more in (
            (
                "test_preloaded_images_are_in_docker",
                {"another": {**MEMBER, **listed_node("registry.test/app:1 sha256:bb", pin=False)}},
            ),
            ("test_preloaded_layers_are_in_docker", {}),
            ("test_preloaded_images_run", {}),
        )
    ),
    Case(
        "test_preload_store",
        "test_every_layer_is_somewhere",
        {**MEMBER, **status_node("MISSING: 2 layers are nowhere"), **listed_node(pin=False)},
        {
            "a pinned one": {**MEMBER, **status_node("MISSING: 2 layers"), **listed_node(pin=True)},
            "no node of a cluster": {**status_node("MISSING: 2 layers"), **listed_node(pin=False)},
            "lost": {**MEMBER, **status_node("LOST: 2 layers"), **listed_node(pin=False)},
        },
        DOCKER,
    ),
    Case(
        "test_preload",
        "test_preload_succeeded",
        {
            **MEMBER,
            **preload_node("degraded", "preload.fallback"),
            **listed_node(pin=False),
        },  # it was deleted
        {
            "a pinned one": {
                **MEMBER,
                **preload_node("degraded", "preload.fallback"),
                **listed_node(pin=True),
            },
            "no node of a cluster": {
                **preload_node("degraded", "preload.fallback"),
                **listed_node(pin=False),
            },
            "failed": {**MEMBER, **preload_node("failed", "preload.fallback"), **listed_node(pin=False)},
        },
        DOCKER,
    ),
    Case(
        "test_preload_archive",
        "test_preload_archive_is_as_declared",
        archive_node(file=True, listed=True),
        {
            "no archive": archive_node(file=False, listed=True),
            "not listed": archive_node(file=True, listed=False),
        },
        {"image_preload_archive": True},
    ),
    Case(
        "test_preload_archive",
        "test_preload_archive_is_as_declared",
        archive_node(file=False, listed=False),
        {
            "an archive": archive_node(file=True, listed=False),
            "a listed one": archive_node(file=False, listed=True),
        },
        {"image_preload_archive": False},
    ),
    Case(
        "test_local_disk",
        "test_local_disk_is_furnished",
        furnished_node(),
        {
            "a directory on the OS disk": furnished_node(directory="2049 1777"),
            "a directory of another mode": furnished_node(directory="2065 755"),
            "no directory": furnished_node(directory=(1, "", "No such file or directory")),
            "a cache on the OS disk": furnished_node(cache="2049"),
            "no quota": furnished_node(quota="#0 1 0 0 00 [------]\n#1 12 0 0 00 [------]\n"),
            "no project": furnished_node(quota="#0 1 0 0 00 [------]\n"),
            "another quota": furnished_node(quota="#1 12 0 500000000 00 [------]\n"),
            "no bind": furnished_node(bind=(1, "")),
            "a bind of another directory": furnished_node(bind="/pods"),
            "a bind of another disk": furnished_node(pods="2049"),
        },
        DISK,
    ),
    Case(
        "test_preload_store",
        "test_every_layer_is_somewhere",
        status_node("local disk"),
        {
            "no layer of the image": status_node("nowhere"),
            "loaded, not seeded": status_node("archive"),
        },
        WITHOUT_CLUSTER,
    ),
    Case(
        "test_preload_store",
        "test_every_layer_is_somewhere",
        status_node("archive", "archive"),
        {"no layer of the archive's image": status_node("nowhere", "archive")},
        WITHOUT_CLUSTER,
    ),
    Case(
        "test_preload_store",
        "test_store_lists_the_preloaded_images",
        manifest_node("archive"),
        {"a layer that the store should have": manifest_node("copy", "sha256:1")},
    ),
    Case(
        "test_preload_store",
        "test_store_can_be_verified",
        store_node(),
        {
            "other bytes": store_node("12" * 32, stored=False),
            "other bytes, with their hashes": store_node("12" * 32),
            "a broken hash tree": store_node(stored=False),
        },
        {"image_preload_verity": True},
    ),
    Case(
        "test_preload_store",
        "test_store_can_be_verified",
        unchecked_node("ab" * 32),
        {"other bytes": unchecked_node("12" * 32), "no hash": unchecked_node("ab" * 32, recorded=None)},
        {"image_preload_verity": False},
    ),
    Case(
        "test_packages",
        "test_packages_files_are_unchanged",
        {"dpkg --verify": ""},
        {"dpkg's database is damaged": {"dpkg --verify": (2, "", "dpkg: error: parsing file")}},
    ),
    Case(
        "test_cloud",
        "test_pod_guard_is_in_force",
        guard_node(*_HARMLESS, chains=("others", "deeper")),
        {
            "accepted before": guard_node("-A FORWARD -c 0 0 -j ACCEPT"),
            "returned before": guard_node("-A FORWARD -i cali+ -c 0 0 -j RETURN"),
            "queued before": guard_node("-A FORWARD -c 0 0 -j NFQUEUE --queue-num 0"),
            "accepted in a chain": guard_node(
                "-A others -c 0 0 -j ACCEPT", "-A FORWARD -c 0 0 -j others", chains=("others",)
            ),
            "accepted further on": guard_node(
                "-A deeper -m mark --mark 0x1/0x1 -c 0 0 -j ACCEPT",
                "-A others -c 0 0 -j deeper",
                "-A FORWARD -p tcp -c 0 0 -j others",
                chains=("others", "deeper"),
            ),
            "a chain in place of the rest": guard_node("-A FORWARD -c 0 0 -g others", chains=("others",)),
            "its port among others": guard_node("-A FORWARD -p tcp -m multiport --dports 22,79:81 -j ACCEPT"),
            "all but another address": guard_node("-A FORWARD ! -d 192.0.2.1/32 -c 0 0 -j ACCEPT"),
            "some packets alone": guard_node(more="-i eth1 "),
            "another protocol": guard_node(protocol="udp"),
            "another port": guard_node(port=9),
        },
        {"azure_guest_blocked_for_pods": [{"address": "169.254.169.254", "ports": [80]}]},
    ),
    Case(
        "test_boot",
        "test_clock_is_right",
        clock_node("yes"),
        {"never synchronised": clock_node("no")},
    ),
    Case(
        "test_boot",
        "test_clock_is_right",
        {**LAB, **clock_node("no")},
        {"never synchronised, on somebody's KVM": clock_node("no")},
    ),
    Case(
        "test_boot",
        "test_network_is_up",
        network_node("192.0.2.1"),
        {"a name server that is silent": network_node("")},
    ),
    Case(
        "test_boot",
        "test_network_is_up",
        {**LAB, **network_node("")},
        {"a silent name server, on somebody's KVM": network_node("")},
    ),
    Case(
        "test_boot",
        "test_only_known_ports_are_open",
        member_node("kubepods.slice/kubepods-besteffort.slice/cri-1.scope"),
        {
            "another program on the kubelet's port": ports_node(listener("nc")),
            "another program of the host": member_node("system.slice/nc.service"),
            "a server in the kernel": ports_node("tcp LISTEN 0 64 0.0.0.0:2049 0.0.0.0:*"),
        },
        {"image_layers": ["kubernetes"], "kubelet_mode": "cluster"},
    ),
    Case(
        "test_boot",
        "test_only_known_ports_are_open",
        ports_node(),
        {
            "the kubelet of a node without a cluster": ports_node(listener("kubelet")),
            "a tunnel of a node without a cluster": ports_node(VXLAN),
        },
        {"image_layers": ["kubernetes"], "kubelet_mode": "standalone"},
    ),
    Case(
        "test_boot",
        "test_cgroup_v2",
        # As Cilium and Calico mount it.
        cgroup_node("/sys/fs/cgroup cgroup2", "/run/cilium/cgroupv2 cgroup2", "/run/calico/cgroup cgroup2"),
        {
            "an old one as well": cgroup_node("/sys/fs/cgroup cgroup2", "/run/cgroup1 cgroup"),
            "an old one": cgroup_node("/sys/fs/cgroup/memory cgroup", "/sys/fs/cgroup/unified cgroup2"),
            "elsewhere": cgroup_node("/run/calico/cgroup cgroup2"),
        },
    ),
    Case(
        "test_boot",
        "test_no_unit_was_restarted",
        {**MEMBER, **restarted_node("oneshot", "active")},
        {
            "still trying": {**MEMBER, **restarted_node("oneshot", "activating")},
            "a daemon": {**MEMBER, **restarted_node("notify", "active")},
            "no node of a cluster": restarted_node("oneshot", "active"),
            "the kubelet": {**MEMBER, **restarted_node("simple", "active", "kubelet")},
        },
        CLUSTER,
    ),
    Case(
        "test_boot",
        "test_no_unit_was_restarted",
        {**MEMBER, **restarted_node("simple", "active", "kubelet")},  # the GPUs passed in the end
        {
            "another daemon": {**MEMBER, **restarted_node("simple", "active", "containerd")},
            "no node of a cluster": restarted_node("simple", "active", "kubelet"),
        },
        HARD,
    ),
    Case(
        "test_boot",
        "test_journal_has_no_trouble",
        {**MEMBER, **journal_node(*POD, start=".")},  # of a node that has been up for long
        {
            "a panic": {**MEMBER, **journal_node(*POD, "Kernel panic - not syncing: x", start=".")},
            "the node": {**MEMBER, **journal_node(*POD, "Out of memory: Killed process 9 (x)", start=".")},
            "a service": {**MEMBER, **journal_node(*SERVICE, start=".")},
            "no journal": {**MEMBER, **journal_node(start="nothing")},
            "no grep": {**MEMBER, **journal_node(start="."), "journalctl": (2, "", "grep: no")},
            "no node of a cluster": journal_node(*POD),
        },
        CLUSTER,
    ),
    Case(
        "test_boot",
        "test_journal_has_no_trouble",
        journal_node(),
        {"no start": journal_node(start="."), "a crash": journal_node("x[1]: segfault at 0")},
        {"kubelet_mode": "standalone"},
    ),
    Case(
        "test_boot",
        "test_no_zombies",
        zombie_node("kubepods.slice/kubepods-besteffort.slice/cri-1.scope"),
        {"the host's": zombie_node("system.slice/mutation.service")},
    ),
    Case(
        "test_hygiene",
        "test_only_known_file_capabilities",
        capable_node(ping="0100000200200000000000000000000000000000"),
        {
            "another program": capable_node(env="0100000280000000000000000000000000000000"),
            "more than it may": capable_node(ping="0100000200300000000000000000000000000000"),
            "in the second word": capable_node(ping="0100000200200000000000008000000000000000"),
            "inheritable": capable_node(ping="0000000200000000800000000000000000000000"),
            "as old kernels kept it": capable_node(env="010000018000000000000000"),
        },
    ),
    Case(
        "test_system",
        "test_sessions_have_the_limits",
        session_node("unlimited"),
        {"root's own limit": session_node("64")},
        {"system_limits": LIMITS},
    ),
)


def _call(case: Case, answers: Mapping[str, Answer], suite: Callable[[str], ModuleType]) -> None:
    check = getattr(suite(case.module), case.check)
    known = {"host": Node(answers), "v": dict(case.variables)}
    check(**{name: known[name] for name in inspect.signature(check).parameters})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_a_sound_node_passes(case: Case, suite: Callable[[str], ModuleType]) -> None:
    _call(case, case.sound, suite)


@pytest.mark.parametrize(
    ("case", "how"),
    [(case, how) for case in CASES for how in case.broken],
    ids=lambda of: getattr(of, "check", of),
)
def test_a_broken_node_fails(case: Case, how: str, suite: Callable[[str], ModuleType]) -> None:
    with pytest.raises(AssertionError):
        _call(case, case.broken[how], suite)


FACTS = {"image": "i", "build_id": "0" * 64, "variables": {}, "packages": []}


def test_a_dead_mount_of_a_volume_fails_no_check(suite: Callable[[str], ModuleType]) -> None:
    """find ends with 1 if it meets such a mount; findmnt without a path asks it for its size, and waits for ever."""
    root = {"target": "/", "size": 1 << 30}
    node = Node(
        {
            "'/var/lib/kubelet/plugins/*'": "".join(f"ff 644 0 0\0{9}\0/n/{n}\0\0" for n in range(1001)),
            "find /": (1, "", "Transport endpoint is not connected"),
            "--mountpoint /boot/efi": (1, ""),
            "--mountpoint /": json.dumps({"filesystems": [{**root, "size": 1}, root]}),
        }
    )
    assert "/n/1000" in suite("suite").list_tree(node, suite("suite").Facts(FACTS), booted=True)
    assert suite("questions").mounted(node, "/") == root
    with pytest.raises(AssertionError, match="nothing is mounted at /boot/efi"):
        suite("questions").mounted(node, "/boot/efi")


def test_the_console_s_patterns_mean_the_same_to_grep(suite: Callable[[str], ModuleType]) -> None:
    trouble = suite("test_boot").TROUBLE
    assert re.findall(r"\(\?|[*+?]\?|\\[^sSwb.|()[\]]", trouble) == []


CALICOS_CHECKS = {
    "test_only_known_suid_programs": ("ff 4755 0 0", "/opt/cni/bin/calico"),
    "test_no_stray_files_in_usr": (
        "ff 755 0 0",
        "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/nodeagent~uds/uds",
    ),
}


@pytest.mark.parametrize("check", CALICOS_CHECKS)
def test_calicos_files_are_only_known_on_a_node_of_a_cluster(
    check: str, suite: Callable[[str], ModuleType]
) -> None:
    status, path = CALICOS_CHECKS[check]
    others = (("ff 644 0 0", f"/n/{number}") for number in range(1000))
    printed = "".join(f"{status}\0{9}\0{path}\0\0" for status, path in (*others, (status, path)))
    tree = suite("tree").Tree(printed.encode())
    known = {"host": Node({**MEMBER, "cat /var/lib/dpkg/info": ""}), "tree": tree, "v": CLUSTER}
    run = getattr(suite("test_hygiene"), check)
    run(**{name: known[name] for name in inspect.signature(run).parameters})
    for changed in ({"host": Node({"cat /var/lib/dpkg/info": ""})}, {"v": {"kubelet_mode": "standalone"}}):
        other = known | changed
        with pytest.raises(AssertionError, match=path):
            run(**{name: other[name] for name in inspect.signature(run).parameters})


def test_zeros_are_no_signed_boot_loader(suite: Callable[[str], ModuleType]) -> None:
    paths = ("/usr/lib/shim/shimx64.efi.signed", "/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed")
    tree = {path: SimpleNamespace(size=200_000) for path in paths}
    with pytest.raises(AssertionError, match="no MZ header"):
        suite("test_kernel").test_boot_loader_is_signed(Node(dict.fromkeys(paths, "\0" * 200_000)), tree)
