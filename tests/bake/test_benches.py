"""Each bench runs at its smallest size, and prints the figures that it is for. What they are says nothing here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from tests.support.images import programs
from tests.support.images.builds import REPO, Workplace

pytestmark = [pytest.mark.root, pytest.mark.slow]

# The fixture of the image that a bench needs in the store, and the figures that it is for.
BENCHES = [
    pytest.param("bake", "minimal", "cold_ratio warm_seconds last_role_ratio peak_mib", id="bake"),
    pytest.param("exported", "tiny", "import_ratio warm_seconds", id="exported"),
    pytest.param("gate", "", "largest lists_and_watches reading_seconds", id="gate"),
    pytest.param("health", "", "cpu_ratio memory_ratio start_ratio", id="health"),
    pytest.param("house", "", "python_lines vague_share code_bake code_node", id="house"),
    pytest.param(
        "pools",
        "",
        "plan_ratio probe_ratio verify_ratio resume_overhead bootstrap_ratio rejoin_seconds rejoin_changed",
        id="pools",
    ),
    pytest.param(
        "power_on",
        "worker_current",
        "power_on_ratio",
        id="power_on",
        marks=[pytest.mark.boot, programs.needs_programs],
    ),
    pytest.param(
        "preload",
        "",
        "docker_large_0.1gb_load_ratio docker_large_0.1gb_seed_flatness docker_many_seconds",
        id="preload",
    ),
    pytest.param("publish", "", "upload_cpu_ratio resumed_ratio twice_ratio", id="publish"),
    pytest.param("pull", "", "parallel_ratio hand_ratio wire_ratio", id="pull"),
    pytest.param(
        "roll",
        "",
        "jobs_lost driver_cpu_seconds requests_a_node azure_requests_a_node back_seconds",
        id="roll",
        marks=programs.needs_programs,
    ),
    pytest.param(
        "roll_days", "", "roll_days gpu_hours_idle_percent throttle_share throttled", id="roll_days"
    ),
]


def run(name: str, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, os.fspath(REPO / f"tests/bench/{name}.py"), "--json", *more]
    return subprocess.run(argv, cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize(("name", "image", "figures"), BENCHES)
def test_a_bench_prints_its_ratios(
    name: str, image: str, figures: str, request: pytest.FixtureRequest
) -> None:
    place: Workplace | None = request.getfixturevalue(image) if image else None
    more = ["--artefact", os.fspath(place.artefact)] if place and name == "power_on" else []
    done = run(name, "--smallest", *more)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert all(math.isfinite(found[figure]) for figure in figures.split())


def test_without_a_gpu_its_bench_measures_nothing() -> None:
    done = run("gpu")
    assert (done.returncode, json.loads(done.stdout)["gpu"]) == (4, None)


def test_no_bench_is_left_out() -> None:
    there = {path.stem for path in (REPO / "tests/bench").glob("*.py") if "__main__" in path.read_text()}
    assert there - {"gpu", "mutants"} == {bench.values[0] for bench in BENCHES}
