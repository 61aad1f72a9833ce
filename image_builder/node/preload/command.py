"""``node-agent preload``: ask the engine for every image, load the archive where one is missing, ask again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import layout, preload_settings, status
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.preload import archive, images, outcome
from image_builder.node.preload.containerd import Containerd
from image_builder.node.preload.docker import Docker
from image_builder.node.preload.engine import Engine
from image_builder.node.preload.images import Preload, Store
from image_builder.node.preload.outcome import Done

# Seconds between two lines of progress.
_INTERVAL = 3.0


@dataclass(frozen=True)
class Places(status.Places):
    """And the descriptions of the archive and of the store."""

    list: Path = layout.LIST
    store: Path = layout.MANIFEST


def run(places: Places = Places()) -> int:
    """Return 0 when every image is there, whole and under its names. Raises no error that is expected."""
    started = time.monotonic()
    engine = ""
    try:
        chosen = preload_settings.load(places.etc)
        engine = chosen.engine
        section = _work(places, chosen)
    except ProgramError as error:
        section = outcome.failed(engine, "preload.engine", error.message)
    except NodeError as error:
        section = outcome.failed(engine, error.code, error.message)
    seconds = round(time.monotonic() - started, 3)
    status.update("preload", {**section, "seconds": seconds}, places)
    for line in summary(section, seconds):
        status.tell(line)
    return 1 if section["state"] == status.FAILED else 0


def _work(places: Places, chosen: preload_settings.Preload) -> dict[str, Any]:
    preload = images.read_list(places.list, chosen.pause)
    if preload.engine != chosen.engine:
        message = f"{places.list} is for {preload.engine}, this node has {chosen.engine}"
        raise NodeError("preload.list", message)
    engine: Engine = (
        Docker(chosen.pause) if chosen.engine == "docker" else Containerd(chosen.namespace, chosen.data_root)
    )
    store = images.read_store(places.store, preload.images)
    done = bring(preload, store, engine, chosen.data_root, status.tell, _INTERVAL)
    return outcome.section(preload, store, status.read(places.run).get("seed", {}), done)


def bring(
    preload: Preload,
    store: Store,
    engine: Engine,
    data_root: Path,
    tell: Callable[[str], None],
    interval: float,
) -> Done:
    """Load what is missing, name what is unnamed, and return what was done. Raises NodeError."""
    state = engine.look(preload.images)
    lacking = state.faults
    for ref, fault in lacking.items():
        tell(f"{ref} {fault}")
    if lacking:
        tell(f"{len(lacking)} of {len(preload.images)} images are loaded from {preload.archive}")
        images_to_load = [image for image in preload.images if image.ref in lacking]
        archive.check_room(preload, images_to_load, store.layers, data_root)
        archive.check(preload, tell, interval)
        engine.forget(images_to_load)
        archive.load(engine.load(preload.archive), preload.archive, data_root, tell, interval)
        state = engine.look(preload.images)
    faults, named = dict(state.faults), dict(state.misnamed)
    sound = [image for image in preload.images if image.ref not in faults]
    if misnamed := {key: fault for key, fault in named.items() if key not in faults}:
        engine.name(sound, misnamed)
        unnamed = {
            key: fault for key, fault in engine.look(preload.images).misnamed.items() if key in misnamed
        }
        faults |= unnamed
        named = {key: fault for key, fault in misnamed.items() if key not in unnamed}
    return Done(lacking, faults, state.digestless, tuple(named))


def summary(section: Mapping[str, Any], seconds: float) -> list[str]:
    """Return the last lines for people: what went wrong, or what was done."""
    if section["state"] == status.FAILED:
        return [f"FAILED: {problem}" for problem in section["problems"]]
    lines = []
    if section["state"] == status.DEGRADED:
        lines.append(f"DEGRADED: {section['code']}: {section['reason']}")
    if section["loaded"]:
        lines.append(f"loaded in {seconds:.1f} s: {', '.join(section['loaded'])}")
    else:
        lines.append(
            f"all {section['images']} images are there already, nothing was loaded ({seconds:.1f} s)"
        )
    return lines
