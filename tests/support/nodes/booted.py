"""A host booted by systemd in its own namespaces: an overlay over a baked tree, reached through its own sshd.

It shares this machine's kernel. Everything machine-wide is read-only: sysfs, and kernel settings except the network's.
The controller enters only the host's network namespace, which has nothing but a loopback interface.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from image_builder.bake.lock import repository
from image_builder.machine.ssh import SshAddress
from image_builder.system import cgroups, environment, namespace
from image_builder.system.process import Arg

REPO = Path(__file__).resolve().parents[3]
USER = "admin"
_BOOT_SECONDS = 300
_STATE = ("systemctl", "is-system-running")
# Units that need a real machine may fail: here none can remount the root, for instance.
_UP = ("running", "degraded")
_KEPT = ("--bounding-set", "-sys_module,-sys_rawio,-sys_time,-sys_boot", "--")
_UNSHARED = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--fork", "--kill-child")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Request:
    """The parts of a host: its trees (topmost first), a directory for its files, and its bind mounts below /run."""

    trees: tuple[str, ...]
    folder: str
    binds: dict[str, str]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    output: str

    @property
    def changed(self) -> int:
        """Return how many tasks of a play changed something."""
        (number,) = re.findall(r"^\S+ +: ok=.*\bchanged=(\d+)", self.output, re.MULTILINE)
        return int(number)


@dataclass(frozen=True)
class BootedHost:
    """A booted host. ``pid`` is its init, as seen from here; ``folder`` has the controller's files.

    ``sockets`` is the directory of ssh's control sockets, whose paths must be short.
    """

    pid: int
    folder: Path
    sockets: str

    def run(self, *argv: Arg) -> Ended:
        """Run a command on the host as root."""
        entered = ["nsenter", "--target", str(self.pid), "--all", "--root", "--wd", "--"]
        return _run([*entered, *argv])

    def play(self, playbook: str | Path, *argv: Arg, **settings: str) -> Ended:
        """Run a playbook with plain ansible-playbook over ssh, with ``settings`` added to a minimal environment."""
        entered = ("nsenter", "--target", str(self.pid), "--net", "--")
        controller = {"ANSIBLE_SSH_CONTROL_PATH_DIR": self.sockets, **settings}
        return play(self.folder, playbook, *argv, within=entered, **controller)


def write_inventory(folder: Path, host: str, address: SshAddress) -> None:
    """Write the inventory for plays: one host in the group ``nodes``, and how to reach it."""
    connection = {
        "ansible_host": address.host,
        "ansible_port": address.port,
        "ansible_user": address.user,
        "ansible_become": True,
        "ansible_ssh_private_key_file": os.fspath(address.key or ""),
        "ansible_ssh_common_args": "-F none -o StrictHostKeyChecking=accept-new"
        f" -o UserKnownHostsFile={address.known_hosts}",
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    (folder / "hosts.yml").write_text(json.dumps({"nodes": {"hosts": {host: connection}}}))


def play(
    folder: Path, playbook: str | Path, *argv: Arg, within: Sequence[Arg] = (), **settings: str
) -> Ended:
    """Run a playbook with plain ansible-playbook on the inventory in ``folder``; ``settings`` are for its environment.

    ``within`` is a command prefix that runs it somewhere else.
    """
    program = Path(sys.executable).parent / "ansible-playbook"
    return _run(
        [*within, program, "-i", folder / "hosts.yml", *argv, playbook],
        {
            "PATH": os.environ["PATH"],
            "HOME": os.fspath(folder),
            "ANSIBLE_PIPELINING": "true",
            # Logging in took 12 s or more on a busy host, half a minute on an emulated machine; the default is 10 s.
            "ANSIBLE_TIMEOUT": "120",
            **settings,
        },
        folder,
    )


def _run(argv: Sequence[Arg], env: Mapping[str, str] | None = None, folder: Path | None = None) -> Ended:
    done = subprocess.run(
        argv,
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout)


@contextmanager
def booted(trees: Sequence[Path], folder: Path, binds: Mapping[str, Path]) -> Iterator[BootedHost]:
    """Boot a host, which ends with the block together with all of its processes.

    ``binds`` maps paths below /run to directories here. Packages come only from a flat repository at
    ``repository.MOUNT_POINT``.
    """
    folder.mkdir(parents=True)
    request = Request(
        tuple(map(os.fspath, trees)), os.fspath(folder), {at: os.fspath(path) for at, path in binds.items()}
    )
    (folder / "request.json").write_text(json.dumps(asdict(request)))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    with (
        cgroups.held(),
        tempfile.TemporaryDirectory(prefix="ssh-", dir="/tmp") as sockets,
        (folder / "console.log").open("wb") as console,
    ):
        group = _group() / folder.name
        group.mkdir(parents=True, exist_ok=True)
        host = subprocess.Popen(
            # The host's control groups are below one of its own, where its cgroup namespace begins.
            [
                *("setpriv", "--pdeathsig", "KILL", "sh", "-c", 'echo $$ >"$0"; exec "$@"'),
                *(group / "cgroup.procs", "unshare", *_UNSHARED),
                *(sys.executable, "-m", "tests.support.nodes.booted", folder / "request.json"),
            ],
            cwd=REPO,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
        try:
            yield _ready(host, folder, sockets)
        finally:
            host.kill()
            host.wait()
            # All other processes end with the host's first one; only then can their groups be removed.
            while "populated 1" in (group / "cgroup.events").read_text():
                time.sleep(0.02)


def _group() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(f"{place}{cgroups.PARENT}")
    raise AssertionError("no cgroup2 is mounted here: systemd needs it")


def _ready(process: subprocess.Popen[bytes], folder: Path, sockets: str) -> BootedHost:
    """Wait until the host has started all units, write its inventory, and return the host."""
    deadline = time.monotonic() + _BOOT_SECONDS
    while not (host := _init_of(process, folder, sockets)) or host.run(*_STATE).output.strip() not in _UP:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "console.log").read_text()
        time.sleep(0.1)
    write_inventory(folder, "host", SshAddress(USER, "127.0.0.1", 22, folder / "key", folder / "known"))
    # In check mode Ansible fetches no package index, and a sealed image has none.
    indexed = host.run("apt-get", "update", "--error-on=any")
    assert indexed.status == 0, indexed.output
    return host


def _init_of(process: subprocess.Popen[bytes], folder: Path, sockets: str) -> BootedHost | None:
    """Return the host once its systemd accepts requests, None until then."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if not children or not Path(f"/proc/{children[0]}/root/run/systemd/private").exists():
        return None
    return BootedHost(int(children[0]), folder, sockets)


def main(file: str) -> None:
    """Run as the host's first process, already in its own namespaces: mount its root and become its systemd."""
    request = Request(**json.loads(Path(file).read_text()))
    base = Path(request.folder)
    root = base / "root"
    for part in ("upper", "work", "root"):
        (base / part).mkdir()
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    options = f"lowerdir={':'.join(request.trees)},upperdir={base}/upper,workdir={base}/work"
    namespace.mount("overlay", "overlay", os.fspath(root), options)
    _mount_system(root)
    for place, source in request.binds.items():
        os.makedirs(f"{root}{place}")
        namespace.bind(source, f"{root}{place}", read_only=True)
    _write_files(root, (base / "key.pub").read_text())
    _libc.sethostname(b"booted", 6)
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "."], check=True)
    os.chroot(".")
    if _libc.umount2(b"/", 2) != 0:  # the old root
        raise OSError(ctypes.get_errno(), "umount2")
    os.chdir("/")
    env = {"container": "namespaces", "PATH": environment.BASE["PATH"]}
    os.execve("/usr/bin/setpriv", ["setpriv", *_KEPT, "/lib/systemd/systemd"], env)


def _mount_system(root: Path) -> None:
    namespace.mount("proc", "proc", f"{root}/proc")
    for name in ("sys", "sys/net", "sysrq-trigger"):
        with suppress(FileNotFoundError):  # not every kernel has a SysRq key
            namespace.bind(f"{root}/proc/{name}", f"{root}/proc/{name}", read_only=name == "sysrq-trigger")
    namespace.make_read_only(f"{root}/proc/sys")
    namespace.mount("sysfs", "sysfs", f"{root}/sys")
    namespace.make_read_only(f"{root}/sys")
    namespace.mount("cgroup2", "cgroup2", f"{root}/sys/fs/cgroup")
    environment.mount_dev(f"{root}/dev")
    namespace.mount("tmpfs", "tmpfs", f"{root}/run", "mode=755")


def _write_files(root: Path, key: str) -> None:
    """Write the controller's account on the host, and the host's package sources."""
    for name, line in (
        ("passwd", f"{USER}:x:2000:2000::/home/{USER}:/bin/sh"),
        ("shadow", f"{USER}:*:20000::::::"),
        ("group", f"{USER}:x:2000:"),
    ):
        with (root / "etc" / name).open("a") as file:
            file.write(f"{line}\n")
    ssh = root / "home" / USER / ".ssh"
    ssh.mkdir(parents=True)
    (ssh / "authorized_keys").write_text(key)
    for path in (ssh.parent, ssh, ssh / "authorized_keys"):
        os.chown(path, 2000, 2000)
        path.chmod(0o600 if path.is_file() else 0o700)
    (root / "etc/sudoers.d/admin").write_text(f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n")
    (root / "etc/sudoers.d/admin").chmod(0o440)
    for source in (root / "etc/apt/sources.list.d").iterdir():
        source.unlink()
    (root / "etc/apt/sources.list").write_text(f"{repository.SOURCES_LINE}\n")


if __name__ == "__main__":
    main(sys.argv[1])
