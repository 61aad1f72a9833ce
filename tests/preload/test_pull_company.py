"""Pulls from a company's registry: images by digest, clear errors, and no secrets anywhere."""

from __future__ import annotations

import time

import pytest
import urllib3

from image_builder.bake.pull import registry
from image_builder.bake.pull.registry import locate
from tests.support.canaries import files_with, watched_processes
from tests.support.images.builds import Workplace
from tests.support.registries.company import REGISTRY, STORAGE, company
from tests.support.registries.plan import Fault, Tokens
from tests.support.registries.pull_cases import (
    AFTER,
    HASTY,
    PATIENT,
    large_layer,
    layer_fault,
    partial,
    placed,
    told,
)
from tests.support.registries.pulls import (
    MB,
    PLATFORM,
    Lab,
    Result,
    every_engine,
    family,
    when_part_is_there,
    with_each_engine,
)

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", params=every_engine(newest=True))
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


TOKEN_SECONDS = 2.0


def pull_from_a_company(lab: Lab) -> Result:
    """Lock and pull images: a layer that outlives its token and breaks off, one stored elsewhere, a rate limit."""
    pushed = {name: lab.push(name, 3 * MB) for name in ("team/long", "team/moved", "team/limited")}
    with company(lab, token_seconds=TOKEN_SECONDS) as place:
        located = {
            name: locate(place.reference(image), PLATFORM, lab.endpoints) for name, image in pushed.items()
        }
        by_lock = list(place.way.tunnels)
        place.registry.rate = 1.0 * MB
        long, moved = located["team/long"], located["team/moved"]
        later = (("Retry-After", "100000"),)
        place.registry.faults = [
            placed(layer_fault("short", times=1), "team/long", long),
            placed(layer_fault("elsewhere", host=STORAGE), "team/moved", moved),
            *(
                Fault("status", path="/limited/manifests/", status=429, headers=later, method=method)
                for method in ("GET", "HEAD")
            ),
        ]
        asked = time.monotonic()
        refusal = told(lambda: locate(place.reference(pushed["team/limited"]), PLATFORM, lab.endpoints))[0]
        locked_limited = [refusal, time.monotonic() - asked]
        state = lab.folder("state")
        with watched_processes(lambda: place.secrets) as seen, lab.running(state) as engine:
            result: Result = {
                "pulled": lab.pull(engine, [long, moved], limits=PATIENT, attempts=1),
                "has": [engine.has(long), engine.has(moved)],
                "limited": lab.pull(engine, [located["team/limited"]], limits=PATIENT),
                "version": engine.version(),
            }
            assert lab.root
            files = files_with(lab.root.path / "run", place.secrets)
        tokens = place.registry.tokens
        result |= {
            "locked_limited": locked_limited,
            "digests": [located[name].digest == image.digest for name, image in pushed.items()],
            "ranges": [r.range for r in place.registry.requests if r.range],
            "tokens": len(tokens.given) if tokens else 0,
            "stored": [large_layer(moved) in r.path for r in place.storage.requests],
            "lock": by_lock,
            "bake": place.way.tunnels[len(by_lock) :],
            "refused": place.way.refused,
            "arguments": sorted(seen.arguments),
            "programs": sorted(seen.programs),
        }
        secrets = place.secrets
    (lab.base / "canary").write_text("".join(secrets))
    result["files"] = sorted({*files, *files_with(lab.base, secrets)})
    result["told"] = any(word in str(result) for word in secrets)
    return result


def test_a_companys_registry_is_locked_and_pulled_from(worker: Workplace, engine: str) -> None:
    found = with_each_engine(pull_from_a_company, worker, engine)
    assert all(found["digests"])
    assert not found["pulled"]["bug"] and not found["pulled"]["error"], found["pulled"]
    assert found["has"] == [True, True]
    assert found["ranges"] == [f"bytes={AFTER}-"], "it didn't go on where it broke off"
    assert found["tokens"] > 4, "three images are locked, then the token runs out within a layer"
    assert found["stored"] == [True]
    assert set(found["lock"]) == {f"{REGISTRY}:443"}
    assert set(found["bake"]) == {f"{REGISTRY}:443", f"{STORAGE}:443"}
    assert found["refused"] == []
    limited = found["limited"]
    assert "the registry asks for a pause of 100000 s" in limited["error"], limited
    assert len(limited["records"][0]["attempts"]) == 1
    error, seconds = found["locked_limited"]
    assert "answered 429" in error and error.endswith("it asks for a pause of 100000 s"), error
    assert seconds < 10
    assert {"ctr", "dockerd"} & set(found["programs"]), "nobody was looked at"
    assert found["arguments"] == [] and not found["told"]
    (canary,) = found["files"]
    assert canary.endswith("/canary"), "secrets are found where they were put, and nowhere else"


# -- what fails in the middle of a layer -----------------------------------------------------------------------


def fail_midway(lab: Lab) -> Result:
    """Refuse the login, or lose the proxy, once part of a layer has arrived; then pull without either fault."""
    pushed = {name: lab.push(name, 3 * MB) for name in ("refused", "cut")}
    result: Result = {}
    with company(lab, token_seconds=TOKEN_SECONDS) as place:
        refused, cut = (
            locate(place.reference(pushed[n]), PLATFORM, lab.endpoints) for n in ("refused", "cut")
        )

        def refuse() -> None:
            place.registry.tokens = Tokens(None, TOKEN_SECONDS)

        place.registry.rate = 1.0 * MB
        place.registry.faults = [placed(layer_fault("short", times=1), "refused", refused)]
        state = lab.folder("state")
        with lab.running(state) as engine:
            with when_part_is_there(place.registry, large_layer(refused), refuse):
                result["refused"] = lab.pull(engine, [refused], limits=HASTY)
            place.registry.tokens = Tokens(place.login, TOKEN_SECONDS)
            with when_part_is_there(place.registry, large_layer(cut), place.way.die):
                result["cut"] = lab.pull(engine, [cut], limits=HASTY, attempts=2)
            result["has"] = [engine.has(refused), engine.has(cut)]
        lab.module.strip(state)
        result["partial"] = partial(state)
        result["secrets"] = [word for word in place.secrets if word in str(result)]
    return result


def test_what_fails_within_a_layer_is_told_and_ends(worker: Workplace, engine: str) -> None:
    found = with_each_engine(fail_midway, worker, engine)
    assert found["has"] == [False, False] and found["partial"] == [] and found["secrets"] == []
    refused = found["refused"]
    assert not refused["bug"] and refused["error"].startswith(f"{REGISTRY}/refused:1: ")
    assert "401" in refused["error"] or "unauthorized" in refused["error"], refused
    # Docker keeps retrying on its own for a minute, longer than this attempt may last; the next one gets the reason.
    assert len(refused["records"][0]["attempts"]) == (2 if family(engine) == "docker" else 1), refused
    cut = found["cut"]
    assert not cut["bug"] and cut["error"].startswith(f"{REGISTRY}/cut:1: ")
    assert "proxy" in cut["error"], cut
    assert len(cut["records"][0]["attempts"]) == 2 and cut["seconds"] < 2 * (HASTY.progress_seconds + 5) + 5


# -- a registry that falls silent after a login ------------------------------------------------------------------


def fall_silent(lab: Lab) -> Result:
    """Lock and pull an image whose manifest never arrives after a login; then without that fault."""
    pushed = lab.push("team/mute", MB)
    with company(lab) as place:
        image = locate(place.reference(pushed), PLATFORM, lab.endpoints)
        place.registry.faults = [
            Fault("silence", path="/mute/manifests/", method=method) for method in ("GET", "HEAD")
        ]
        usual = registry._RETRIES, registry._TIMEOUT
        registry._RETRIES, registry._TIMEOUT = registry.Patience(1), urllib3.Timeout(2)
        began = time.monotonic()
        result: Result = {"locked": told(lambda: locate(image.ref, PLATFORM, lab.endpoints))[0]}
        result["lock_seconds"] = time.monotonic() - began
        registry._RETRIES, registry._TIMEOUT = usual
        state = lab.folder("state")
        with lab.running(state) as engine:
            result["pulled"] = lab.pull(engine, [image], limits=HASTY, attempts=2)
            result["has"] = [engine.has(image)]
            place.registry.faults = ()
            result["again"] = lab.pull(engine, [image], attempts=1)
            result["has"] += [engine.has(image)]
        result["secrets"] = [word for word in place.secrets if word in str(result)]
    return result


@pytest.mark.nightly
def test_a_manifest_that_never_comes_behind_a_login_is_given_up(worker: Workplace, engine: str) -> None:
    found = with_each_engine(fall_silent, worker, engine)
    assert found["locked"].startswith(f"{REGISTRY}/team/mute:1: {REGISTRY} can't be reached"), found["locked"]
    assert found["lock_seconds"] < 15
    pulled = found["pulled"]
    assert not pulled["bug"] and pulled["error"].startswith(f"{REGISTRY}/team/mute:1: no progress for 0:0"), (
        pulled
    )
    assert len(pulled["records"][0]["attempts"]) == 2
    assert pulled["seconds"] < 2 * (HASTY.progress_seconds + 5) + 5
    assert found["has"] == [False, True] and not found["again"]["error"], found["again"]
    assert found["secrets"] == []
