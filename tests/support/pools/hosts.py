"""The process of the hosts: each is an overlay of a small memory disk over a baked image's disk; one bridge for all.

It has its own namespaces (mounts, processes, network), and so does each host (mounts, name, network, and processes,
with its sshd as the first, so that only the host's own processes are found there). It ends, and all hosts with it, at
the end of its standard input. fleet.py starts it and sends it requests, a line of JSON each way.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from image_builder.bake.store import Store
from image_builder.system import environment, namespace
from tests.support.pools.fleet import (
    ACCOUNT_RULE,
    ANSWERED,
    DIRECTORY,
    GATEWAY,
    HANGS,
    NOBODY,
    READY_SECONDS,
    SITE,
    SLOW_SECONDS,
    USER,
    HostsRequest,
    host_of,
)
from tests.support.registries.pulls import leave_the_network

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
_BASE = Path("/run/fleet")
_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
{certificate}
AuthorizedKeysFile /etc/ssh/fleet_users
ClientAliveInterval 5
ClientAliveCountMax 3
LogLevel DEBUG1
PasswordAuthentication no
KbdInteractiveAuthentication no
PerSourcePenalties no
MaxStartups 500
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
UseDNS no
UsePAM no
"""
_SLOW_SHELL = f'#!/bin/sh\nsleep {SLOW_SECONDS}\nexec /bin/sh "$@"\n'
# Like a directory service that answers once, if it hasn't yet, and hangs from then on: opening a pipe blocks until its
# other end is opened.
_DIRECTORY = f"#!/bin/sh\nmkdir {ANSWERED} 2>/dev/null || exec cat {HANGS}\n"
_libc = ctypes.CDLL(None, use_errno=True)
# The connections that a server that says nothing has accepted.
_SOCKETS: list[socket.socket] = []


def serve(file: str) -> int:
    """Run as the process of the hosts until standard input ends."""
    request = HostsRequest(**json.loads(Path(file).read_text()))
    # Before the other namespaces, so that the parent finds the network by the process that it started.
    leave_the_network()
    if request.image:
        _mount_image(request)

    def work() -> int:
        with Store(Path(request.store)).in_use():
            _serve(request)
        return 0

    return namespace.run_isolated(work)


def _mount_image(request: HostsRequest) -> None:
    """Mount the image's root filesystem where only this process sees it; the loop device goes with the mount."""
    _call(_libc.unshare, _CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    place = _image(request)
    place.mkdir()
    # Writes go to the overlay above it, so the journal doesn't have to be replayed.
    options = f"ro,noload,loop,offset={request.start}"
    subprocess.run(["mount", "-t", "ext4", "-o", options, request.image, place], check=True)


def _image(request: HostsRequest) -> Path:
    return Path(request.folder, "image")


def _serve(request: HostsRequest) -> None:
    namespace.mount("tmpfs", "tmpfs", "/run", "mode=755")
    root = _overlay(request, "bridge")
    _ip(root, ["link add fleet type bridge", f"addr add {GATEWAY}/16 dev fleet", "link set fleet up"])
    children = [_start(request, number) for number in range(len(request.faults))]
    links = []
    for number, (pid, _) in enumerate(children):
        if request.faults[number] == "dead":
            # A neighbor that is known and never answers, as if the host were behind a router.
            links += [f"neigh add {host_of(number).address} {NOBODY} dev fleet"]
        else:
            links += [f"link add host{number} type veth peer name eth0 netns {pid}"]
            links += [f"link set host{number} master fleet up"]
    _ip(root, links)
    for _, go in children:
        os.write(go, b"g")
        os.close(go)
    _wait_until_ready([pid for pid, _ in children], request.faults)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(_do(command, root, [pid for pid, _ in children])), flush=True)


def _do(command: Mapping[str, Any], root: Path, hosts: Sequence[int]) -> dict[str, Any]:
    if command["do"] == "link":
        _ip(root, [f"link set host{command['host']} {command['state']}"])
        return {}
    if command["do"] == "neigh":
        _ip(root, [f"neigh {command['state']} {host_of(command['host']).address} {NOBODY} dev fleet"])
        return {}
    if command["do"] == "list":
        return _processes(hosts)
    pid = hosts[command["host"]]
    entered = ["nsenter", "--target", str(pid), "--mount", "--net", "--pid", "--uts", "--root", "--wd"]
    argv = [*entered, "--", *command["argv"]]
    done = subprocess.run(argv, input=command["input"].encode(), capture_output=True, check=False)
    streams = {"output": done.stdout, "error": done.stderr}
    return {"status": done.returncode} | {
        name: text.decode("utf-8", "replace") for name, text in streams.items()
    }


def _processes(hosts: Sequence[int]) -> dict[str, list[str]]:
    """Return the command lines of the processes on each host, by its number, except for its first process."""
    numbers = {os.readlink(f"/proc/{pid}/ns/net"): str(number) for number, pid in enumerate(hosts)}
    owners: dict[str, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in hosts:
            continue
        with suppress(OSError):  # it has ended
            number = numbers.get(os.readlink(entry / "ns/net"))
            if number is not None:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                owners.setdefault(number, []).append(line.decode("utf-8", "replace").strip())
    return owners


def _ip(root: Path, lines: Sequence[str]) -> None:
    argv = ["chroot", os.fspath(root), "ip", "-batch", "-"]
    subprocess.run(argv, input="\n".join(lines) + "\n", text=True, check=True)


def _overlay(request: HostsRequest, name: str) -> Path:
    """Mount a separate root, with writes to it kept in memory; return it."""
    base = _BASE / name
    base.mkdir(parents=True)
    namespace.mount("tmpfs", "tmpfs", os.fspath(base), f"size={request.disk},mode=755")
    for part in ("upper", "work", "root"):
        (base / part).mkdir()
    options = (
        f"lowerdir={':'.join(request.trees) or _image(request)},upperdir={base}/upper,workdir={base}/work"
    )
    root = os.fspath(base / "root")
    namespace.mount("overlay", "overlay", root, options)
    environment.mount_dev(f"{root}/dev")
    namespace.mount("proc", "proc", f"{root}/proc")
    if request.site:
        Path(f"{root}{SITE}").mkdir(parents=True, exist_ok=True)
        namespace.bind(request.site, f"{root}{SITE}", read_only=True)
    return base / "root"


def _start(request: HostsRequest, number: int) -> tuple[int, int]:
    """Start a host's process in its own network; return its id, and the pipe to write to once it has a link."""
    unshared, go = os.pipe(), os.pipe()
    _call(_libc.unshare, _CLONE_NEWPID)  # for the next child
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go[1])
            _call(_libc.unshare, _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWNET)
            os.close(unshared[1])
            os.read(go[0], 1)
            _be_host(request, number)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    with open("/proc/self/ns/pid") as own:
        _call(_libc.setns, own.fileno(), _CLONE_NEWPID)
    os.close(unshared[1])
    os.close(go[0])
    os.read(unshared[0], 1)  # end of file: the child has closed it, deliberately or by ending
    os.close(unshared[0])
    return pid, go[1]


def _call(function: Callable[..., int], *args: int) -> None:
    if function(*args) != 0:
        raise OSError(ctypes.get_errno(), function.__name__)


def _be_host(request: HostsRequest, number: int) -> NoReturn:
    """Set up a host and become its sshd, or whatever its fault puts in sshd's place."""
    fault = request.faults[number]
    root = _overlay(request, str(number))
    _write_files(request, number, root)
    _libc.sethostname(f"host-{number}".encode(), len(f"host-{number}"))
    if fault == "disk full":
        with suppress(OSError), open(root / "var/fill", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    os.chroot(root)
    os.chdir("/")
    link = [] if fault == "dead" else [f"addr add {host_of(number).address}/16 dev eth0", "link set eth0 up"]
    _ip(Path("/"), ["link set lo up", *link])
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    if fault in ("dead", "refused"):
        os.execve("/bin/sleep", ["sleep", "infinity"], environment)
    if fault == "slow banner":
        with socket.create_server((host_of(number).address, 22)) as server:
            while True:
                _SOCKETS.append(server.accept()[0])
    os.execve("/usr/sbin/sshd", ["/usr/sbin/sshd", "-D", "-E", "/var/log/sshd.log"], environment)


def _write_files(request: HostsRequest, number: int, root: Path) -> None:
    """Write a host's keys, its user, and its fault."""
    fault, keys, ssh = request.faults[number], Path(request.folder), root / "etc/ssh"
    shutil.copy(keys / f"host-{number}", ssh / "ssh_host_ed25519_key")
    certificate = keys / f"host-{number}-cert.pub"
    if certificate.exists():
        shutil.copy(certificate, ssh / "ssh_host_ed25519_key-cert.pub")
    line = "HostCertificate /etc/ssh/ssh_host_ed25519_key-cert.pub" if certificate.exists() else ""
    (ssh / "sshd_config").write_text(_CONFIG.format(certificate=line))
    (ssh / "fleet_users").write_text("" if fault == "auth" else (keys / "user.pub").read_text())
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost host-{number}\n")
    (root / "run/sshd").mkdir(parents=True, exist_ok=True)
    shell = "/usr/local/bin/slow-sh" if fault == "slow" else "/bin/sh"
    for path, script in (("usr/local/bin/slow-sh", _SLOW_SHELL), (DIRECTORY[1:], _DIRECTORY)):
        (root / path).write_text(script)
        (root / path).chmod(0o755)
    os.mkfifo(f"{root}{HANGS}")
    for name, added in (
        ("passwd", f"{USER}:x:2000:2000::/home/{USER}:{shell}"),
        ("shadow", f"{USER}:*:20000::::::"),
        ("group", f"{USER}:x:2000:"),
    ):
        with (root / "etc" / name).open("a") as file:
            file.write(added + "\n")
    (root / "home" / USER).mkdir(mode=0o700)
    os.chown(root / "home" / USER, 2000, 2000)
    if fault != "sudo refuses":
        rule = "ALL" if fault == "sudo asks" else "NOPASSWD: ALL"
        (root / "etc/sudoers.d/fleet").write_text(f"{USER} ALL=(ALL:ALL) {rule}\n")
        (root / "etc/sudoers.d/fleet").chmod(0o440)
    if fault == "sudo hangs":
        Path(f"{root}{ANSWERED}").mkdir()
        pam = root / "etc/pam.d/sudo"
        pam.write_text(f"{ACCOUNT_RULE}\n{pam.read_text()}")


def _wait_until_ready(pids: Sequence[int], faults: Sequence[str]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    for pid, fault in zip(pids, faults, strict=True):
        while fault not in ("dead", "refused", "slow banner"):
            # A full disk has no room for the PID file.
            if _listens(pid) if fault == "disk full" else Path(f"/proc/{pid}/root/run/sshd.pid").exists():
                break
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"a host ({fault or 'sound'}) didn't start: {status}")
            time.sleep(0.02)


def _listens(pid: int) -> bool:
    """Return whether something in a host's network listens on sshd's port (proc_net_tcp)."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(":0016") and row[3] == "0A" for row in rows)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
