"""The acts of ``slices``: a node, the documented Jobs, their output and leftovers, and `pool run` afterwards."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from image_builder.errors import BootError
from image_builder.machine import monitor
from image_builder.settings import REPO_ROOT
from image_builder.system import process
from tests.boot.node import Instance, Local, allocated
from tests.e2e.join_lab import MACHINE, JoinLab
from tests.e2e.join_machine import Member
from tests.e2e.link import Link
from tests.support import slices_howto
from tests.support.control_plane.servers import ADMINISTRATORS
from tests.support.pools.fleet import Fleet
from tests.support.pools.rollouts import POLICY, Rollout, make

# Hosts by number; the wave has all of them. The dead one is behind a network that drops every packet.
HOSTS, DEAD = (0, 1, 2, 3), 3
WAVE = {
    "waves": ["100%"],
    "canaries": len(HOSTS),
    "slice_hosts": 2,
    "deadlines": {"probe": 15, "bootstrap": 300, "verify": 60},
}
KUBELET = 10250
_JOB = "/apis/batch/v1/namespaces/default/jobs/pool-slices"
_INDEX = "batch.kubernetes.io/job-completion-index"
_PODS = "/api/v1/namespaces/default/pods"
_SECRETS = "/api/v1/namespaces/default/secrets"
_ARCHIVE = "/var/tmp/worker.tar"
# An emulated machine starts Python and OpenSSH in half a minute each.
_JOBS_SECONDS, _GONE_SECONDS = 1800.0, 300.0
_STEP = 3.0
_AT_ONCE = 1e9  # bytes per second
_VOLUME = re.compile(r"(\w+) \S+/volumes/kubernetes\.io~(empty-dir|secret)/(\S+)")
_EVENT = re.compile(rb'"uuid": "([0-9a-f-]{36})"')
# The search finds a piece of written data wherever it is stored contiguously.
_PIECE = 48
BLOCK = 64 << 20

Say = Callable[[str], None]


def reference() -> str:
    """Return the image of the documented Job."""
    return str(_pod()["containers"][0]["image"])


def labels() -> dict[str, str]:
    """Return the labels that the documented Job requires of its node."""
    found: dict[str, str] = _pod()["nodeSelector"]
    return found


def _pod() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(slices_howto.manifest())["spec"]["template"]["spec"]
    return found


class Acts:
    """The acts, in order. ``work`` is an empty directory, ``programs`` a directory with kubectl."""

    def __init__(self, lab: JoinLab, hosts: Fleet, work: Path, programs: Path, say: Say) -> None:
        self.lab, self.hosts, self.work, self.say = lab, hosts, work, say
        self._streams: dict[str, bytes] = {}
        self._environment = {
            "PATH": f"{programs}:{REPO_ROOT}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": os.fspath(work),
            "KUBECONFIG": os.fspath(lab.plane.kubeconfig("lab:operator", ADMINISTRATORS)),
            "CI": "true",
        }

    def play(self, instance: Instance, archive: Path) -> dict[str, Any]:
        """Run all acts with a machine and an image for it; return the observations. At the end the machine is off."""
        member = Member(self.lab, instance, self.say)
        member.deallocate([Local("local")])
        node = member.enter()
        image = self._load(instance, archive)
        rollout = make(self.hosts, self.work, HOSTS, policy=POLICY | WAVE, agent="seconds=1\n", sound=HOSTS)
        self._put_inputs(rollout)
        self.hosts.part(DEAD)
        with self._way_to_kubelet(instance):
            seen = self._jobs(instance)
        self.hosts.unite(DEAD)
        told = rollout.joins()
        seen["left"] = self._left(instance)
        self.say("switching the machine off, looking for the key on its disks")
        instance.vm.shutdown(600)
        seen["disks"] = search(instance.folder.parent, *self._patterns())
        self.say("pool run")
        report = rollout.finish()
        return {
            "node": node,
            "image": image,
            "slices": _slices(rollout),
            "dead": f"host-{DEAD}",
            "told_by_jobs": _by_name(told),
            **seen,
            "told_in_the_end": _by_name(rollout.joins()),
            "ends": {name: end["outcome"]["kind"] for name, end in report["results"].items()},
        }

    def _load(self, instance: Instance, archive: Path) -> dict[str, Any]:
        """Import the image into the machine's containerd."""
        self.say(f"ctr images import: {archive.stat().st_size / 1e6:.0f} MB")
        started = time.monotonic()
        instance.ssh.put(archive.read_bytes(), _ARCHIVE)
        instance.shell(f"ctr --namespace k8s.io images import {_ARCHIVE}; rm {_ARCHIVE}", timeout=1200)
        return {
            "reference": reference(),
            "bytes": archive.stat().st_size,
            "seconds": round(time.monotonic() - started, 1),
        }

    def _way_to_kubelet(self, instance: Instance) -> Link:
        """Let the API server reach the kubelet at the address in the Node object.

        QEMU makes clients with a loopback address look to the machine like its gateway. The machine wouldn't answer
        packets from its own address, the source of direct connections to it here.
        """
        line = f"hostfwd_add net tcp:127.0.0.1:{KUBELET}-:{KUBELET}"
        said = monitor.execute(
            instance.vm.directory / "monitor", "human-monitor-command", {"command-line": line}
        )
        if said:
            raise BootError(f"{line}: {said}")
        return Link((MACHINE, KUBELET), ("127.0.0.1", KUBELET), _AT_ONCE)

    def _put_inputs(self, rollout: Rollout) -> None:
        """Put the files that the page mentions where its commands run, under the names used there."""
        for name, target in {
            "h100.plan.json": rollout.plan,
            "hosts.keys": self.hosts.pinned.path,
            "id_pool": self.hosts.key,
        }.items():
            (self.work / name).symlink_to(target)
        (self.work / "job.yaml").write_text(slices_howto.manifest(), encoding="utf-8")

    def _jobs(self, instance: Instance) -> dict[str, Any]:
        """Run the documented commands; return what happened to the Jobs."""
        start, take_in = slices_howto.commands()
        self.say("the commands that start the Job")
        process.run(["sh", "-euc", start], cwd=self.work, env=self._environment, on_line=self._show)
        # Read the Secret before the other commands delete it.
        (secret,) = self._secrets()
        self._streams = {name: base64.b64decode(stream) for name, stream in secret["data"].items()}
        self.say("those that take in what they say")
        started = time.monotonic()
        log = self.work / "taken-in.log"
        argv = ["sh", "-euc", f'cd "$0"\n{take_in}', os.fspath(self.work)]
        mounted: set[str] = set()
        with process.background(argv, log=log, env=self._environment) as child:
            while child.poll() is None:
                assert time.monotonic() < started + _JOBS_SECONDS, self._trouble(instance, log)
                mounted |= self._volumes(instance)
                time.sleep(_STEP)
        assert child.returncode == 0, self._trouble(instance, log)
        self.say("the Job has ended")
        said = log.read_text(errors="replace").splitlines()
        for line in said:
            self._show(line)
        return {
            "jobs_seconds": round(time.monotonic() - started, 1),
            "job": self._job(),
            "last_line": said[-1],
            "pods": {number: self._pods(number) for number in self._streams},
            "volumes": sorted(mounted),
            "processed": {path.name: _processed(path) for path in sorted((self.work / "told").iterdir())},
            "bytes": {
                "streams": {name: len(stream) for name, stream in self._streams.items()},
                "told": {path.name: path.stat().st_size for path in sorted(self.work.glob("told-*"))},
            },
            "commands": [start, take_in],
            "manifest": slices_howto.manifest(),
        }

    def _items(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.lab.admin.request("GET", path)["items"]
        return found

    def _conditions(self) -> list[dict[str, Any]]:
        conditions = self.lab.admin.request("GET", _JOB)["status"].get("conditions", [])
        return [condition for condition in conditions if condition["status"] == "True"]

    def _job(self) -> dict[str, Any]:
        status = self.lab.admin.request("GET", _JOB)["status"]
        ends = [
            container["state"]["terminated"]["finishedAt"]
            for pod in self._items(_PODS)
            for container in pod["status"]["containerStatuses"]
        ]
        return {
            "conditions": [
                [condition["type"], condition.get("reason", "")] for condition in self._conditions()
            ],
            "completed": status.get("completedIndexes", ""),
            "failed": status.get("failedIndexes", ""),
            "last_end": max(ends),
            "failed_at": max(condition["lastTransitionTime"] for condition in self._conditions()),
        }

    def _pods(self, number: str) -> dict[str, Any]:
        """Return what happened to a slice's pods."""
        pods = [pod for pod in self._items(_PODS) if pod["metadata"]["labels"].get(_INDEX) == number]
        ends = [
            status["state"]["terminated"] | {"restarts": status["restartCount"]}
            for pod in pods
            for status in pod["status"]["containerStatuses"]
        ]
        return {
            "pods": len(pods),
            "nodes": sorted({pod["spec"]["nodeName"] for pod in pods}),
            "ends": [
                {"status": end["exitCode"], "restarts": end["restarts"], "said": end.get("message", "")}
                for end in ends
            ],
        }

    def _secrets(self) -> list[dict[str, Any]]:
        return [one for one in self._items(_SECRETS) if one["metadata"]["name"] == "pool-slices"]

    def _volumes(self, instance: Instance) -> set[str]:
        """Return the volumes that the kubelet has mounted for the pods of slices."""
        return volumes(instance.shell("findmnt -rno FSTYPE,TARGET"))

    def _left(self, instance: Instance) -> list[str]:
        """Wait until the kubelet has removed the pods' volumes; return those left after the timeout, and Secrets."""
        deadline = time.monotonic() + _GONE_SECONDS
        while (found := self._volumes(instance)) and time.monotonic() < deadline:
            time.sleep(_STEP)
        return [*sorted(found), *(secret["metadata"]["name"] for secret in self._secrets())]

    def _patterns(self) -> tuple[list[bytes], list[bytes]]:
        """Return what no disk may contain, and controls that the search must find: an event of each slice."""
        secrets = pieces(self.hosts.key.read_bytes(), list(self._streams.values()))
        events = [_EVENT.search(path.read_bytes()) for path in sorted(self.work.glob("told-*"))]
        return secrets, [event[1] for event in events if event]

    def _show(self, line: str) -> None:
        self.say(f"  {line.rstrip()[:150]}")

    def _trouble(self, instance: Instance, log: Path) -> str:
        pods = [(p["metadata"]["name"], p["status"]) for p in self._items(_PODS)]
        said = instance.shell("crictl ps -a; journalctl -u kubelet -n 40 --no-pager -o cat", ok=range(256))
        return f"{log.read_text(errors='replace')[-2000:]}\n{pods}\n{said}"


def volumes(mounts: str) -> set[str]:
    """Return the filesystem, kind and name of each pod volume in ``findmnt``'s lines."""
    return {" ".join(match.groups()) for line in mounts.splitlines() if (match := _VOLUME.match(line))}


def pieces(key: bytes, streams: Iterable[bytes]) -> list[bytes]:
    """Return pieces that identify a private key and streams: lines of the former, parts of the latter's archives.

    The first line of a key's data only gives its type: the machine's own host key has the same one.
    """
    parts = [line for line in key.splitlines()[2:] if len(line) >= _PIECE]
    for stream in streams:
        archive = max(stream.splitlines(), key=len)
        parts += [archive[at : at + _PIECE] for at in range(_PIECE, len(archive) - _PIECE, len(archive) // 4)]
    return parts


def search(folder: Path, secrets: Sequence[bytes], controls: Sequence[bytes]) -> dict[str, Any]:
    """Search the files of a machine's disks in a folder; return how much of both was found.

    ``controls`` are found if the search works at all.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".raw", ".qcow2")]
    found: set[bytes] = set()
    for path in files:
        found |= _found(path, {*secrets, *controls})
    return {
        "files": [path.name for path in files],
        "bytes": sum(allocated(path) for path in files),
        "secrets_wanted": len(secrets),
        "secrets_found": len(found & set(secrets)),
        "controls_wanted": len(controls),
        "controls_found": len(found & set(controls)),
    }


def _found(path: Path, patterns: Iterable[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    overlap = max(map(len, patterns)) - 1
    with path.open("rb") as file:
        for start, end in _data(file.fileno()):
            file.seek(start)
            block = b""
            while part := file.read(min(BLOCK, end - file.tell())):
                block = block[-overlap:] + part
                found |= {pattern for pattern in patterns if pattern in block}
    return found


def _data(fd: int) -> list[tuple[int, int]]:
    """Return the start and end of each part of a sparse file that isn't a hole."""
    size, at, parts = os.fstat(fd).st_size, 0, []
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            break
        at = os.lseek(fd, start, os.SEEK_HOLE)
        parts.append((start, at))
    return parts


def _processed(folder: Path) -> dict[str, str]:
    """Return what ansible-runner recorded about a slice."""
    return {name: (folder / "artifacts" / name).read_text() for name in ("rc", "status")}


def _slices(rollout: Rollout) -> list[list[str]]:
    found: list[list[str]] = json.loads(rollout.plan.read_text())["waves"][0]["slices"]
    return found


def _by_name(joins: Mapping[int, int]) -> dict[str, int]:
    return {f"host-{number}": count for number, count in joins.items()}
