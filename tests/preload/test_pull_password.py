"""A registry that requires a password: the password opens it, and is found nowhere afterwards."""

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
from tests.support.registries.pull_cases import (
    PRIVATE,
    told,
)
from tests.support.registries.pulls import MB, PLATFORM, Lab, Result, isolated, new_address

pytestmark = pytest.mark.root


@contextmanager
def private_registry(lab: Lab, username: str, password: str) -> Iterator[Endpoint]:
    """Run a second registry on the same storage, which rejects every client without a password."""
    storage = next(lab.base.glob("storage-*"))
    address = new_address()
    with open_root(
        [lab.tools], lab.folder("private"), binds={registry._STORAGE: storage}, network=True
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
    pushed = [lab.push(name, 20 * MB) for name in ("locked", "denied", "anonymous")]
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


def test_a_password_opens_a_registry_and_is_found_nowhere(worker: Workplace, engine: str) -> None:
    found = isolated(use_password, worker, engine)
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
    assert {"dockerd" if engine == "docker" else "ctr"} <= set(found["programs"]), "nobody was looked at"
    assert found["processes"] == []
    (canary,) = found["files"]
    assert canary.endswith("/canary"), "it is found where it was put for this purpose, and nowhere else"
    assert not found["records"]
