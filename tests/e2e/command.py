"""The common parts of this folder's commands: options, builds, a run in namespaces of its own, what it showed."""

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
from tests.support.pages import proofs

# What a run must show, in words, and whether it holds.
Facts = dict[str, bool]


def say(text: str) -> None:
    print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options that all commands have; ``doc`` is the command's module docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print all observations")
    parser.add_argument(
        "--update-docs", action="store_true", help="replace this command's rows of docs/reference/proofs.md"
    )
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


def measure(name: str, settings: Settings, play: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Call ``play`` in namespaces of its own, with a staging directory of the store; return its observations."""
    began, started = proofs.stamp(), time.monotonic()
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

        if status := namespace.run_isolated(lambda: failure.guard(work, json_wanted=False, command=name)):
            raise SystemExit(status)
        return {
            "began": began,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "load": round(os.getloadavg()[2], 1),  # the last 15 minutes
            **json.loads(out.read_text(encoding="utf-8")),
        }


def machine(record: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Return where it ran. ``node`` is the node's nodeInfo."""
    emulated = ", emulated" if record["accelerator"] == "tcg" else ""
    return (
        f"{record['minutes']:.0f} minutes: a QEMU machine with 2 cores{emulated}, on a host with {os.cpu_count()} "
        f"cores and a load of {record['load']}; kubelet {node['kubeletVersion']}, {node['containerRuntimeVersion']}, "
        f"{node['osImage']}, kernel {node['kernelVersion']}"
    )


def conclude(
    told: argparse.Namespace, name: str, record: Mapping[str, Any], figures: Mapping[str, str], facts: Facts
) -> int:
    """Show a run's figures and facts; keep them on the page if requested. Return 1 if a fact doesn't hold."""
    held = f"{sum(facts.values())} of {len(facts)} facts hold"
    shown = {**figures, **{fact: proofs.HOLDS if holds else proofs.FAILS for fact, holds in facts.items()}}
    if told.update_docs:
        proofs.record(f"tests.e2e.{name}", shown, held, proofs.Stamp(*record["began"]))
    print(json.dumps(record, indent=1) if told.json else "\n".join(f"{k}: {v}" for k, v in shown.items()))
    say(held)
    return 0 if all(facts.values()) else 1
