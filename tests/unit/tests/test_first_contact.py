"""The results of a first contact: floors checked by hand, runs that calibrate nothing, what may not be published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.first_contact import propose, worker
from tests.bench.first_contact.assumptions import Contact, rows, table
from tests.bench.first_contact.context import TOTAL_SECONDS
from tests.bench.first_contact.runner import REAP_SECONDS
from tests.bench.first_contact.steps import STEPS

SIZE = "Standard_ND96isr_H100_v5"
GPUS = [f"GPU-566e6f65-c38e-b12f-4824-6944218668b{n}" for n in range(2)]


def test_down_to_a_fifth_of_its_length_a_run_measures_as_often() -> None:
    assert [worker.runs(pace) for pace in (1.0, 0.5, 0.2, 0.1, 0.02)] == [10, 10, 10, 5, 3]


def test_what_is_kept_for_each_step_fits_into_the_whole() -> None:
    assert sum(step.least for step in STEPS if not step.spare) + REAP_SECONDS < TOTAL_SECONDS
    assert all(step.least <= step.seconds for step in STEPS)
    assert len({step.name for step in STEPS}) == len(STEPS)


def contact(out: Path, runs: dict[str, list[float]], *, size: str = SIZE, **changes: Any) -> Contact:
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
        "facts.json": {"size": size, "machine": {"driver_loaded": "580.159.04", "pci": []}},
        "steps/readings/result.json": {"nvml": {"gpus": gpus}},
        "steps/spread/result.json": {"workers": [{"measurements": measured}]},
        "steps/smoke-full/result.json": {"document": {"checks": [{"id": "kat.int", "status": "pass"}]}},
    }
    for name, value in {**files, **changes}.items():
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


WRONG = {"id": "kat.ffma", "gpu": GPUS[0], "status": "failed", "measured": 1.0, "detail": "x"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": ""}, "size"),
        ({"summary.json": {"pace": 0.5}}, "shortened"),
        ({"steps/smoke-full/result.json": {}}, "no document"),
        (
            {"steps/smoke-full/result.json": {"document": {"checks": [{"id": "ecc.off", "status": "fail"}]}}},
            "ecc.off",
        ),
        ({"steps/spread/result.json": {"workers": [{"measurements": [WRONG]}]}}, "wrong answers: kat.ffma"),
    ],
)
def test_what_calibrates_nothing(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    document = propose.calibration(contact(tmp_path, RUNS, **changes))
    assert document["calibrations"] == [] and any(why in reason for reason in document["why_not"])


@pytest.mark.parametrize("values", [[3000.0] * 7, [1000.0, 5000.0] * 5])
def test_too_few_runs_or_too_wide_a_spread_make_no_floor(values: list[float], tmp_path: Path) -> None:
    document = propose.calibration(contact(tmp_path, {"bw.hbm": values}))
    assert (
        document["overrides"] == {} and document["calibrations"] == [] and "bw.hbm" in document["why_not"][0]
    )


def test_a_floor_that_was_assumed_too_high_is_marked(tmp_path: Path) -> None:
    learned = contact(tmp_path, {"bw.hbm": [12.0] * 10})
    row = next(row for row in rows(learned) if row.subject == f"{SIZE}: bw.hbm, GB/s")
    assert row.holds is False and "lowest 12" in row.measured
    assert f"| {SIZE}: bw.hbm, GB/s |" in table(learned) and "**differs**" in table(learned)


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
