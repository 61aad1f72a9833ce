"""Registries and engines that fail during a pull: the outcome, the message, and the cost.

Each engine resumes in its own way; what isn't overcome is ours to judge, with one engine. All faults of one engine
that can occur at the same time do: each has an image of its own, and one daemon has them all. The proxy's records
tell them apart by the repository's name.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from image_builder.bake.pull import registry
from image_builder.bake.pull.model import Limits
from image_builder.bake.pull.network import Endpoint
from image_builder.bake.pull.registry import locate
from image_builder.lab.registry import HOST, PORT
from tests.support.images.builds import Workplace
from tests.support.registries.plan import Fault
from tests.support.registries.pull_cases import (
    AFTER,
    ATTEMPTS,
    EXPIRED,
    HASTIER,
    HASTY,
    PACED,
    PATIENT,
    REFUSED,
    SIZE,
    STEADY,
    large_layer,
    layer_fault,
    partial,
    placed,
    told,
    unknown,
)
from tests.support.registries.pulls import (
    CONTAINERD,
    MB,
    PLATFORM,
    Lab,
    Result,
    family,
    isolated,
    kill,
    new_address,
    wait_until,
    when_part_is_there,
    with_each_engine,
)

STALLED = r"no progress for \d:\d\d min"
# Of a fault that no number of attempts overcomes.
LAST = 2

pytestmark = pytest.mark.root


# containerd writes a layer in steps of 1 MiB: anything after the last whole step is invisible.
@dataclass(frozen=True)
class Case:
    """What goes wrong with one image; a fault's path is a regular expression below the image's repository.

    ``{layer}`` in it is the digest of the large layer. The message contains ``words``, and ``attempts`` attempts are
    made. ``{stalled}`` in the words stands for an attempt that ``limits`` ended.
    """

    faults: tuple[Fault, ...] = ()
    limits: Limits = PATIENT
    host: str = HOST
    words: str = ""
    attempts: int = LAST


def _limit(engine: str, attempts: int | None, *headers: tuple[str, str]) -> tuple[Fault, ...]:
    """Refuse a manifest with 429 for this number of our attempts.

    Docker requests it once, by GET, then we ask how long to wait. containerd requests it six times by HEAD without a
    pause, then we do.
    """
    asked = {"docker": {"GET": 1, "HEAD": 1}, "containerd": {"HEAD": 7}}[engine]
    return tuple(
        Fault(
            "status",
            path="/manifests/",
            status=429,
            times=None if attempts is None else attempts * times,
            headers=headers,
            method=method,
        )
        for method, times in asked.items()
    )


def transient(engine: str) -> Mapping[str, Case]:
    """Return the faults that retries overcome."""
    return {
        "reset": Case((layer_fault("reset", times=1),)),
        "short": Case((layer_fault("short", times=1),)),
        "status503": Case((layer_fault("status", status=503, times=2),)),
        "manifest503": Case((Fault("status", path="/manifests/", status=503, times=2),)),
        "limited": Case(_limit(engine, 2)),
        "limited_for": Case(_limit(engine, 2, ("Retry-After", "3"))),
        "stall": Case((layer_fault("stall", times=1, after=300_000),), HASTY),
        "wrong_once": Case((layer_fault("wrong", times=1),)),
        "drip": Case((layer_fault("drip", rate=1_900_000, after=0),), STEADY),
        # Docker answers nothing before it has a manifest. containerd asks by HEAD.
        "mute": Case(_never("GET" if engine == "docker" else "HEAD", times=1), HASTY),
    }


def _never(*methods: str, times: int | None = None) -> tuple[Fault, ...]:
    return tuple(Fault("silence", path="/manifests/", method=method, times=times) for method in methods)


def permanent() -> Mapping[str, Case]:
    """Return the faults that no number of retries overcomes, for containerd."""
    redirects = "stopped after 10 redirects"
    hurried = Limits(overall_seconds=HASTIER.progress_seconds)
    return {
        "stall_always": Case(
            # containerd continues where the previous attempt ended: all of them together get less than the whole.
            (layer_fault("stall", after=1_500_000),),
            HASTY,
            words="{stalled}; layer {layer}: downloading",
        ),
        "silent": Case((layer_fault("stall", after=0),), HASTY, words="{stalled}; layer {layer}: "),
        "slow": Case(
            (layer_fault("drip", rate=450_000, after=0),), PACED, words="; layer {layer}: downloading, "
        ),
        "wrong": Case((layer_fault("wrong"),), words="unexpected commit digest"),
        "never": Case(_never("GET", "HEAD"), HASTIER, words="{stalled}; "),
        "overall": Case(_never("GET", "HEAD"), hurried, words="not finished after 0:0", attempts=1),
        "redirect": Case((Fault("redirect_loop", path="/manifests/"),), words=redirects, attempts=1),
        "redirect_layer": Case((layer_fault("redirect_loop"),), words=redirects, attempts=1),
        "limited_always": Case(
            _limit("containerd", None, ("Retry-After", "1")),
            words=f"the registry asks for a pause of 1 s (attempt {LAST})",
        ),
        "limited_for_long": Case(
            _limit("containerd", None, ("Retry-After", "100000")),
            words="the registry asks for a pause of 100000 s",
            attempts=1,
        ),
        "unknown": Case(words="not found", attempts=1),
        "refused": Case(host=REFUSED, words="refused"),
        "expired": Case(host=EXPIRED, words="certificate has expired", attempts=1),
    }


# -- faults of the registry ------------------------------------------------------------------------------------


def meet_faults(lab: Lab) -> Result:
    """Pull one image for each case, some of them at once; kill the engine; let a new one pull what failed."""
    lasting = permanent() if lab.engine == "containerd" else {}
    cases = {**transient(lab.engine), **lasting}
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    lab.serve_proxy(EXPIRED, not_after=yesterday)
    lab.endpoints[REFUSED] = Endpoint(REFUSED, new_address(), PORT, lab.endpoints[HOST].ca)
    pushed = {name: lab.push(name, SIZE) for name in cases}
    wanted = {
        name: image.model_copy(update={"ref": f"{cases[name].host}/{name}:1"})
        for name, image in pushed.items()
    }
    if "unknown" in wanted:
        wanted["unknown"] = unknown(wanted["unknown"])
    moved = lab.push("moved", MB)
    moved_to = lab.push("moved", 2 * MB)
    killed = lab.push("killed", SIZE)
    lab.proxy.faults = [placed(f, name, wanted[name]) for name, case in cases.items() for f in case.faults]
    state = lab.folder("state")

    def meet(engine: Any, name: str) -> Result:
        image, case = wanted[name], cases[name]
        found = lab.pull(engine, [image], limits=case.limits, attempts=LAST if name in lasting else ATTEMPTS)
        asked = [r for r in lab.proxy.requests if r.path.startswith(f"/v2/{name}/")]
        layers = [r for r in asked if any(layer.digest in r.path for layer in image.layers)]
        return {
            **found,
            "ref": image.ref,
            "layer": large_layer(image).removeprefix("sha256:")[:12],
            "bytes": image.size,
            "wire": sum(r.sent for r in layers),
            "ranges": [r.range for r in layers if r.range],
            "manifests": [r.started for r in asked if "/manifests/" in r.path],
            "has": engine.has(image),
        }

    with lab.running(state) as engine:
        # Not all at once: a program waiting for one of a few processors is as slow as a registry.
        with ThreadPoolExecutor(8) as threads:
            met = threads.map(lambda name: meet(engine, name), cases)
            result: Result = {"cases": dict(zip(cases, met, strict=True))}
        result["moved"] = {**lab.pull(engine, [moved]), "has": [engine.has(moved), engine.has(moved_to)]}
        lab.proxy.faults = [placed(layer_fault("stall"), "killed", killed)]
        daemon = "dockerd" if lab.engine == "docker" else "containerd"
        with when_part_is_there(lab.proxy, large_layer(killed), lambda: kill(daemon)):
            result["killed"] = lab.pull(engine, [killed], limits=PATIENT)
    lab.proxy.faults = ()
    again = [*(pushed[name] for name in lasting), killed]
    before = len(lab.proxy.requests)
    with lab.running(state) as engine:
        result["again"] = lab.pull(engine, again, limits=PATIENT, attempts=1)
        result["again"]["has"] = [engine.has(image) for image in again]
    result["again"]["wire"] = sum(r.sent for r in lab.proxy.requests[before:] if "/blobs/" in r.path)
    result["again"]["bytes"] = sum(image.size for image in again)
    # Docker leaves an idle connection open until it exits.
    wait_until(lambda: all(r.ended is not None for r in lab.proxy.requests))
    result["open"] = [r.path for r in lab.proxy.requests if r.ended is None]
    lab.module.strip(state)
    result["partial"] = partial(state)
    return result


@pytest.fixture(scope="module")
def met(worker: Workplace, engine: str) -> Result:
    result: Result = with_each_engine(meet_faults, worker, engine)
    return result


@pytest.mark.parametrize("name", transient("docker"))
def test_transient_fault_is_overcome(met: Result, engine: str, name: str) -> None:
    case = met["cases"][name]
    assert not case["bug"], case["bug"]
    assert not case["error"] and case["has"], case
    attempts = case["records"][0]["attempts"]
    wire = case["wire"] / case["bytes"]
    assert wire >= 1, "all of it came from there"
    if name == "wrong_once":
        assert wire <= 2.01 and len(attempts) == 2  # wrong bytes can't be the beginning of the right ones
    elif (family(engine), name) == ("containerd", "reset"):
        # ctr's lease ends when it fails, and what arrived before the reset is lost with it.
        assert wire <= 1.01 + AFTER / case["bytes"]
    else:
        assert wire <= 1.2
    if name == "short" or (family(engine), name) == ("docker", "reset"):
        assert case["ranges"] == [f"bytes={AFTER}-"] and len(attempts) == 1
    if name in ("limited", "limited_for"):
        said = "toomanyrequests" if family(engine) == "docker" else "429 Too Many Requests"
        assert [said in a["outcome"] for a in attempts] == [True, True, False]
    if name == "limited_for":
        assert len([1 for a, b in pairwise(case["manifests"]) if b - a >= 3]) == 2, "each wait was as asked"
    if name in ("stall", "mute"):
        assert re.search(STALLED, attempts[0]["outcome"]) and len(attempts) > 1
    if name == "drip":
        assert len(attempts) == 1, attempts


@pytest.fixture(scope="module")
def lasting(worker: Workplace) -> Result:
    """Return the cases of the one engine that has those that are never overcome."""
    result: Result = with_each_engine(meet_faults, worker, CONTAINERD)["cases"]
    return result


@pytest.mark.parametrize("name", permanent())
def test_permanent_fault_is_reported(lasting: Result, name: str) -> None:
    case, planned = lasting[name], permanent()[name]
    layer, attempts = case["layer"], case["records"][0]["attempts"]
    assert not case["bug"], case["bug"]
    assert not case["has"]
    assert case["error"].startswith(f"{case['ref']}: ")
    words = re.escape(planned.words.replace("{layer}", layer)).replace(re.escape("{stalled}"), STALLED)
    assert re.search(words, case["error"]), case["error"]
    assert case["records"][0]["outcome"] == "failed"
    assert len(attempts) == planned.attempts, attempts
    if name == "stall_always":
        assert re.search(r"downloading, [\d.]+ [kM]B of 6 MB", case["error"]), case["error"]
    if name == "slow":
        assert case["error"].split(": ")[1].startswith("too slow for 0:0")
        assert case["error"].endswith(f"B/s (attempt {LAST})")
    if name in ("never", "unknown", "refused", "expired", "redirect", "limited_always", "limited_for_long"):
        assert case["wire"] == 0


def test_a_tag_that_moved_after_the_lock_changes_nothing(met: Result) -> None:
    assert not met["moved"]["error"] and met["moved"]["has"] == [True, False]


def test_an_engine_that_is_killed_is_named(met: Result, engine: str) -> None:
    killed = met["killed"]
    assert not killed["bug"] and killed["error"].startswith(f"{HOST}/killed:1: {family(engine)} is gone"), (
        killed
    )


def test_what_failed_comes_to_a_new_engine_and_nothing_else_is_left(met: Result) -> None:
    again = met["again"]
    assert not again["error"] and all(again["has"]), again
    assert again["wire"] <= again["bytes"] + 100_000
    assert met["open"] == [] and met["partial"] == []


def lock_what_fails(lab: Lab) -> Result:
    """Lock images that don't exist, can't be reached, or have the wrong bytes."""
    good = lab.push("good", MB)
    lab.endpoints[REFUSED] = Endpoint(REFUSED, new_address(), PORT, lab.endpoints[HOST].ca)
    lab.serve_proxy(EXPIRED, not_after=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1))
    lab.proxy.faults = [Fault("wrong", path="/blobs/")]
    refs = {
        "unknown": f"{HOST}/good:none",
        "no_repository": f"{HOST}/none:1",
        "refused": f"{REFUSED}/good:1",
        "expired": f"{EXPIRED}/good:1",
        "wrong": good.ref,
    }

    def message(ref: str) -> str:
        return told(lambda: locate(ref, PLATFORM, lab.endpoints))[0]

    registry._RETRIES = registry.Patience(1)
    with ThreadPoolExecutor(len(refs)) as threads:
        return dict(zip(refs, threads.map(message, refs.values()), strict=True))


def test_what_can_not_be_locked_is_named(worker: Workplace) -> None:
    found = isolated(lock_what_fails, worker, CONTAINERD)
    assert found["unknown"].startswith(f"{HOST}/good:none: {HOST} answered 404 manifest unknown")
    assert found["no_repository"].startswith(f"{HOST}/none:1: {HOST} answered 404")
    assert found["refused"].startswith(f"{REFUSED}/good:1: ") and "refused" in found["refused"]
    assert found["expired"].startswith(f"{EXPIRED}/good:1: ") and "expired" in found["expired"]
    assert found["wrong"].startswith(f"{HOST}/good:1: the registry gave other bytes than those of sha256:")
