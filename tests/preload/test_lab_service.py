"""`lab up`, `status` and `down` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_builder.errors import ImageBuilderError
from image_builder.events import Monitor
from image_builder.lab import service as lab_service
from tests.support.images.builds import REPO, Workplace
from tests.support.registries.pulls import wait_until

pytestmark = pytest.mark.root


def _lab(*words: str, store: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [os.fspath(REPO / "image-builder"), "lab", *words, "--json"]
    if store:
        argv += ["--store", os.fspath(store)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "CI": "true"})


@pytest.fixture
def no_lab() -> Iterator[None]:
    _lab("down")
    yield
    _lab("down")


@pytest.mark.usefixtures("no_lab")
def test_it_serves_until_it_is_taken_down(worker: Workplace) -> None:
    """Start two at once, which are one; then one more; kill it; start another one; take it down."""
    store = worker.store
    with ThreadPoolExecutor(2) as threads:
        ups = list(threads.map(lambda _: _lab("up", store=store), range(2)))
    assert [up.returncode for up in ups] == [0, 0], [up.stderr for up in ups]
    state = json.loads(ups[0].stdout)
    assert state["address"].startswith("127.") and state["port"] == 443
    assert {up.stdout for up in (*ups, _lab("up", store=store))} == {ups[0].stdout}
    assert json.loads(_lab("status").stdout)["answers"] is True
    trust = ssl.create_default_context(cafile=state["ca"])
    trust.check_hostname = False  # addressed by IP here; clients that pull have its name in /etc/hosts
    with urllib.request.urlopen(f"https://{state['address']}/v2/_catalog", context=trust) as answer:
        assert json.load(answer)["repositories"] == ["pause", "software"]

    assert len(_session(state["pid"])) > 1, "its registry is a process of its own"
    os.kill(state["pid"], signal.SIGKILL)
    assert wait_until(lambda: not _session(state["pid"]))
    assert _lab("status").returncode == 1
    again = json.loads(_lab("up", store=store).stdout)
    assert again["pid"] != state["pid"]

    assert json.loads(_lab("down").stdout) == {"stopped": True}
    status = _lab("status")
    assert (status.returncode, json.loads(status.stdout)) == (1, {"running": False})
    assert json.loads(_lab("down").stdout) == {"stopped": False}
    assert not Path("/run/image-builder-lab").exists()
    assert wait_until(lambda: not _session(again["pid"]))


def _session(pid: int) -> list[int]:
    """Return the processes of the session that a lab leads, without those that only wait to be reaped."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.getsid(int(name)) == pid and Path("/proc", name, "cmdline").read_bytes():
                found.append(int(name))
    return found


class _Impatient(Monitor):
    """Remembers the process that reports its PID, and presses Ctrl-C if requested."""

    def __init__(self, *, interrupts: bool) -> None:
        self.interrupts, self.pid = interrupts, 0

    def stage_doing(self, _stage: str, what: str) -> None:
        self.pid = int(what)
        if self.interrupts:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("interrupts", "error"),
    [(True, KeyboardInterrupt), (False, ImageBuilderError)],
    ids=["Ctrl-C", "too late"],
)
def test_one_that_nobody_waits_for_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupts: bool, error: type[BaseException]
) -> None:
    for name in ("_SERVING", "_STATE", "_CA"):
        monkeypatch.setattr(lab_service, name, tmp_path / name)
    monitor = _Impatient(interrupts=interrupts)
    # An hour passes once it has reported its PID.
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * bool(monitor.pid), sleep=time.sleep)
    monkeypatch.setattr(lab_service, "time", clock)
    with pytest.raises(error):
        lab_service.start(["sh", "-c", 'echo "12:00:00 $$"; exec sleep 60'], tmp_path, monitor)
    assert monitor.pid and not Path(f"/proc/{monitor.pid}").exists()


def test_one_that_ends_in_this_moment_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    state = lab_service.State(ended.pid, 1, "registry.lab", "127.1.2.3", 443, "ca.pem", ())
    monkeypatch.setattr(lab_service, "running", lambda: state)
    assert lab_service.stop()
