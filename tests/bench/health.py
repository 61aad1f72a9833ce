"""The cost of a node health check: the archive as the node compiles and starts it, with every check due.

    .venv/bin/python tests/bench/health.py [--smallest] [--json]

Needs root: `node-agent health` runs in a namespace of its own, where its settings and results are. There is a
registry that answers, the metadata service's recorded answer, the kernel's whole log, and, in every second run,
something to report to an API server, over TLS. There is no GPU: the cost of NVML isn't in these figures.

    cpu_ratio      CPU seconds of a run / the timer's 60 seconds, for the most expensive run, goal <= 0.01
    memory_ratio   the peak memory of all runs / 30 MB, goal <= 1
    start_ratio    CPU seconds of the cheapest run / those of `python3 -I -c pass`, no goal
"""

from __future__ import annotations

import json
import os
import ssl
import stat
import sys
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.lab.certificate import Certificate, make  # noqa: E402
from image_builder.node import mounts, zipapp  # noqa: E402
from image_builder.system.namespace import run_isolated  # noqa: E402
from tests.bench import report  # noqa: E402
from tests.bench.report import Row  # noqa: E402
from tests.support.servers import running  # noqa: E402

INTERVAL_SECONDS, MEMORY_BYTES = 60.0, 30_000_000
GOALS = {"cpu_ratio": ("<=", 0.01), "memory_ratio": ("<=", 1.0)}
# As in Microsoft's documentation, for a machine that is about to be preempted.
EVENTS = (
    b'{"DocumentIncarnation":1,"Events":[{"EventId":"A123BC45-1234-5678-AB90-ABCDEF123456","EventStatus":"Scheduled",'
    b'"EventType":"Preempt","ResourceType":"VirtualMachine","Resources":["myspotvm"],'
    b'"NotBefore":"Tue, 16 Mar 2021 00:58:46 GMT","Description":"","EventSource":"Platform"}]}'
)


class Metadata(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = EVENTS if "scheduledevents" in self.path else b"myspotvm"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ARG002
        return

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@contextmanager
def serving(certificate: Certificate | None = None) -> Iterator[int]:
    """Answer as the metadata service or, with a certificate, as an API server; yield the port."""
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.server, certificate.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        yield server.server_port


def run(argv: list[str]) -> float:
    """Run a program; return its CPU seconds, including its children's."""
    pid = os.posix_spawn(argv[0], argv, {"PATH": "/usr/bin", "LC_ALL": "C.UTF-8"})
    _, status, used = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, argv
    return used.ru_utime + used.ru_stime


def peak(metrics: Path) -> int:
    """Return the peak memory that a run reports, in bytes.

    The value from wait4(2) would include the memory of the process that started it, this benchmark.
    """
    text = (metrics / "node_health.prom").read_text()
    return int(text.partition("\nnode_health_run_peak_memory_bytes ")[2].split()[0])


def isolate(place: Path) -> None:
    """Give this namespace its own /etc and /run, and the kernel's log, which its /dev lacks."""
    mounts.mount("tmpfs", "/run", "tmpfs")
    for name in ("upper", "work"):
        (Path("/run") / name).mkdir()
    mounts.mount("overlay", "/etc", "overlay", options="lowerdir=/etc,upperdir=/run/upper,workdir=/run/work")
    os.mknod("/dev/kmsg", stat.S_IFCHR | 0o600, os.makedev(1, 11))
    Path("/etc/node-agent").mkdir(exist_ok=True)
    (place / "metrics").mkdir()


def measure_runs(place: Path, count: int) -> list[tuple[float, int]]:
    """Run the agent; return the CPU seconds and peak memory in bytes of each run."""
    isolate(place)
    interpreter, agent = os.path.realpath(sys.executable), place / "node-agent"
    agent.write_bytes(zipapp.compiled(zipapp.archive()))
    made = make("localhost", place)
    runs = []
    with serving() as metadata, serving(made) as api:
        authority = b64encode(made.ca.read_bytes()).decode()
        (place / "kubelet.conf").write_text(_KUBECONFIG.format(port=api, authority=authority))
        settings = {
            "imds": f"http://127.0.0.1:{metadata}",
            "registries": [f"127.0.0.1:{metadata}"],
            "names": ["localhost.localdomain"],
            "textfile_directory": str(place / "metrics"),
            "kubeconfig": str(place / "kubelet.conf"),
            "node_name": "worker-1",
            "intervals": {"nvme": 0, "gpu": 0},
        }
        Path("/etc/node-agent/health.json").write_text(json.dumps(settings))
        for number in range(count):
            # Every second run has no saved state: it reads the whole log, and has something to report.
            if number % 2:
                Path("/run/node/health-state.json").unlink()
            seconds = run([interpreter, "-I", str(agent), "health"])
            runs.append((seconds, peak(place / "metrics")))
        checks = json.loads(Path("/run/node/health.json").read_bytes())["checks"]
    blind = {name: one["error"] for name, one in checks.items() if one["error"]}
    assert not blind, f"could not look: {blind}"
    assert (place / "metrics/node_health.prom").stat().st_size > 1000
    return runs


def measure(count: int) -> dict[str, Any]:
    """Return the figures of all runs."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def work() -> int:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the agent's output
            (place / "runs.json").write_text(json.dumps(measure_runs(place, count)))
            return 0

        assert run_isolated(work) == 0
        runs = json.loads((place / "runs.json").read_text())
    interpreter = os.path.realpath(sys.executable)
    bare = min(run([interpreter, "-I", "-c", "pass"]) for _ in range(count))
    seconds, memory = [cpu for cpu, _ in runs], max(most for _, most in runs)
    return {
        "cpu_seconds_most": round(max(seconds), 4),
        "cpu_seconds_least": round(min(seconds), 4),
        "memory_bytes": memory,
        "bare_cpu_seconds": round(bare, 4),
        "cpu_ratio": round(max(seconds) / INTERVAL_SECONDS, 5),
        "memory_ratio": round(memory / MEMORY_BYTES, 3),
        "start_ratio": round(min(seconds) / bare, 2),
    }


_KUBECONFIG = """apiVersion: v1
kind: Config
current-context: node
contexts:
- name: node
  context:
    cluster: lab
    user: node
clusters:
- name: lab
  cluster:
    server: https://localhost:{port}
    certificate-authority-data: {authority}
users:
- name: node
  user:
    token: of-the-kubelet
"""


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    options = report.parse(parser, runs=2)
    found = measure(options.runs)
    rows = [
        Row("processor seconds", f"{found['cpu_seconds_most']}", f"{INTERVAL_SECONDS:g}", "cpu_ratio"),
        Row("most memory, bytes", f"{found['memory_bytes']}", str(MEMORY_BYTES), "memory_ratio"),
        Row(
            "beside a bare Python",
            f"{found['cpu_seconds_least']}",
            f"{found['bare_cpu_seconds']}",
            "start_ratio",
        ),
    ]
    return report.conclude(options, found, GOALS, rows)


if __name__ == "__main__":
    sys.exit(main())
