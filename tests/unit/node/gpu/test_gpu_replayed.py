"""A real GPU's answers, byte by byte: an H200 in a one-GPU machine with driver 580.159.04, 2026-11-26.

``tests/bench/gpu.py --first-contact`` recorded every NVML call with its return code and the bytes that it wrote.
Here they are written into our own structures, so neither layouts nor meanings are from memory.
"""

from __future__ import annotations

import ctypes
import json
import lzma
from collections.abc import Callable
from ctypes import addressof, c_uint, memmove, sizeof
from dataclasses import replace
from typing import Any

from image_builder.node.decode import decode
from image_builder.node.gpu import nvml, readings
from image_builder.node.gpu.evidence import NOT_APPLICABLE, Evidence
from image_builder.node.gpu.model import Gpu, Measurement, Seen
from image_builder.node.gpu.rules.checks import judge, missing
from image_builder.node.gpu.settings import Settings
from image_builder.node.gpu.smoke.command import expectation
from image_builder.node.gpu.xids import parse_message
from image_builder.node.health import gpu as health
from tests.support.gpu_stand_in.recordings import CATALOGUE, DATA, node, recorded

RECORDING = "h200-580.159.04"
_NAMELESS = "GPU-00000000-0000-0000-0000-000000000000"
# Recorded with NVIDIA's Python binding's structure, 8 bytes and a version. The driver wrote over that version.
_UNREPAIRABLE = "nvmlDeviceGetUnrepairableMemoryFlag_v1"
_SILENT = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetSerial")  # answered, but not recorded


class Replayed:
    """A library that gives the recorded answers of one GPU."""

    def __init__(self) -> None:
        lines = lzma.decompress((DATA / f"{RECORDING}.nvml.jsonl.xz").read_bytes()).decode().splitlines()
        records = [json.loads(line) for line in lines]
        self.records = {(record["call"], tuple(record["numbers"])): record for record in records}

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name in _SILENT:
            return 0
        if name == "nvmlDeviceGetUUID":
            arguments[1].value = _NAMELESS.encode()
            return 0
        if name == "nvmlDeviceGetFieldValues":
            for request in arguments[2]:
                self._field(request)
            return 0
        numbers = tuple(argument.value for argument in arguments if type(argument) is c_uint)
        is_text = (
            any(isinstance(argument, ctypes.Array) for argument in arguments) and (name, ()) in self.records
        )
        record = self.records[name, () if is_text else numbers]
        for output in record.get("out", {}).values():
            target = getattr(arguments[output["at"]], "_obj", arguments[output["at"]])
            data = bytes.fromhex(output["bytes"])
            assert is_text or len(data) == sizeof(target) or name == _UNREPAIRABLE, name
            memmove(addressof(target), data, min(len(data), sizeof(target)))
        return int(record["code"])

    def _field(self, request: nvml.FieldValue) -> None:
        record = self.records["nvmlDeviceGetFieldValues", (request.fieldId, request.scopeId)]
        request.nvmlReturn = record["code"]
        if "out" in record:
            request.valueType = record["out"]["type"]
            data = bytes.fromhex(record["out"]["bytes"])
            memmove(addressof(request.value), data, len(data))


def reading() -> Any:
    return readings.look(nvml.Library(Replayed()))


def test_the_bytes_become_what_was_read_on_the_machine() -> None:
    result = reading()
    expected, driver = recorded(RECORDING)
    assert (result.error, result.driver, result.count, dict(result.lost)) == ("", driver, 1, {})
    assert replace(result.gpus[0], serial=None) == expected


def test_unrepairable_memory_is_where_the_driver_writes_it() -> None:
    library = Replayed()
    output = library.records[_UNREPAIRABLE, ()]["out"]["value"]
    assert output["value"]["version"] == 0, "a driver that leaves the version as it was sent"
    for written, is_unrepairable in (("0000000000000000", False), ("0100000000000000", True)):
        output["bytes"] = written
        assert readings.look(nvml.Library(library)).gpus[0].unrepairable_memory is is_unrepairable


def test_what_this_gpu_does_not_answer_is_not_supported_and_nothing_else() -> None:
    # A single GPU from a board with NVSwitches: its links and its fabric belong to the platform and are hidden.
    gpu = reading().gpus[0]
    assert set(gpu.missing.values()) == {"not-supported"}
    assert gpu.nvlinks is None and gpu.fabric_state == "not-supported"


def test_a_working_node_finds_nothing() -> None:
    assert health.rule(reading(), 1, {}) == []


def test_a_lone_gpu_of_an_unknown_size_passes_without_links() -> None:
    settings = Settings(mode="enforce", allow_unknown_size=True, count=1)
    whole = node("H200")
    gpu, uuid = reading().gpus[0], whole.gpus[0].uuid
    results: tuple[Measurement, ...] = tuple(
        replace(measurement, gpu=gpu.uuid)
        for measurement in whole.workers[0].measurements
        if measurement.id != "bw.p2p" and measurement.gpu == uuid
    )
    machine = replace(
        whole.before.machine,
        vm_size="",
        driver_loaded="580.159.04",
        libraries={"libcuda": "580.159.04", "libnvidia-ml": "580.159.04"},
        modules={"nvidia": "580.159.04", "nvidia_uvm": "580.159.04"},
        pci=(replace(whole.before.machine.pci[0], address="0000:00:06.0"),),
        nodes=("nvidia0", "nvidiactl", "nvidia-uvm"),
        cdi_gpus=None,
        fabric_manager="",
        ports=(),
    )
    seen = Seen(machine, reading())
    evidence = Evidence(
        "boot-full",
        expectation(settings, ""),
        CATALOGUE,
        seen,
        seen,
        tuple(replace(sample, gpu=gpu.uuid) for sample in whole.samples if sample.gpu == uuid),
        (replace(whole.workers[0], gpu=gpu.uuid, measurements=results),),
        whole.began_us,
    )
    checks = judge(evidence)
    assert [check.code for check in checks if check.id == "bw.p2p"] == [NOT_APPLICABLE]
    assert missing(checks, "boot-full") == [] and not [check for check in checks if check.status == "fail"]


def test_one_fault_of_a_program_is_four_records_of_xid_13() -> None:
    lines = (DATA / "xids-580.159.04.log").read_text(encoding="utf-8").splitlines()
    xids = [parse_message(line, 1) for line in lines]
    assert [xid and (xid.number, xid.pci) for xid in xids] == [
        *[(13, "0000:00:06")] * 4,
        (31, "0000:00:06"),
    ]
    assert {CATALOGUE.classify(xid.number).name for xid in xids if xid} == {"RESTART_APP"}


def test_the_recording_names_no_machine() -> None:
    text = lzma.decompress((DATA / f"{RECORDING}.nvml.jsonl.xz").read_bytes()).decode()
    assert decode(Gpu, json.loads((DATA / f"{RECORDING}.json").read_text())["gpus"][0]).serial is None
    for call in ("nvmlDeviceGetSerial", "nvmlDeviceGetUUID", "nvmlDeviceGetBoardId"):
        (record,) = [json.loads(line) for line in text.splitlines() if f'"{call}"' in line]
        assert "out" not in record
