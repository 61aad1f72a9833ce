"""Registries, disks and engines that fail during a pull: what comes of it, what is said, and what it costs.

All faults of one engine that may be met at once are: each has an image of its own, and one daemon has them all. The
proxy's books tell them apart by the repository's name.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.lab.registry import HOST, PORT
from image_builder.lock import LockedImage
from image_builder.pull.model import Limits
from image_builder.pull.registry import Endpoint
from tests.faults.registry_proxy import Fault
from tests.pulls import MB, Lab, Result, new_address

pytestmark = pytest.mark.root

SIZE = 3 * MB
AFTER = 1 * MB
# Docker waits 5 s before it goes on where it broke off, 10 s the second time.
PATIENT = Limits(progress_seconds=20.0)
HASTY = Limits(progress_seconds=3.0)
PACED = Limits(progress_seconds=3.0, min_rate=300_000, rate_seconds=3.0)
ATTEMPTS = 3
REFUSED, EXPIRED = "refused.lab.internal", "expired.lab.internal"


@dataclass(frozen=True)
class Case:
    """What goes wrong with one image; a fault's path is a regular expression below the image's repository.

    ``{layer}`` in it is the digest of the large layer.
    """

    faults: tuple[Fault, ...] = ()
    limits: Limits = PATIENT
    host: str = HOST


def _layer(kind: Any, **more: Any) -> Fault:
    return Fault(kind, path="/blobs/{layer}", **{"after": AFTER, **more})


def _limit(times: int | None, *headers: tuple[str, str]) -> tuple[Fault, ...]:
    """Refuse a manifest, by either method, with 429."""
    return tuple(
        Fault("status", path="/manifests/", status=429, times=times, headers=headers, method=method)
        for method in ("GET", "HEAD")
    )


TRANSIENT: Mapping[str, Case] = {
    "reset": Case((_layer("reset", times=1),)),
    "short": Case((_layer("short", times=1),)),
    "status503": Case((_layer("status", status=503, times=2),)),
    "manifest503": Case((Fault("status", path="/manifests/", status=503, times=2),)),
    "limited": Case(_limit(2)),
    "limited_for": Case(_limit(2, ("Retry-After", "3"))),
    "stall": Case((_layer("stall", times=1, after=300_000),), HASTY),
    "wrong_once": Case((_layer("wrong", times=1),)),
    "drip": Case((_layer("drip", rate=600_000, after=0),), PACED),
}
PERMANENT: Mapping[str, Case] = {
    "stall_always": Case((_layer("stall"),), HASTY),
    "silent": Case((_layer("stall", after=0),), HASTY),
    "slow": Case((_layer("drip", rate=100_000),), PACED),
    "wrong": Case((_layer("wrong"),)),
    "redirect": Case((Fault("redirect_loop", path="/manifests/"),)),
    "redirect_layer": Case((_layer("redirect_loop"),), HASTY),
    "limited_always": Case(_limit(None, ("Retry-After", "1"))),
    "limited_for_long": Case(_limit(None, ("Retry-After", "100000"))),
    "unknown": Case(),
    "refused": Case(host=REFUSED),
    "expired": Case(host=EXPIRED),
}
CASES = {**TRANSIENT, **PERMANENT}


def _unknown(image: LockedImage) -> LockedImage:
    digest = f"sha256:{'0' * 64}"
    return image.model_copy(update={"digest": digest, "manifest": digest})


def _placed(fault: Fault, name: str, image: LockedImage) -> Fault:
    large = max(image.layers, key=lambda layer: layer.size).digest
    path = f"^/v2/{name}{fault.path.replace('{layer}', large)}"
    return Fault(**{**fault.__dict__, "path": path})


def meet_faults(lab: Lab) -> Result:
    """Pull one image for each case, all at once; then once more without faults."""
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    proxies = {HOST: lab.proxy, EXPIRED: lab.serve_proxy(EXPIRED, not_after=yesterday)}
    lab.endpoints[REFUSED] = Endpoint(REFUSED, new_address(), PORT, lab.endpoints[HOST].ca)
    pushed = {name: lab.push(name, SIZE) for name in CASES}
    wanted = dict(pushed)
    wanted["unknown"] = _unknown(pushed["unknown"])
    for name, case in CASES.items():
        ref = f"{case.host}/{name}:1"
        wanted[name] = wanted[name].model_copy(update={"ref": ref})
    moved = lab.push("moved", MB)
    lab.push("moved", 2 * MB)
    lab.proxy.faults = [_placed(f, name, wanted[name]) for name, case in CASES.items() for f in case.faults]
    state = lab.folder("state")
    result: Result = {}
    with lab.running(state) as engine:

        def meet(name: str) -> Result:
            image, case = wanted[name], CASES[name]
            found = lab.pull(engine, [image], limits=case.limits, attempts=ATTEMPTS)
            asked = [
                r
                for r in proxies.get(case.host, lab.proxy).requests
                if r.path.startswith(f"/v2/{name}/") and "sha256:" in r.path
            ]
            layers = [r for r in asked if any(layer.digest in r.path for layer in image.layers)]
            return {
                **found,
                "ref": image.ref,
                "bytes": image.size,
                "wire": sum(r.sent for r in layers),
                "ranges": [r.range for r in layers if r.range],
                "blobs": len(layers),
                "manifests": [r.started for r in asked if "/manifests/" in r.path and r.method == "GET"],
                "has": engine.has(image),
            }

        with ThreadPoolExecutor(len(CASES)) as threads:
            result["cases"] = dict(zip(CASES, threads.map(meet, CASES), strict=True))
        result["moved"] = {**lab.pull(engine, [moved]), "has": engine.has(moved)}
        # Nobody waits for bytes of a pull that was given up.
        result["live"] = _until_none(
            lambda: [r.path for r in lab.proxy.requests if r.ended is None and r.fault == "stall"]
        )
        result["partial"] = _until_none(lambda: _partial(state, lab.engine))
        lab.proxy.faults = ()
        again = [pushed[name] for name in PERMANENT]
        before = len(lab.proxy.requests)
        result["again"] = lab.pull(engine, again, limits=HASTY, attempts=1)
        result["again_has"] = [engine.has(image) for image in again]
        result["again_wire"] = sum(r.sent for r in lab.proxy.requests[before:] if "/blobs/" in r.path)
        result["again_bytes"] = sum(image.size for image in again)
    lab.module.strip(state)
    result["stripped"] = _partial(state, lab.engine)
    return result


def _until_none(look: Callable[[], list[str]], seconds: float = 5) -> list[str]:
    """Look until nothing is found; return what is left then."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _partial(state: Path, engine: str) -> list[str]:
    """Return the parts of blobs in a data root."""
    if engine == "docker":
        return [p.name for p in state.rglob("GetImageBlob*")]
    return [p.name for p in (state / "io.containerd.content.v1.content/ingest").glob("*")]


def locate_faults(lab: Lab) -> Result:
    raise NotImplementedError
