"""This project's own checks, quick ones first: lint and types, the unit tests, then all that needs root.

Here all is started, what it took is compared with the ceilings, and one closing line is printed last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from image_builder.errors import UsageError
from tests.selftest import lanes
from tests.selftest.disk import peak_disk
from tests.selftest.lint import lint
from tests.selftest.surroundings import cache_directory, environment

# Minutes on 2 cores with an empty store. `fast` is lint, types and unit tests; `bake` is everything up to an
# artefact, `preload` the pulls of container images, `disk` the local disk with the preload store, and the booted
# machine, `gpu` the drivers' build, the booted machine with them, and the gate, `pools` hundreds of hosts with sshd.
CEILINGS = {"fast": 2.0, "bake": 15.0, "preload": 8.0, "disk": 15.0, "gpu": 12.0, "pools": 10.0}
# Of the whole, which is less than the sum: booted machines have a lane of their own.
CEILING_MINUTES = 60.0
CEILING_GB = 25.0
# The parts that tests/conftest.py tells apart, and the ceiling that each counts for.
PARTS = {
    "unit": "fast",
    "root": "bake",
    "preload": "preload",
    "pools": "pools",
    "disk": "disk",
    "e2e": "bake",
    "boot": "disk",
    "gpu": "gpu",
}


def run(arguments: Sequence[str], *, fast: bool, store: Path, as_json: bool, nightly: bool = False) -> int:
    """Run the checks and return the exit status: 0 when all passed.

    With ``arguments`` (for pytest) only pytest runs, once. ``fast`` leaves out what needs root, ``nightly`` takes along
    what is too long for every commit. Everything is told on standard output, or on standard error when ``as_json``
    wants that for the result.
    """
    if not fast and os.geteuid() != 0:
        raise UsageError("the whole suite needs root", hint="image-builder test --fast needs none")
    sink = sys.stderr if as_json else sys.stdout

    def write(text: str) -> None:
        print(text, file=sink, flush=True)

    cache = cache_directory()
    started = time.monotonic()
    clean = bool(arguments) or lint(cache, write)
    minutes = dict.fromkeys(CEILINGS, 0.0)
    with peak_disk([store, Path(environment(cache)["TMPDIR"])]) as disk:
        surroundings = lanes.Surroundings(store, cache, write)
        if arguments:
            ended = [lanes.chosen(arguments, surroundings, fast=fast)]
        else:
            ended = lanes.unit(surroundings)
            minutes["fast"] = (time.monotonic() - started) / 60
            if not fast:
                if clean and not any(lane.status for lane in ended):
                    ended += lanes.rest(surroundings, nightly=nightly)
                else:
                    write("what needs root is not run")
    for lane in ended:
        for part, seconds in lane.parts.items():
            if arguments or part != "unit":
                minutes[PARTS[part]] += seconds / 60
    whole = (time.monotonic() - started) / 60
    passed = clean and all(lane.status == 0 for lane in ended)
    for line in _summary(minutes, whole, disk[0] / 1e9, fast):
        write(line)
    if not clean:
        write("lint failed: see above")
    closing = lanes.closing_line(ended, whole * 60)
    write(closing)
    if as_json:
        told = {k: round(v, 2) for k, v in (minutes | {"all": whole}).items()}
        print(
            json.dumps(
                {"passed": passed, "minutes": told, "disk_gb": round(disk[0] / 1e9, 2), "closing": closing}
            )
        )
    return 0 if passed else 1


def _summary(minutes: Mapping[str, float], whole: float, gigabytes: float, fast: bool) -> Iterator[str]:
    for name, taken in minutes.items():
        if name == "fast" or not fast:
            yield f"{name}: {taken:.1f} of {CEILINGS[name]:g} min{' (over)' if taken > CEILINGS[name] else ''}"
    if not fast:
        yield f"all: {whole:.1f} of {CEILING_MINUTES:g} min{' (over)' if whole > CEILING_MINUTES else ''}"
    yield f"disk: {gigabytes:.1f} of {CEILING_GB:g} GB{' (over)' if gigabytes > CEILING_GB else ''}"
