"""The pulls after a change of the list, with the real command: only the images that are new."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import PullError
from tests.support.images.builds import REPO, Workplace

pytestmark = pytest.mark.root

PAUSE, SOFTWARE, NONE = (f"registry.lab.internal/{name}" for name in ("pause:1.0", "software:1.0", "none:1"))


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


def test_a_change_of_the_list_pulls_what_is_new(
    copies: Callable[[Workplace], Workplace], pulled_worker: Workplace, tmp_path: Path
) -> None:
    workplace = copies(pulled_worker)
    original = workplace.object("preload")
    before = _state(original)
    # An image that can't be had stops the build if it is required.
    done = workplace.build(inventory=_inventory(tmp_path, [PAUSE, NONE]))
    assert done.status == PullError.exit_code
    assert f"{NONE}: registry.lab.internal answered 404" in done.stderr
    assert not workplace.output.exists()
    assert list((workplace.store / "staging").iterdir()) == []
    # One image less: taken over from the build that has both, and nothing is pulled.
    inventory = _inventory(tmp_path, [PAUSE], optional=(NONE,))
    assert _pulls(workplace, inventory) == {PAUSE: "there already"}
    assert json.loads(workplace.lock.read_text())["left_out"] == [NONE]
    # What was taken over shares its files with its original stage, which stays unchanged.
    assert _state(original) == before
    workplace.forget_id(original.name)
    # One more: only that one is pulled. (Without its pin, the list differs from the original's.)
    both = _inventory(tmp_path, [PAUSE, SOFTWARE])
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
