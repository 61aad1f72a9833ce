"""Pulls from a company's registry: images by digest, clear errors, and no secrets anywhere."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import bcrypt
import pytest

from image_builder.bake.pull.credentials import VARIABLE
from image_builder.bake.pull.network import Endpoint
from image_builder.bake.pull.registry import locate
from image_builder.lab import certificate, registry
from image_builder.lab.registry import HOST, PORT
from image_builder.system import process
from image_builder.system.sandbox import open_root
from tests.support.canaries import files_with, watched_processes
from tests.support.images.builds import Workplace
from tests.support.registries.company import REGISTRY, STORAGE, company
from tests.support.registries.plan import Fault, Tokens
from tests.support.registries.pull_cases import (
    AFTER,
    PATIENT,
    PRIVATE,
    large_layer,
    layer_fault,
    partial,
    placed,
    told,
)
from tests.support.registries.pulls import (
    CONTAINERD,
    DOCKER,
    MB,
    PLATFORM,
    Lab,
    Result,
    isolated,
    new_address,
    when_part_is_there,
)

pytestmark = pytest.mark.root

TOKEN_SECONDS = 2.0


def pull_from_a_company(lab: Lab) -> Result:
    """Lock and pull images: a layer that outlives its token and breaks off, one stored elsewhere, a rate limit.

    Then the login is refused, and the proxy lost, once part of a layer has arrived.
    """
    names = ("team/long", "team/moved", "team/limited", "refused", "cut")
    pushed = {name: lab.push(name, 3 * MB) for name in names}
    state = lab.folder("state")
    with company(lab, token_seconds=TOKEN_SECONDS) as place:
        located = {
            name: locate(place.reference(image), PLATFORM, lab.endpoints) for name, image in pushed.items()
        }
        by_lock = list(place.way.tunnels)
        place.registry.rate = 1.0 * MB
        long, moved, limited, refused, cut = located.values()
        later = (("Retry-After", "100000"),)

        def refuse() -> None:
            place.registry.tokens = Tokens(None, TOKEN_SECONDS)

        place.registry.faults = [
            placed(layer_fault("short", times=1), "team/long", long),
            placed(layer_fault("elsewhere", host=STORAGE), "team/moved", moved),
            placed(layer_fault("short", times=1), "refused", refused),
            *(
                Fault("status", path="/limited/manifests/", status=429, headers=later, method=method)
                for method in ("GET", "HEAD")
            ),
        ]
        before = len(place.registry.requests)
        refusal = told(lambda: locate(place.reference(pushed["team/limited"]), PLATFORM, lab.endpoints))[0]
        asked = [r for r in place.registry.requests[before:] if r.status == 429]
        with watched_processes(lambda: place.secrets) as seen, lab.running(state) as engine:
            tokens = place.registry.tokens
            assert tokens
            locked = len(tokens.given)
            result: Result = {
                "pulled": lab.pull(engine, [long, moved], limits=PATIENT, attempts=1),
                "has": [engine.has(long), engine.has(moved)],
                "tokens": len(tokens.given) - locked,
                "limited": lab.pull(engine, [limited], limits=PATIENT),
                "version": engine.version(),
            }
            ranges = [r.range for r in place.registry.requests if r.range]
            with when_part_is_there(place.registry, large_layer(refused), refuse):
                result["refused"] = lab.pull(engine, [refused], limits=PATIENT)
            words = place.secrets | set(tokens.given)
            place.registry.tokens = Tokens(place.login, TOKEN_SECONDS)
            with when_part_is_there(place.registry, large_layer(cut), place.way.die):
                result["cut"] = lab.pull(engine, [cut], limits=PATIENT, attempts=2)
            result["has_failed"] = [engine.has(refused), engine.has(cut)]
            words |= place.secrets
            assert lab.root
            files = files_with(lab.root.path / "run", words)
        result |= {
            "locked_limited": [refusal, len(asked)],
            "digests": [located[name].digest == image.digest for name, image in pushed.items()],
            "ranges": ranges,
            "stored": [large_layer(moved) in r.path for r in place.storage.requests],
            "lock": by_lock,
            "bake": place.way.tunnels[len(by_lock) :],
            "refused_tunnels": place.way.refused,
            "arguments": sorted(seen.arguments),
            "programs": sorted(seen.programs),
        }
    lab.module.strip(state)
    result["partial"] = partial(state)
    (lab.base / "canary").write_text("".join(words))
    result["files"] = sorted({*files, *files_with(lab.base, words)})
    result["told"] = any(word in str(result) for word in words)
    return result


@pytest.fixture(scope="module")
def found(worker: Workplace) -> Result:
    result: Result = isolated(pull_from_a_company, worker, CONTAINERD)
    return result


def test_a_companys_registry_is_locked_and_pulled_from(found: Result) -> None:
    assert all(found["digests"])
    assert not found["pulled"]["bug"] and not found["pulled"]["error"], found["pulled"]
    assert found["has"] == [True, True]
    assert found["ranges"] == [f"bytes={AFTER}-"], "it didn't go on where it broke off"
    assert found["tokens"] > 2, "of one of the two images the token runs out within a layer"
    assert found["stored"] == [True]
    assert set(found["lock"]) == {f"{REGISTRY}:443"}
    assert set(found["bake"]) == {f"{REGISTRY}:443", f"{STORAGE}:443"}
    assert found["refused_tunnels"] == []
    limited = found["limited"]
    assert "the registry asks for a pause of 100000 s" in limited["error"], limited
    assert len(limited["records"][0]["attempts"]) == 1
    error, asked = found["locked_limited"]
    assert "answered 429" in error and error.endswith("it asks for a pause of 100000 s"), error
    assert asked == 1, "it wasn't asked again"


def test_no_secret_is_found_anywhere(found: Result) -> None:
    assert "ctr" in found["programs"], "nobody was looked at"
    assert found["arguments"] == [] and not found["told"]
    (canary,) = found["files"]
    assert canary.endswith("/canary"), "secrets are found where they were put, and nowhere else"


def test_what_fails_within_a_layer_is_told_and_ends(found: Result) -> None:
    assert found["has_failed"] == [False, False] and found["partial"] == []
    refused = found["refused"]
    assert not refused["bug"] and refused["error"].startswith(f"{REGISTRY}/refused:1: ")
    assert "401" in refused["error"] or "unauthorized" in refused["error"], refused
    assert len(refused["records"][0]["attempts"]) == 1, refused
    cut = found["cut"]
    assert not cut["bug"] and cut["error"].startswith(f"{REGISTRY}/cut:1: ")
    assert "proxy" in cut["error"] and len(cut["records"][0]["attempts"]) == 2, cut


# -- a password --------------------------------------------------------------------------------------------------


@contextmanager
def private_registry(lab: Lab, username: str, password: str) -> Iterator[Endpoint]:
    """Run a second registry on the same storage, which rejects every client without a password."""
    address = new_address()
    with open_root(
        [lab.tools], lab.folder("private"), binds={registry._STORAGE: lab.storage}, network=True
    ) as root:
        home = root.path / registry._HOME.lstrip("/")
        made = certificate.make(PRIVATE, home)
        hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()
        (home / "htpasswd").write_text(f"{username}:{hashed}\n")
        config = {
            **registry.configuration(address, writable=False),
            "auth": {"htpasswd": {"realm": "lab", "path": f"{registry._HOME}/htpasswd"}},
        }
        (home / "config.json").write_text(json.dumps(config))
        ca = lab.folder("private-ca") / "ca.pem"
        ca.write_bytes(made.ca.read_bytes())
        argv = root.argv([f"/{registry._PROGRAM}", "serve", f"{registry._HOME}/config.json"])
        with process.background(argv, log=lab.base / "private.log"):
            yield Endpoint(PRIVATE, address, PORT, ca)


def use_password(lab: Lab) -> Result:
    """Pull from a registry that requires a password: with it, with a wrong one, without; find every place it got to."""
    username, password = "robot", f"canary-{secrets.token_hex(12)}"
    pushed = [lab.push(name, 4 * MB) for name in ("locked", "denied", "anonymous")]
    locked, denied, anonymous = (i.model_copy(update={"ref": i.ref.replace(HOST, PRIVATE)}) for i in pushed)
    state = lab.folder("state")
    header = json.dumps({"username": username, "password": password}).encode()
    words = {
        password,
        base64.b64encode(f"{username}:{password}".encode()).decode(),
        base64.b64encode(header).decode(),
        base64.urlsafe_b64encode(header).decode(),
    }

    def login(secret: str) -> str:
        return json.dumps({PRIVATE: {"username": username, "password": secret}})

    result: Result = {}
    with private_registry(lab, username, password) as endpoint:
        lab.endpoints[PRIVATE] = endpoint
        with lab.running(state) as engine:
            result["locate_without"] = told(lambda: locate(locked.ref, PLATFORM, lab.endpoints))
            os.environ[VARIABLE] = login(password)
            result["located"] = locate(locked.ref, PLATFORM, lab.endpoints) == locked
            with watched_processes(lambda: words) as seen:
                result["with"] = lab.pull(engine, [locked])
            result["has"] = engine.has(locked)
            os.environ[VARIABLE] = login("wrong")
            result["wrong"] = lab.pull(engine, [denied])
            del os.environ[VARIABLE]
            result["without"] = lab.pull(engine, [anonymous])
            assert lab.root
            files = files_with(lab.root.path / "run", words)
    (lab.base / "canary").write_text(password)
    result["files"] = [*files, *files_with(lab.base, words)]
    result["processes"] = sorted(seen.arguments | seen.environment)
    result["programs"] = sorted(seen.programs)
    result["records"] = any(word in json.dumps(result) for word in words)
    return result


def test_a_password_opens_a_registry_and_is_found_nowhere(worker: Workplace) -> None:
    """Docker gets it in a header of its own; what containerd is given leads to a gateway that has the login."""
    found = isolated(use_password, worker, DOCKER)
    message, hint = found["locate_without"]
    assert message.startswith(f"{PRIVATE}/locked:1: {PRIVATE} answered 401") and VARIABLE in hint
    assert found["located"]
    assert not found["with"]["bug"] and not found["with"]["error"] and found["has"], found["with"]
    for name, image in (("wrong", "denied"), ("without", "anonymous")):
        case = found[name]
        assert not case["bug"]
        assert case["error"].startswith(f"{PRIVATE}/{image}:1: ")
        assert any(w in case["error"].lower() for w in ("unauthorized", "authorization", "basic auth")), case
        assert len(case["records"][0]["attempts"]) == 1, case
    assert "dockerd" in found["programs"], "nobody was looked at"
    assert found["processes"] == []
    (canary,) = found["files"]
    assert canary.endswith("/canary"), "it is found where it was put for this purpose, and nowhere else"
    assert not found["records"]
