"""`node-agent gpu-smoke` from end to end, with a fake library that serves recorded answers; no GPU is involved."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from image_builder.node import sysfs
from image_builder.node.errors import NodeError
from image_builder.node.gpu import nvml
from image_builder.node.gpu.model import Gpu, Process, Tier, Worker, Xid
from image_builder.node.gpu.smoke import command
from image_builder.node.gpu.smoke.command import System
from tests.support.gpu_stand_in.libnvidia_ml import Node
from tests.support.gpu_stand_in.recordings import BOOT, node
from tests.support.gpu_stand_in.recordings import places as below

Tree = Callable[..., System]


@pytest.fixture
def schema(repo_root: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((repo_root / "docs/reference/gpu-smoke.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(document)
    return document


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


T4 = node("T4")


def loaded(workers: Sequence[Worker]) -> Callable[..., Sequence[Worker]]:
    def load(
        uuids: Sequence[str], tier: Tier, seed: int, deadline_seconds: float, on_tick: Callable[[], None]
    ) -> Sequence[Worker]:
        assert list(uuids) == [gpu.uuid for gpu in T4.gpus]
        assert 0 < deadline_seconds < 360
        for _ in range(3):
            on_tick()
        return workers

    return load


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing may be put under load")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a function that makes a node with one recorded T4, as changed by the arguments."""

    def make(
        gpus: tuple[Gpu, ...] = T4.gpus,
        *,
        settings: dict[str, Any] | None = None,
        codes: dict[str, int] | None = None,
        error: Exception | None = None,
        load: Any = None,
        devices: int = 1,
        xids: Any = lambda _: (),
    ) -> System:
        driver = T4.before.machine.driver_loaded
        places = below(tmp_path)
        put(
            places.proc / "driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  x\n",
        )
        put(places.proc / "sys/kernel/random/boot_id", BOOT + "\n")
        put(places.proc / "meminfo", f"MemTotal: {28 << 20} kB\n")
        for name in ("libcuda", "libnvidia-ml"):
            real = places.root / f"usr/lib/x86_64-linux-gnu/{name}.so.{driver}"
            put(real, "")
            real.with_name(f"{name}.so.1").unlink(missing_ok=True)
            real.with_name(f"{name}.so.1").symlink_to(real.name)
        for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
            put(places.dev / name, "")
        put(places.sys / "module/nvidia/version", driver)
        for number in range(devices):
            at = places.sys / f"bus/pci/devices/{number + 1:04x}:00:00.0"
            for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x1eb8")):
                put(at / name, text)
            (at / "driver").mkdir(exist_ok=True)
        directory = tmp_path / "etc"
        put(directory / "gpu.json", json.dumps({"vm_size": "Standard_NC4as_T4_v3"} | (settings or {})))

        @contextmanager
        def library() -> Iterator[nvml.Library]:
            if error:
                raise error
            yield nvml.Library(Node(gpus, driver, codes=codes))

        now = [0.0]  # nobody waits in earnest

        def sleep(seconds: float) -> None:
            now[0] += seconds

        return System(
            places, directory, library, load or loaded(T4.workers), xids, never, sleep, lambda: now[0]
        )

    return make


def result(system: System, schema: dict[str, Any], tier: str = "boot-full") -> tuple[int, dict[str, Any]]:
    code = command.run(tier, system=system)
    document: dict[str, Any] = json.loads((system.places.run / "gpu.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    assert document["verdict"]["exit_code"] == code
    return code, document


def test_a_healthy_node(tree: Tree, schema: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, document = result(tree(), schema)
    assert code == 0, document["verdict"]
    assert document["boot_id"] == BOOT
    assert document["coverage"]["gpus_tested"] == document["expect"]["gpu_count"] == 1
    assert document["gpus"][0]["uuid"] == T4.gpus[0].uuid
    assert document["seed"] > 0
    output = capsys.readouterr().out
    assert "pass (exit 0)" in output and "Tesla T4" in output


def test_json_on_stdout_is_the_file(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    system = tree()
    assert command.run("boot-quick", as_json=True, seed=5, system=system) == 0
    output = capsys.readouterr().out
    assert output == (system.places.run / "gpu.json").read_text(encoding="utf-8")
    assert json.loads(output)["seed"] == 5


def test_no_gpu_where_none_is_expected(
    tree: Tree, schema: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    system = tree(devices=0, settings={"expect": "none"}, load=never, error=OSError("not there"))
    code, document = result(system, schema)
    assert (code, document["verdict"]["summary"]) == (0, "no GPU found, as expected")
    assert "no GPU" in capsys.readouterr().out


def test_a_gpu_where_none_is_expected(tree: Tree, schema: dict[str, Any]) -> None:
    code, document = result(tree(settings={"expect": "none"}, load=never), schema)
    assert (code, document["verdict"]["reason_code"]) == (4, "gpu.unexpected")


def test_no_gpu_where_some_are_expected(tree: Tree, schema: dict[str, Any]) -> None:
    code, document = result(tree(devices=0, load=never), schema)
    assert (code, document["verdict"]["reason_code"]) == (2, "gpu.count")


@pytest.mark.parametrize(
    ("appears", "bound", "code", "waited"),
    [(0, 0, 0, 0), (20, 50, 0, 50), (0, 58, 0, 58), (62, 62, 2, 60), (0, 62, 0, 60)],
    ids=["at once", "late", "only its driver is late", "never", "its driver is never there"],
)
def test_gpus_have_their_time(
    tree: Tree, schema: dict[str, Any], appears: int, bound: int, code: int, waited: int
) -> None:
    """The library is opened only afterwards."""
    whole = tree()
    device = whole.places.sys / "bus/pci/devices/0001:00:00.0"
    aside, driver = device.parents[3] / "aside", device / "driver"
    device.rename(aside)
    (aside / "driver").rmdir()

    def arrived() -> None:
        if whole.clock() >= appears and aside.exists():
            aside.rename(device)
        if whole.clock() >= bound and device.exists():
            driver.mkdir(exist_ok=True)

    def sleep(seconds: float) -> None:
        whole.sleep(seconds)
        arrived()

    opened: list[float] = []

    def library() -> Any:
        opened.append(whole.clock())
        return whole.library()

    arrived()
    status, document = result(replace(whole, sleep=sleep, library=library), schema)
    assert (status, whole.clock()) == (code, waited), document["verdict"]
    assert opened == ([waited] if code == 0 else [])


BUSY = (replace(T4.gpus[0], processes=(Process(4711, 1 << 30),)),)
MIG = (replace(T4.gpus[0], mig_current=True, mig_pending=True, missing={}),)
# Name: what differs on the node, the exit code and the reason. None of these nodes may be put under load.
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown size": ({"settings": {"vm_size": "Standard_NC4as_T5_v9"}}, 4, "sku.unknown"),
    "no library": (
        {"error": OSError("libnvidia-ml.so.1: cannot open shared object file")},
        5,
        "driver.library",
    ),
    "versions differ": (
        {"error": nvml.NvmlError("nvmlInit_v2", nvml.VERSION_MISMATCH)},
        5,
        "driver.mismatch",
    ),
    "another driver than baked": ({"settings": {"driver_version": "580.1.1"}}, 5, "driver.version"),
    "driver for another kernel": ({"settings": {"kernel": "5.10.0-1-amd64"}}, 5, "driver.kernel"),
    "MIG": ({"gpus": MIG}, 4, "mig.mode"),
    "a foreign process": ({"gpus": BUSY}, 3, "procs.foreign"),
    "one GPU too many": ({"devices": 2}, 4, "gpu.count"),
    "NVML fails": ({"codes": {"nvmlDeviceGetCount_v2": 999}}, 2, "gpu.count"),
    "bad settings": ({"settings": {"overrides": {"hbm_floor_gbps": 9}}}, 4, "gpu.settings"),
    "an implausible floor": (
        {"settings": {"overrides": {"hbm_floor_gbps": {"value": 200000, "from": "MB/s"}}}},
        4,
        "gpu.settings",
    ),
    "a waiver of nothing": ({"settings": {"waived": {"pcie.lnik": "x"}}}, 4, "gpu.settings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_fails_closed(name: str, tree: Tree, schema: dict[str, Any]) -> None:
    arguments, code, reason = REFUSED[name]
    status, document = result(tree(**{"load": never} | arguments), schema)
    assert (status, document["verdict"]["reason_code"]) == (code, reason), document["verdict"]


def test_gpus_in_parts_are_not_put_under_load(tree: Tree, schema: dict[str, Any]) -> None:
    code, document = result(tree(MIG, settings={"mig": "enabled"}, load=never), schema)
    assert code == 0, document["verdict"]
    reasons = {check["id"]: check["reason_code"] for check in document["checks"]}
    assert reasons["kat.mma"] == reasons["worker"] == "not-applicable" and reasons["mig.mode"] == ""


def test_an_unknown_tier(tree: Tree, schema: dict[str, Any]) -> None:
    code, document = result(tree(load=never), schema, tier="deep")
    assert (code, document["verdict"]["reason_code"]) == (4, "gpu.tier")


def test_a_journal_that_cannot_be_read(tree: Tree, schema: dict[str, Any]) -> None:
    def unread(_: str) -> tuple[Xid, ...]:
        raise NodeError("gpu.journal", "no journal")

    code, document = result(tree(xids=unread), schema)
    assert (code, document["verdict"]["reason_code"]) == (3, "xid.unread")


def test_xids_before_and_during(tree: Tree, schema: dict[str, Any]) -> None:
    message = "NVRM: Xid (PCI:0001:00:00): 31, pid=1"
    early, late = Xid(31, "0001:00:00", 1, message), Xid(31, "0001:00:00", 2**62, message)
    code, document = result(tree(xids=lambda _: (early,)), schema)
    assert code == 0 and [xid["during_test"] for xid in document["xids"]] == [False]
    enforcing = {"mode": "enforce"}
    code, document = result(tree(xids=lambda _: (early, late), settings=enforcing), schema)
    assert (code, document["verdict"]["reason_code"]) == (3, "xid.31")
    switch = Xid(20034, "0000:00:00", 1, "nvidia-nvswitch0: SXid …", "nvidia-nvswitch0", fatal=True)
    code, document = result(tree(xids=lambda _: (early, switch)), schema)
    assert (code, document["verdict"]["reason_code"]) == (2, "sxid.20034")
    assert document["xids"][1]["class"] == "SXID_FATAL"


def test_a_bug_is_no_verdict_on_the_hardware(tree: Tree, schema: dict[str, Any]) -> None:
    def bug(*_: Any) -> Any:
        raise KeyError("a bug")

    code, document = result(tree(load=bug), schema)
    assert (code, document["verdict"]["reason_code"]) == (3, "internal")
    assert document["verdict"]["action"] == "none"


@pytest.mark.parametrize(
    ("settings", "status"), [({}, 3), ({"expect": "none"}, 4)], ids=["a pass is none", "a finding stays"]
)
def test_a_result_that_can_not_be_written_is_no_hardware_fault(
    tree: Tree, settings: dict[str, Any], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    system = tree(settings=settings)
    (system.places.run / ".gpu.json.new").mkdir(parents=True)  # where the draft is written
    assert command.run("boot-full", as_json=True, system=system) == status
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"]["exit_code"] == status
    assert "can't write " in captured.err and "gpu.json" in captured.err


def test_an_old_pass_does_not_outlive_a_failure(tree: Tree, schema: dict[str, Any]) -> None:
    system = tree()
    assert result(system, schema)[0] == 0

    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command.run("boot-full", system=replace(system, load=stopped))
    assert not (system.places.run / "gpu.json").exists()


def test_a_worker_that_hung_is_a_failure_that_names_the_gpu(tree: Tree, schema: dict[str, Any]) -> None:
    hung = (Worker(T4.gpus[0].uuid, "hung: unkillable"),)
    code, document = result(tree(load=loaded(hung)), schema)
    assert (code, document["verdict"]["reason_code"]) == (2, "worker.unkillable")
    assert T4.gpus[0].uuid in document["verdict"]["summary"]


WRONG = replace(
    T4.workers[0],
    measurements=tuple(
        replace(measurement, status="failed", measured=3.0) if measurement.id == "kat.mma" else measurement
        for measurement in T4.workers[0].measurements
    ),
)


def test_a_wrong_answer_is_observed_until_a_calibration_is_on_record(
    tree: Tree, schema: dict[str, Any]
) -> None:
    code, document = result(tree(load=loaded((WRONG,))), schema)
    assert (code, document["expect"]["mode"], document["expect"]["calibrated"]) == (0, "observe", False)
    [mma] = [check for check in document["checks"] if check["id"] == "kat.mma"]
    assert (mma["status"], mma["reason_code"], mma["action"]) == ("warn", "answer.wrong", "none")

    record = {
        "size": "standard_nc4as_t4_V3",
        "driver": document["driver"]["loaded"],
        "agent": document["tool_version"],
        "from": "a test",
    }
    code, document = result(tree(load=loaded((WRONG,)), settings={"calibrations": [record]}), schema)
    assert (code, document["expect"]["mode"], document["expect"]["calibrated"]) == (1, "enforce", True)
    assert (document["verdict"]["reason_code"], document["verdict"]["action"]) == ("answer.wrong", "replace")

    for key in ("size", "driver", "agent"):
        other = {"calibrations": [record | {key: "another"}]}
        assert result(tree(load=loaded((WRONG,)), settings=other), schema)[0] == 0, key
    assert result(tree(load=loaded((WRONG,)), settings={"mode": "enforce"}), schema)[0] == 1


def test_it_gives_itself_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a driver call doesn't return, the watchdog writes a document and ends the process with 124."""
    ended: list[int] = []

    monkeypatch.setattr("os._exit", ended.append)
    with command._given_up_after(0.0, lambda: ended.append(-1)):
        for _ in range(12_000):
            if len(ended) == 2:
                break
            time.sleep(0.005)
    assert ended == [-1, 124]

    def full() -> None:
        raise OSError("no space left for a document")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with command._given_up_after(0.0, full):
        for _ in range(12_000):
            if len(ended) == 3:
                break
            time.sleep(0.005)
    assert ended == [-1, 124, 124]
    late = command._late(1)
    assert (late.exit_code, late.status) == (124, "inconclusive")


@pytest.mark.parametrize(
    ("up_after", "waited"), [(0.0, 0.0), (7.0, 8.0), (1000.0, 120.0)], ids=["up", "late", "never"]
)
def test_infiniband_has_its_time(tree: Tree, up_after: float, waited: float) -> None:
    """Eight ports, one of which the subnet manager brings up late; the clock is simulated."""
    evidence = node("H100")
    now = [0.0]
    system = replace(tree(load=never), clock=lambda: now[0])

    def ports() -> None:
        for port in evidence.before.machine.ports:
            at = system.places.sys / f"class/infiniband/{port.device}/ports/1"
            is_up = port.device != "mlx5_3" or now[0] >= up_after
            put(at / "state", "4: ACTIVE\n" if is_up else "2: INIT\n")
            put(at / "phys_state", "5: LinkUp\n")
            put(at / "rate", "400 Gb/sec (4X NDR)\n")
            put(at / "link_layer", "InfiniBand\n")

    def sleep(seconds: float) -> None:
        now[0] += seconds
        ports()

    ports()
    reading = replace(evidence.before.machine, ports=sysfs.ports(system.places.sys))
    waiting = replace(evidence, before=replace(evidence.before, machine=reading))
    until = evidence.expected.settings.infiniband_wait_seconds
    settled = command._with_ports(waiting, until, replace(system, sleep=sleep))
    assert now[0] == waited
    assert all(port.is_up for port in settled.before.machine.ports) == (up_after < 1000)
    # A size without InfiniBand waits for nothing, and neither does one whose time the fabric has used up.
    assert command._with_ports(T4, until, replace(system, sleep=never)) == T4
    assert command._with_ports(waiting, now[0], replace(system, sleep=never)) == waiting


def test_the_fabric_has_its_time(tree: Tree) -> None:
    """Eight H200s whose fabric is still in progress in the first readings."""
    evidence = node("H200")
    waiting = tuple(replace(gpu, fabric_state="in-progress") for gpu in evidence.gpus)
    looks = [waiting, waiting, evidence.gpus]
    slept: list[float] = []
    now = [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    class Training(Node):
        def _count(self, out: Any) -> int:
            now[0] += 8  # a reading takes time, which is part of the wait
            if len(looks) > 1:
                self.gpus = looks.pop(0)
            else:
                self.gpus = looks[0]
            return super()._count(out)

    system = replace(tree(load=never), sleep=sleep, clock=lambda: now[0])
    library = nvml.Library(Training(waiting, "550.90.12"))
    expected = evidence.expected
    settled = command._settled(
        "boot-full", expected, evidence.catalogue, evidence.before.machine, library, system, now[0]
    )
    assert [gpu.fabric_state for gpu in settled.gpus] == ["completed"] * 8
    assert slept == [2, 2]
    looks[:] = [waiting]
    began = now[0]
    never_ready = command._settled(
        "boot-full", expected, evidence.catalogue, evidence.before.machine, library, system, now[0]
    )
    assert {gpu.fabric_state for gpu in never_ready.gpus} == {"in-progress"}
    wait = expected.settings.fabric_wait_seconds
    assert wait <= now[0] - began <= wait + 10
