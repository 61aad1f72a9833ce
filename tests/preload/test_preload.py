"""Pulls with the real command: after a change of the list only the new images; ended by a registry that fails."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import PullError
from image_builder.lab.registry import HOST
from tests.support.canaries import files_with, watched_processes
from tests.support.images.builds import REPO, Workplace, left_behind
from tests.support.images.fixtures import _copy
from tests.support.registries.company import REGISTRY, company
from tests.support.registries.plan import Tokens
from tests.support.registries.pull_cases import large_layer, layer_fault, placed
from tests.support.registries.pulls import MB, Lab, Result, isolated, when_part_is_there

pytestmark = pytest.mark.root

PAUSE, SOFTWARE, NONE = (f"registry.lab.internal/{name}" for name in ("pause:1.0", "software:1.0", "none:1"))


@pytest.fixture(scope="module")
def workplace(pulled_worker: Workplace) -> Iterator[Workplace]:
    """The pulled worker in a store of these tests."""
    place = pulled_worker.store.parent / f"{pulled_worker.store.name}-test-{os.getpid()}-preload"
    (place / "store").mkdir(parents=True)
    _copy(pulled_worker, place / "store")
    yield Workplace(place / "store", place / "output", pulled_worker.image)
    subprocess.run(["rm", "-rf", "--one-file-system", place], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of the inventory, which is the same for all builds: the first one takes the store's records over."""
    return tmp_path_factory.mktemp("preload")


def _inventory(folder: Path, refs: list[str], *, optional: tuple[str, ...] = ()) -> Path:
    """Make a copy of the lab's inventory that preloads ``refs``, with those in ``optional`` not required.

    Its worker has no kubelet, which would have to be compiled.
    """
    target = folder / "inventory"
    shutil.copytree(REPO / "inventories/lab", target, dirs_exist_ok=True)
    variables = target / "group_vars/workers.yml"
    head, _, rest = variables.read_text().partition("image_preload:\n")
    kept = rest.partition("\n\n")[2]
    items = "".join(f"  - ref: {ref}\n" for ref in refs)
    items += "".join(f"  - ref: {ref}\n    required: false\n" for ref in optional)
    variables.write_text(f"{head}image_preload:\n{items}\n{kept}")
    (target / "host_vars/worker.yml").write_text("image_layers: [system, container_runtime, node]\n")
    return target


def _pulls(workplace: Workplace, inventory: Path) -> dict[str, str]:
    """Build up to the preload; return the outcome for each image."""
    done = workplace.build("--stop-after", "preload", inventory=inventory)
    assert done.status == 0, done.stderr
    stage: dict[str, Any] = next(s for s in done.result["stages"] if s["name"] == "preload")
    product = workplace.store / "objects" / stage["id"] / "product"
    told = json.loads((product / "pulls.json").read_text())
    listed = json.loads((product / "tree/opt/preloaded_docker_images.json").read_text())
    outcomes = {image["ref"]: image["outcome"] for image in told["images"]}
    assert sorted(image["ref"] for image in listed["images"]) == sorted(outcomes)
    return outcomes


def test_a_change_of_the_list_pulls_what_is_new(workplace: Workplace, folder: Path) -> None:
    original = workplace.object("preload")
    before, published = _state(original), workplace.published()
    # An image that can't be had stops the build if it is required.
    done = workplace.build(inventory=_inventory(folder, [PAUSE, NONE]))
    assert done.status == PullError.exit_code
    assert f"{NONE}: registry.lab.internal answered 404" in done.stderr
    assert workplace.published() == published
    assert list((workplace.store / "staging").iterdir()) == []
    # One image less: taken over from the build that has both, and nothing is pulled.
    inventory = _inventory(folder, [PAUSE], optional=(NONE,))
    assert _pulls(workplace, inventory) == {PAUSE: "there already"}
    assert json.loads(workplace.lock.read_text())["left_out"] == [NONE]
    # What was taken over shares its files with its original stage, which stays unchanged.
    assert _state(original) == before
    workplace.forget_id(original.name)
    # One more: only that one is pulled. (Without its pin, the list differs from the original's.)
    both = _inventory(folder, [PAUSE, SOFTWARE])
    assert _pulls(workplace, both) == {PAUSE: "there already", SOFTWARE: "done"}


def _state(stage: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in (stage / "product" / "state").rglob("*"):
        info = path.lstat()
        found[str(path)] = (info.st_mode, info.st_size, info.st_mtime_ns if not path.is_dir() else 0)
    return found


def test_the_manifest_tells_which_program_pulled(worker: Workplace, pulled_worker: Workplace) -> None:
    facts = json.loads((pulled_worker.object("preload") / "meta.json").read_text())["facts"]
    assert facts["engine"]["name"] == "docker"
    assert facts["engine"]["version"].startswith("26.1")
    # A pull that is already there doesn't need the layer, which may be a different one by now with the same program.
    binary = worker.object("container_runtime") / "product/tree" / facts["engine"]["binary"].lstrip("/")
    assert hashlib.sha256(binary.read_bytes()).hexdigest() == facts["engine"]["binary_sha256"]


# -- a registry, or the way to it, that fails within a layer -----------------------------------------------------

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
    workplace: Workplace, worker: Workplace, minimal: Workplace, folder: Path
) -> None:
    """The exit code is that of a pull, the message names the image, nothing is published or left."""
    before = workplace.take_artefact(minimal)
    inventory = _inventory(folder, [])
    (inventory / "host_vars/worker.yml").write_text(json.dumps(_VARIABLES))
    command = [
        *workplace.command("build", "worker", inventory=inventory),
        *workplace._places(),
        "--json",
    ]
    found = isolated(build_from_a_company, worker, "docker", json.dumps(command))
    for name, expected in {
        "refused": ("unauthorized",),
        "cut": ("proxyconnect", "connection refused"),
    }.items():
        case = found[name]
        assert case["status"] == PullError.exit_code, case
        assert case["error"]["stage"] == "preload" and case["error"]["cause"] == "PullError"
        assert f"{REGISTRY}/team/app:1: " in case["error"]["message"]
        for word in expected:
            assert word in case["error"]["message"], case["error"]
        assert "Traceback" not in case["text"] and not case["secrets"] and case["arguments"] == []
    assert found["files"] == []
    assert workplace.published() == before
    assert list((workplace.store / "staging").iterdir()) == []
    assert left_behind(workplace.store) == []
