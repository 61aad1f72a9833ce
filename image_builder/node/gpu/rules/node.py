"""Rules about the node: its size, driver, devices, kernel log, and the hardware other than the GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from image_builder.node.gpu import xids
from image_builder.node.gpu.evidence import (
    Evidence,
    absent,
    bad,
    broken,
    compared,
    doubtful,
    good,
    not_made,
    unanswered,
    without_gpus,
)
from image_builder.node.gpu.model import INFINIBAND_MODULES, Check, Xid
from image_builder.node.sysfs import Port

_NO_DEVICE = "no GPU is on the PCI bus"
_DEVICES = ("nvidiactl", "nvidia-uvm")
_MEMORY_OF_MODEL = 0.97
_HOST_MEMORY_WARN, _HOST_MEMORY_FAIL = 0.97, 0.90
_GIB = 1 << 30


def sku_known(evidence: Evidence) -> Iterator[Check]:
    machine, expected = evidence.before.machine, evidence.expected
    if expected.size:
        yield good(detail=f"{expected.size.name}, by the {machine.vm_size_from or 'configuration'}")
        if expected.size.retired:
            yield doubtful("sku.retired", f"{expected.size.name} was retired on {expected.size.retired}")
        if expected.stale:
            yield doubtful("calibration.stale", "the calibration on record is of another driver or program")
    elif expected.settings.allow_unknown_size:
        reason = machine.vm_size or "the size can't be found"
        yield doubtful("sku.unknown", f"{reason}: allowed by the configuration, without floors")
    elif not machine.vm_size:
        yield broken("sku.unanswered", "no VM size is configured, and the platform's metadata has none")
    else:
        yield bad("config", "sku.unknown", f"{machine.vm_size} is not in table {expected.table_version}")


def driver_loaded(evidence: Evidence) -> Iterator[Check]:
    machine, settings = evidence.before.machine, evidence.expected.settings
    if not machine.pci:
        yield absent(_NO_DEVICE)
        return
    if settings.kernel and machine.kernel != settings.kernel:
        detail = f"the driver was baked for kernel {settings.kernel}, but {machine.kernel} is running"
        yield bad("reimage", "driver.kernel", detail, **compared(machine.kernel, "==", settings.kernel))
    if not machine.driver_loaded:
        yield bad("reimage", "driver.absent", "GPUs are present, but no NVIDIA driver is loaded")
        return
    pinned = settings.driver_version
    versions = compared(machine.driver_loaded, "==" if pinned else "", pinned or None)
    module = machine.modules.get("nvidia", "")
    flavours = evidence.expected.gpu.driver_flavours if evidence.expected.gpu else ()
    if pinned and machine.driver_loaded != pinned:
        yield bad(
            "reimage",
            "driver.version",
            f"{pinned} was baked, but {machine.driver_loaded} is loaded",
            **versions,
        )
    elif module and module != machine.driver_loaded:
        yield bad("reimage", "driver.version", f"module {module}, driver {machine.driver_loaded}", **versions)
    elif settings.driver_flavour and machine.flavour != settings.driver_flavour:
        yield bad(
            "reimage",
            "driver.flavour",
            f"{settings.driver_flavour} was baked, but {machine.flavour} is loaded",
        )
    elif flavours and machine.flavour not in flavours:
        yield bad("reimage", "driver.flavour", f"{machine.flavour}: these GPUs need {' or '.join(flavours)}")
    else:
        yield good(detail=machine.flavour, **versions)


def driver_match(evidence: Evidence) -> Iterator[Check]:
    machine, nvml = evidence.before.machine, evidence.before.nvml
    needed = [name for name in ("libcuda", "libnvidia-ml") if not machine.libraries.get(name)]
    if needed or nvml.error.startswith("library"):
        detail = f"missing: {', '.join(needed)}" if needed else nvml.error
        yield bad("reimage", "driver.library", detail)
        return
    if nvml.error.startswith("mismatch"):
        yield bad("reimage", "driver.mismatch", nvml.error)
        return
    size = evidence.expected.size
    if size and size.nvswitch and not machine.libraries.get("fabricmanager"):
        yield bad(
            "reimage",
            "driver.fabricmanager",
            f"{size.name} has NVSwitches, but no fabric manager is installed",
        )
        return
    versions = {"loaded": machine.driver_loaded, "NVML": nvml.driver, **machine.libraries}
    differing = {version for version in versions.values() if version}
    detail = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if len(differing) > 1:
        yield bad("reimage", "driver.mismatch", detail)
    elif nvml.error and machine.pci:
        yield broken("nvml.unavailable", nvml.error)
    else:
        yield good(detail=detail)


def driver_nouveau(evidence: Evidence) -> Iterator[Check]:
    machine = evidence.before.machine
    bound = [gpu.address for gpu in machine.pci if gpu.driver == "nouveau"]
    if "nouveau" in machine.modules or bound:
        yield bad(
            "reimage",
            "driver.nouveau",
            f"nouveau is loaded{' and bound to ' if bound else ''}{', '.join(bound)}",
        )
    else:
        yield good()


def dev_nodes(evidence: Evidence) -> Iterator[Check]:
    machine, count = evidence.before.machine, evidence.expected.count
    if not machine.pci:
        yield absent(_NO_DEVICE)
        return
    # With MIG, the specs name only the parts, which may not have been made yet.
    named = None if evidence.expected.settings.mig == "enabled" else machine.cdi_gpus
    # Their numbers are the driver's minor numbers, which need not start at 0 or be consecutive.
    numbered = [name for name in machine.nodes if re.fullmatch(r"nvidia\d+", name)]
    missing = [name for name in _DEVICES if name not in machine.nodes]
    if len(numbered) < (count or len(machine.pci)):
        missing.append(f"{(count or len(machine.pci)) - len(numbered)} of the GPUs' own")
    if missing:
        yield bad("config", "dev.nodes", f"missing below /dev: {', '.join(missing)}")
    elif named is not None and count is not None and named != count:
        detail = f"the CDI specs name {named} GPUs, expected {count}"
        yield bad("config", "dev.cdi", detail, **compared(named, "==", count))
    else:
        yield good(detail="" if machine.cdi_gpus is not None else "no CDI spec")


def gpu_count(evidence: Evidence) -> Iterator[Check]:
    machine, nvml, expected = evidence.before.machine, evidence.before.nvml, evidence.expected
    if expected.count is None:
        yield not_made("gpu.unknown", "the expected number of GPUs isn't configured")
        return
    opened = len(nvml.gpus)
    detail = f"{expected.count} expected, {len(machine.pci)} on the PCI bus, {nvml.count} counted by NVML"
    numbers = compared(min(len(machine.pci), opened), "==", expected.count, "GPUs")
    if len(machine.pci) > expected.count:
        yield bad("config", "gpu.count", detail, **numbers)
    elif not len(machine.pci) == nvml.count == expected.count:
        yield bad("reboot", "gpu.count", detail, **numbers)
    else:
        yield good(detail=detail, **numbers)
    yield from _models(evidence)


def _models(evidence: Evidence) -> Iterator[Check]:
    """Yield a check of each GPU's model and memory against those of the size."""
    model = evidence.expected.gpu
    if not model:
        return
    least = int(_MEMORY_OF_MODEL * model.memory_mib)
    for gpu in evidence.gpus:
        if not re.fullmatch(model.name_pattern, gpu.name):
            detail = f"{gpu.name!r}, the size has {model.name_pattern}"
            yield bad(
                "config", "gpu.model", detail, gpu.uuid, measured=gpu.name, threshold=model.name_pattern
            )
            continue
        gap = unanswered(gpu, "memory_total_bytes")
        if gap or gpu.memory_total_bytes is None:
            yield gap or broken("nvml.error", "memory_total_bytes", gpu.uuid)
            continue
        has = gpu.memory_total_bytes >> 20
        numbers = compared(has, ">=", least, "MiB")
        if has < least:
            yield bad("replace", "gpu.memory", f"{has} MiB of {model.memory_mib}", gpu.uuid, **numbers)
        else:
            yield good(gpu.uuid, gpu.name, **numbers)


def gpu_lost(evidence: Evidence) -> Iterator[Check]:
    nvml = evidence.before.nvml
    if nvml.error:
        yield from without_gpus(evidence)
        return
    lost = dict(nvml.lost)
    if evidence.after:
        lost |= {f"{index} under load": why for index, why in evidence.after.nvml.lost.items()}
        gone = [gpu for gpu in evidence.gpus if not evidence.later(gpu.uuid)]
        lost |= {f"{gpu.index} under load": evidence.after.nvml.error or "gone" for gpu in gone}
    if lost:
        yield bad("reboot", "gpu.lost", "; ".join(f"GPU {index}: {why}" for index, why in lost.items()))
    else:
        yield good()


def xid_boot(evidence: Evidence) -> Iterator[Check]:
    if evidence.latest.machine.journal_error:
        yield broken("xid.unread", evidence.latest.machine.journal_error)
        return
    by_address = {xids.address(gpu.pci): gpu.uuid for gpu in evidence.gpus}
    outcomes = [_xid(evidence, xid, by_address.get(xid.pci, "")) for xid in evidence.latest.xids]
    checks = [check for check in outcomes if check]
    yield from checks
    if not checks:
        yield good(detail=f"{len(outcomes)} Xids for the record" if outcomes else "")


def _xid(evidence: Evidence, xid: Xid, gpu: str) -> Check | None:
    """Return the check that an Xid results in; None if it is only for the record."""
    if xids.needs_nothing(xid):
        return None
    if xid.switch:
        # The driver itself says which ones are fatal; the others occur on every boot.
        detail = f"{xid.switch}, SXid {xid.number}: {xid.raw}"
        return bad("reboot", f"sxid.{xid.number}", detail, measured=xid.number)
    xid_class = evidence.catalogue.class_of(xid)
    if xids.is_unreadable(xid):
        return broken("xid.unreadable", xid.raw)
    level = xid_class.during if xids.is_during(xid, evidence.began_us) else xid_class.before
    code, detail = f"xid.{xid.number}", f"Xid {xid.number} ({xid_class.name}: {xid_class.means}): {xid.raw}"
    if level == "fail":
        return bad(xid_class.action, code, detail, gpu, measured=xid.number)
    if level == "unsettled":
        # A bug in our own program causes it as well. A wrong answer or a dead worker fails its own check.
        return broken(code, detail, gpu, measured=xid.number)
    return doubtful(code, detail, gpu, measured=xid.number) if level == "warn" else None


def fabric(evidence: Evidence) -> Iterator[Check]:
    size, model = evidence.expected.size, evidence.expected.gpu
    if not size or not model or not size.nvswitch:
        yield absent("no NVSwitches" if size else "the size is unknown")
        return
    state = evidence.before.machine.fabric_manager
    if state != "active":
        yield bad("reboot", "fabric.manager", f"the fabric manager is {state or 'not installed'}")
        return
    if not model.fabric_state:
        yield good(detail="the fabric manager is active; these GPUs report no state of their own")
        return
    yield from without_gpus(evidence)
    for gpu in evidence.gpus:
        gap = unanswered(gpu, "fabric_state", "fabric_status")
        if gap:
            yield gap
        elif (gpu.fabric_state, gpu.fabric_status) == ("completed", "success"):
            yield good(gpu.uuid)
        else:
            detail = f"state {gpu.fabric_state}, status {gpu.fabric_status}"
            yield bad(
                "reboot", "fabric.state", detail, gpu.uuid, measured=gpu.fabric_state, threshold="completed"
            )


def ib_links(evidence: Evidence) -> Iterator[Check]:
    size = evidence.expected.size
    if not size or not size.infiniband_ports:
        yield absent("no InfiniBand" if size else "the size is unknown")
        return
    machine = evidence.before.machine
    ports = [port for port in machine.ports if port.is_infiniband]
    down = [port for port in ports if not port.is_up]
    slow = [port for port in ports if port.is_up and port.rate_gbit < size.infiniband_gbit]
    numbers = compared(len(ports), "==", size.infiniband_ports, "ports")
    if not ports and not set(INFINIBAND_MODULES) & set(machine.modules):
        yield bad("reimage", "ib.driver", "no InfiniBand port, and no InfiniBand driver is loaded", **numbers)
    elif len(ports) != size.infiniband_ports:
        detail = f"{len(ports)} of {size.infiniband_ports} InfiniBand ports"
        yield bad("reboot", "ib.count", detail, **numbers)
    elif down:
        detail = ", ".join(f"{port.name} {port.state}, {port.physical}" for port in down)
        yield _of_the_fabric(down, ports, "ib.down", detail)
    elif slow:
        detail = ", ".join(f"{port.name} {port.rate_gbit:g} Gb/s" for port in slow)
        more: dict[str, Any] = {"threshold": size.infiniband_gbit, "op": ">=", "unit": "Gb/s"}
        yield _of_the_fabric(slow, ports, "ib.rate", detail, **more)
    else:
        yield good(**numbers)


def _of_the_fabric(some: Sequence[Port], ports: Sequence[Port], code: str, detail: str, **more: Any) -> Check:
    """Return the check of ports that aren't as expected: if none is, the network is to blame, not the machine."""
    if len(some) == len(ports):
        return broken(code, f"all ports: {detail}", **more)
    return bad("reboot", code, detail, **more)


def nvme_local(evidence: Evidence) -> Iterator[Check]:
    size, has = evidence.expected.size, evidence.before.machine.local_nvme
    if not size or size.local_nvme is None:
        yield absent("the expected number is unknown")
        return
    numbers = compared(has, "==", size.local_nvme, "disks")
    if has != size.local_nvme:
        yield bad("replace", "nvme.count", f"{has} local NVMe disks, {size.local_nvme} expected", **numbers)
    else:
        yield good(**numbers)


def mem_host(evidence: Evidence) -> Iterator[Check]:
    size, has = evidence.expected.size, evidence.before.machine.memory_bytes
    if not size:
        yield absent("the size is unknown")
        return
    if not has:
        yield broken("mem.unread", "/proc/meminfo has no MemTotal")
        return
    gib = round(has / _GIB, 1)
    numbers = compared(gib, ">=", size.memory_gib, "GiB")
    detail = f"{gib} of {size.memory_gib} GiB"
    if gib < _HOST_MEMORY_FAIL * size.memory_gib:
        yield bad("replace", "mem.host", detail, **numbers)
    elif gib < _HOST_MEMORY_WARN * size.memory_gib:
        yield doubtful("mem.host", detail, **numbers)
    else:
        yield good(**numbers)
