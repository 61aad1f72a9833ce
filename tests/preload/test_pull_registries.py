"""Registries as they are outside a lab: slow to answer, and particular about their clients."""

from __future__ import annotations

import threading
import time

import pytest

from image_builder.bake.pull.model import Limits
from image_builder.lab.registry import HOST
from tests.support.images.builds import Workplace
from tests.support.registries.plan import Fault
from tests.support.registries.pull_cases import HASTY, PATIENT
from tests.support.registries.pulls import (
    MB,
    Lab,
    Result,
    every_engine,
    isolated,
    wait_until,
)

pytestmark = [pytest.mark.root, pytest.mark.process]


@pytest.fixture(scope="module", params=every_engine())
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- a manifest that never comes -------------------------------------------------------------------------------


def wait_for_a_manifest(lab: Lab) -> Result:
    """Pull from a registry that accepts a manifest request and never answers, until each deadline and until a stop."""
    names = ("progress", "overall", "stopped")
    pushed = {name: lab.push(name, MB) for name in names}
    # Neither the manifest nor, for clients that use HEAD, whether it exists.
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
