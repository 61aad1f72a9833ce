"""``node-agent preload``: check the engine for every image, load the archive if any is missing, check again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node import layout, preload_settings, status
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.preload import archive, images
from image_builder.node.preload.containerd import Containerd
from image_builder.node.preload.docker import Docker
from image_builder.node.preload.images import Engine, Preload, Store

# Seconds between progress messages.
_INTERVAL = 3.0


@dataclass(frozen=True)
class Done:
    """What was found and done, by reference. ``lacking`` has the faults from before anything was loaded.

    ``unpinned`` says why nothing protects an image that is pinned.
    """

    lacking: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    unpinned: Mapping[str, str] = field(default_factory=dict)
    digestless: Mapping[str, str] = field(default_factory=dict)
    named: tuple[str, ...] = ()

    @property
    def loaded(self) -> dict[str, str]:
        """Return the references that were loaded, and why."""
        return {ref: fault for ref, fault in self.lacking.items() if ref not in self.problems}


@dataclass(frozen=True)
class Places(status.Places):
    """Also the archive's list and the store's manifest."""

    list: Path = layout.LIST
    store: Path = layout.MANIFEST


def run(places: Places = Places()) -> int:
    """Bring every image; return 0 if all are there, complete and with their names. Never raises an expected error."""
    started = time.monotonic()
    engine = ""
    try:
        chosen = preload_settings.load(places.etc)
        engine = chosen.engine
        section = _work(places, chosen)
    except ProgramError as error:
        section = failed(engine, "preload.engine", error.message)
    except NodeError as error:
        section = failed(engine, error.code, error.message)
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
    return section_of(preload, store, status.read(places.run).get("seed", {}), done)


def bring(
    preload: Preload,
    store: Store,
    engine: Engine,
    data_root: Path,
    tell: Callable[[str], None],
    interval: float,
) -> Done:
    """Load missing images, add missing names, and return what was done. Raises NodeError.

    Without an archive nothing can be loaded: missing images remain problems.
    """
    state = engine.look(preload.images)
    lacking = state.faults
    for ref, fault in lacking.items():
        tell(f"{ref} {fault}")
    if lacking and (source := preload.archive):
        tell(f"{len(lacking)} of {len(preload.images)} images are loaded from {source.path}")
        images_to_load = [image for image in preload.images if image.ref in lacking]
        archive.check_room(source, preload.engine, images_to_load, store.layers, data_root)
        archive.check(source, tell, interval)
        engine.forget(images_to_load)
        archive.load(engine.load(source.path), source.path, data_root, tell, interval)
        state = engine.look(preload.images)
    faults, unpinned = dict(state.faults), dict[str, str]()
    sound = [image for image in preload.images if image.ref not in faults]
    lacks = {k: fault for k, fault in {**state.misnamed, **state.unpinned}.items() if k not in faults}
    if lacks:
        failures = engine.name(sound, lacks)
        after = engine.look(preload.images)
        unpinned = {
            key: ": ".join(filter(None, (fault, failures.get(key))))
            for key, fault in after.unpinned.items()
            if key in lacks
        }
        faults |= {key: fault for key, fault in after.misnamed.items() if key in lacks}
    named = tuple(key for key in lacks if key not in faults and key not in unpinned)
    return Done(lacking, faults, unpinned, state.digestless, named)


def summary(section: Mapping[str, Any], seconds: float) -> list[str]:
    """Return the final messages for people: what went wrong, or what was done."""
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


# -- the status section: which images were there, which were loaded, and why that differs from the plan -------------


def section_of(preload: Preload, store: Store, seed: Mapping[str, Any], done: Done) -> dict[str, Any]:
    """Return the section ``preload`` of the status, without its ``seconds``.

    ``seed`` is the seed's section, empty if it did not run. In the result, ``images`` counts the list, ``seeded`` those
    that the engine had complete from the seed, ``there`` the others that it had; ``loaded`` says why each was loaded,
    ``bytes`` is the archive's size if it was needed, and ``named`` lists what got a name, label or guard.
    """
    expected = {image.ref for image in preload.images} & set(store.seeded)
    whole = [image.ref for image in preload.images if image.ref not in done.lacking]
    # Images that are there although the seed gave up came from the archive in an earlier boot.
    seeded = [ref for ref in whole if ref in expected and seed.get("state") == status.OK]
    return {
        **_verdict(preload, store, seed, done),
        "engine": preload.engine,
        "images": len(preload.images),
        "seeded": len(seeded),
        "there": len(whole) - len(seeded),
        "loaded": done.loaded,
        "bytes": preload.archive.size if preload.archive and done.lacking else 0,
        "named": list(done.named),
        "problems": [f"{ref} {fault}" for ref, fault in done.problems.items()],
    }


def _verdict(
    preload: Preload, store: Store, seed: Mapping[str, Any], done: Done
) -> dict[str, str | list[str]]:
    """Return state, code and reason; ``reasons`` has one entry for each image that isn't as planned at the bake."""
    fell = [f"{ref} {fault}" for ref, fault in done.lacking.items() if store.seeded.get(ref)]
    bare = [
        f"{ref} {fault}"
        for ref, fault in done.digestless.items()
        if ref in store.seeded and ref not in done.lacking
    ]
    if done.problems:
        problems = [f"{ref} {fault}" for ref, fault in done.problems.items()]
        why = f"{len(problems)} images are not usable"
        if not preload.archive:
            why += f", and this node was baked without an archive of them: {cause(seed)}"
        return _state(status.FAILED, "preload.missing", why, problems)
    if fell:
        why = f"{len(fell)} required images came from the archive, not from the preload store: {cause(seed)}"
        return _state(status.DEGRADED, "preload.fallback", why, [*fell, *bare])
    if done.unpinned:
        why = f"{len(done.unpinned)} pinned images are not protected from the kubelet"
        return _state(status.DEGRADED, "preload.pin", why, [f"{k} {v}" for k, v in done.unpinned.items()])
    if bare:
        why = f"{len(bare)} images can't be had by their digests"
        return _state(status.DEGRADED, "preload.digest", why, bare)
    return {"state": status.OK}


def _state(state: str, code: str, why: str, reasons: list[str]) -> dict[str, str | list[str]]:
    return {"state": state, "code": code, "reason": f"{why}; {reasons[0]}", "reasons": reasons}


def cause(seed: Mapping[str, Any]) -> str:
    """Return why the seed did not provide what it should have, as far as the seed itself knows."""
    if not seed:
        return "the seed did not run"
    if seed.get("state") == status.OK:
        return "the seed reported nothing"
    return f"the seed reported {seed.get('code', 'no code')}: {seed.get('reason', 'no reason')}"


def failed(engine: str, code: str, message: str) -> dict[str, Any]:
    """Return the section of a run that failed before it could check or load the images."""
    return {
        "state": status.FAILED,
        "code": code,
        "reason": message,
        "engine": engine,
        "loaded": {},
        "bytes": 0,
        "problems": [message],
    }
