"""The lab's registry and its service in simulated time: when they serve, when they are given up, and how they end."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

from image_builder.errors import CommandError, HostError, ImageBuilderError
from image_builder.events import Monitor
from image_builder.lab import certificate, registry, service
from image_builder.lab.registry import HOST, Registry, configuration, serve
from image_builder.system import process


class Lab:
    """A registry that answers with ``answers``, the last again and again, and ends at ``over_at``."""

    returncode = 3

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.over_at, self.answers = 0.0, 1e9, [200]
        self.tools, self.storage, self.root = folder / "tools", folder / "storage", folder / "root"
        (self.tools / "usr/bin").mkdir(parents=True)
        (self.tools / "usr/bin/docker-registry").touch()
        self.storage.mkdir()
        (folder / "authority").write_text("PEM")
        self.binds: dict[str, Any] = {}
        self.asked = 0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        for module in (registry, service):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(registry, "open_root", self._open)
        monkeypatch.setattr(process, "background", self._background)
        monkeypatch.setattr(Registry, "connect", lambda _: self)
        made = SimpleNamespace(ca=folder / "authority")
        monkeypatch.setattr(certificate, "make", lambda _, home: home.mkdir(parents=True) or made)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @contextmanager
    def _open(self, lowers: list[Path], _work: Path, **binds: Any) -> Iterator[SimpleNamespace]:
        assert lowers == [self.tools]
        self.binds = binds
        yield SimpleNamespace(path=self.root, argv=lambda argv: argv)

    @contextmanager
    def _background(self, argv: list[str], log: Path) -> Iterator[Lab]:
        assert argv[0] == "/usr/bin/docker-registry"
        log.write_text("".join(f"line {n}\n" for n in range(99)))
        yield self

    def poll(self) -> int | None:
        return None if self.now < self.over_at else self.returncode

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None: ...

    def request(self, *_: object, **__: object) -> SimpleNamespace:
        self.asked += 1
        status = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if status == 0:
            raise urllib3.exceptions.HTTPError("refused")
        return SimpleNamespace(status=status)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


@pytest.mark.parametrize("writable", [False, True])
def test_a_registry_serves_when_the_block_begins(lab: Lab, tmp_path: Path, writable: bool) -> None:
    lab.answers = [0, 503, 200]
    with serve(lab.tools, lab.storage, tmp_path / "work", writable=writable) as running:
        assert lab.asked == 3 and running.port == 443
        assert running.hosts_line == f"{running.address} {HOST}"
        assert running.ca.read_text() == "PEM"
    kinds = {name: list(lab.binds[name].values()) for name in ("binds", "writable_binds")}
    assert kinds == {"binds": [lab.storage] * (not writable), "writable_binds": [lab.storage] * writable}
    written = json.loads((lab.root / "run/registry/config.json").read_text())
    assert written["http"]["addr"] == f"{running.address}:443"
    assert written["storage"]["maintenance"]["readonly"]["enabled"] is not writable


def test_each_registry_has_a_secret_of_its_own() -> None:
    first, second = (configuration("127.1.2.3", writable=False) for _ in range(2))
    assert first != second and len(json.loads(json.dumps(first))["http"]["secret"]) == 64


def test_addresses_are_loopback_ones_of_which_none_is_a_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, address in ((lambda _: 0, "127.1.0.1"), (lambda most: most - 1, "127.254.255.254")):
        monkeypatch.setattr(secrets, "randbelow", chosen)
        assert registry._random_address() == address


@pytest.mark.parametrize(("over_at", "seconds"), [(1e9, 30.0), (5.0, 5.0)])
def test_a_registry_that_does_not_serve_is_given_up(
    lab: Lab, tmp_path: Path, over_at: float, seconds: float
) -> None:
    lab.answers, lab.over_at = [0], over_at
    with pytest.raises(CommandError) as error, serve(lab.tools, lab.storage, tmp_path / "work"):
        pass
    assert lab.now == pytest.approx(seconds, abs=0.05)
    assert error.value.tail.splitlines()[-1] == "line 98" and len(error.value.tail.splitlines()) < 99


@pytest.mark.parametrize(("fails", "ends"), [(False, True), (True, True), (True, False)])
def test_a_registry_that_ends_too_early_is_the_failure(
    lab: Lab, tmp_path: Path, fails: bool, ends: bool
) -> None:
    with pytest.raises(CommandError if ends else ZeroDivisionError):  # noqa: PT012, SIM117
        with serve(lab.tools, lab.storage, tmp_path / "work"):
            lab.over_at = lab.now if ends else 1e9
            if fails:
                raise ZeroDivisionError


@pytest.mark.parametrize("lacks", ["program", "storage"])
def test_what_a_registry_lacks_is_named_before_it_starts(lab: Lab, tmp_path: Path, lacks: str) -> None:
    if lacks == "program":
        (lab.tools / "usr/bin/docker-registry").unlink()
    else:
        lab.storage.rmdir()
    place = lab.tools if lacks == "program" else lab.storage
    with pytest.raises(HostError, match=f"^{place} "), serve(lab.tools, lab.storage, tmp_path / "work"):
        pass
    assert not (tmp_path / "work").exists()


# -- the service -----------------------------------------------------------------------------------------------

STATE: dict[str, Any] = {"host": HOST, "address": "127.1.2.3", "port": 443, "ca": "/ca", "images": ["a", "b"]}


@pytest.fixture
def places(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    made = {name: tmp_path / name for name in ("_STATE", "_SERVING", "_STARTING")}
    for name, path in made.items():
        monkeypatch.setattr(service, name, path)
    return made


def _started(pid: int = os.getpid()) -> int:
    found = service._started(pid)
    assert found is not None
    return found


def test_a_lab_runs_as_long_as_the_process_that_its_record_names(places: dict[str, Path]) -> None:
    assert service.running() is None and not service.stop()
    record = {**STATE, "pid": os.getpid(), "started": _started()}
    for changes in ({}, {"started": 1}, {"pid": 2**22 + 1}):
        places["_STATE"].write_text(json.dumps({**record, **changes}))
        assert (service.running() is not None) is (changes == {})
    places["_STATE"].write_text("{ torn")
    assert service.running() is None


@pytest.mark.parametrize(("ends_after", "is_over"), [(5, True), (10**9, False)])
def test_a_lab_is_ended_and_waited_for(
    lab: Lab, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, ends_after: float, is_over: bool
) -> None:
    sent: list[tuple[int, int]] = []
    places["_STATE"].write_text(json.dumps({**STATE, "pid": 7, "started": 11}))
    monkeypatch.setattr(service, "_started", lambda _: 11 if lab.now < ends_after else None)
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    if is_over:
        assert service.stop() and lab.now == pytest.approx(5, abs=0.1)
    else:
        with pytest.raises(ImageBuilderError):
            service.stop()
        assert lab.now == pytest.approx(service._STOP_SECONDS, abs=0.1)
    assert sent == [(7, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("serves_at", "over_at", "seconds"), [(4.0, 1e9, None), (1e9, 1e9, "limit"), (1e9, 9.0, 9.0)]
)
def test_a_lab_that_starts_is_waited_for(
    lab: Lab,
    places: dict[str, Path],
    tmp_path: Path,
    serves_at: float,
    over_at: float,
    seconds: float | str | None,
) -> None:
    def alive() -> bool:
        if lab.now >= serves_at:
            places["_SERVING"].write_text(json.dumps(STATE))
        return lab.now < over_at

    (tmp_path / "log").write_text("12:00 one\n12:01 two\n")
    assert service._last_line(tmp_path / "log") == "two" and service._last_line(tmp_path / "none") == ""
    if seconds is None:
        state = service._await_serving(os.getpid(), alive, tmp_path / "log", Monitor())
        assert (state.pid, state.images, state.started) == (os.getpid(), ("a", "b"), _started())
        return
    with pytest.raises(ImageBuilderError):
        service._await_serving(os.getpid(), alive, tmp_path / "log", Monitor())
    assert lab.now == pytest.approx(service._START_SECONDS if seconds == "limit" else seconds, abs=0.25)
