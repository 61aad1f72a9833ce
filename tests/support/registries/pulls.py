"""Pulls by a baked image's own engines: the lab's registry, a faulty proxy in front of it, small images.

A scenario is a function in a test module that takes a ``Lab`` and returns what it saw, as JSON. It runs in its own
process and namespaces, and asserts nothing: the tests do, in the process that can show what was compared. All
scenarios of one test process and engine share a network and a registry; the proxies are a scenario's own.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import datetime
import fcntl
import importlib
import json
import os
import random
import secrets
import select
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull import containerd_engine, docker_engine, retry
from image_builder.bake.pull.model import Limits
from image_builder.bake.pull.network import Endpoint, Network
from image_builder.bake.pull.puller import Puller, Request
from image_builder.bake.pull.registry import locate
from image_builder.bake.stages.preload.run import write_names
from image_builder.bake.store import Store
from image_builder.errors import PullError
from image_builder.events import Monitor, Part
from image_builder.lab import certificate, images, registry
from image_builder.lab.registry import HOST, PORT
from image_builder.settings import DEFAULT_STORE
from image_builder.system import environment, namespace, process
from image_builder.system.sandbox import Root, open_root
from tests.support.images import programs
from tests.support.images.builds import REPO, Workplace
from tests.support.registries.plan import Upstream
from tests.support.registries.proxy import RegistryProxy

ENGINES: Mapping[str, Any] = {"docker": docker_engine, "containerd": containerd_engine}
# Engines newer than those in Debian's archive, as packages in the directory of programs.
NEWER = {
    "docker_28": ("repository/docker-ce_28.*.deb", "repository/containerd.io_2.*.deb"),
    "containerd_2": ("repository/containerd.io_2.*.deb",),
}
# The engines of what each engine is tested for: today's, or Debian 13's where today's packages are absent.
EACH = [
    next((name for name in NEWER if name.startswith(plain) and all(map(programs.find, NEWER[name]))), plain)
    for plain in ENGINES
]
# The engine of what doesn't depend on it: deadlines, stops, proxies, retries, messages.
DOCKER, CONTAINERD = EACH
PLATFORM = "linux/amd64"
MB = 1_000_000
# The engine's output directory, in its root.
_OUT = "/run/image-builder/out"
# Addresses for benchmarks, RFC 2544, which no real host has.
NETWORK = "198.18"
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_CHILD = "import sys; from tests.support.registries import pulls; sys.exit(pulls.child(sys.argv[1]))"

# Scenarios that run in the background of the current test, one at a time; and the results of all that were asked for.
_BESIDE = ThreadPoolExecutor(1)
_RESULTS: dict[tuple[str, ...], Future[Any]] = {}

Result = dict[str, Any]


class _Host:
    """A process in namespaces of its own that serves the lab's registry and forks for each scenario.

    It ends with this process, and leaves nothing on disk.
    """

    def __init__(self, worker: Workplace, engine: str) -> None:
        # Next to the store: a data root needs a real filesystem, and a directory for tests may not be on one.
        parent, name = worker.store.parent, f"{worker.store.name}-pulls-{os.getpid()}-{secrets.token_hex(3)}"
        self.base = parent / name
        self.base.mkdir()
        self.turn = threading.Lock()
        self._numbers = iter(range(10_000))
        told = {
            "engine": family(engine),
            "store": os.fspath(worker.store),
            "tools": os.fspath(worker.object("tools") / "product/tree"),
            "trees": [*_newer(engine, self.base), *map(os.fspath, worker.trees("container_runtime"))],
        }
        (self.base / "host.json").write_text(json.dumps(told))
        with (self.base / "host.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, self.base],
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """Let it end: it does once nobody can ask for a scenario."""
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        subprocess.run(["rm", "-rf", "--one-file-system", self.base], check=True)

    @property
    def serves(self) -> bool:
        """Return whether it is still there."""
        return self._process.poll() is None

    def run(self, module: str, name: str, words: Sequence[str], seconds: float) -> Any:
        """Run a scenario; return its result. Raises AssertionError with its logs."""
        base = self.base / f"scenario-{next(self._numbers)}"
        base.mkdir()
        told = {"module": module, "name": name, "words": words, "base": os.fspath(base)}
        assert self._process.stdin and self._process.stdout
        status = ""
        try:
            with suppress(OSError):
                self._process.stdin.write(f"{json.dumps(told)}\n")
                self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], seconds)[0]:
                status = self._process.stdout.readline()
            if status != "0\n":
                logs = [*base.glob("*.log"), self.base / "host.log"]
                raise AssertionError(
                    "\n".join(f"-- {p}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)
                )
            return json.loads((base / "result.json").read_text())
        finally:
            if status:
                subprocess.run(["rm", "-rf", "--one-file-system", base], check=True)
            else:  # it is gone, or hangs, or nobody waits for it any longer
                self._process.kill()
                self.close()


_HOSTS: dict[tuple[str, Sequence[Path]], _Host] = {}
_STARTING = threading.Lock()


def isolated(
    scenario: Callable[..., object], worker: Workplace, engine: str, *words: str, seconds: float = 900
) -> Any:
    """Run ``scenario(lab, *words)`` in its own namespaces; return its JSON. Nothing is left on disk.

    ``engine`` is one of ENGINES, or one of NEWER, which is unpacked over the worker's own.
    """
    named = (scenario.__module__, scenario.__qualname__, words, seconds)
    if worker.store != Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE)):
        with closing(_Host(worker, engine)) as own:  # a test's copy of a store won't outlive the test
            return own.run(*named)
    key = (engine, worker.trees("container_runtime"))
    with _STARTING:
        if key not in _HOSTS or not _HOSTS[key].serves:
            _HOSTS[key] = _Host(worker, engine)
        host = _HOSTS[key]
    with host.turn:
        return host.run(*named)


def with_each_engine(scenario: Callable[..., object], worker: Workplace, engine: str, *words: str) -> Any:
    """Return what ``isolated`` does. A scenario mostly waits, so the one that is asked for first starts the other."""

    def key(name: str) -> tuple[str, ...]:
        return (name, scenario.__module__, scenario.__qualname__, *words)

    together = next((list(names) for names in (EACH, ENGINES) if engine in names), [])
    for other in together:
        if key(other) not in _RESULTS and other != engine:
            _RESULTS[key(other)] = _BESIDE.submit(isolated, scenario, worker, other, *words)
    if key(engine) not in _RESULTS:
        result: Future[Any] = Future()
        result.set_result(isolated(scenario, worker, engine, *words))
        _RESULTS[key(engine)] = result
    return _RESULTS[key(engine)].result()


def family(engine: str) -> str:
    """Return the one of ENGINES to which a test's parameter belongs."""
    return engine.partition("_")[0]


def _newer(engine: str, base: Path) -> list[str]:
    """Unpack the programs of a newer engine and return their tree; return nothing for any other engine."""
    if engine not in NEWER:
        return []
    tree = base / "programs"
    for pattern in NEWER[engine]:
        (package,) = programs.find(pattern)
        subprocess.run(["dpkg-deb", "--extract", package, tree], check=True)
    return [os.fspath(tree)]


def child(path: str) -> int:
    """Run as the process of a ``_Host``: serve, and fork for each line of the input until it ends."""
    base = Path(path)
    told = json.loads((base / "host.json").read_text())
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Neither is a scenario's.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def work() -> int:
        # The tests may be run with a build's proxy variables set; none of those are for this process.
        for name in environment.PROXIES:
            os.environ.pop(name, None)
            os.environ.pop(name.upper(), None)
        leave_the_network()
        storage = base / "storage"
        storage.mkdir()
        with registry.serve(Path(told["tools"]), storage, base / "registry", writable=True) as served:
            for order in orders:
                one = json.loads(order)
                importlib.import_module(one["module"])  # once for all forks
                status = namespace.run_isolated(lambda: _play(one, told, served, storage))  # noqa: B023
                answers.write(f"{status}\n")
                answers.flush()
        return 0

    try:
        return namespace.run_isolated(work)
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", base], check=True)


def _play(one: Mapping[str, Any], told: Mapping[str, Any], served: registry.Registry, storage: Path) -> int:
    """Run one scenario, in a process of its own; its output goes to a log."""
    base = Path(one["base"])
    with (base / "output.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    scenario = getattr(importlib.import_module(one["module"]), one["name"])
    trees = [Path(t) for t in told["trees"]]
    with (
        Store(Path(told["store"])).in_use(),
        Lab(base, Path(told["tools"]), trees, told["engine"], served, storage) as lab,
    ):
        result = scenario(lab, *one["words"])
    (base / "result.json").write_text(json.dumps(result))
    return 0


def leave_the_network(*more: str) -> None:
    """Move to a network with only a loopback interface, which also has addresses that aren't loopback addresses.

    ``more`` are single addresses in addition to those of NETWORK. Docker doesn't require a certificate from a registry
    on 127.0.0.0/8, and accepts plain HTTP from it.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    have_addresses(*more)


def have_addresses(*more: str) -> None:
    """Give NETWORK's addresses, and these single ones, to the loopback interface of the current network."""
    places = [(f"{NETWORK}.0.1", "255.255.0.0"), *((address, "255.255.255.255") for address in more)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # struct ifreq: a name, then flags or a sockaddr. On a loopback interface a whole network is local.
        up = struct.pack("=h", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16s24s", b"lo", up))
        for number, place in enumerate(places):
            name = f"lo:{number}".encode()
            for code, text in zip((_SIOCSIFADDR, _SIOCSIFNETMASK), place, strict=True):
                value = struct.pack("=hH4s", socket.AF_INET, 0, socket.inet_aton(text))
                fcntl.ioctl(control, code, struct.pack("16s24s", name, value))


class Pictures(Monitor):
    """Keeps what was shown of each pull: for each image its lines, without consecutive repetitions."""

    def __init__(self) -> None:
        self.shown: dict[str, list[Part]] = {}

    def stage_parts(self, stage: str, parts: Sequence[Part]) -> None:  # noqa: ARG002
        for part in parts:
            lines = self.shown.setdefault(part.name, [])
            if not lines or lines[-1] != part:
                lines.append(part)


class Lab:
    """A running registry with its ``storage``, and a proxy in front of it under the registry's name.

    ``endpoints`` leads to the proxy, ``behind`` past it. The content of images is random, but seeded with their names:
    the same scenario has the same bytes.
    """

    def __init__(
        self,
        base: Path,
        tools: Path,
        trees: Sequence[Path],
        engine: str,
        served: registry.Registry,
        storage: Path,
    ) -> None:
        self.base, self.tools, self.trees, self.engine = base, tools, list(trees), engine
        self.registry, self.storage = served, storage
        self.module = ENGINES[engine]
        self.endpoints: dict[str, Endpoint] = {}
        self.names: dict[str, str] = {}
        self.log = base / f"{engine}.log"
        self.root: Root | None = None
        self.network = Network()
        self._stack = ExitStack()
        self._numbers = iter(range(1000))

    def __enter__(self) -> Self:
        trust = ssl.create_default_context(cafile=os.fspath(self.registry.ca))
        self.upstream = Upstream(self.registry.address, self.registry.port, HOST, trust)
        self.proxy = self.serve_proxy(HOST)
        self.behind = {HOST: Endpoint(HOST, self.registry.address, PORT, self.registry.ca)}
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def folder(self, name: str) -> Path:
        """Make a new directory on the filesystem of the store."""
        path = self.base / f"{name}-{next(self._numbers)}"
        path.mkdir()
        return path

    def serve_proxy(
        self, host: str, *, rate: float | None = None, not_after: datetime.datetime | None = None
    ) -> RegistryProxy:
        """Put a proxy in front of the registry as ``host``, on an address of its own."""
        folder = self.folder("certificate")
        before = not_after - datetime.timedelta(days=2) if not_after else None
        made = certificate.make(host, folder, not_before=before, not_after=not_after)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.server, made.key)
        address = new_address()
        proxy = RegistryProxy((address, PORT), context, self.upstream, rate=rate)
        self._stack.enter_context(proxy)
        self.endpoints[host] = Endpoint(host, address, PORT, made.ca)
        return proxy

    # -- images ---------------------------------------------------------------------------------------------

    def push(
        self,
        name: str,
        *sizes: int,
        tag: str = "1",
        zeros: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> LockedImage:
        """Make, push and lock an image with a small layer of text and a layer of random bytes for each size.

        ``zeros`` adds a layer that unpacks to that many bytes.
        """
        work = self.folder("image")
        files: list[tuple[str, bytes]] = [("etc/name", f"{name}:{tag}\n".encode())]
        for number, size in enumerate(sizes):
            files.append((f"srv/data{number}", random.Random(f"{name}:{tag}/{number}").randbytes(size)))
        if zeros:
            files.append(("srv/zeros", bytes(zeros)))
        layers = []
        for number, (path, data) in enumerate(files):
            tree = work / f"tree{number}"
            (tree / path).parent.mkdir(parents=True)
            (tree / path).write_bytes(data)
            layers.append(images.layer_from_tree(tree, work / f"{number}.tar.gz", process.run))
        image = images.make_image(layers, {}, [path for path, _ in files])
        if settings:
            image = images.Image(image.layers, {**image.config, **settings})
        images.push(self.registry, name, tag, image)
        shutil.rmtree(work)
        return self.locate(f"{HOST}/{name}:{tag}")

    def locate(self, ref: str) -> LockedImage:
        """Lock ``ref``, bypassing the proxy."""
        return locate(ref, PLATFORM, self.behind)

    # -- the engine -----------------------------------------------------------------------------------------

    @contextmanager
    def running(self, state: Path, *, downloads: int = 64, network: Network | None = None) -> Iterator[Any]:
        """Run the engine on a data root in the worker's tree, as the stage ``preload`` does."""
        self.out = self.folder("out")
        with open_root(
            self.trees,
            self.folder("root"),
            writable_binds={self.module.DATA_ROOT: state, _OUT: self.out},
            network=True,
        ) as root:
            self.name(root)
            self.root = root
            self.network = network or Network()
            with self.module.running(
                root, downloads=downloads, endpoints=self.endpoints, log=self.log, network=self.network
            ) as engine:
                yield engine

    def name(self, root: Root) -> None:
        """Write the names of registries to a root's hosts file, in place of a resolver."""
        write_names(root.path, self.endpoints)
        with (root.path / "etc/hosts").open("a") as hosts:
            hosts.writelines(f"{address} {name}\n" for name, address in self.names.items())

    def pull(
        self,
        engine: Any,
        wanted: Sequence[LockedImage | Request],
        *,
        limits: Limits | None = None,
        attempts: int = 3,
        longest_wait: float = 600.0,
        parallel: int = 8,
        stop: threading.Event | None = None,
        monitor: Monitor | None = None,
    ) -> Result:
        """Pull; return ``error``, ``failed``, ``records`` and ``seconds``, and ``bug`` for other than a PullError."""
        puller = Puller(
            engine,
            limits=limits or Limits(progress_seconds=30.0),
            policy=retry.Policy(attempts=attempts, longest_wait=longest_wait),
            parallel=parallel,
            endpoints=self.endpoints,
            network=self.network,
            stage="preload",
            monitor=monitor or Monitor(),
            stop=stop,
        )
        result: Result = {"error": "", "failed": {}, "records": [], "bug": ""}
        started = time.monotonic()
        try:
            pulled = puller.pull([w if isinstance(w, Request) else Request(w) for w in wanted])
            result.update(failed=dict(pulled.failed), records=list(pulled.records))
        except PullError as error:
            result.update(error=error.message, records=list(error.records))
        except Exception:  # the test shows it, with the scenario's other results
            result["bug"] = traceback.format_exc()
        result["seconds"] = time.monotonic() - started
        return result


def new_address() -> str:
    """Return an address of this network that nothing listens on."""
    return f"{NETWORK}.{1 + secrets.randbelow(254)}.{1 + secrets.randbelow(254)}"


def requests_of(proxy: RegistryProxy, path: str) -> list[Result]:
    """Return the requests for paths that begin with ``path``, as JSON."""
    return [dataclasses.asdict(r) for r in proxy.requests if r.path.startswith(path)]


def wait_until(what: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait until ``what`` holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not (holds := what()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


@contextmanager
def when_part_is_there(proxy: RegistryProxy, layer: str, act: Callable[[], None]) -> Iterator[None]:
    """Act once, concurrently with the block, when a megabyte of a layer has been sent; never if that ends first."""
    over = threading.Event()

    def wait_and_act() -> None:
        while not over.wait(0.05):
            if any(layer in r.path and r.sent > MB for r in proxy.requests):
                act()
                return

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Process:
    """A process of this PID namespace."""

    pid: int
    words: list[str]
    environment: list[str]


def processes() -> list[Process]:
    """Return all processes of this PID namespace except this one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                parts = [Path("/proc", name, file).read_bytes() for file in ("cmdline", "environ")]
            except OSError:
                continue
            words, variables = (data.decode(errors="replace").split("\0") for data in parts)
            found.append(Process(int(name), words, variables))
    return found


def kill(program: str) -> None:
    """SIGKILL the processes of a program, as an OOM killer would."""
    pids = [p.pid for p in processes() if Path(p.words[0]).name == program]
    assert pids, f"no {program} is running"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
