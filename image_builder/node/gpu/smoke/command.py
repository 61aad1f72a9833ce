"""``node-agent gpu-smoke``: read the GPUs, put them under load, judge, report.

The exit status is the verdict's (``model.ENDINGS``), and only a node that gets 0 may take work. Nothing that goes wrong
here counts as a pass: it ends with a document and a status of its own, never with Python's 1, which means hardware.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image_builder.node import files, sysfs
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError
from image_builder.node.gpu import document, machine, nvml, readings, sizes, xids
from image_builder.node.gpu import settings as gpu_settings
from image_builder.node.gpu.evidence import Evidence, Expected, bad, good
from image_builder.node.gpu.model import (
    CONFIGURATION,
    DEADLINE,
    ENDINGS,
    INCONCLUSIVE,
    PASS,
    TIERS,
    Check,
    Gpu,
    Machine,
    Nvml,
    Sample,
    Seen,
    Tier,
    Verdict,
    Worker,
    Xid,
)
from image_builder.node.gpu.nvml import Library, NvmlError
from image_builder.node.gpu.rules import checks
from image_builder.node.gpu.settings import Settings
from image_builder.node.gpu.smoke import fleet, program

RESULT = "gpu.json"
# How long the workers may take: the whole of boot-quick should take at most 90 s, of the others 360 s.
LOAD_SECONDS: dict[Tier, float] = {"boot-quick": 80, "boot-full": 330, "periodic": 330}
# The time for everything else before this command gives up: any driver call may never return.
_REST_SECONDS = 90
# How long GPUs may take to appear on the PCI bus and to get their driver.
_GPU_WAIT_SECONDS = 60
_POLL_SECONDS = 2
# Prerequisites: without these, a load would fail for a reason other than the GPU, or disturb another user of it.
_NEEDED = ("sku.known", "driver.", "dev.nodes", "gpu.count", "gpu.lost", "fabric", "mig.mode", "procs")
# NodeError codes for which the configuration is to blame.
_CONFIGURATION = ("settings", "gpu.settings", "gpu.sizes", "gpu.xids", "gpu.tier")


Load = Callable[[Sequence[str], Tier, int, float, Callable[[], None]], Sequence[Worker]]
"""Runs the workers, as ``fleet.run`` does."""


@dataclass(frozen=True)
class System:
    """The interfaces to the machine; tests substitute their own."""

    places: machine.Places = field(default_factory=machine.Places)
    directory: Path = settings_files.DIRECTORY
    library: Callable[[], AbstractContextManager[Library]] = nvml.opened
    load: Load = fleet.run
    read_xids: Callable[[str], tuple[Xid, ...]] = machine.read_xids
    ask: machine.Ask = machine.ask_imds
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def longest_seconds(settings: Settings, tier: Tier = "boot-full") -> float:
    """Return the deadline of a whole test, in seconds."""
    waits = max(_GPU_WAIT_SECONDS, settings.fabric_wait_seconds, settings.infiniband_wait_seconds)
    return LOAD_SECONDS[tier] + machine.PLATFORM_SECONDS + waits + _REST_SECONDS


def run(tier: str, *, as_json: bool = False, seed: int | None = None, system: System = System()) -> int:
    """Test this node's GPUs, write ``/run/node/gpu.json``, print the result; return the exit status."""
    is_tier = tier in TIERS
    started = datetime.now(UTC).isoformat(timespec="seconds")
    chosen = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    began = document.Run(program.digest(), tier if is_tier else TIERS[0], started, 0.0, chosen)  # type: ignore[arg-type]
    result = system.places.run / RESULT
    clock = time.monotonic()

    def report(body: dict[str, Any]) -> int:
        body["duration_s"] = round(time.monotonic() - clock, 3)
        try:
            result.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(result, body, durable=False)
        except OSError as error:
            sys.stderr.write(f"node-agent: can't write {result}: {error.strerror}\n")
            # A pass that isn't written can't be shown to be from this boot.
            if body["verdict"]["exit_code"] == PASS:
                raise
        sys.stdout.write(json.dumps(body, indent=1) + "\n" if as_json else document.text(body))
        sys.stdout.flush()
        return int(body["verdict"]["exit_code"])

    def without_evidence(outcome: Verdict) -> int:
        return report(document.bare(began, machine.boot_id(system.places.proc), outcome))

    try:
        # An old pass must not remain in place while this run is going on, or if it never ends.
        result.unlink(missing_ok=True)
        if not is_tier:
            raise NodeError("gpu.tier", f"{tier!r} is not one of {', '.join(TIERS)}")
        settings = gpu_settings.load(system.directory)
        seconds = longest_seconds(settings, began.tier)
        with _given_up_after(seconds, lambda: without_evidence(_late(seconds))):
            return report(_tested(began, settings, system))
    except NodeError as error:
        is_configuration = error.code in _CONFIGURATION
        code = CONFIGURATION if is_configuration else INCONCLUSIVE
        return without_evidence(Verdict(code, ENDINGS[code].action, error.message[:200], error.code))
    except Exception as error:
        # A bug in this program says nothing about the hardware.
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        return without_evidence(Verdict(INCONCLUSIVE, "none", message[:200], "internal"))


def _late(seconds: float) -> Verdict:
    summary = f"timed out after {seconds:g} s: a driver call didn't return"
    return Verdict(DEADLINE, "none", summary, "deadline")


@contextmanager
def _given_up_after(seconds: float, late: Callable[[], object]) -> Iterator[None]:
    """Exit with 124 when the block takes too long: no signal reaches a driver call that doesn't return."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            try:
                late()
            finally:
                os._exit(DEADLINE)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _tested(began: document.Run, settings: Settings, system: System) -> dict[str, Any]:
    """Run the test and return its document."""
    catalogue = xids.load()
    if settings.expect == "none":
        node = Seen(machine.look(system.places, vm_size="none"))
        evidence = Evidence(began.tier, Expected(settings), catalogue, node, idle_why="no GPU is expected")
        check = none_expected(node.machine)
        return document.document(began, evidence, (check,), _none_verdict(check))
    evidence = gather(began.tier, began.seed, settings, catalogue, system)
    results = checks.judge(evidence)
    return document.document(began, evidence, results, document.verdict(results, began.tier))


def none_expected(node: Machine) -> Check:
    """Return the only check of a pool without GPUs: that there are none."""
    if not node.pci:
        return replace(good(detail="no GPU found, as expected"), id="gpu.count")
    detail = f"no GPU is expected, but found {', '.join(gpu.address for gpu in node.pci)}"
    return replace(bad("config", "gpu.unexpected", detail), id="gpu.count")


def _none_verdict(check: Check) -> Verdict:
    if check.status == "pass":
        return Verdict(PASS, "none", check.detail)
    return Verdict(CONFIGURATION, "config", check.detail[:200], check.code)


def expectation(settings: Settings, vm_size: str, driver: str = "") -> Expected:
    """Return the expectations for a node of this size and driver. Raises NodeError if tables or overrides are bad."""
    table = sizes.load()
    row = table.find(vm_size)
    if not row:
        count = settings.count if settings.allow_unknown_size else None
        return Expected(settings, table.version, count=count, observes=settings.mode != "enforce")
    size, gpu = sizes.overridden(*row, settings.overrides)
    agent = program.digest()
    records = [record for record in settings.calibrations if record.size.lower() == size.name.lower()]
    is_known = any(record.is_about(size.name, driver, agent) for record in records)
    return Expected(
        settings,
        table.version,
        size,
        gpu,
        size.count,
        tuple(sorted(settings.overrides)),
        calibrated=size.calibrated or is_known,
        stale=bool(records) and not is_known,
        observes=settings.mode != "enforce" and not is_known,
    )


def gather(tier: Tier, seed: int, settings: Settings, catalogue: xids.Catalogue, system: System) -> Evidence:
    """Look, put the GPUs under load if that makes sense, and look again. Raises NodeError."""
    node = machine.look(system.places, settings.vm_size, system.ask)
    began = system.clock()
    node = _with_gpus(node, expectation(settings, node.vm_size).count, began + _GPU_WAIT_SECONDS, system)
    expected = expectation(settings, node.vm_size, node.driver_loaded)
    with ExitStack() as stack:
        library: Library | None = None
        try:
            library = stack.enter_context(system.library()) if node.pci else None
            evidence = _settled(tier, expected, catalogue, node, library, system, began)
            evidence = _with_ports(evidence, began + settings.infiniband_wait_seconds, system)
        except (OSError, NvmlError) as error:
            evidence = Evidence(
                tier, expected, catalogue, _with_xids(Seen(node, nvml.refused(error)), system)
            )
        if settings.mig == "enabled":
            # CUDA shows only parts of such a GPU, under other names: whole GPUs can't be put under load.
            evidence = replace(evidence, idle_by_policy=True)
        why = idle_reason(evidence)
        if why or library is None:
            return replace(evidence, idle_why=why or "not put under load: no GPU is on the PCI bus")
        return _loaded(evidence, seed, library, system)


def _with_gpus(node: Machine, count: int | None, until: float, system: System) -> Machine:
    """Return the node once its GPUs are on the PCI bus and have a driver, or their time is over."""
    # Without a size, each look would ask the platform again, for a minute.
    while node.vm_size and (len(node.pci) < (count or 0) or not all(gpu.driver for gpu in node.pci)):
        if system.clock() >= until:
            break
        system.sleep(_POLL_SECONDS)
        node = machine.look(system.places, node.vm_size, system.ask)
    return node


def _settled(
    tier: Tier,
    expected: Expected,
    catalogue: xids.Catalogue,
    node: Machine,
    library: Library | None,
    system: System,
    began: float,
) -> Evidence:
    """Return the evidence at rest, once the NVLink fabric is up or its time is over."""
    until = began + expected.settings.fabric_wait_seconds
    while True:
        before = Seen(node, _named(readings.look(library), system) if library else Nvml())
        evidence = Evidence(tier, expected, catalogue, before)
        is_training = any(gpu.fabric_state in ("not-started", "in-progress") for gpu in evidence.gpus)
        is_starting = node.fabric_manager in ("activating", "reloading")
        uses_fabric = expected.size is not None and expected.size.nvswitch
        if not (uses_fabric and (is_training or is_starting)) or system.clock() >= until:
            return replace(evidence, before=_with_xids(before, system))
        system.sleep(_POLL_SECONDS)
        node = machine.look(system.places, node.vm_size, system.ask)


def _with_ports(evidence: Evidence, until: float, system: System) -> Evidence:
    """Return the evidence once InfiniBand ports are up or their time is over: the subnet manager brings them up."""
    size, latest = evidence.expected.size, evidence.before
    expected_ports = size.infiniband_ports if size else 0
    while system.clock() < until:
        up = sum(port.is_up and port.is_infiniband for port in latest.machine.ports)
        if up >= expected_ports:
            break
        system.sleep(_POLL_SECONDS)
        latest = replace(latest, machine=replace(latest.machine, ports=sysfs.ports(system.places.sys)))
    return replace(evidence, before=latest)


def idle_reason(evidence: Evidence) -> str:
    """Return why the GPUs must not be put under load; empty if they may be."""
    if evidence.idle_by_policy:
        return "not put under load: the pool's policy is MIG"
    for check in checks.judge(evidence):
        is_open = check.status in ("fail", "error") or (check.status == "skip" and check.id == "procs")
        if is_open and check.id.startswith(_NEEDED):
            return f"not put under load: {check.id}: {check.detail or check.code}"
    return "" if evidence.gpus else "not put under load: NVML opens no GPU"


def _loaded(evidence: Evidence, seed: int, library: Library, system: System) -> Evidence:
    handles = {gpu.uuid: readings.handle_of(library, gpu.index) for gpu in evidence.gpus}
    samples: list[Sample] = []
    began = time.monotonic()

    def on_tick() -> None:
        at = time.monotonic() - began
        samples.extend(readings.sample(library, handle, uuid, at) for uuid, handle in handles.items())

    workers = system.load(list(handles), evidence.tier, seed, LOAD_SECONDS[evidence.tier], on_tick)
    try:
        after = Seen(evidence.before.machine, readings.look(library))
    except NvmlError as error:
        after = Seen(evidence.before.machine, nvml.refused(error))
    return replace(
        evidence,
        after=_with_xids(after, system),
        samples=tuple(samples),
        workers=tuple(workers),
        began_us=int(began * 1_000_000),
    )


def _with_xids(reading: Seen, system: System) -> Seen:
    try:
        return replace(reading, xids=system.read_xids(reading.machine.boot_id))
    except NodeError as error:
        return replace(reading, machine=replace(reading.machine, journal_error=error.message))


def _named(answers: Nvml, system: System) -> Nvml:
    """Return NVML's answers with the names of the processes, of which it reports only the IDs."""

    def named(gpu: Gpu) -> Gpu:
        if gpu.processes is None:
            return gpu
        names = [machine.process_name(system.places.proc, process.pid) for process in gpu.processes]
        return replace(
            gpu,
            processes=tuple(
                replace(process, name=name) for process, name in zip(gpu.processes, names, strict=True)
            ),
        )

    return replace(answers, gpus=tuple(named(gpu) for gpu in answers.gpus))
