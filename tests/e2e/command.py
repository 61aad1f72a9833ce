"""The common parts of this folder's commands: options, builds, a run in namespaces of its own, the record."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from image_builder.bake.store import Store
from image_builder.cli import failure
from image_builder.settings import DEFAULT_STORE, REPO_ROOT, Settings
from image_builder.system import namespace
from tests.support import provenance


def say(text: str) -> None:
    print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options that all commands have; ``doc`` is the command's module docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--update-docs", action="store_true", help="keep the record, make the page anew")
    parser.add_argument("--render", action="store_true", help="do nothing: take the record that was kept")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    parser.add_argument(
        "--output", type=Path, default=Path.cwd() / "output", help="where builds are published"
    )
    return parser


# The lab's images; the workers have the large image.
LARGE_LAB = (REPO_ROOT / "inventories/lab", REPO_ROOT / "tests/e2e/large.yml")


def settings_of(told: argparse.Namespace) -> Settings:
    return Settings(store=told.store, output=told.output)


def build(image: str, inventories: Sequence[Path], settings: Settings) -> Path:
    """Build an image with the real command; return the directory of its artifacts."""
    say(f"building {image}")
    argv = [os.fspath(REPO_ROOT / "image-builder"), "build", image, "--json"]
    places = [("-i", inventory) for inventory in inventories]
    places += [("--store", settings.store), ("--output", settings.output)]
    done = subprocess.run(
        [*argv, *(word for name, path in places for word in (name, os.fspath(path)))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "CI": "true"},
    )
    return Path(json.loads(done.stdout)["artefact"])


def measure(
    name: str, settings: Settings, about: provenance.Subject, play: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Call ``play`` in namespaces of its own, with a staging directory of the store; return its record.

    ``about`` is the code that the result depends on.
    """
    code = provenance.digest(about)
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        out = Path(folder, "record.json")

        def work() -> int:
            store = Store(settings.store)
            with store.in_use(), store.staging() as staging:
                try:
                    seen = play(staging)
                except AssertionError:
                    traceback.print_exc()
                    return 1
            out.write_text(json.dumps(seen), encoding="utf-8")
            return 0

        started = time.monotonic()
        if status := namespace.run_isolated(lambda: failure.guard(work, json_wanted=False, command=name)):
            raise SystemExit(status)
        return {
            "code": code,
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "minutes": round((time.monotonic() - started) / 60, 1),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[2], 1),  # the last 15 minutes
            **json.loads(out.read_text(encoding="utf-8")),
        }


def kept(file: Path) -> dict[str, Any]:
    """Return the saved record."""
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def conclude(
    told: argparse.Namespace,
    record: Mapping[str, Any],
    file: Path,
    *,
    write: Callable[[Mapping[str, Any]], object],
    shown: Callable[[Mapping[str, Any]], str],
    wrong: list[str],
) -> int:
    """Show a record; save it in ``file`` and ``write`` its page if requested. Return 1 if anything is wrong."""
    if told.update_docs:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write(record)
    print(json.dumps(record, indent=1) if told.json else shown(record))
    for text in wrong:
        say(f"does not hold: {text}")
    return 1 if wrong else 0
