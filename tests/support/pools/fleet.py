"""Real hosts for the tests of pools: each an sshd in its own network namespace, with its own address and keys.

    with fleet(place, folder, 12, faults={3: "dead"}) as pool:
        pool.hosts

They run under a separate process (hosts.py), and end with it, however that happens. Only who is in their network
(``Fleet.entered``) reaches them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from image_builder.machine.vm import write_key
from image_builder.pool.plan.model import Host
from image_builder.pool.reach.hostkeys import (
    CertificateAuthority,
    HostKeys,
    Pinned,
    known_as,
    openssh_options,
)
from image_builder.pool.reach.reach import Access
from image_builder.pool.steps.openssh import arguments
from tests.support.images.builds import REPO, Workplace

# dead: packets to it vanish. slow banner: accepts connections and says nothing. other key: not the pinned one. slow:
# each command takes SLOW_SECONDS longer. The rest are self-explanatory.
Fault = Literal[
    "dead",
    "refused",
    "slow banner",
    "other key",
    "auth",
    "sudo asks",
    "sudo hangs",
    "sudo refuses",
    "disk full",
    "slow",
]
# The outcome of a command that is run as root on a host with the fault.
CLASSES: dict[Fault, str] = {
    "dead": "timeout",
    "refused": "refused",
    "slow banner": "timeout",
    "other key": "host key",
    "auth": "auth",
    "sudo asks": "sudo",
    "sudo hangs": "sudo",
    "sudo refuses": "sudo",
    "disk full": "ok",
    "slow": "ok",
}
SLOW_SECONDS = 1
USER = "operator"
SITE = "/opt/site"
# Addresses for benchmarks, RFC 2544; ``leave_the_network`` takes the other half of them.
NETWORK, GATEWAY = "198.19", "198.19.255.254"
# The program that makes sudo hang, its mark and its pipe (see hosts.py), and the line with which PAM calls it.
DIRECTORY, ANSWERED, HANGS = "/usr/local/sbin/directory", "/tmp/answered", "/run/hangs"
ACCOUNT_RULE = f"account required pam_exec.so {DIRECTORY}"
# A neighbor that is known and never answers.
NOBODY = "lladdr 02:00:00:00:00:01 nud permanent"
_CLONE_NEWNET = 0x40000000
READY_SECONDS = 300
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class HostsRequest:
    """The request to the process of the hosts; ``disk`` is a size as tmpfs takes it.

    The hosts' root is the filesystem at byte ``start`` of ``image``, or else ``trees``, topmost first.
    """

    store: str
    image: str
    start: int
    trees: list[str]
    disk: str
    folder: str
    faults: list[str]
    site: str


class Fleet:
    """The running hosts, and what can be done to them. Requests and answers are a line of JSON each."""

    def __init__(self, folder: Path, hosts: tuple[Host, ...], process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.hosts = hosts
        self._process = process
        self._lock = threading.Lock()
        # The processes that were in their network when the caller entered it: that of the hosts, and the calling one.
        self.bystanders: set[int] = set()

    @property
    def key(self) -> Path:
        """The user's key, which the hosts accept."""
        return self.folder / "user"

    @property
    def pinned(self) -> Pinned:
        return Pinned(self.folder / "known_hosts")

    @property
    def authority(self) -> CertificateAuthority:
        return CertificateAuthority(self.folder / "authorities")

    def access(self, host_keys: HostKeys | None = None, **seconds: float) -> Access:
        """Return how to reach the hosts: by default with short timeouts and pinned keys."""
        times = {"connect_seconds": 3.0, "banner_seconds": 3.0, "auth_seconds": 60.0} | seconds
        return Access(host_keys or self.pinned, USER, self.key, **times)

    def variables(self, host: Host) -> dict[str, str]:
        """Return the variables with which Ansible reaches a host and checks it against the same key."""
        return {
            "ansible_host": host.address,
            "ansible_user": USER,
            "ansible_ssh_private_key_file": os.fspath(self.key),
            "ansible_ssh_common_args": shlex.join(
                ["-o", "IdentitiesOnly=yes", *arguments(openssh_options(self.pinned, host))]
            ),
        }

    @contextmanager
    def entered(self) -> Iterator[Self]:
        """Put this thread, and whatever it starts, into the hosts' network until the block ends."""
        with _network_of(self._process.pid):
            self.bystanders = self.around()
            yield self

    def run(self, host: int, *argv: str, input: str = "", ok: bool = True) -> str:
        """Run a command on a host as root, bypassing SSH; return its output."""
        done = self._ask({"do": "run", "host": host, "argv": argv, "input": input})
        assert done["status"] == 0 or not ok, done
        return str(done["output"])

    def cpu_seconds(self) -> float:
        """Return the CPU seconds used by the hosts, including everything that ran on them and has ended."""
        own: dict[int, tuple[int, float]] = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                fields = entry.read_text().rpartition(")")[2].split()
                own[int(entry.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
        parents = {self._process.pid}
        ticks = 0.0
        while parents:
            ticks += sum(own[pid][1] for pid in parents if pid in own)
            parents = {pid for pid, (parent, _) in own.items() if parent in parents}
        return ticks / os.sysconf("SC_CLK_TCK")

    def log(self, host: int) -> str:
        """Return the log of a host's sshd."""
        return self.run(host, "cat", "/var/log/sshd.log")

    def cut(self, host: int) -> None:
        """Drop all packets from and to a host."""
        self._ask({"do": "link", "host": host, "state": "down"})

    def mend(self, host: int) -> None:
        """Undo ``cut``."""
        self._ask({"do": "link", "host": host, "state": "up"})

    def hang_sudo(self, host: int, *, answers: bool) -> None:
        """Make sudo hang; with ``answers`` it works once before that, so that a probe finds nothing."""
        script = f"rm -rf {ANSWERED}; grep -q {DIRECTORY} $0 || sed -i '1i {ACCOUNT_RULE}' $0"
        self.run(host, "sh", "-ec", script + ("" if answers else f"; mkdir {ANSWERED}"), "/etc/pam.d/sudo")

    def free_sudo(self, host: int) -> None:
        """Undo ``hang_sudo``; a hanging sudo continues, and does now what it was asked for."""
        self.run(host, "sh", "-ec", f"sed -i '\\|{DIRECTORY}|d' $0; : <>{HANGS}", "/etc/pam.d/sudo")

    def around(self) -> set[int]:
        """Return the processes in the hosts' network that don't belong to a host."""
        network, names = os.readlink("/proc/thread-self/ns/net"), set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended
                if entry.name.isdigit() and os.readlink(entry / "ns/net") == network:
                    names.add(int(entry.name))
        return names

    def processes(self) -> dict[int, list[str]]:
        """Return the command lines of processes on hosts besides sshd, by the number of each host that has any."""
        return {int(number): lines for number, lines in self._ask({"do": "list"}).items()}

    def part(self, host: int) -> None:
        """Drop packets between a host and processes here; hosts still reach each other."""
        self._neighbours(host, "replace")

    def unite(self, host: int) -> None:
        """Undo ``part``."""
        self._neighbours(host, "del")

    def _neighbours(self, host: int, verb: str) -> None:
        self._ask({"do": "neigh", "host": host, "state": verb})
        self.run(host, "ip", "neigh", verb, GATEWAY, *NOBODY.split(), "dev", "eth0")

    def change_key(self, host: int) -> None:
        """Give a host a new key, as if it had been reinstalled."""
        self._restart(
            host, 'rm -f "$0"; ssh-keygen -q -t ed25519 -N "" -f "$0"', "/etc/ssh/ssh_host_ed25519_key"
        )

    def restore_key(self, host: int, key: str = "") -> None:
        """Give a host this key; by default the one that it had first, with its certificate."""
        if not key:
            key = (self.folder / f"host-{host}").read_text()
            self.show(host, (self.folder / f"host-{host}-cert.pub").read_text())
        self._restart(host, 'cat > "$0"', "/etc/ssh/ssh_host_ed25519_key", key)

    def configure(self, host: int, line: str = "") -> None:
        """Set the last line of a host's sshd_config, in place of the one that was set before."""
        self._restart(host, f"sed -i '/# last$/d' $0; echo '{line} # last' >>$0", "/etc/ssh/sshd_config")

    def show(self, host: int, certificate: str) -> None:
        """Make a host show another certificate for the key that it has."""
        self._restart(host, 'cat > "$0"', "/etc/ssh/ssh_host_ed25519_key-cert.pub", certificate)

    def _restart(self, host: int, script: str, file: str, input: str = "") -> None:
        """Run a script, then make the host's sshd reread its files."""
        before = self.log(host).count("Server listening")
        self.run(host, "sh", "-ec", script + '; kill -HUP "$(cat /run/sshd.pid)"', file, input=input)
        deadline = time.monotonic() + READY_SECONDS
        while self.log(host).count("Server listening") == before:
            assert time.monotonic() < deadline, "sshd didn't come back"
            time.sleep(0.05)

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def fleet(place: Workplace, folder: Path, count: int, **more: Any) -> Iterator[Fleet]:
    """Start hosts, as ``started`` does, and enter their network. Call it from the main thread."""
    with started(place, folder, count, **more) as hosts, hosts.entered():
        yield hosts


@contextmanager
def started(
    place: Workplace,
    folder: Path,
    count: int,
    *,
    faults: Mapping[int, Fault] | None = None,
    signed: bool = False,
    site: Path | None = None,
    trees: Sequence[Path] = (),
    disk: str = "48m",
) -> Iterator[Fleet]:
    """Start ``count`` hosts; host N has fault N. With ``signed`` they have certificates of ``Fleet.authority``.

    The directory ``site``, such as one with packages, is mounted on all of them at SITE. Their writes go to memory, at
    most ``disk`` for each.

    ``place`` holds an image with sshd, sudo, ip and Python: the small one, whose disk they use unless there are
    ``trees``, topmost first.
    """
    hosts = tuple(host_of(n) for n in range(count))
    wrong = [(faults or {}).get(n, "") for n in range(count)]
    _write_keys(folder, hosts, wrong, signed)
    request = HostsRequest(
        store=os.fspath(place.store),
        image="" if trees else os.fspath(place.artefact / f"{place.image}.raw"),
        start=0 if trees else _root_of(place.artefact),
        trees=[os.fspath(tree) for tree in trees],
        disk=disk,
        folder=os.fspath(folder),
        faults=list(wrong),
        site=os.fspath(site or ""),
    )
    (folder / "request.json").write_text(json.dumps(dataclasses.asdict(request)))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.pools.hosts", folder / "request.json"],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    # Not Popen's own context manager, which waits a quarter of a second on Ctrl-C.
    with ExitStack() as stack:
        stack.enter_context(process.stdout)
        stack.callback(process.wait)
        stack.enter_context(process.stdin)  # end of file ends the process, and all hosts with it
        assert process.stdout.readline() == "ready\n", "the hosts didn't start"
        yield Fleet(folder, hosts, process)
    assert process.returncode == 0


def _root_of(artefact: Path) -> int:
    """Return where the root filesystem begins on the disk of an image."""
    disk = json.loads((artefact / "manifest.json").read_bytes())["disk"]
    (start,) = (part["start"] for part in disk["partitions"] if part["name"] == "root")
    return int(start)


def host_of(number: int) -> Host:
    """Return a host as an inventory would have it."""
    return Host(
        name=f"host-{number}",
        address=f"{NETWORK}.{number // 250}.{number % 250 + 1}",
        pool="pool",
        scale_set=f"set-{number // 100}",
        vm_size="Standard_ND96isr_H100_v5",
        image="minimal",
        vm_id=f"00000000-0000-4000-8000-{number:012x}",
    )


def _write_keys(folder: Path, hosts: Sequence[Host], wrong: Sequence[str], signed: bool) -> None:
    """Write the user's key, the hosts' keys, and the two files by which those are known."""
    new_key(folder / "user")
    authority = new_key(folder / "authority")
    (folder / "authorities").write_text(f"@cert-authority * {authority}\n")
    lines = []
    for number, host in enumerate(hosts):
        public = new_key(folder / f"host-{number}")
        if wrong[number] == "other key":
            public = new_key(folder / f"host-{number}.other")
        lines.append(f"{known_as(host)} {public}\n")
        if signed:
            sign(folder / "authority", folder / f"host-{number}.pub", "-n", known_as(host))
    (folder / "known_hosts").write_text("".join(lines))


def new_key(path: Path) -> str:
    """Write a new key pair, NAME and NAME.pub; return the public line."""
    public = write_key(path, path.name)
    path.with_name(f"{path.name}.pub").write_text(public + "\n")
    return public


def sign(authority: Path, public: Path, *options: str) -> Path:
    """Make a host certificate for a public key with OpenSSH; return its file."""
    argv: list[str | Path] = ["ssh-keygen", "-q", "-s", authority, "-h", "-I", "fleet", *options, public]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return public.with_name(f"{public.stem}-cert.pub")


@contextmanager
def _network_of(pid: int) -> Iterator[None]:
    """Put this thread into a process's network until the block ends."""
    own_network = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _enter(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
        try:
            yield
        finally:
            _enter(os.dup(own_network))
    finally:
        os.close(own_network)


def _enter(fd: int) -> None:
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)
