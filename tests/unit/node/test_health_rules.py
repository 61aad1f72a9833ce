"""Findings about the clock, planned maintenance, GPUs and InfiniBand: each rule applied to facts."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import Gpu, Nvml
from image_builder.node.health import apart, clock, gpu, maintenance, network
from image_builder.node.health.model import Look, Places
from image_builder.node.net import fetch, imds
from tests.unit.node.health_findings import SETTINGS, codes


def timex(*, status: int = 0, offset: int = 0, worst: int = 500, error: int = 100) -> bytes:
    return struct.pack("=I4xqqqqi4x", 0, offset, 0, worst, error, status) + bytes(208 - 48)


@pytest.mark.parametrize(
    ("data", "state", "uptime", "wanted"),
    [
        (timex(), 0, 9999.0, []),
        (timex(status=0x40, error=16_000_000), 5, 9999.0, [("clock.unsynchronized", "clock", "warn")]),
        (timex(status=0x40), 5, 30.0, []),  # it has just booted
        (timex(), 5, 9999.0, [("clock.unsynchronized", "clock", "warn")]),
        (timex(error=1_500_000), 0, 9999.0, [("clock.off", "clock", "fail")]),
        (timex(offset=-1_200_000), 0, 9999.0, [("clock.off", "clock", "fail")]),
        (timex(offset=-1_200_000, status=0x2000), 0, 9999.0, []),  # nanoseconds
    ],
)
def test_clock(data: bytes, state: int, uptime: float, wanted: list[tuple[str, str, str]]) -> None:
    assert codes(clock.rule(clock.parse(data, state, uptime), SETTINGS)) == wanted


# The metadata service's answer as Microsoft's documentation shows it (articles on Spot VMs, `az vm simulate-eviction`).
PREEMPT = (
    b'{"DocumentIncarnation":1,"Events":[{"EventId":"A123BC45-1234-5678-AB90-ABCDEF123456","EventStatus":"Scheduled",'
    b'"EventType":"Preempt","ResourceType":"VirtualMachine","Resources":["myspotvm"],'
    b'"NotBefore":"Tue, 16 Mar 2021 00:58:46 GMT","Description":"","EventSource":"Platform"}]}'
)


def test_maintenance() -> None:
    (event,) = maintenance.parse(fetch.Response(200, PREEMPT))
    assert event.not_before == 1615856326 and event.resources == ("myspotvm",)
    (found,) = maintenance.rule([event])
    assert (found.code, found.subject, found.severity) == ("maintenance.scheduled", "Preempt", "fail")
    assert "2021-03-16T00:58:46Z" in found.detail
    assert codes(maintenance.rule([replace(event, kind="Freeze")]))[0][2] == "warn"
    assert maintenance.rule([replace(event, status="Completed")]) == []
    begun = maintenance.parse(fetch.Response(200, PREEMPT.replace(b"Tue, 16 Mar 2021 00:58:46 GMT", b"")))
    assert "not before now" in maintenance.rule(begun)[0].detail
    assert maintenance.parse(fetch.Response(200, b'{"DocumentIncarnation":1,"Events":[]}')) == []


@pytest.mark.parametrize(("name", "count"), [("myspotvm", 1), ("another", 0)])
def test_maintenance_of_another_machine_of_the_set_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    def ask(path: str, **_: object) -> fetch.Response:
        return fetch.Response(200, PREEMPT if "scheduledevents" in path else name.encode())

    monkeypatch.setattr(imds, "ask", ask)
    outcome = maintenance.check(Look(SETTINGS, Places(), 0.0))
    assert (len(outcome.findings), len(outcome.samples), outcome.memory["name"]) == (count, count, name)


@pytest.mark.parametrize(
    ("status", "name"), [(429, b"slow down"), (503, b""), (404, b"myspotvm"), (200, b" ")]
)
def test_events_are_nobodys_while_the_machine_does_not_know_its_name(
    monkeypatch: pytest.MonkeyPatch, status: int, name: bytes
) -> None:
    def ask(path: str, **_: object) -> fetch.Response:
        return fetch.Response(200, PREEMPT) if "scheduledevents" in path else fetch.Response(status, name)

    monkeypatch.setattr(imds, "ask", ask)
    with pytest.raises(NodeError) as caught:
        maintenance.check(Look(SETTINGS, Places(), 0.0))
    assert caught.value.code == "health.imds"


@pytest.mark.parametrize(("born", "hangs"), [("4711", True), ("4712", False), ("", False)])
def test_a_process_that_hangs_is_known_by_its_number_and_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, born: str, hangs: bool
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text(f"7 (a) b) D {' '.join('0' * 18)} 4711 0\n")
    begun: list[int] = []

    def pipe(flags: int) -> tuple[int, int]:
        begun.append(flags)
        raise OSError(errno.EMFILE, "nothing is started here")

    monkeypatch.setattr(os, "pipe2", pipe)
    with pytest.raises(OSError if not hangs else apart.HungError):
        apart.run(lambda: None, "a look", 1.0, hung=(7, born), proc=tmp_path)
    assert len(begun) == (not hangs)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"Not found"),
        (500, b""),
        (200, b""),
        (200, b"{}"),
        (200, b'{"Events": {}'),
        (200, b'{"Events": [{"EventId": "x"}]}'),
        (200, PREEMPT.replace(b"16 Mar", b"no date")),
    ],
)
def test_answers_that_are_no_events_are_neither_good_nor_bad(status: int, body: bytes) -> None:
    with pytest.raises(NodeError) as caught:
        maintenance.parse(fetch.Response(status, body))
    assert caught.value.code == "health.imds"


HEALTHY = Gpu(0, uuid="GPU-1", pci="0001:00:00", ecc_volatile_uncorrected=0, nvlinks=(True,) * 18)


@pytest.mark.parametrize(
    ("changes", "code", "action"),
    [
        ({"ecc_volatile_uncorrected": 1}, "gpu.ecc", "reboot"),
        ({"sram_threshold_exceeded": True}, "gpu.sram", "replace"),
        ({"remap_failure": True}, "gpu.remap-failure", "replace"),
        ({"unrepairable_memory": True}, "gpu.remap-unrepairable", "replace"),
        ({"remap_pending": True}, "gpu.remap-pending", "reboot"),
        ({"retired_pending": True}, "gpu.remap-pending", "reboot"),
        ({"inforom_valid": False}, "gpu.inforom", "replace"),
        ({"recovery_action": "drain-and-reset"}, "gpu.recovery", "reboot"),
        ({"recovery_action": "recover-imex-domain"}, "gpu.recovery", "config"),
        ({"recovery_action": "action 99"}, "gpu.recovery", "replace"),
        ({"nvlinks": (True,) * 17 + (False,)}, "gpu.nvlink", "replace"),
    ],
)
def test_gpu(changes: dict[str, Any], code: str, action: str) -> None:
    best = {"GPU-1": 18}
    assert gpu.rule(Nvml(count=1, gpus=(HEALTHY,)), 1, best) == []
    found = gpu.rule(Nvml(count=1, gpus=(replace(HEALTHY, **changes),)), 1, best)
    assert [(one.code, one.action, one.severity) for one in found] == [(code, action, "fail")]


def test_links_that_mig_switches_off_are_not_down() -> None:
    parted = replace(HEALTHY, nvlinks=(False,) * 18, mig_current=True)
    assert gpu.rule(Nvml(count=1, gpus=(parted,)), 1, {"GPU-1": 18}) == []


def test_gpu_that_can_t_say_is_neither_good_nor_bad() -> None:
    silent = Gpu(0, uuid="GPU-1", missing={"ecc_volatile_uncorrected": "not-supported"})
    assert gpu.rule(Nvml(count=1, gpus=(silent,)), 1, {}) == []
    names = {one.name for one in gpu.samples(Nvml(count=1, gpus=(silent,)), 1)}
    assert names == {"gpu_expected", "gpu_answering"}


def test_gpus_that_don_t_answer() -> None:
    mismatch = Nvml(error="mismatch: driver and library differ in version")
    assert [one.code for one in gpu.rule(mismatch, 8, {})] == ["gpu.driver"]
    lost = Nvml(count=2, gpus=(HEALTHY,), lost={"1": "the GPU is lost"})
    (found,) = gpu.rule(lost, 2, {})
    assert found.code == "gpu.lost" and "1 of 2" in found.detail and "the GPU is lost" in found.detail
    assert [one.code for one in gpu.rule(Nvml(count=1, gpus=(HEALTHY,)), 2, {})] == ["gpu.lost"]


def port_files(root: Path, state: str, physical: str, rate: str, downed: int) -> None:
    port = root / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True, exist_ok=True)
    files = {"link_layer": "InfiniBand", "state": state, "phys_state": physical, "rate": rate}
    for name, text in files.items():
        (port / name).write_text(f"{text}\n")
    (port / "counters/link_downed").write_text(f"{downed}\n")


def test_infiniband(tmp_path: Path) -> None:
    """Use files like those of a ConnectX-7."""
    look = Look(SETTINGS, Places(sys=tmp_path), 0.0)
    port_files(tmp_path, "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)", 0)
    first = network.check_infiniband(look)
    assert first.findings == () and first.memory["best"] == {"mlx5_0/1": 400.0}
    port_files(tmp_path, "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)", 1)
    down = network.check_infiniband(replace(look, now=60.0, memory=first.memory))
    assert codes(down.findings) == [("infiniband.down", "mlx5_0/1", "fail")]
    port_files(tmp_path, "4: ACTIVE", "5: LinkUp", "200 Gb/sec (4X HDR)", 4)
    slow = network.check_infiniband(replace(look, now=120.0, memory=down.memory))
    assert {one.code for one in slow.findings} == {"infiniband.slow", "infiniband.flaps"}
    for path in sorted((tmp_path / "class/infiniband").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    gone = network.check_infiniband(replace(look, now=180.0, memory=slow.memory))
    assert "infiniband.down" in {one.code for one in gone.findings}
