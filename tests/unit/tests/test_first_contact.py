"""The results of a first contact: floors checked by hand, and what may not be published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.first_contact import propose
from tests.bench.first_contact.assumptions import Contact

SIZE = "Standard_ND96isr_H100_v5"
GPUS = [f"GPU-566e6f65-c38e-b12f-4824-6944218668b{n}" for n in range(2)]


def contact(out: Path, runs: dict[str, list[float]]) -> Contact:
    """Write the parts of a first contact's directory that floors come from; both GPUs have the same runs."""
    measured = [
        {"id": name, "gpu": gpu, "status": "done", "measured": value, "detail": ""}
        for gpu in GPUS
        for name, values in runs.items()
        for value in values
    ]
    gpus = [
        {"index": n, "uuid": gpu, "name": "NVIDIA H100", "serial": "165502200547"}
        for n, gpu in enumerate(GPUS)
    ]
    files: dict[str, Any] = {
        "summary.json": {"started": "2026-11-24T10:00:00", "agent": "0123456789ab", "pace": 1, "steps": []},
        "facts.json": {"size": SIZE, "machine": {"driver_loaded": "580.159.04", "pci": []}},
        "steps/readings/result.json": {"nvml": {"gpus": gpus}},
        "steps/spread/result.json": {"workers": [{"measurements": measured}]},
        "steps/smoke-full/result.json": {"document": {"checks": [{"id": "kat.int", "status": "pass"}]}},
    }
    for name, value in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value), encoding="utf-8")
    return Contact(out)


RUNS = {"bw.hbm": [2990.0, 3010.0] * 5, "perf.mma": [600.0, 620.0] * 5}


def test_floors_are_five_deviations_or_five_percent_below_the_median(tmp_path: Path) -> None:
    document = propose.calibration(contact(tmp_path, {**RUNS, "bw.h2d": [50.0, 54.0] * 5}))
    # Twenty runs, each 2 from the median: the sample's deviation is 2 * sqrt(20 / 19), five of them 10.26.
    assert document["overrides"]["h2d_floor_gbps"]["value"] == 41.7
    # Here five of them would be 51.3.
    assert document["overrides"]["hbm_floor_gbps"]["value"] == 2850.0
    # The rule takes 0.85 of a reference by itself.
    assert document["overrides"]["mma_reference_tflops"]["value"] == 610.0
    assert document["why_not"] == []
    record = {**document["calibrations"][0]}
    assert record.pop("from") == "first contact, 2026-11-24, 2 GPUs"
    assert record == {"size": SIZE, "driver": "580.159.04", "agent": "0123456789ab"}


def test_what_would_name_the_machine_is_not_written(tmp_path: Path) -> None:
    answer = {"call": "nvmlDeviceGetFieldValues", "gpu": 0, "numbers": [1, 0], "code": 0}
    out = tmp_path / "out"
    contact(out, RUNS)
    path = out / "steps/nvml/answers.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**answer, "out": {"bytes": b"165502200547".hex()}}) + "\n")
    with pytest.raises(ValueError, match=r"nvml\.jsonl would name the machine"):
        propose.run(out, tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []
    path.write_text(json.dumps({**answer, "out": {"bytes": "00"}}) + "\n")
    assert propose.run(out, tmp_path / "into") == 0
    assert len(list((tmp_path / "into").iterdir())) == 4
