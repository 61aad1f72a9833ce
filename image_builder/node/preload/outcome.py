"""The outcome: which images were present, which were loaded, and why that differs from the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from image_builder.node import status
from image_builder.node.preload.images import Preload, Store


@dataclass(frozen=True)
class Done:
    """What was found and done, by reference. ``lacking`` is what was wrong before anything was loaded."""

    lacking: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    digestless: Mapping[str, str] = field(default_factory=dict)
    named: tuple[str, ...] = ()

    @property
    def loaded(self) -> dict[str, str]:
        """Return what was loaded, and why."""
        return {ref: fault for ref, fault in self.lacking.items() if ref not in self.problems}


def section(preload: Preload, store: Store, seed: Mapping[str, Any], done: Done) -> dict[str, Any]:
    """Return the section ``preload`` of the status, all but its seconds.

    ``seed`` is the seed's section, empty where it did not run. ``images`` counts the list, ``seeded`` those that
    the engine had whole from the seed, ``there`` the others that it had; ``loaded`` tells why each was loaded,
    ``bytes`` are the archive's, ``named`` what got a name, label or guard.
    """
    expected = {image.ref for image in preload.images} & set(store.seeded)
    whole = [image.ref for image in preload.images if image.ref not in done.lacking]
    # What is there although the seed gave up came from the archive, at an earlier boot.
    seeded = [ref for ref in whole if ref in expected and seed.get("state") == status.OK]
    return {
        **_verdict(store, seed, done, expected),
        "engine": preload.engine,
        "images": len(preload.images),
        "seeded": len(seeded),
        "there": len(whole) - len(seeded),
        "loaded": done.loaded,
        "bytes": preload.size if done.lacking else 0,
        "named": list(done.named),
        "problems": [f"{ref} {fault}" for ref, fault in done.problems.items()],
    }


def _verdict(
    store: Store, seed: Mapping[str, Any], done: Done, expected: set[str]
) -> dict[str, str | list[str]]:
    """Return state, code and reason; ``reasons`` has one for each image that is not as it was baked."""
    fell = [f"{ref} {fault}" for ref, fault in done.lacking.items() if store.seeded.get(ref)]
    bare = [
        f"{ref} {fault}"
        for ref, fault in done.digestless.items()
        if ref in expected and ref not in done.lacking
    ]
    if done.problems:
        problems = [f"{ref} {fault}" for ref, fault in done.problems.items()]
        return _state(status.FAILED, "preload.missing", f"{len(problems)} images are not usable", problems)
    if fell:
        why = f"{len(fell)} required images came from the archive, not from the preload store: {cause(seed)}"
        return _state(status.DEGRADED, "preload.fallback", why, [*fell, *bare])
    if bare:
        why = f"{len(bare)} images can't be had by their digests"
        return _state(status.DEGRADED, "preload.digest", why, bare)
    return {"state": status.OK}


def _state(state: str, code: str, why: str, reasons: list[str]) -> dict[str, str | list[str]]:
    return {"state": state, "code": code, "reason": f"{why}; {reasons[0]}", "reasons": reasons}


def cause(seed: Mapping[str, Any]) -> str:
    """Return why the seed did not give what it should have, as far as the seed itself knows."""
    if not seed:
        return "the seed did not run"
    if seed.get("state") == status.OK:
        return "the seed reported nothing"
    return f"the seed reported {seed.get('code', 'no code')}: {seed.get('reason', 'no reason')}"


def failed(engine: str, code: str, message: str) -> dict[str, Any]:
    """Return the section of a run that could not even look, or load."""
    return {
        "state": status.FAILED,
        "code": code,
        "reason": message,
        "engine": engine,
        "loaded": {},
        "bytes": 0,
        "problems": [message],
    }
