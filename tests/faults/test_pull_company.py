"""Pulls from a company's registry: images by their digests, clear errors, and no secret anywhere."""

from __future__ import annotations

import pytest

from image_builder.bake.pull.registry import locate
from tests.builds import Workplace
from tests.faults.canaries import files_with, watched_processes
from tests.faults.company import REGISTRY, STORAGE, company
from tests.faults.pull_cases import AFTER, PATIENT, large_layer, layer_fault, placed
from tests.faults.registry_plan import Fault
from tests.pulls import MB, PLATFORM, Lab, Result, every_engine, with_each_engine

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", params=every_engine())
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


TOKEN_SECONDS = 2.0


def pull_from_a_company(lab: Lab) -> Result:
    """Lock and pull images: a layer that outlives its token and breaks off, one that is stored elsewhere, a limit."""
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
    assert {"ctr", "dockerd"} & set(found["programs"]), "nobody was looked at"
    assert found["arguments"] == [] and not found["told"]
    (canary,) = found["files"]
    assert canary.endswith("/canary"), "secrets are found where they were put, and nowhere else"
