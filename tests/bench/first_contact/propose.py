"""The proposal after a first contact: recordings, floors, and a comparison of assumptions and observations.

Nothing in it identifies the machine: no serial number, no UUID. Nothing is changed in the project: a person reads
the proposal, and copies what is right.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, stdev
from typing import Any

from image_builder.node import files as node_files
from image_builder.node.decode import decode
from image_builder.node.gpu.model import Gpu
from tests.bench.first_contact import assumptions
from tests.bench.first_contact.assumptions import Contact
from tests.bench.first_contact.nvml_answers import ANSWERS

SIGMAS = 5
# Ten runs in a row on one machine differ less than two machines do: on two H200 the medians of perf.mma were 0.2 %
# apart, nearly four of its deviations, and with a floor of five the other machine's slowest run would have failed.
LEAST_MARGIN = 0.05
_LEAST_RUNS = 8  # of the ten, on each GPU, that a floor requires
_WIDEST = 0.5  # a floor below this fraction of the median means that the spread isn't noise
_NOBODY = "GPU-00000000-0000-0000-0000-{:012x}"
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
# Answers that identify a machine; in the fabric's it is the cluster's UUID, at bytes 4 to 20.
NAMING = ("nvmlDeviceGetSerial", "nvmlDeviceGetUUID", "nvmlDeviceGetBoardId")
_FABRIC, _CLUSTER = "nvmlDeviceGetGpuFabricInfoV", slice(8, 40)
_FLOORS = {
    "bw.hbm": "hbm_floor_gbps",
    "bw.h2d": "h2d_floor_gbps",
    "bw.d2h": "d2h_floor_gbps",
    "bw.p2p": "p2p_floor_gbps",
}
# References instead of floors: by the smoke test's rule the floor is 0.85 of the reference.
_REFERENCES = {"perf.mma": "mma_reference_tflops"}


def run(out: Path, into: Path) -> int:
    """Write the proposal; return 0. Raises OSError, and ValueError if something would identify the machine."""
    contact = Contact(out)
    into.mkdir(parents=True, exist_ok=True)
    secrets = list(names_of(contact))
    files: dict[str, bytes] = {
        "gpu-results.md": assumptions.table(contact).encode(),
        "calibration.json": _json(calibration(contact)),
    }
    if contact.gpus:
        name = recording_name(contact)
        files[f"{name}.json"] = _json(recording(contact))
        raw = "".join(f"{json.dumps(answer)}\n" for answer in answers(contact))
        files[f"{name}.nvml.jsonl"] = raw.encode()
    for name, data in files.items():
        named = [secret for secret in secrets if secret in data]
        if named:
            raise ValueError(f"{name} would name the machine: {named[0][:12].decode('ascii', 'replace')}…")
    for name, data in files.items():
        packed = name.endswith(".jsonl")
        node_files.write(into / (f"{name}.xz" if packed else name), lzma.compress(data) if packed else data)
        sys.stderr.write(f"{into / name}{'.xz' if packed else ''}\n")
    return 0


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def names_of(contact: Contact) -> Iterator[bytes]:
    """Yield what no file may contain: serial numbers and UUIDs, as text and as NVML's bytes in hex."""
    for gpu in contact.gpus:
        for text in (gpu.get("serial"), gpu["uuid"], gpu["uuid"].removeprefix("GPU-")):
            if text:
                yield text.encode()
                yield text.encode().hex().encode()
        yield gpu["uuid"].removeprefix("GPU-").replace("-", "").encode()


def _nameless(value: Any, places: Mapping[str, int]) -> Any:
    """Return a JSON value with each GPU's UUID replaced by one that contains only its index."""
    text = _UUID.sub(lambda match: _NOBODY.format(places.get(match[0].lower(), 0xFF)), json.dumps(value))
    return json.loads(text)


def _places(contact: Contact) -> dict[str, int]:
    return {gpu["uuid"].lower(): gpu["index"] for gpu in contact.gpus}


# -- recordings ------------------------------------------------------------------------------------------------


def recording_name(contact: Contact) -> str:
    """Return the files' base name, made from the GPU's name and the driver's version."""
    slug = re.sub(r"[^a-z0-9]+", "-", str(contact.gpus[0].get("name", "gpu")).lower()).strip("-")
    return f"{slug.removeprefix('nvidia-').removeprefix('tesla-')}-{contact.driver}"


def recording(contact: Contact) -> dict[str, Any]:
    """Return NVML's answers in the format of tests/data/gpu: all GPUs, before any of them was put under load."""
    gpus = []
    for gpu in contact.gpus:
        fields = {key: value for key, value in gpu.items() if key != "serial" and value not in (None, {})}
        gpus.append(_nameless(fields, _places(contact)))
        decode(Gpu, gpus[-1])  # the tests will read it this way
    return {
        "format": 1,
        "source": f"first contact, {contact.date}, program {contact.agent}",
        "recorded": contact.date,
        "driver": contact.driver,
        "attached": len(gpus),
        "pci_devices": [device["device"] for device in contact.machine.get("pci", ())],
        "gpus": gpus,
    }


def answers(contact: Contact) -> Iterator[dict[str, Any]]:
    """Yield every NVML answer about the machine and its first GPU, including its bytes, without identifying data."""
    for answer in contact.lines("nvml", ANSWERS):
        if "code" in answer and answer["gpu"] in (None, 0):
            yield _nameless(_without_names(answer), _places(contact))


def _without_names(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["call"] in NAMING:
        return {key: value for key, value in answer.items() if key != "out"}
    if answer["call"] != _FABRIC or not answer.get("out"):
        return answer
    written = answer["out"]["value"]
    zeros = "0" * (_CLUSTER.stop - _CLUSTER.start)
    data = written["bytes"][: _CLUSTER.start] + zeros + written["bytes"][_CLUSTER.stop :]
    value = {**written["value"], "clusterUuid": [0] * 16}
    return {**answer, "out": {"value": {**written, "bytes": data, "value": value}}}


# -- floors ----------------------------------------------------------------------------------------------------


def calibration(contact: Contact) -> dict[str, Any]:
    """Return what ``/etc/node-agent/gpu.json`` may contain after this: the record of the calibration, and floors.

    A machine on which something went wrong isn't used for calibration: ``why_not`` gives the reasons.
    """
    why_not = [*contact.doubts()]
    floors: dict[str, Any] = {}
    for name, key in {**_FLOORS, **_REFERENCES}.items():
        runs = contact.runs(name)
        values = [value for measured in runs.values() for value in measured]
        if not values:
            continue
        if min(map(len, runs.values())) < _LEAST_RUNS:
            why_not.append(f"{name}: fewer than {_LEAST_RUNS} runs on a GPU")
            continue
        middle, spread = median(values), stdev(values)
        floor = min(middle - SIGMAS * spread, middle * (1 - LEAST_MARGIN))
        if floor < _WIDEST * middle:
            why_not.append(f"{name}: its runs differ too much ({spread:.3g} around {middle:.4g})")
            continue
        summary = f"{len(runs)} GPUs, {len(values)} runs: median {middle:.4g}, deviation {spread:.3g}"
        value = middle if name in _REFERENCES else floor
        floors[key] = {"value": round(value, 1), "from": f"first contact, {contact.date}: {summary}"}
    document: dict[str, Any] = {"why_not": why_not, "overrides": floors, "calibrations": []}
    if not why_not:
        source = f"first contact, {contact.date}, {len(contact.gpus)} GPUs"
        document["calibrations"] = [
            {"size": contact.size, "driver": contact.driver, "agent": contact.agent, "from": source}
        ]
    return document
