"""Slices run by ansible-runner over OpenSSH: a private data directory, a process that runs it, an outcome per host.

The directory is the whole contract (inventory, project, env): another engine that runs ansible-runner can be given
the same one. It contains no secrets; the key is given as a path. Node configurations that are delivered to hosts are
one file per host, HOST.json, in one directory.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from image_builder.errors import DefinitionError, ImageBuilderError, Problem
from image_builder.node.errors import NodeError
from image_builder.node.join import config
from image_builder.node.net.fetch import proven_by
from image_builder.pool.plan.model import Outcome, ended, failed
from image_builder.pool.plan.render import one_nodes_of_several
from image_builder.pool.reach.provision import LOCK, NO_CONFIG, NOT_STARTED, JoinStatus, after_join
from image_builder.pool.reach.reach import Access
from image_builder.pool.run.driver import Work
from image_builder.pool.run.journal import in_use
from image_builder.pool.steps import openssh
from image_builder.pool.steps.control_plane import server_fault
from image_builder.pool.steps.slice import CONTROL, DATA, PLAYBOOK, WORKER, Worker, describe
from image_builder.settings import REPO_ROOT
from image_builder.system import process
from image_builder.system.trees import remove_tree
from image_builder.text import short_list

# Tasks of playbooks/bootstrap.yml, used to identify their results; a test compares the names.
CONFIGURE, START, WAIT = (
    "Deliver the node configuration",
    "Tell the host to join",
    "Wait until it has joined or given up",
)
# Each waiting host holds a fork, but all hosts have been told before: a full slice takes about as long as its slowest
# host.
FORKS = 50
_MESSAGES = ("msg", "stderr", "module_stderr", "stdout")
# Seconds: for the tasks before joining, and for a process to end after it was asked to.
_TASKS_SECONDS, _GRACE = 120.0, 30.0
# Any exit status is accepted: what counts is what was reported of each host.
_ANY_STATUS = range(-64, 256)
# A first line that is well formed, and a message of Ansible's around it.
_CLASSES: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"SSH-no way through hop-\d+", "bastion"),  # bastion.sh
        (r"\bsudo\b|\bsudoers\b|privilege escalation|a password is required", "sudo"),
        (
            r"host key verification failed|host identification has changed|no .* host key is known"
            r"|revoked host key|certificate (?:invalid|not yet valid|has expired)",
            "host key",
        ),
        (r"permission denied|too many authentication failures|no supported authentication", "auth"),
        (r"connection refused|kex_exchange_identification|invalid ssh identification string", "refused"),
        (
            r"timed out during banner|connect to host \S+ port \d+: connection timed out|no route to host"
            r"|network is unreachable|could not resolve hostname|operation timed out",
            "timeout",
        ),
        (
            # Possibly an empty message: connections are shared, and the process that opened one doesn't report why it
            # broke.
            r"via ssh:$|broken pipe|connection reset|connection closed|closed by remote|not responding"
            r"|connection timed out|connection to \S+ (?:port \d+ )?timed out",
            "dropped",
        ),
    )
)

OnEnd = Callable[[str, JoinStatus], None]
"""Called with a host's name and how joining ended on it, from the slice's thread."""


@dataclass(frozen=True)
class Slice:
    """One Ansible process. ``configurations`` are files by host name, ``seconds`` is the time for one host to join.

    It runs here, or on a ``worker``.
    """

    work: Sequence[Work]
    access: Access
    seconds: float
    configurations: Mapping[str, Path] = field(default_factory=dict)
    worker: Worker | None = None


def unreached(message: str, *, answered: bool) -> Outcome:
    """Return the outcome of a host on which OpenSSH or sudo failed, by their message.

    ``answered``: the host had answered before, so it counts as a connection that broke.
    """
    text = " ".join(message.split())
    for pattern, kind in _CLASSES:
        if pattern.search(text):
            lost = answered and kind in ("refused", "timeout")
            return ended("dropped" if lost else kind, text)  # type: ignore[arg-type]  # the classes above
    return ended("dropped" if answered else "timeout", text)


class Results:
    """Derives one result for each host from the results of its tasks, or from their absence."""

    def __init__(self, names: Sequence[str], on_end: OnEnd) -> None:
        self._unfinished = dict.fromkeys(names)
        self._told_hosts: set[str] = set()
        self._on_end = on_end

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The hosts that have no result yet."""
        return tuple(self._unfinished)

    def line(self, line: str) -> str:
        """Process a line of the slice's process; return Ansible's last words if the line contains them."""
        try:
            entry = json.loads(line)
        except ValueError:
            return line  # a Python traceback
        if not isinstance(entry, dict) or "host" not in entry:
            return str(entry.get("tail", "")) if isinstance(entry, dict) else ""
        self._task(entry["host"], entry["task"], entry["what"], entry["result"])
        return ""

    def over(self, why: str) -> None:
        """End the remaining hosts: the process ended without a result for them."""
        for name in self.unfinished:
            if name in self._told_hosts:
                self._end(name, JoinStatus(ended("unknown", f"told to join, then {why}"), "unknown"))
            else:
                # The host may just have been told to join; whether it was isn't known.
                self._end(name, JoinStatus(ended("dropped", why), "unknown"))

    def _task(self, name: str, task: str, end: str, result: Mapping[str, Any]) -> None:
        if name not in self._unfinished:
            return
        message = " ".join(str(result[key]) for key in _MESSAGES if result.get(key))
        if task == START and end == "ok":
            self._told_hosts.add(name)
        elif task == WAIT and "rc" in result:
            self._end(name, _joined(result))
        elif end == "unreachable" or (end == "failed" and _is_sudo(message)):
            self._end(name, _lost(message, task, is_told=name in self._told_hosts))
        elif end == "failed" and task == CONFIGURE:
            self._end(name, JoinStatus(failed("bootstrap", NO_CONFIG, message), "no"))
        elif end == "failed":
            self._end(name, JoinStatus(failed("bootstrap", NOT_STARTED, message), "unknown"))

    def _end(self, name: str, status: JoinStatus) -> None:
        del self._unfinished[name]
        self._on_end(name, status)


def _lost(message: str, task: str, *, is_told: bool) -> JoinStatus:
    outcome = unreached(message, answered=is_told)
    # A host that refused the login can't have been told. If the connection broke meanwhile, it may have been.
    untold = not is_told and (
        task == CONFIGURE or outcome.kind in ("refused", "bastion", "auth", "host key", "sudo")
    )
    return JoinStatus(outcome, "no" if untold else "unknown")


def _joined(result: Mapping[str, Any]) -> JoinStatus:
    return after_join(int(result["rc"]), str(result.get("stdout", "")), str(result.get("stderr", "")))


def _is_sudo(message: str) -> bool:
    return unreached(message, answered=False).kind == "sudo"


class Process:
    """The process of one slice: ``run`` blocks its thread until the process has ended; other threads call ``end``."""

    def __init__(self, slice_: Slice, folder: Path, python: Path) -> None:
        self._slice, self._folder, self._python = slice_, folder, python
        self._guard = threading.Lock()
        self._pidfd = -1
        self._unwanted = False

    def run(self, on_end: OnEnd) -> None:
        """Run the slice; each of its hosts gets one result. The folder is created here and removed afterwards."""
        results = Results([work.host.name for work in self._slice.work], on_end)
        last = ""

        def line(text: str) -> None:
            nonlocal last
            last = self._began(text) or results.line(text) or last

        longest = _longest(self._slice)
        try:
            write(self._slice, self._folder)
            process.run(
                self._argv(longest),
                ok=_ANY_STATUS,
                env=_environment(self._folder),
                timeout=longest + _GRACE,
                on_line=line,
            )
            results.over(f"its Ansible process ended: {last}" if last else "its Ansible process ended")
        except (ImageBuilderError, OSError) as error:
            results.over(str(error))
        finally:
            self._close()
            remove_tree(self._folder)

    def end(self) -> None:
        """End the process and everything that it started; call it at any time, even before the process runs."""
        with self._guard:
            self._unwanted = True
            if self._pidfd >= 0:
                _terminate(self._pidfd)

    def _began(self, line: str) -> str:
        """Note the process, from the first line that it prints."""
        if self._pidfd < 0 and line.startswith('{"pid":'):
            with self._guard:
                # The PID can't have been reused yet: the process hasn't been waited for.
                self._pidfd = os.pidfd_open(json.loads(line)["pid"])
                if self._unwanted:
                    _terminate(self._pidfd)
        return ""

    def _close(self) -> None:
        with self._guard:
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1

    def _argv(self, seconds: float) -> list[process.Arg]:
        module = ("-P", "-m", "image_builder.pool.steps.slice")
        return [self._python, *module, self._folder, f"{seconds:.0f}", str(os.getpid())]


def _terminate(pidfd: int) -> None:
    with suppress(ProcessLookupError):  # it has already ended
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)


def _longest(slice_: Slice) -> float:
    """Return how many seconds a slice may take: its last host's slot and deadline, and the preceding tasks."""
    return slice_.seconds + max(work.delay for work in slice_.work) + _TASKS_SECONDS


def _environment(folder: Path) -> dict[str, str]:
    return {
        "HOME": os.fspath(folder / "tmp"),
        "PYTHONPATH": os.fspath(REPO_ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def clear(folder: Path) -> None:
    """Remove what the slices of a killed run left in ``folder``, once none of their processes is running.

    Raises ImageBuilderError if one is still running after half a minute, OSError.
    """
    for leftover in sorted(folder.iterdir()) if folder.is_dir() else ():
        deadline = time.monotonic() + _GRACE
        while not _is_free(leftover):
            if time.monotonic() > deadline:
                raise ImageBuilderError(
                    f"an Ansible process of an earlier run is still running in {leftover}",
                    hint="end it, then resume: two would tell the same hosts to join",
                )
            time.sleep(0.1)
        remove_tree(leftover)


def _is_free(folder: Path) -> bool:
    try:
        return not in_use(folder)
    except FileNotFoundError:
        return True


def write(slice_: Slice, folder: Path) -> None:
    """Create the private data directory of a slice, and what else its process needs. Raises OSError."""
    folder.mkdir(mode=0o700)
    if slice_.worker:
        key = Path(slice_.access.login(slice_.work[0].host).key)  # the only one, as was checked
        (folder / WORKER).write_text(describe(slice_.worker, key), encoding="utf-8")
        write_portable(slice_, folder / DATA)
        return
    for name in ("tmp", CONTROL):
        (folder / name).mkdir()
    _fill(folder, slice_, environment(folder, slice_))


def write_portable(slice_: Slice, folder: Path) -> None:
    """Create a private data directory that any ansible-runner can run anywhere: all paths in it stay within it.

    Only the private key isn't in it: the runner's ``ssh_key`` provides that, through an agent. Raises OSError.
    """
    here, access = "{{ inventory_dir }}/../env", slice_.access
    host_keys = type(access.host_keys)(Path(here) / "known_hosts")
    moved = replace(
        slice_,
        access=replace(access, host_keys=host_keys),
        configurations={name: Path(here) / f"{name}.json" for name in slice_.configurations},
    )
    folder.mkdir(mode=0o700)
    # Ansible's working directory is `project`.
    settings = environment(Path(".."), slice_, agent=True)
    _fill(folder, moved, settings, here=here, agent=True)
    (folder / "env" / "known_hosts").write_bytes(access.host_keys.path.read_bytes())
    for work in slice_.work:
        if path := slice_.configurations.get(work.host.name):
            (folder / "env" / f"{work.host.name}.json").write_bytes(path.read_bytes())


def _fill(
    folder: Path, slice_: Slice, environment: Mapping[str, str], *, here: str = "../env", agent: bool = False
) -> None:
    for name in ("inventory", "project", "env"):
        (folder / name).mkdir()
    (folder / "project" / PLAYBOOK).write_bytes((REPO_ROOT / "playbooks" / PLAYBOOK).read_bytes())
    (folder / "project" / "ansible.cfg").touch()
    document = inventory(slice_, here=here, agent=agent)
    (folder / "inventory" / "hosts.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    (folder / "env" / "envvars").write_text(json.dumps(environment, indent=1), encoding="utf-8")
    if ways := _ways(slice_):
        known_hosts = Path("known_hosts") if agent else slice_.access.host_keys.path
        (folder / "env" / openssh.SCRIPT.name).write_bytes(openssh.SCRIPT.read_bytes())
        text = openssh.config(slice_.access, ways, known_hosts, agent=agent)
        (folder / "env" / openssh.CONFIG).write_text(text, encoding="utf-8")


def inventory(slice_: Slice, *, here: str = "../env", agent: bool = False) -> dict[str, Any]:
    """Return the inventory of a slice. Hosts are in the order in which they join, since they are awaited in that order.

    ``here`` is the directory of the slice's own files as Ansible finds it; with ``agent`` an agent holds the key.
    """
    access, ways = slice_.access, _ways(slice_)
    hosts = {}
    for work in sorted(slice_.work, key=lambda w: w.delay):
        host = access.login(work.host)
        hosts[host.name] = {
            "ansible_host": host.address,
            "ansible_port": host.port,
            "ansible_user": host.user,
            "ansible_become": host.user != "root",
            **({} if agent else {"ansible_ssh_private_key_file": host.key}),
            "ansible_ssh_common_args": shlex.join(
                openssh.arguments(openssh.host_options(access, host, ways, here))
            ),
            "pool_join_delay": round(work.delay, 3),
            **_configuration(slice_.configurations.get(work.host.name)),
        }
    variables = {
        "ansible_python_interpreter": "/usr/bin/python3",
        "pool_join_lock": LOCK,
        "pool_join_seconds": round(slice_.seconds),
    }
    return {"all": {"hosts": hosts, "vars": variables}}


def _ways(slice_: Slice) -> openssh.Ways:
    return openssh.ways(slice_.access.login(work.host) for work in slice_.work)


def _configuration(path: Path | None) -> dict[str, str]:
    return {"pool_node_config": os.fspath(path)} if path else {}


def environment(folder: Path, slice_: Slice, *, agent: bool = False) -> dict[str, str]:
    """Return Ansible's settings: no configuration and no plugin of this machine or its user has any effect.

    With ``agent`` the only key is that of the runner's own agent.
    """
    from image_builder.definition import engine

    access = slice_.access
    longest_way = max(access.way_seconds(work.host) for work in slice_.work)
    # Ahead of Ansible's own timeout, which lasts until sudo has answered: OpenSSH uses the first of two.
    timeout = {"ConnectTimeout": f"{access.connect_seconds + longest_way:.0f}"}
    options = openssh.common(access, agent=agent) | timeout
    arguments = ["-F", "none", *openssh.arguments(options)]
    return {
        **engine.plugin_settings(None, folder / "nowhere"),
        "ANSIBLE_CONFIG": os.fspath(folder / "project" / "ansible.cfg"),
        "ANSIBLE_HOME": os.fspath(folder / "tmp"),
        "ANSIBLE_LOCAL_TEMP": os.fspath(folder / "tmp"),
        "ANSIBLE_SSH_ARGS": shlex.join(arguments),
        "ANSIBLE_HOST_KEY_CHECKING": "true",
        "ANSIBLE_PIPELINING": "true",
        # On a terminal, sudo's warnings would be mixed with the host's answer.
        "ANSIBLE_SSH_USETTY": "false",
        "ANSIBLE_GATHERING": "explicit",
        "ANSIBLE_FORKS": str(min(len(slice_.work), FORKS)),
        "ANSIBLE_TIMEOUT": f"{access.answer_seconds + longest_way:.0f}",
        "ANSIBLE_RETRY_FILES_ENABLED": "false",
        "ANSIBLE_NOCOLOR": "true",
        "ANSIBLE_FORCE_COLOR": "false",
    }


def read_configurations(folder: Path, hosts: Sequence[str]) -> dict[str, Path]:
    """Return the file of each host. Raises DefinitionError for files that the node would refuse, by the same rules."""
    paths = {name: folder.absolute() / f"{name}.json" for name in hosts}
    files = {name: file for name, file in paths.items() if file.is_file()}
    missing = [name for name in paths if name not in files]
    problems = [f"{folder} has no file for {short_list(missing)}"] if missing else []
    problems += [f"{short_list(sorted(names))}: {fault}" for fault, names in sorted(_wrong(files).items())]
    if problems:
        raise DefinitionError(
            [Problem("", "--node-configs", fault) for fault in problems], hint="no host was touched"
        )
    return files


def _wrong(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return the faults, each with the hosts that have it."""
    wrong: dict[str, list[str]] = defaultdict(list)
    nodes: dict[str, Mapping[str, object]] = {}
    clusters: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, file in files.items():
        try:
            settings = config.parse(file.read_bytes())
            nodes[name] = vars(settings)
            clusters[settings.server, settings.ca].append(name)
        except NodeError as error:
            wrong[error.message].append(name)
        except OSError as error:
            wrong[error.strerror or str(error)].append(name)
    for (key, value), names in one_nodes_of_several(nodes).items():
        wrong[f"node.{key}: {value} can belong to only one node"] += names
    for (server, ca), names in clusters.items():
        if fault := server_fault(server, proven_by(ca), time.time()):
            wrong[f"cluster: {fault}"] += names
    return wrong
