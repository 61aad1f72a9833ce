"""This project's own checks, fast ones first: lint and types, the unit tests, then everything that needs root.

This package starts them all, compares the times with the ceilings, and prints a single closing line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from image_builder.bake.store import Store
from image_builder.errors import UsageError
from tests.selftest import ceilings, compiled, durations, lanes
from tests.selftest.ceilings import CEILINGS
from tests.selftest.disk import peak_disk
from tests.selftest.lint import lint
from tests.selftest.proofs import Proofs
from tests.selftest.surroundings import cache_directory, environment


def run(
    arguments: Sequence[str],
    *,
    fast: bool,
    store: Path,
    as_json: bool,
    nightly: bool = False,
    use_proofs: bool = True,
) -> int:
    """Run the checks and return the exit status: 0 when all passed.

    With ``arguments`` (for pytest) only pytest runs, once. ``fast`` omits the tests that need root, ``nightly`` adds
    those that take too long for every commit, and without ``use_proofs`` tests that earlier runs have proven run again.
    Progress goes to standard output, or to standard error if ``as_json`` reserves standard output for the result.
    """
    if not fast and os.geteuid() != 0:
        raise UsageError("the whole suite needs root", hint="image-builder test --fast needs none")
    write = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    cache = cache_directory()
    kind = "chosen" if arguments else "fast" if fast else "nightly" if nightly else durations.WHOLE_RUN
    store_state = "filled" if any((store / "objects").glob("*")) else "empty"
    slowness = ceilings.slowness()
    started = time.monotonic()
    proofs = _proofs(cache, write) if use_proofs and kind == durations.WHOLE_RUN else None
    clean = bool(arguments) or lint(cache, write)
    minutes = dict.fromkeys(CEILINGS if not fast else ("fast",), 0.0)
    with peak_disk([store, Path(environment(cache)["TMPDIR"])]) as disk:
        surroundings = lanes.Surroundings(store, cache, durations.reports(cache, kind), write)
        if arguments:
            outcomes = [lanes.chosen(arguments, surroundings, fast=fast)]
        else:
            outcomes = lanes.unit(surroundings)
            minutes["fast"] = (time.monotonic() - started) / 60
            if not fast and clean and not any(outcome.status for outcome in outcomes):
                outcomes += _rest(surroundings, nightly=nightly, proofs=proofs)
            elif not fast:
                write("what needs root is not run")
    _add_minutes(minutes, outcomes, with_units=bool(arguments))
    whole, gigabytes = (time.monotonic() - started) / 60, disk[0] / 1e9
    is_sound = passed = clean and all(outcome.status == 0 for outcome in outcomes)
    if not arguments:
        for line in durations.slowest(durations.files(surroundings.reports)):
            write(line)
        # Nightly runs have no ceilings.
        slowness = max(slowness, ceilings.slowness())
        judgement = ceilings.lines(minutes, whole, gigabytes, store_state, slowness)
        passed &= nightly or _write(judgement, write)
    write(f"JUnit files: {surroundings.reports}")
    if not clean:
        write("lint failed: see above")
    times = {name: round(spent, 2) for name, spent in (minutes | {"all": whole}).items()}
    if kind == durations.WHOLE_RUN and not (proofs and proofs.days):
        durations.keep(surroundings.reports, _of_today(store_state, times, gigabytes, passed=is_sound))
    closing = lanes.closing_line(outcomes, whole * 60)
    write(closing)
    if as_json:
        result = {"passed": passed, "minutes": times, "disk_gb": round(gigabytes, 2), "closing": closing}
        print(json.dumps(result))
    return 0 if passed else 1


def _add_minutes(minutes: dict[str, float], outcomes: Iterable[lanes.Outcome], *, with_units: bool) -> None:
    """Add up the minutes of all lanes, by part."""
    for outcome in outcomes:
        for part, of_part in _minutes(outcome, with_units=with_units):
            minutes[part] = minutes.get(part, 0.0) + of_part


def _write(judgement: Iterable[tuple[str, bool]], write: Callable[[str], None]) -> bool:
    """Write a line about each ceiling; return whether none is exceeded."""
    reds = []
    for line, is_red in judgement:
        write(line)
        reds.append(is_red)
    return not any(reds)


def _of_today(
    store_state: str, minutes: Mapping[str, float], gigabytes: float, *, passed: bool
) -> durations.Run:
    """Return the record of a complete run that has just ended."""
    return durations.Run(
        day=datetime.now(UTC).date().isoformat(),
        store=store_state,
        processors=os.cpu_count() or 1,
        passed=passed,
        minutes=minutes,
        gigabytes=round(gigabytes, 2),
    )


def _minutes(outcome: lanes.Outcome, *, with_units: bool) -> Iterator[tuple[str, float]]:
    """Yield the minutes of each part. For the unit tests, wall time counts, from the start of lint."""
    for part, seconds in outcome.parts.items():
        if with_units or part != "unit":
            yield "fast" if part == "unit" else part, seconds / 60


def _proofs(cache: Path, write: Callable[[str], None]) -> Proofs:
    """Return the proofs of earlier runs, and report how many there are."""
    proofs = Proofs.look_up(cache / "proofs", lanes.REST + lanes.NOT_NIGHTLY)
    if proofs.days:
        number, since = len(proofs.days), min(proofs.days.values())
        write(
            f"proven by runs on this host since {since}: {number} files of tests (--no-proofs runs them again)"
        )
    return proofs


def _rest(surroundings: lanes.Surroundings, *, nightly: bool, proofs: Proofs | None) -> list[lanes.Outcome]:
    """Run the tests that need root. Nightly runs compile what their store lacks, others use the cache directory."""
    store, place = Store(surroundings.store), compiled.directory(surroundings.cache)
    store.prepare()
    if not nightly:
        for name in compiled.restore(store, place):
            surroundings.write(f"{name}: compiled by an earlier run")
    outcomes = lanes.rest(surroundings, nightly=nightly, proofs=proofs)
    compiled.keep(store, place)
    return outcomes
