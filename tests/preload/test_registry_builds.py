"""Builds where a registry, or the way to it, fails within a layer: an exit code, a clear message, nothing published."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder import errors
from image_builder.lab.registry import HOST
from tests.support.canaries import files_with, watched_processes
from tests.support.images.builds import REPO, Workplace, left_behind
from tests.support.registries.company import REGISTRY, company
from tests.support.registries.plan import Tokens
from tests.support.registries.pull_cases import large_layer, layer_fault, placed
from tests.support.registries.pulls import MB, Lab, Result, isolated, when_part_is_there

pytestmark = pytest.mark.root

TOKEN_SECONDS = 2.0
_VARIABLES: dict[str, Any] = {
    "image_layers": ["system", "container_runtime", "node"],  # no kubelet, which would have to be compiled
    "image_preload": [{"ref": f"{HOST}/pause:1.0", "pin": True}, {"ref": f"{REGISTRY}/team/app:1"}],
    "image_pull": {"progress_seconds": 4, "attempts": 2},
}


def build_from_a_company(lab: Lab, command: str) -> Result:
    """Build until the login is refused within a layer, then until the proxy is gone."""
    image = lab.push("team/app", 4 * MB)
    argv: Sequence[str] = json.loads(command)
    result: Result = {}
    with company(lab, token_seconds=TOKEN_SECONDS) as place:

        def build(act: Callable[[], None]) -> dict[str, Any]:
            with (
                watched_processes(lambda: place.secrets) as seen,
                when_part_is_there(place.registry, large_layer(image), act),
            ):
                env = {**os.environ, "CI": "true"}
                done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
            text = done.stdout + done.stderr
            return {
                "status": done.returncode,
                "error": json.loads(done.stdout).get("error", {}) if done.stdout else {},
                "text": text[-6000:],
                "secrets": any(word in text for word in place.secrets),
                "arguments": sorted(seen.arguments),
            }

        def refuse() -> None:
            place.registry.tokens = Tokens(None, TOKEN_SECONDS)

        place.registry.rate = 1.0 * MB
        place.registry.faults = [placed(layer_fault("short", times=1), "team/app", image)]
        result["refused"] = build(refuse)
        place.registry.tokens = Tokens(place.login, TOKEN_SECONDS)
        result["cut"] = build(place.way.die)
        secrets = place.secrets
    store = Path(argv[argv.index("--store") + 1])
    result["files"] = files_with(store / "logs", secrets) + files_with(store / "locks", secrets)
    return result


def test_what_fails_within_a_layer_ends_the_build(
    copies: Callable[[Workplace], Workplace], worker: Workplace, minimal: Workplace, tmp_path: Path
) -> None:
    place = copies(worker)
    before = place.take_artefact(minimal)
    inventory = tmp_path / "inventory"
    subprocess.run(["cp", "-a", REPO / "inventories/lab", inventory], check=True)
    (inventory / "host_vars").mkdir(exist_ok=True)
    (inventory / "host_vars/worker.yml").write_text(json.dumps(_VARIABLES))
    command = [*place.command("build", "worker", inventory=inventory), *place._places(), "--json"]
    found = isolated(build_from_a_company, worker, "docker", json.dumps(command))
    for name, expected in {
        "refused": ("unauthorized",),
        "cut": ("proxyconnect", "connection refused"),
    }.items():
        case = found[name]
        assert case["status"] == errors.PullError.exit_code, case
        assert case["error"]["stage"] == "preload" and case["error"]["cause"] == "PullError"
        assert f"{REGISTRY}/team/app:1: " in case["error"]["message"]
        for word in expected:
            assert word in case["error"]["message"], case["error"]
        assert "Traceback" not in case["text"] and not case["secrets"] and case["arguments"] == []
    assert found["files"] == []
    assert place.published() == before
    assert list((place.store / "staging").iterdir()) == []
    assert left_behind(place.store) == []
