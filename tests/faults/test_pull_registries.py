"""Registries as they are outside of a laboratory: slow to answer, and particular about who asks."""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest

from image_builder.bake.pull.mirrors import Mirror
from image_builder.bake.pull.model import Limits
from image_builder.bake.pull.registry import Endpoint, locate
from image_builder.lab.registry import HOST, PORT
from tests.builds import Workplace
from tests.faults.pull_cases import HASTY, PATIENT, REFUSED
from tests.faults.registry_plan import Fault
from tests.pulls import (
    MB,
    PLATFORM,
    Lab,
    Result,
    every_engine,
    isolated,
    new_address,
    wait_until,
)

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", params=every_engine())
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- a mirror that is the only way out ----------------------------------------------------------------------------

OUTSIDE = "outside.lab.internal"


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
