"""What the project assumes of GPUs, row by row, and what a first contact has seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from image_builder.node.gpu import sizes
from image_builder.node.gpu.sizes import GpuModel, Size
from image_builder.node.gpu.smoke import known_answer
from tests.bench import gpu as bench
from tests.bench.first_contact.context import FACTS, RESULT, lines, read_json

ANSWERS = ("kat.int", "kat.ffma", "kat.dfma", "kat.mma", "det.fp32", "mem.pattern")
_SUMMARY = "summary.json"
_DRILLS = {
    "drill-result": "a wrong bit in what a kernel is given",
    "drill-memory": "a wrong bit in memory",
    "drill-copy": "a wrong bit in copies",
    "drill-crash": "a worker that crashes",
    "drill-killed": "a worker that is killed",
    "drill-hang": "a kernel that doesn't end",
    "drill-full": "memory nearly full: no crash, no wrong answer",
    "drill-in-use": "a process that holds the GPU: nothing is put under load",
    "drill-xid-13": "Xid 13 of a store that isn't aligned",
    "drill-xid-31": "Xid 31 of a store to no memory",
}


class Contact:
    """A first contact's directory, read. What a step did not get to is empty."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def result(self, step: str) -> dict[str, Any]:
        """Return what a step has found."""
        return read_json(self._out / "steps" / step / RESULT)

    def lines(self, step: str, name: str) -> list[dict[str, Any]]:
        """Return a step's JSON lines."""
        return lines(self._out / "steps" / step / name)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_json(self._out / _SUMMARY)

    @cached_property
    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return how each step ended, by its name."""
        return {one["step"]: one for one in self.summary.get("steps", [])}

    @cached_property
    def machine(self) -> dict[str, Any]:
        return dict(read_json(self._out / FACTS).get("machine", {}))

    @cached_property
    def gpus(self) -> list[dict[str, Any]]:
        """Return the GPUs as NVML told them at first."""
        return list(self.result("readings").get("nvml", {}).get("gpus", []))

    @property
    def driver(self) -> str:
        return str(self.machine.get("driver_loaded", ""))

    @property
    def date(self) -> str:
        return str(self.summary.get("started", ""))[:10]

    @property
    def agent(self) -> str:
        return str(self.summary.get("agent", ""))

    @property
    def size(self) -> str:
        return str(read_json(self._out / FACTS).get("size", ""))

    @cached_property
    def expected(self) -> tuple[Size, GpuModel] | None:
        """Return what the table says of this size; None where nobody knows the size."""
        return sizes.load().find(self.size)

    def measurements(self, step: str, key: str = "workers") -> Iterator[dict[str, Any]]:
        """Yield what the workers of a step measured."""
        for worker in self.result(step).get(key, []):
            yield from worker.get("measurements", [])

    def runs(self, name: str) -> dict[str, list[float]]:
        """Return the runs of one measurement that were done, by GPU."""
        found: dict[str, list[float]] = {}
        for key in ("workers", "links"):
            for one in self.measurements("spread", key):
                if one["id"] == name and one["status"] == "done" and one["measured"] is not None:
                    found.setdefault(one["gpu"], []).append(one["measured"])
        return found

    def doubts(self) -> Iterator[str]:
        """Yield why this machine is no example of a healthy one."""
        if not self.size:
            yield "nobody knows the machine's size: give --vm-size"
        if self.summary.get("pace") != 1:
            yield f"the run was shortened (pace {self.summary.get('pace')})"
        wrong = sorted({one["id"] for one in self.measurements("spread") if one["status"] == "failed"})
        if wrong:
            yield f"wrong answers: {', '.join(wrong)}"
        document = self.result("smoke-full").get("document", {})
        failed = [one["id"] for one in document.get("checks", []) if one["status"] in ("fail", "error")]
        # Floors are what this is for.
        failed = sorted({one for one in failed if not one.startswith(("bw.", "perf."))})
        if not document:
            yield "gpu-smoke boot-full left no document"
        elif failed:
            yield f"gpu-smoke boot-full: {', '.join(failed)}"


@dataclass(frozen=True)
class Row:
    """One assumption. ``holds`` is None where nothing was seen."""

    what: str
    assumed: str
    seen: str
    holds: bool | None


def rows(contact: Contact) -> list[Row]:
    """Return all assumptions with what was seen of each."""
    return [row for part in (_steps, _driver, _answers, _speeds, _drills, _table) for row in part(contact)]


def table(contact: Contact) -> str:
    """Return the rows as a page's section."""
    found = rows(contact)
    names = sorted({str(gpu.get("name")) for gpu in contact.gpus}) or ["no GPU"]
    wrong = sum(row.holds is False for row in found)
    unseen = sum(row.holds is None for row in found)
    head = (
        f"## {len(contact.gpus)} x {', '.join(names)}, {contact.size or 'a size that nobody knows'}\n\n"
        f"Driver {contact.driver or 'unknown'}, {contact.date}, program {contact.agent}. "
        f"{len(found)} assumptions: {len(found) - wrong - unseen} hold, **{wrong} don't**, {unseen} were not seen.\n\n"
        "| what | assumed | seen | |\n| --- | --- | --- | --- |\n"
    )
    marks: dict[bool | None, str] = {True: "holds", False: "**differs**", None: "not seen"}
    return head + "".join(
        f"| {row.what} | {row.assumed} | {_cell(row.seen)} | {marks[row.holds]} |\n" for row in found
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300] or "-"


def _steps(contact: Contact) -> Iterator[Row]:
    for name, one in contact.outcomes.items():
        if one["state"] in ("done", "planned"):
            continue
        # What was skipped was not seen; all else went another way than it should.
        holds = None if one["state"] in ("skipped", "interrupted") else False
        yield Row(f"the step `{name}`", "done", f"{one['state']}: {one['why']}", holds)


def _driver(contact: Contact) -> Iterator[Row]:
    missing: dict[str, set[str]] = {}
    for gpu in contact.gpus:
        for name, why in gpu.get("missing", {}).items():
            missing.setdefault(why, set()).add(name)
    seen = "; ".join(f"{why}: {', '.join(sorted(names))}" for why, names in sorted(missing.items()))
    errors = [why for why in missing if why != "not-supported"]
    yield Row(
        "NVML answers what is asked of it",
        "an answer, or not-supported",
        seen or "all answered",
        not errors if contact.gpus else None,
    )
    nvml = contact.result("nvml")
    yield Row(
        "no call of NVML hangs", "0", str(nvml.get("hung", "")), nvml.get("hung") == 0 if nvml else None
    )
    cuda = contact.result("cuda").get("gpus", [])
    same = [one["uuid"] for one in cuda] == [gpu["uuid"] for gpu in contact.gpus]
    yield Row(
        "CUDA and NVML name the same GPUs in the same order",
        "the same UUIDs",
        f"{len(cuda)} and {len(contact.gpus)}",
        same if cuda and contact.gpus else None,
    )
    if len(cuda) > 1:
        by_atomics = all(any(one["linked"]) for one in cuda)
        by_links = all(any(gpu.get("nvlinks") or ()) for gpu in contact.gpus)
        yield Row(
            "NVLink is told from PCIe by native atomics between peers",
            "as NVML's links say",
            f"by atomics: {by_atomics}; NVML has links up: {by_links}",
            by_atomics == by_links if contact.gpus else None,
        )
    for name, found in contact.result("jit").get("workers", {}).items():
        measured = [m for worker in found for m in worker["measurements"] if m["id"].startswith("jit.")]
        spent = sum(m["measured"] or 0 for m in measured)
        yield Row(
            f"the driver's compiler, {name}", "<= 3 s", f"{spent:.2f} s", spent <= 3 if measured else None
        )


def _answers(contact: Contact) -> Iterator[Row]:
    for name in ANSWERS:
        found = [one for one in contact.measurements("spread") if one["id"] == name]
        done = sum(one["status"] == "done" for one in found)
        other = sorted({f"{one['status']}: {one['detail']}" for one in found if one["status"] != "done"})[:2]
        yield Row(
            f"{name}: the host's answers",
            "0 mismatches",
            f"{done} of {len(found)} runs {'; '.join(other)}",
            done == len(found) if found else None,
        )
    covered = [one for one in contact.measurements("coverage") if one["id"].startswith("cover.")]
    if covered:
        sms = {one["uuid"]: one["sms"] for one in contact.result("cuda").get("gpus", [])}
        whole = [one for one in covered if one["measured"] == sms.get(one["gpu"])]
        least = min((int(one["id"].removeprefix("cover.")) for one in whole), default=0)
        gpus = {one["gpu"] for one in whole}
        most = known_answer.BLOCKS_PER_SM[-1]
        yield Row(
            "every SM gets a block",
            f"with at most {most} blocks an SM",
            f"with {least}" if whole else "with none that was tried",
            gpus == {one["gpu"] for one in covered},
        )
    else:
        yield Row("every SM gets a block", "some launch reaches all", "", None)


def _speeds(contact: Contact) -> Iterator[Row]:
    found = contact.result("references")
    for name, (sign, goal) in bench.GOALS.items():
        if name == "boot_quick_seconds":
            continue
        value = found.get(name)
        why = found.get("mma_missing" if name == "mma_ratio" else "copies_error", "")
        yield Row(
            f"`{name}`",
            f"{sign} {goal}",
            str(value if value is not None else why),
            None if value is None else value >= goal,
        )
    quick = contact.result("smoke-quick")
    if quick:
        yield Row("gpu-smoke boot-quick", "<= 30 s", f"{quick['seconds']} s", quick["seconds"] <= 30)
        verdict = quick["document"].get("verdict", {})
        yield Row(
            "a healthy machine passes, enforcing",
            "exit status 0",
            f"{quick['exit_status']}: {verdict.get('summary', '')}",
            quick["exit_status"] == 0,
        )
    else:
        yield Row("gpu-smoke boot-quick", "<= 30 s", "", None)
    alone = _best(contact, "alone")
    together = _best(contact, "together")
    for way, speed in alone.items():
        if way in together:
            part = together[way] / speed
            yield Row(
                f"{way} of all GPUs side by side",
                "as alone, or half of it behind a shared switch",
                f"{part:.2f} of {speed:.1f} GB/s",
                part >= 0.4,
            )


def _best(contact: Contact, kind: str) -> dict[str, float]:
    """Return for each way of copying the slowest GPU's best NUMA node."""
    best: dict[tuple[str, str], float] = {}
    for one in contact.measurements("copies", kind):
        if one["id"].startswith("bw.") and one["measured"] is not None:
            key = (".".join(one["id"].split(".")[:2]), one["gpu"])
            best[key] = max(best.get(key, 0.0), one["measured"])
    ways = {way for way, _ in best}
    return {way: min(speed for (name, _), speed in best.items() if name == way) for way in sorted(ways)}


def _drills(contact: Contact) -> Iterator[Row]:
    for name, what in _DRILLS.items():
        found = contact.result(name)
        if not found:
            yield Row(what, "noticed", "", None)
            continue
        worker = found.get("worker") or {}
        words = str(worker.get("ended") or found.get("cuda") or f"exit status {found.get('exit_status')}")
        if "xids" in found:
            numbers = [one["number"] for one in found["xids"] or ()]
            words += f"; Xids {numbers}{' ' if found.get('kernel_log') else ''}{found.get('kernel_log', '')}"
        holds = None if found.get("kernel_log") else bool(found.get("caught"))
        yield Row(what, "noticed", words, holds)


def _table(contact: Contact) -> Iterator[Row]:
    """Compare with the size's and the model's row of sizes.json."""
    if contact.expected is None or not contact.gpus:
        return
    size, model = contact.expected
    yield Row("GPUs of this size", str(size.count), str(len(contact.gpus)), size.count == len(contact.gpus))
    first = contact.gpus[0]
    links = first.get("nvlinks")
    compared: list[tuple[str, Any, Any, Callable[[Any, Any], bool]]] = [
        ("name", model.name_pattern, first.get("name"), lambda a, b: str(b).startswith(str(a))),
        ("compute capability", model.compute_capability, first.get("compute_capability"), _same),
        (
            "memory, MiB",
            model.memory_mib,
            (first.get("memory_total_bytes") or 0) >> 20,
            lambda a, b: abs(a - b) <= 0.02 * a,
        ),
        ("PCIe generation, at most", model.pcie_generation, first.get("pcie_generation_max"), _same),
        ("PCIe width", size.pcie_width, first.get("pcie_width"), _same),
        ("NVLink links", size.nvlink_links, len(links) if links is not None else 0, _same),
        (
            "row remapping",
            model.row_remapping,
            first.get("remap_failure") is not None,
            _same,
        ),
        ("a state of the fabric", model.fabric_state, first.get("fabric_state") is not None, _same),
        (
            "driver's flavour",
            "/".join(model.driver_flavours),
            contact.machine.get("flavour", ""),
            lambda a, b: b in a,
        ),
        ("local NVMe disks", size.local_nvme, contact.machine.get("local_nvme"), lambda a, b: a in (None, b)),
        ("memory of the machine, GiB", size.memory_gib, contact.machine.get("memory_bytes", 0) >> 30, _near),
    ]
    for what, assumed, seen, agree in compared:
        yield Row(f"{size.name}: {what}", str(assumed), str(seen), bool(agree(assumed, seen)))
    floors = {
        "bw.hbm": size.hbm_floor_gbps,
        "bw.h2d": size.h2d_floor_gbps,
        "bw.d2h": size.d2h_floor_gbps,
        "bw.p2p": size.p2p_floor_gbps,
    }
    for name, floor in floors.items():
        if floor is None:
            continue
        values = [value for found in contact.runs(name).values() for value in found]
        seen = f"lowest {min(values):.4g}, median {median(values):.4g}" if values else ""
        yield Row(
            f"{size.name}: {name}, GB/s",
            f">= {floor.value:g}",
            seen,
            min(values) >= floor.value if values else None,
        )


def _same(assumed: Any, seen: Any) -> bool:
    return bool(assumed == seen)


def _near(assumed: int, seen: int) -> bool:
    return abs(assumed - seen) <= 0.1 * assumed
