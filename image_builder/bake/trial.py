"""The trial: the image's own kubelet, engines and node agent read what was written for them, before the seal.

The agent has a command for it. Each of the others is started as its unit starts it, on a throwaway copy of the tree and
in a network of its own, and is ended as soon as it has read all of its configuration. The kubelet gets a runtime to
talk to: with none, it never comes to quantities and thresholds. What belongs to this machine decides nothing: swap, the
version of the control groups, kernel settings and the number of processors are hidden, come later, or are known by what
the program says of them.
"""

from __future__ import annotations

import json
import re
import shlex
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from image_builder.errors import CommandError
from image_builder.system import process
from image_builder.system.sandbox import Root, open_root

_AGENT = "/usr/local/sbin/node-agent"
_INSTEAD_OF_DOCKER = "/run/trial/cri.sock"
_SECONDS = 30.0
_POLL_SECONDS = 0.02
# What each program logs once it has read all of its configuration, in every version.
_STARTED = {"kubelet": "Started kubelet", "dockerd": "API listen on", "cri-dockerd": "Starting cri-dockerd"}
# What programs say of the machine rather than of their configuration.
_THIS_MACHINE = re.compile(
    r"online-cpus|required amount of CPUs|NUMA nodes?\b|/sys/fs/cgroup|/proc/sys|/dev/kmsg|running with swap"
    r"|mountpoint for|[Cc]groups? (?:v1|controllers|subsystem|mount)|subsystem mount|clock speed"
    r"|Cannot connect to the Docker daemon"
    # All is read: an image without a runtime has none to ask, and this network is none that Docker could set up.
    r"|validate service connection: .* no such file|initializing network controller",
)
# Settings of the kubelet that only the right machine can judge: without them, the trial goes on to all others.
_OF_A_MACHINE = (
    *("cgroupRoot", "cpuManagerPolicy", "cpuManagerPolicyOptions", "memoryManagerPolicy", "reservedMemory"),
    *("reservedSystemCPUs", "topologyManagerPolicy", "topologyManagerPolicyOptions"),
)
# What a kubelet says of settings that it goes on without.
_IGNORED = re.compile(r"Invalid clusterDNS.*|strict decod(?:ing|er) error.*|unrecognized feature gate: \S+")
_UNITS = (
    "etc/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
)
# A line of an EnvironmentFile. A value in quotes may go on in the next ones.
_VARIABLE = re.compile(
    r"""^[ \t]*([^#;=\s][^=\s]*)[ \t]*=[ \t]*(?:'([^']*)'|"((?:[^"\\]|\\.)*)"|([^\n]*?))[ \t]*$""",
    re.MULTILINE | re.DOTALL,
)
# In namespaces of their own: loopback, a version 2 of the control groups in which nothing can be created, and no swap.
# $1 is a directory that the kernel lets overlays lie on.
_ALONE = """
ip link set lo up 2>/dev/null
mount -t cgroup2 none /sys/fs/cgroup && mount -o remount,bind,ro /sys/fs/cgroup
mount --bind /run/trial/swaps /proc/swaps
if test -n "$1"; then mkdir -p "$1" && mount -t tmpfs tmpfs "$1"; fi
shift; exec "$@"
"""
# Stand-ins for what a node gets when it joins: a way to no cluster, and an authority whose key nobody has.
_KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "none", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "none", "user": {"token": "none"}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
    "current-context": "none",
}
_AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBdTCCARugAwIBAgIUUziO0tEEUuAC94hY6t5z/bqr5bswCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEbm9uZTAgFw0yNjExMjgyMDU1MzBaGA8yMTI2MTEwNDIwNTUz
MFowDzENMAsGA1UEAwwEbm9uZTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABG2g
ucErL5ULgFV7DSIzY/hJVyepV0QajNBWpZLXkwYdK9Aps5FHNBM7kKuHvBq5g9VF
Zx6GbkSrYDJd9+WzGLajUzBRMB0GA1UdDgQWBBTTIuc8Z2XH5Ih3X3LYxqTdgLNv
zzAfBgNVHSMEGDAWgBTTIuc8Z2XH5Ih3X3LYxqTdgLNvzzAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0gAMEUCIQDXuC8aFXWqVKiwMWh7tCT0ZqBN05/zR3ke
UA0l1X/nAgIgWE9RLpcBO/Rv0cTfSbVACnZp9anjliYimQ2ynh2W154=
-----END CERTIFICATE-----
"""


@dataclass(frozen=True)
class Refusal:
    """A program's refusal of its configuration: ``sentence`` is its own, ``file`` what it read, as a path of the image.

    ``status`` is its exit status, None if it went on without the part that is configured wrongly.
    """

    program: str
    file: str
    sentence: str
    status: int | None = None

    def __str__(self) -> str:
        if self.status is None:
            return f"{self.program} goes on without it: {self.sentence}"
        return f"{self.program} refuses it (exit status {self.status}): {self.sentence}"


@dataclass(frozen=True)
class Unit:
    """A service of an image: what systemd runs, and with which variables."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def hold(lowers: Sequence[Path], work: Path, log: Path) -> list[Refusal]:
    """Return what the programs of an image refuse. ``lowers`` are its trees, topmost first, ``work`` is scratch space.

    Programs that the image doesn't have, or has no unit for, aren't asked.
    """
    with open_root(lowers, work) as root:
        return list(ask(root, log))


def ask(root: Root, log: Path) -> Iterator[Refusal]:
    """Yield what the programs in an open root refuse. The root has no network, and is changed."""
    engine, docker, kubelet = (read_unit(root.path, name) for name in ("containerd", "docker", "kubelet"))
    prepare(root)
    if (root.path / _AGENT.lstrip("/")).exists():
        yield from ask_agent(root, log)
    with ExitStack() as running:
        if engine:
            refused = running.enter_context(containerd(root, engine, log))
            yield from refused
            if any(each.status is not None for each in refused):
                return  # the others would wait for it
        if docker:
            yield from ask_dockerd(root, docker, log)
        if shim := read_unit(root.path, "cri-docker"):
            yield from ask_cri_dockerd(root, shim, log)
        if kubelet:
            endpoint = runtime_endpoint(root, kubelet)
            if engine and endpoint and not (root.path / endpoint.lstrip("/")).exists():
                running.enter_context(runtime(root, engine, endpoint, log))
            yield from ask_kubelet(root, kubelet, log)


def prepare(root: Root) -> None:
    """Write what programs are shown instead of this machine's: no swap, and no messages of the kernel."""
    (root.path / "run/trial").mkdir(exist_ok=True)
    (root.path / "run/trial/swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n", encoding="utf-8")
    (root.path / "dev/kmsg").touch()


# -- units -----------------------------------------------------------------------------------------------------


def read_unit(root: Path, name: str) -> Unit | None:
    """Return a service as systemd reads its files, None if there is none or its program is absent."""
    files = [path for folder in _UNITS if (path := root / folder / f"{name}.service").is_file()][:1]
    if not files:
        return None
    drop_ins = {
        path.name: path
        for folder in reversed(_UNITS)
        for path in (root / folder).glob(f"{name}.service.d/*.conf")
    }
    command, environment, of_files = "", dict[str, str](), dict[str, str]()
    for file in (*files, *(drop_ins[key] for key in sorted(drop_ins))):
        text = re.sub(r"^[#;].*\n?", "", file.read_text("utf-8", "replace"), flags=re.MULTILINE)
        for line in text.replace("\\\n", " ").splitlines():
            key, _, value = (part.strip() for part in line.partition("="))
            if key == "ExecStart":
                command = value
            elif key == "Environment":
                environment |= _assignments(_words(value))
            elif key == "EnvironmentFile" and (path := root / value.lstrip("-/")).is_file():
                of_files |= _environment_file(path.read_text("utf-8", "replace"))
    environment |= of_files  # wherever they are named
    argv = tuple(_expanded(command.lstrip("-@:+!"), environment))
    return Unit(argv, environment) if argv and (root / argv[0].lstrip("/")).exists() else None


def _assignments(words: Sequence[str]) -> dict[str, str]:
    return {key: value for key, equals, value in (word.partition("=") for word in words) if equals}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote without its twin
        return text.split()


def _environment_file(text: str) -> dict[str, str]:
    """Return the variables in a file. Unlike in a shell, a value without quotes has all words of its line."""
    variables = {}
    for match in _VARIABLE.finditer(text.replace("\\\n", "")):
        name, raw, quoted, plain = match.groups()
        value = re.sub(r"\\([\"\\`$])", r"\1", quoted) if quoted else re.sub(r"\\(.)", r"\1", plain or "")
        variables[name] = raw or value
    return variables


def _expanded(command: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a command's words: ``${NAME}`` is a value inside of a word, ``$NAME`` alone as many words as it has."""
    for word in _words(command):
        if match := re.fullmatch(r"\$(\w+)", word):
            yield from environment.get(match[1], "").split()
        else:
            value = re.sub(r"\$\{(\w+)\}", lambda match: environment.get(match[1], ""), word)
            yield value.replace("%%", "%").replace("$$", "$")


def _flag(unit: Unit, name: str, default: str = "") -> str:
    """Return the value of a flag, as ``--name=value`` or ``--name value``."""
    values = [default]
    for word, following in zip(unit.argv, (*unit.argv[1:], ""), strict=True):
        flag, equals, value = word.partition("=")
        if flag == f"--{name}":
            values.append(value if equals else following)
    return values[-1]


# -- the node agent ----------------------------------------------------------------------------------------------


def ask_agent(root: Root, log: Path) -> list[Refusal]:
    """Return what the node agent refuses in its settings."""
    done = process.run(root.argv([_AGENT, "check"]), ok=range(256), log=log)
    problems = [line.partition(": ") for line in done.stdout.splitlines()] if done.returncode == 1 else []
    return [Refusal("node-agent", f"/etc/node-agent/{file}", problem, 1) for file, _, problem in problems]


# -- containerd --------------------------------------------------------------------------------------------------


@contextmanager
def containerd(root: Root, unit: Unit, log: Path) -> Iterator[list[Refusal]]:
    """Run containerd; yield what it refuses: its whole configuration, or parts of it."""
    file = _flag(unit, "config", "/etc/containerd/config.toml")
    content = _toml(root.path / file.lstrip("/"))
    grpc = content.get("grpc")
    own = grpc.get("address") if isinstance(grpc, Mapping) else None
    address = _socket(own or "/run/containerd/containerd.sock")
    with _daemon(root, unit, address, log) as daemon:
        if daemon.status is not None:
            yield _refusals("containerd", file, _reason_of_containerd(daemon.said), daemon.status)
        else:
            named = set(_plugins(root, content))
            yield [Refusal("containerd", file, sentence) for sentence in _failed_parts(daemon, named)]


def _failed_parts(daemon: _Daemon, named: Set[str]) -> Iterator[str]:
    """Yield what containerd says of keys that it doesn't know, and of plugins that it goes on without.

    Which of the others work depends on the machine: only the CRI's, and those that the configuration names, count.
    """
    lines = daemon.said.splitlines()
    for line in lines:
        if "Ignoring unknown key in TOML" in line:
            yield f"{_field(line, 'plugin')}: unknown key {_field(line, 'key')}"
    rows = [line.split() for line in daemon.plugins.splitlines()]
    failed = {f"{row[0]}.{row[1]}" for row in rows if len(row) >= 4 and row[-1] == "error"}
    for name in sorted(each for each in failed if each in named or ".cri" in each):
        reasons = [line for line in lines if "failed to load plugin" in line and name in _plain(line)]
        yield f"{name}: {_field(reasons[-1], 'error')}" if reasons else f"{name} does not work"


def _plugins(root: Root, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plugins that a configuration and the files that it imports name."""
    imports = content.get("imports")
    patterns = [str(each).lstrip("/") for each in imports] if isinstance(imports, list) else []
    files = (file for pattern in patterns if pattern for file in root.path.glob(pattern))
    for plugins in (each.get("plugins") for each in (content, *map(_toml, files))):
        yield from plugins if isinstance(plugins, Mapping) else ()


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # containerd says so itself
        return {}


def _reason_of_containerd(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("containerd: ") or "level=fatal" in line]
    return (fatal or lines or [""])[-1].removeprefix("containerd: ")


@contextmanager
def runtime(root: Root, unit: Unit, endpoint: str, log: Path) -> Iterator[None]:
    """Serve the CRI at a kubelet's address, if it has one: the image's containerd, with its default configuration."""
    if not endpoint:
        yield
        return
    file = root.path / "run/trial/stand-in.toml"
    text = (
        f'version = 2\nroot = "/run/trial/root"\nstate = "/run/trial/state"\n[grpc]\naddress = "{endpoint}"\n'
    )
    file.write_text(text, encoding="utf-8")
    with _daemon(root, Unit((unit.argv[0], "--config", f"/run/trial/{file.name}"), {}), endpoint, log):
        yield


@dataclass(frozen=True)
class _Daemon:
    """A containerd: its output so far, its plugins as ``ctr`` lists them, and its exit status if it has ended."""

    said: str
    plugins: str
    status: int | None


@contextmanager
def _daemon(root: Root, unit: Unit, address: str, log: Path) -> Iterator[_Daemon]:
    """Run a containerd, once it answers or has ended."""
    own = log.with_name(f"{log.stem}-{address.replace('/', '-')}.log")
    try:
        with process.background(root.argv(unit.argv, unit.environment), log=own) as child:
            deadline = time.monotonic() + _SECONDS
            plugins = ""
            while not plugins and child.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                if (root.path / address.lstrip("/")).exists():
                    asked = root.run(["ctr", "--address", address, "plugins", "ls"], ok=range(256))
                    plugins = asked.stdout if asked.returncode == 0 else ""
            yield _Daemon(own.read_text("utf-8", "replace"), plugins, child.poll())
    finally:
        with log.open("a", encoding="utf-8") as sink:
            sink.write(own.read_text("utf-8", "replace"))
        own.unlink()


# -- dockerd and the kubelet -------------------------------------------------------------------------------------


def ask_dockerd(root: Root, unit: Unit, log: Path) -> list[Refusal]:
    """Return what dockerd refuses, with its unit's flags."""
    file = _flag(unit, "config-file", "/etc/docker/daemon.json")
    path = root.path / file.lstrip("/")
    settings: Any = {}
    if path.is_file():
        try:
            settings = json.loads(path.read_text("utf-8"))
        except ValueError:  # it says so itself
            settings = {}
    data = (
        settings.get("data-root", "/var/lib/docker") if isinstance(settings, Mapping) else "/var/lib/docker"
    )
    # systemd hands it its socket.
    argv = [word.replace("fd://", "unix:///run/docker.sock") for word in unit.argv]
    status, said = _start(root, "dockerd", argv, unit.environment, log, data if isinstance(data, str) else "")
    lines = [line for line in said.splitlines() if line.strip()]
    return _refusals("dockerd", file, (lines or [""])[-1].removeprefix("failed to start daemon: "), status)


def ask_cri_dockerd(root: Root, unit: Unit, log: Path) -> list[Refusal]:
    """Return what cri-dockerd refuses in its unit's flags, which are all of its configuration."""
    argv = [word.replace("fd://", "unix:///run/trial/shim.sock") for word in unit.argv]
    status, said = _start(root, "cri-dockerd", argv, unit.environment, log)
    lines = [line for line in said.splitlines() if "level=fatal" in line]
    file = "/etc/systemd/system/cri-docker.service"
    return _refusals("cri-dockerd", file, _field(lines[-1], "msg") if lines else said[-200:], status)


def runtime_endpoint(root: Root, unit: Unit) -> str:
    """Return the path of the socket where a kubelet looks for the CRI, empty if it has none."""
    if _flag(unit, "container-runtime") == "docker":
        return _INSTEAD_OF_DOCKER
    endpoint = _flag(unit, "container-runtime-endpoint") or _kubelet_configuration(root, unit).get(
        "containerRuntimeEndpoint"
    )
    return _socket(endpoint or "")


def _socket(address: object) -> str:
    """Return the path of a socket without the link that /var/run is in an image, and that leads out of it from here."""
    return re.sub("^/var/run/", "/run/", str(address).removeprefix("unix://"))


def _kubelet_configuration(root: Root, unit: Unit) -> Mapping[str, Any]:
    path = root.path / _flag(unit, "config").lstrip("/")
    try:
        content = yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {}
    except yaml.YAMLError:  # it says so itself
        content = {}
    return content if isinstance(content, Mapping) else {}


def ask_kubelet(root: Root, unit: Unit, log: Path) -> list[Refusal]:
    """Return what the kubelet refuses, with its unit's flags; ``runtime_endpoint`` should be served."""
    _join(root, unit)
    file = _flag(unit, "config")
    argv = list(unit.argv)
    if _flag(unit, "container-runtime") == "docker":  # by itself: of two values, the last counts
        argv += ["--container-runtime=remote", f"--container-runtime-endpoint=unix://{_INSTEAD_OF_DOCKER}"]
    status, said = _start(root, "kubelet", argv, unit.environment, log)
    sentence = _reason_of_kubelet(said)
    if status is not None and file and _THIS_MACHINE.search(sentence):
        config = {k: v for k, v in _kubelet_configuration(root, unit).items() if k not in _OF_A_MACHINE}
        (root.path / file.lstrip("/")).write_text(json.dumps(config), encoding="utf-8")
        status, said = _start(root, "kubelet", argv, unit.environment, log)
        sentence = _reason_of_kubelet(said)
    if status is None:
        ignored = dict.fromkeys(_plain(each).replace('"', "") for each in _IGNORED.findall(said))
        return [Refusal("kubelet", file, sentence) for sentence in ignored]
    return _refusals("kubelet", file, sentence, status)


def _join(root: Root, unit: Unit) -> None:
    """Write those files of a joined node that the kubelet doesn't start without."""
    authentication = _kubelet_configuration(root, unit).get("authentication")
    x509 = authentication.get("x509") if isinstance(authentication, Mapping) else None
    authority = x509.get("clientCAFile") if isinstance(x509, Mapping) else None
    files = {
        _flag(unit, "bootstrap-kubeconfig"): json.dumps(_KUBECONFIG),
        authority if isinstance(authority, str) else "": _AUTHORITY,
    }
    for name, text in files.items():
        path = root.path / name.lstrip("/")
        if name and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _reason_of_kubelet(said: str) -> str:
    """Return the sentence that a kubelet ends with: ``err=`` of its last line, or what it calls fatal or an error."""
    failed = re.findall(r'"command failed" err=(?:<\n(.*?)\n\s*>|"((?:[^"\\]|\\.)*)")', said, re.DOTALL)
    if failed:
        return str(failed[-1][0]) or _plain(failed[-1][1])
    lines = [line for line in said.splitlines() if line.strip()]
    fatal = [line for line in lines if re.search(r"^\W*F\d{4} |^Error: ", line)]
    return re.sub(r"^\W*F\d{4} .*?\] ", "", (fatal or lines[-1:] or [""])[0])


# -- what both have ------------------------------------------------------------------------------------------------


class _StartedError(Exception):
    """A program has read all of its configuration."""


def _start(
    root: Root, program: str, argv: Sequence[str], environment: Mapping[str, str], log: Path, disk: str = ""
) -> tuple[int | None, str]:
    """Start a program and end it as soon as it has started: return its exit status, None if it did, and its output."""
    lines: list[str] = []

    def read(line: str) -> None:
        lines.append(line)
        if _STARTED[program] in line:
            raise _StartedError

    alone = ["unshare", "--mount", "--cgroup", "sh", "-c", _ALONE, "sh", disk]
    try:
        done = process.run(
            root.argv([*alone, *argv], environment), ok=range(256), timeout=_SECONDS, log=log, on_line=read
        )
    except (_StartedError, CommandError):  # or it tries something again and again, which is no refusal
        return None, "\n".join(lines)
    return done.returncode, "\n".join(lines)


def _refusals(program: str, file: str, sentence: str, status: int | None) -> list[Refusal]:
    """Return a program's refusal, if it ended, and not because of this machine."""
    if status is None or _THIS_MACHINE.search(sentence):
        return []
    return [Refusal(program, file, " ".join(sentence.split()), status)]


def _field(line: str, name: str) -> str:
    """Return a field of a line in logfmt; the whole line if it has no such field."""
    match = re.search(rf'\b{name}=(?:"((?:[^"\\]|\\.)*)"|(\S+))', line)
    return _plain(match[1] or match[2]) if match else line


def _plain(text: str) -> str:
    """Return a quoted text as it was before."""
    return text.replace('\\"', '"').replace("\\n", " ")
