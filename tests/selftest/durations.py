"""The time that each test file takes: in the last run, and in the runs that the repository records.

A run keeps a JUnit file of each lane in the cache directory. ``.venv/bin/python -m tests.selftest.durations`` writes
the times of the last complete run to docs/reference; lanes use them to take the longest files first.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from image_builder.settings import REPO_ROOT
from tests.selftest.ceilings import CEILING_GB, CEILINGS, WHOLE
from tests.selftest.surroundings import cache_directory

RECORD = REPO_ROOT / "docs/reference/ci-durations.json"
PAGE = REPO_ROOT / "docs/reference/benchmarks.md"
SLOWEST = 30
# The kind of run that is recorded: not a selection of tests, not only the fast ones, not a nightly run.
WHOLE_RUN = "all"
_BEGIN, _END = "<!-- ci-durations -->\n", "<!-- /ci-durations -->\n"


@dataclass(frozen=True)
class Run:
    """A complete run: its day, the store (`empty` or `filled`), whether all tests passed, its times and disk usage."""

    day: str
    store: str
    processors: int
    passed: bool
    minutes: Mapping[str, float]
    gigabytes: float


def reports(cache: Path, kind: str) -> Path:
    """Return the directory of a run's JUnit files, without those of an earlier run of the same kind."""
    path = cache / "reports" / kind
    path.mkdir(parents=True, exist_ok=True)
    for old in path.iterdir():
        old.unlink()
    return path


def files(directory: Path) -> dict[str, float]:
    """Return the seconds of each test file, longest first, from the JUnit files in a directory."""
    seconds: dict[str, float] = {}
    for path in directory.glob("*.xml"):
        for case in ET.parse(path).getroot().iter("testcase"):
            name = case.get("file", "")
            seconds[name] = seconds.get(name, 0.0) + float(case.get("time", "0"))
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))


def slowest(seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield lines about the slowest files."""
    yield f"the {min(SLOWEST, len(seconds))} slowest files (seconds, with the images that they were the first to need):"
    for name, taken in list(seconds.items())[:SLOWEST]:
        yield f"{taken:8.1f}  {name}"


def keep(directory: Path, run: Run) -> None:
    """Save the record of a complete run next to its JUnit files."""
    (directory / "run.json").write_text(json.dumps(asdict(run)), encoding="utf-8")


def expected(record: Path = RECORD) -> dict[str, float]:
    """Return the recorded seconds of each file, preferably from a run with a filled store."""
    runs = _recorded(record)
    times: dict[str, float] = {}
    for store in ("empty", "filled"):
        times |= runs.get(store, {}).get("files", {})
    return times


def table(record: Path = RECORD) -> str:
    """Return the page's table of the recorded runs."""
    runs = _recorded(record)
    stores = [store for store in ("empty", "filled") if store in runs]
    lines = [f"| part | {' | '.join(f'minutes, {store} store' for store in stores)} | ceiling |"]
    lines.append(f"| --- |{' --- |' * (len(stores) + 1)}")
    for part, ceiling in CEILINGS.items():
        taken = [f"{runs[store]['minutes'][part]:.1f}" for store in stores]
        lines.append(f"| {part} | {' | '.join(taken)} | {ceiling:g} |")
    taken = [f"{runs[store]['minutes']['all']:.1f}" for store in stores]
    lines.append(f"| all | {' | '.join(taken)} | {WHOLE['empty']:g} empty, {WHOLE['filled']:g} filled |")
    sizes = [f"{runs[store]['gigabytes']:.1f} GB" for store in stores]
    lines.append(f"| disk space | {' | '.join(sizes)} | {CEILING_GB:g} GB |")
    days = ", ".join(
        f"{runs[store]['day']} ({store}, {runs[store]['processors']} processors)" for store in stores
    )
    return f"Measured {days}.\n\n" + "\n".join(lines) + "\n"


def in_page(text: str, content: str) -> str:
    """Return a page with its table replaced."""
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, "the page has no place for the table"
    return f"{before}{_BEGIN}{content}{_END}{after}"


def _recorded(record: Path) -> dict[str, Any]:
    runs: dict[str, Any] = json.loads(record.read_bytes()) if record.exists() else {}
    return runs


def main() -> int:
    """Write the last whole run's times into the record, and the record's table into the page."""
    directory = cache_directory() / "reports" / WHOLE_RUN
    last = directory / "run.json"
    if not last.exists():
        print("there is no whole run: `.ci/run` first", file=sys.stderr)
        return 1
    run = json.loads(last.read_bytes())
    if not run["passed"]:
        print("the last run failed: what it took is no measure", file=sys.stderr)
        return 1
    taken = {name: round(seconds, 1) for name, seconds in files(directory).items() if seconds >= 0.05}
    runs = _recorded(RECORD) | {run["store"]: run | {"files": taken}}
    RECORD.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
