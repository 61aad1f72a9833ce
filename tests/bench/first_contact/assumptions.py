"""The project's assumptions about GPUs, row by row, and what a first contact observed of each."""

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
    "drill-result": "a wrong bit in a kernel's operands",
    "drill-memory": "a wrong bit in memory",
    "drill-copy": "a wrong bit in copies",
    "drill-crash": "a worker that crashes",
    "drill-killed": "a worker that is killed",
    "drill-hang": "a kernel that doesn't end",
    "drill-full": "memory nearly full: no crash, no wrong answer",
    "drill-in-use": "a process that uses the GPU: no GPU is put under load",
    "drill-xid-13": "Xid 13 from a misaligned store",
    "drill-xid-31": "Xid 31 from a store to an unmapped address",
}


class Contact:
    """The contents of a first contact's directory. Anything that a step didn't get to is empty."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def result(self, step: str) -> dict[str, Any]:
        """Return a step's findings."""
        return read_json(self._out / "steps" / step / RESULT)

    def lines(self, step: str, name: str) -> list[dict[str, Any]]:
        """Return a step's JSON lines."""
        return lines(self._out / "steps" / step / name)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_json(self._out / _SUMMARY)

    @cached_property
    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return each step's outcome, by step name."""
        return {step["step"]: step for step in self.summary.get("steps", [])}

    @cached_property
    def machine(self) -> dict[str, Any]:
        return dict(read_json(self._out / FACTS).get("machine", {}))

    @cached_property
    def gpus(self) -> list[dict[str, Any]]:
        """Return the GPUs as NVML reported them first."""
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
        """Return the table's row of this size; None if the size is unknown."""
        return sizes.load().find(self.size)

    def measurements(self, step: str, key: str = "workers") -> Iterator[dict[str, Any]]:
        """Yield what the workers of a step measured."""
        for worker in self.result(step).get(key, []):
            yield from worker.get("measurements", [])

    def runs(self, name: str) -> dict[str, list[float]]:
        """Return the completed runs of one measurement, by GPU."""
        runs: dict[str, list[float]] = {}
        for key in ("workers", "links"):
            for measurement in self.measurements("spread", key):
                if (
                    measurement["id"] == name
                    and measurement["status"] == "done"
                    and measurement["measured"] is not None
                ):
                    runs.setdefault(measurement["gpu"], []).append(measurement["measured"])
        return runs

    def doubts(self) -> Iterator[str]:
        """Yield the reasons why this machine isn't an example of a healthy one."""
        if not self.size:
            yield "the machine's size is unknown: give --vm-size"
        if self.summary.get("pace") != 1:
            yield f"the run was shortened (pace {self.summary.get('pace')})"
        wrong = sorted(
            {
                measurement["id"]
                for measurement in self.measurements("spread")
                if measurement["status"] == "failed"
            }
        )
        if wrong:
            yield f"wrong answers: {', '.join(wrong)}"
        document = self.result("smoke-full").get("document", {})
        failed = [check["id"] for check in document.get("checks", []) if check["status"] in ("fail", "error")]
        # Failed floors don't count: this run is meant to find new ones.
        failed = sorted({check for check in failed if not check.startswith(("bw.", "perf."))})
        if not document:
            yield "gpu-smoke boot-full left no document"
        elif failed:
            yield f"gpu-smoke boot-full: {', '.join(failed)}"


@dataclass(frozen=True)
class Row:
    """One assumption. ``holds`` is None if nothing was observed."""

    subject: str
    assumed: str
    measured: str
    holds: bool | None


def rows(contact: Contact) -> list[Row]:
    """Return all assumptions with the observations of each."""
    return [row for part in (_steps, _driver, _answers, _speeds, _drills, _table) for row in part(contact)]


def table(contact: Contact) -> str:
    """Return the rows as a page's section."""
    all_rows = rows(contact)
    names = sorted({str(gpu.get("name")) for gpu in contact.gpus}) or ["no GPU"]
    wrong = sum(row.holds is False for row in all_rows)
    unseen = sum(row.holds is None for row in all_rows)
    head = (
        f"## {len(contact.gpus)} x {', '.join(names)}, {contact.size or 'an unknown size'}\n\n"
        f"Driver {contact.driver or 'unknown'}, {contact.date}, program {contact.agent}. "
        f"{len(all_rows)} assumptions: {len(all_rows) - wrong - unseen} hold, **{wrong} don't**, "
        f"{unseen} were not observed.\n\n"
        "| subject | assumed | observed | result |\n| --- | --- | --- | --- |\n"
    )
    marks: dict[bool | None, str] = {True: "holds", False: "**differs**", None: "not observed"}
    return head + "".join(
        f"| {row.subject} | {row.assumed} | {_cell(row.measured)} | {marks[row.holds]} |\n"
        for row in all_rows
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300] or "-"


def _steps(contact: Contact) -> Iterator[Row]:
    for name, outcome in contact.outcomes.items():
        if outcome["state"] in ("done", "planned"):
            continue
        # A skipped or interrupted step wasn't observed; all others went wrong.
        holds = None if outcome["state"] in ("skipped", "interrupted") else False
        yield Row(f"the step `{name}`", "done", f"{outcome['state']}: {outcome['why']}", holds)


def _driver(contact: Contact) -> Iterator[Row]:
    missing: dict[str, set[str]] = {}
    for gpu in contact.gpus:
        for name, why in gpu.get("missing", {}).items():
            missing.setdefault(why, set()).add(name)
    reasons = "; ".join(f"{why}: {', '.join(sorted(names))}" for why, names in sorted(missing.items()))
    errors = [why for why in missing if why != "not-supported"]
    yield Row(
        "NVML answers every query",
        "an answer, or not-supported",
        reasons or "all answered",
        not errors if contact.gpus else None,
    )
    nvml = contact.result("nvml")
    yield Row("no NVML call hangs", "0", str(nvml.get("hung", "")), nvml.get("hung") == 0 if nvml else None)
    cuda = contact.result("cuda").get("gpus", [])
    same = [device["uuid"] for device in cuda] == [gpu["uuid"] for gpu in contact.gpus]
    yield Row(
        "CUDA and NVML name the same GPUs in the same order",
        "the same UUIDs",
        f"{len(cuda)} and {len(contact.gpus)}",
        same if cuda and contact.gpus else None,
    )
    if len(cuda) > 1:
        by_atomics = all(any(device["linked"]) for device in cuda)
        by_links = all(any(gpu.get("nvlinks") or ()) for gpu in contact.gpus)
        yield Row(
            "native atomics between peers distinguish NVLink from PCIe",
            "as NVML's links say",
            f"by atomics: {by_atomics}; NVML has links up: {by_links}",
            by_atomics == by_links if contact.gpus else None,
        )
    for name, workers in contact.result("jit").get("workers", {}).items():
        measured = [m for worker in workers for m in worker["measurements"] if m["id"].startswith("jit.")]
        spent = sum(m["measured"] or 0 for m in measured)
        yield Row(
            f"the driver's compiler, {name}", "<= 3 s", f"{spent:.2f} s", spent <= 3 if measured else None
        )


def _answers(contact: Contact) -> Iterator[Row]:
    for name in ANSWERS:
        results = [measurement for measurement in contact.measurements("spread") if measurement["id"] == name]
        done = sum(result["status"] == "done" for result in results)
        other = sorted(
            {f"{result['status']}: {result['detail']}" for result in results if result["status"] != "done"}
        )[:2]
        yield Row(
            f"{name}: the host's answers",
            "0 mismatches",
            f"{done} of {len(results)} runs {'; '.join(other)}",
            done == len(results) if results else None,
        )
    covered = [
        measurement
        for measurement in contact.measurements("coverage")
        if measurement["id"].startswith("cover.")
    ]
    if covered:
        sms = {device["uuid"]: device["sms"] for device in contact.result("cuda").get("gpus", [])}
        whole = [
            measurement for measurement in covered if measurement["measured"] == sms.get(measurement["gpu"])
        ]
        least = min((int(measurement["id"].removeprefix("cover.")) for measurement in whole), default=0)
        gpus = {measurement["gpu"] for measurement in whole}
        most = known_answer.BLOCKS_PER_SM[-1]
        yield Row(
            "every SM gets a block",
            f"with at most {most} blocks per SM",
            f"with {least}" if whole else "with none that was tried",
            gpus == {measurement["gpu"] for measurement in covered},
        )
    else:
        yield Row("every SM gets a block", "some launch reaches all", "", None)


def _speeds(contact: Contact) -> Iterator[Row]:
    references = contact.result("references")
    for name, (sign, goal) in bench.GOALS.items():
        if name == "boot_quick_seconds":
            continue
        value = references.get(name)
        why = references.get("mma_missing" if name == "mma_ratio" else "copies_error", "")
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
                f"{way} of all GPUs at the same time",
                "as alone, or half of it behind a shared switch",
                f"{part:.2f} of {speed:.1f} GB/s",
                part >= 0.4,
            )


def _best(contact: Contact, kind: str) -> dict[str, float]:
    """Return, for each way of copying, the speed of the slowest GPU from its best NUMA node."""
    best: dict[tuple[str, str], float] = {}
    for measurement in contact.measurements("copies", kind):
        if measurement["id"].startswith("bw.") and measurement["measured"] is not None:
            key = (".".join(measurement["id"].split(".")[:2]), measurement["gpu"])
            best[key] = max(best.get(key, 0.0), measurement["measured"])
    ways = {way for way, _ in best}
    return {way: min(speed for (name, _), speed in best.items() if name == way) for way in sorted(ways)}


def _drills(contact: Contact) -> Iterator[Row]:
    for name, subject in _DRILLS.items():
        result = contact.result(name)
        if not result:
            yield Row(subject, "detected", "", None)
            continue
        worker = result.get("worker") or {}
        outcome = str(worker.get("ended") or result.get("cuda") or f"exit status {result.get('exit_status')}")
        if "xids" in result:
            numbers = [str(xid["number"]) for xid in result["xids"] or ()]
            outcome += f"; Xids {', '.join(numbers) or 'none'} {result.get('kernel_log', '')}".rstrip()
        holds = None if result.get("kernel_log") else bool(result.get("caught"))
        yield Row(subject, "detected", outcome, holds)


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
        ("the fabric has a state", model.fabric_state, first.get("fabric_state") is not None, _same),
        (
            "driver flavour",
            "/".join(model.driver_flavours),
            contact.machine.get("flavour", ""),
            lambda a, b: b in a,
        ),
        ("local NVMe disks", size.local_nvme, contact.machine.get("local_nvme"), lambda a, b: a in (None, b)),
        ("memory of the machine, GiB", size.memory_gib, contact.machine.get("memory_bytes", 0) >> 30, _near),
    ]
    for subject, assumed, measured, agree in compared:
        yield Row(f"{size.name}: {subject}", str(assumed), str(measured), bool(agree(assumed, measured)))
    floors = {
        "bw.hbm": size.hbm_floor_gbps,
        "bw.h2d": size.h2d_floor_gbps,
        "bw.d2h": size.d2h_floor_gbps,
        "bw.p2p": size.p2p_floor_gbps,
    }
    for name, floor in floors.items():
        if floor is None:
            continue
        values = [value for values in contact.runs(name).values() for value in values]
        measured = f"lowest {min(values):.4g}, median {median(values):.4g}" if values else ""
        yield Row(
            f"{size.name}: {name}, GB/s",
            f">= {floor.value:g}",
            measured,
            min(values) >= floor.value if values else None,
        )


def _same(assumed: Any, measured: Any) -> bool:
    return bool(assumed == measured)


def _near(assumed: int, measured: int) -> bool:
    return abs(assumed - measured) <= 0.1 * assumed
