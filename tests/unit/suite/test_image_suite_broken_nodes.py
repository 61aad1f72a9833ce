"""Nodes that are broken in what a check covers, with the answers of their programs: each turns the check red.

The check passes on the healthy node. The answers come from a table; the mutations of real images show whether real
programs answer like that."""

from __future__ import annotations

import importlib
import inspect
import json
import os
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
        patch.setattr(importlib.import_module("answers"), "files", lambda _: {})
        patch.setattr(importlib.import_module("suite"), "files", lambda _: {})
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


def status_node(source: str) -> dict[str, Answer]:
    known = {"layers": {"broken": 0}, "images": [{"ref": IMAGE["ref"], "source": source}]}
    return {"node-agent status --json": json.dumps(known)}


# What grep prints about the serial of a disk that only machines of `image-builder boot` have.
LAB: dict[str, Answer] = {"/sys/block/*/serial": "/sys/block/vda/serial:image-builder-seed"}


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


def listener(program: str) -> str:
    return f'tcp LISTEN 0 5 0.0.0.0:10250 0.0.0.0:* users:(("{program}",pid=9,fd=3))'


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
        {"image_preload_archive": True},
    ),
    Case(
        "test_preload",
        "test_preloaded_layers_are_in_docker",
        {**BARE_LAYERS, "sha256sum": "22 -\n11 -\n"},
        {
            "a layer is empty": {**BARE_LAYERS, "sha256sum": "22 -\ne3b0 -\n"},
            "the store has no file": {**BARE_LAYERS, "/run/store-check/layers": "[]", "sha256sum": ""},
        },
        {"image_preload_archive": False},
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
        "test_preload_store",
        "test_every_layer_is_somewhere",
        status_node("local disk"),
        {"no layer of the image": status_node("nowhere")},
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
        ports_node(listener("kubelet")),
        {"another program on the kubelet's port": ports_node(listener("nc"))},
        {"image_layers": ["kubernetes"], "kubelet_mode": "cluster"},
    ),
    Case(
        "test_boot",
        "test_only_known_ports_are_open",
        ports_node(),
        {"the kubelet of a node without a cluster": ports_node(listener("kubelet"))},
        {"image_layers": ["kubernetes"], "kubelet_mode": "standalone"},
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


def test_zeros_are_no_signed_boot_loader(suite: Callable[[str], ModuleType]) -> None:
    paths = ("/usr/lib/shim/shimx64.efi.signed", "/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed")
    tree = {path: SimpleNamespace(size=200_000) for path in paths}
    with pytest.raises(AssertionError, match="no MZ header"):
        suite("test_kernel").test_boot_loader_is_signed(Node(dict.fromkeys(paths, "\0" * 200_000)), tree)
