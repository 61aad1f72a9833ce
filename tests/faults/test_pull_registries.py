"""Registries as they are outside of a laboratory: slow to answer, and particular about who asks."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import pytest

from image_builder.bake.pull.credentials import VARIABLE
from image_builder.bake.pull.mirrors import Mirror
from image_builder.bake.pull.model import Limits
from image_builder.bake.pull.registry import Endpoint, locate
from image_builder.lab.registry import HOST, PORT
from tests.builds import Workplace
from tests.faults.connect_proxy import connect_proxy
from tests.faults.pull_cases import AFTER, HASTY, PATIENT, REFUSED, layer_fault, placed
from tests.faults.registry_plan import Fault, Tokens
from tests.pulls import (
    MB,
    PLATFORM,
    Lab,
    Result,
    every_engine,
    isolated,
    new_address,
    processes,
    wait_until,
)

pytestmark = [pytest.mark.root, pytest.mark.process]


@pytest.fixture(scope="module", params=every_engine())
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- tokens that live for seconds ------------------------------------------------------------------------------

LOGIN = ("robot", "a-password")
# Docker takes any token to live for a minute at least, so it can't be seen to renew one here.
LIFE = {"docker": 60.0, "containerd": 2.0}


def outlive_tokens(lab: Lab) -> Result:
    """Pull a layer that breaks off when its token has run out; then meet a limit for members."""
    image = lab.push("long", 3 * MB)
    limited = lab.push("limited", MB)
    lab.proxy.tokens = Tokens(LOGIN, LIFE[lab.engine])
    lab.proxy.faults = [placed(layer_fault("short", times=1), "long", image)]
    lab.proxy.rate = 1.0 * MB
    os.environ[VARIABLE] = json.dumps({HOST: dict(zip(("username", "password"), LOGIN, strict=True))})
    with lab.running(lab.folder("state")) as engine:
        result = {"long": lab.pull(engine, [image], limits=PATIENT, attempts=1), "has": engine.has(image)}
        result["ranges"] = [r.range for r in lab.proxy.requests if r.range]
        result["given"] = len(lab.proxy.tokens.given)
        lab.proxy.tokens = Tokens(LOGIN, 60.0)
        later = (("Retry-After", "100000"),)
        lab.proxy.faults = [
            Fault("status", path="/limited/manifests/", status=429, headers=later, method=method)
            for method in ("GET", "HEAD")
        ]
        result["limited"] = lab.pull(engine, [limited], limits=PATIENT)
    return result


def test_a_token_that_runs_out_is_renewed_and_a_limit_for_members_is_heard(
    worker: Workplace, engine: str
) -> None:
    found = isolated(outlive_tokens, worker, engine)
    assert not found["long"]["bug"] and not found["long"]["error"] and found["has"], found["long"]
    assert found["ranges"] == [f"bytes={AFTER}-"], "it didn't go on where it broke off"
    assert found["given"] > (0 if engine == "docker" else 1)
    limited = found["limited"]
    assert "the registry asks for a pause of 100000 s" in limited["error"], limited
    assert len(limited["records"][0]["attempts"]) == 1


# -- a way out through a proxy, and a company's authority ------------------------------------------------------

OUTSIDE = "outside.lab.internal"


def go_through_a_proxy(lab: Lab) -> Result:
    """Lock and pull from a registry that no resolver knows and whose authority is the host's alone, by a proxy."""
    image = lab.push("one", 2 * MB)
    lab.serve_proxy(OUTSIDE)
    registry = lab.endpoints.pop(OUTSIDE)
    with connect_proxy(LOGIN, {OUTSIDE: (registry.address, registry.port)}) as (address, tunnels):
        os.environ["HTTPS_PROXY"] = f"http://{':'.join(LOGIN)}@{address[0]}:{address[1]}"
        os.environ["SSL_CERT_FILE"] = os.fspath(registry.ca)
        ref = image.ref.replace(HOST, OUTSIDE)
        located = locate(ref, PLATFORM, {})
        by_lock = list(tunnels)
        seen: set[str] = set()
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.01):
                seen.update(p.words[0] for p in processes() if LOGIN[1] in " ".join(p.words))

        looking = threading.Thread(target=look)
        looking.start()
        with lab.running(lab.folder("state")) as engine:
            result = lab.pull(engine, [located], attempts=1)
            result["has"] = engine.has(located)
        over.set()
        looking.join()
        located_as_pushed = located.digest == image.digest
        return {
            **result,
            "located": located_as_pushed,
            "lock": by_lock,
            "bake": tunnels[len(by_lock) :],
            "seen": sorted(seen),
        }


def test_proxy_and_authority_of_the_host_count_for_lock_and_bake(worker: Workplace, engine: str) -> None:
    found = isolated(go_through_a_proxy, worker, engine)
    assert found["located"] and not found["bug"] and not found["error"] and found["has"], found
    assert set(found["lock"]) == set(found["bake"]) == {f"{OUTSIDE}:443"}
    assert found["seen"] == [], "a proxy's password is in a process list"


def ask_a_mirror(lab: Lab) -> Result:
    """Lock and pull from a registry that is gone, by a mirror of it."""
    image = lab.push("one", MB)
    proxy = lab.serve_proxy(OUTSIDE)
    lab.endpoints[REFUSED] = Endpoint(REFUSED, new_address(), PORT, lab.endpoints[HOST].ca)
    shutil.copyfile(lab.endpoints[OUTSIDE].ca, lab.base / "mirror.pem")
    os.environ["SSL_CERT_FILE"] = os.fspath(lab.base / "mirror.pem")
    mirrors = {REFUSED: [Mirror(f"https://{OUTSIDE}")]}
    ref = image.ref.replace(HOST, REFUSED)
    located = locate(ref, PLATFORM, lab.endpoints, mirrors)
    asked = len(proxy.requests)
    with lab.running(lab.folder("state"), mirrors=mirrors) as engine:
        result = lab.pull(engine, [located], attempts=1)
        result["has"] = engine.has(located)
    return {**result, "same": located.digest == image.digest, "asked": [asked, len(proxy.requests) - asked]}


@pytest.mark.parametrize("engine", [e for e in every_engine() if "docker" not in e.values], indirect=True)
def test_mirrors_of_the_nodes_count_for_lock_and_bake(worker: Workplace, engine: str) -> None:
    found = isolated(ask_a_mirror, worker, engine)
    assert found["same"] and not found["bug"] and not found["error"] and found["has"], found
    assert all(found["asked"])


# -- a manifest that never comes -------------------------------------------------------------------------------


def wait_for_a_manifest(lab: Lab) -> Result:
    """Pull from a registry that takes the request for a manifest and is silent: to each deadline, and to a stop."""
    names = ("progress", "overall", "stopped")
    pushed = {name: lab.push(name, MB) for name in names}
    # Neither the manifest nor, for those that ask by HEAD, whether it exists.
    lab.proxy.faults = [Fault("silence", path="/manifests/", method=method) for method in ("GET", "HEAD")]
    hurried = Limits(progress_seconds=60.0, overall_seconds=HASTY.progress_seconds)
    result: Result = {}
    stop = threading.Event()
    stopped: list[float] = []

    def stop_soon() -> None:
        wait_until(lambda: any(r.path.startswith("/v2/stopped/manifests/") for r in lab.proxy.requests))
        time.sleep(0.5)
        stopped.append(time.monotonic())
        stop.set()

    with lab.running(lab.folder("state")) as engine:
        result["progress"] = lab.pull(engine, [pushed["progress"]], limits=HASTY, attempts=1)
        result["overall"] = lab.pull(engine, [pushed["overall"]], limits=hurried, attempts=1)
        thread = threading.Thread(target=stop_soon)
        thread.start()
        result["stopped"] = lab.pull(engine, [pushed["stopped"]], limits=PATIENT, stop=stop)
        result["after"] = time.monotonic() - stopped[0]
        thread.join()
        lab.proxy.faults = ()
        result["again"] = lab.pull(engine, list(pushed.values()), limits=PATIENT, attempts=1)
    return result


def test_a_manifest_that_never_comes_ends_by_its_deadline(worker: Workplace, engine: str) -> None:
    found = isolated(wait_for_a_manifest, worker, engine)
    for name, words in (("progress", "no progress for 0:0"), ("overall", "not finished after 0:0")):
        case = found[name]
        assert not case["bug"] and case["error"].startswith(f"{HOST}/{name}:1: {words}"), case
        assert case["seconds"] < HASTY.progress_seconds + 5, case
    assert not found["stopped"]["bug"] and "the build ends" in found["stopped"]["error"], found["stopped"]
    assert found["after"] < 5
    assert not found["again"]["error"], "what was given up does no harm to the next"
