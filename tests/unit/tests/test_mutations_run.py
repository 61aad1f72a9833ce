"""Every check of the suite is seen red in some test run: computed from definitions and the runs' selections.

The runs themselves ensure that each selected check is mutated (``blind``).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.definition import ImageDefinition, load_inventory
from image_builder.settings import REPO_ROOT, SUITE
from image_builder.verify.runner import definition_facts
from tests.bake import test_declared_mutations, test_mutations
from tests.disk import test_boot_worker
from tests.gpu import test_boot_worker_gpu, test_gpu_mutations, test_gpu_signing, test_gpu_toolkit
from tests.pools import test_join_mutations
from tests.support.images import toolkits, variants
from tests.support.images.declarations import DECLARATIONS, SELECTED

LAB = REPO_ROOT / "inventories" / "lab"
# A commit boots today's worker, which has containerd; `--slow` the one with Docker, for these checks.
DOCKER = {
    "test_docker_runs_with_overlay2",
    "test_preloaded_images_are_guarded",
    "test_preloaded_images_are_in_docker",
    "test_preloaded_layers_are_in_docker",
    "test_preloaded_pause_image_is_spared",
}
# Only the machine with a GPU driver and the gate has these, and `--slow` boots it.
GPU = {
    "test_endpoint_answers_on_loopback",
    "test_gpu_cdi_describes_what_is_there",
    "test_gpu_devices_have_links",
    "test_gpu_docker_runs_with_the_runtime",
    "test_gpu_driver_wants_nothing_but_a_gpu",
    "test_gpu_tools_say_that_there_is_none",
    "test_gpu_units_follow_the_gpu",
    "test_gpus_that_can_not_be_tested_are_no_pass",
    "test_kubelet_would_register_out",
    "test_metrics_are_written",
    "test_node_was_looked_at",
    "test_this_boot_has_a_verdict",
}
EVERY_COMMIT = (
    test_boot_worker,
    test_declared_mutations,
    test_gpu_mutations,
    test_gpu_signing,
    test_gpu_toolkit,
    test_join_mutations,
    test_mutations,
)

# What a check needs are values.
pytestmark = pytest.mark.usefixtures("unread_layers")

Checks = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def suite() -> Iterator[tuple[Any, Checks]]:
    """Yield the module ``suite``, and the suite's checks by file and name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.fspath(SUITE))
        modules = {path.stem: importlib.import_module(path.stem) for path in sorted(SUITE.glob("test_*.py"))}
        yield (
            importlib.import_module("suite"),
            {
                f"{name}.py": {n: f for n, f in vars(module).items() if n.startswith("test_") and callable(f)}
                for name, module in modules.items()
            },
        )


def marks(function: Any) -> list[Any]:
    return list(getattr(function, "pytestmark", ()))


def selected(
    suite: tuple[Any, Checks], definition: ImageDefinition, side: str, select: Sequence[str] = ()
) -> set[str]:
    """Return the checks that a run on this side of an image makes; ``select`` is as in ``observe_suite``."""
    module, checks = suite
    preload = definition_facts(
        definition, "0" * 64, [], [{"ref": "registry.lab.internal/i:1", "mode": "auto", "pin": True}]
    )
    facts = module.Facts(preload)
    chosen = set()
    for file, functions in checks.items():
        for name, function in functions.items():
            item = SimpleNamespace(
                nodeid=name, iter_markers=lambda kind, f=function: (m for m in marks(f) if m.name == kind)
            )
            if select and not {file, f"{file}::{name}"} & set(select):
                continue
            if side in {mark.name for mark in marks(function)} and not module.applicability(item, facts):
                chosen.add(name)
    return chosen


def is_slow(module: Any) -> bool:
    found = module.pytestmark
    return "slow" in {mark.name for mark in (found if isinstance(found, list) else [found])}


def test_every_mutation_is_run(suite: tuple[Any, Checks], tmp_path: Path) -> None:
    lab = load_inventory([LAB])
    joining = load_inventory(test_join_mutations.INVENTORIES).define(test_join_mutations.IMAGE)
    toolkit = variants.define(toolkits.DECLARATION, tmp_path / "toolkit")
    mutated = selected(suite, lab.define("worker_current"), "offline")
    mutated |= selected(suite, lab.define("worker_gpu"), "offline", test_gpu_mutations.SELECTED)
    mutated |= selected(suite, joining, "offline", test_join_mutations.SELECTED)
    mutated |= selected(suite, toolkit, "offline", (test_gpu_toolkit.CHECKS,))
    for name, declaration in DECLARATIONS.items():
        declared = variants.define(declaration, tmp_path / name)
        mutated |= selected(suite, declared, "offline", SELECTED[name])
    mutated.add(test_gpu_signing.CHECK)

    everything = [item for functions in suite[1].values() for item in functions.items()]
    offline = {name for name, f in everything if "offline" in {mark.name for mark in marks(f)}}
    booted = selected(suite, lab.define("worker_current"), "booted") - offline
    docker = selected(suite, lab.define("worker_current_docker"), "booted") - offline
    gpu = selected(suite, toolkit, "booted", (*test_boot_worker_gpu.CHECKS, test_boot_worker_gpu.TOOLKIT))
    left = {name for name, _ in everything} - mutated - booted
    assert (docker & left, (gpu & left) - docker) == (DOCKER, GPU)
    assert left == DOCKER | GPU
    slow = [image for image in test_boot_worker.IMAGES if "slow" in {mark.name for mark in image.marks}]
    assert [image.values for image in slow] == [("worker_current_docker",)]
    assert is_slow(test_boot_worker_gpu)
    assert not any(is_slow(module) for module in EVERY_COMMIT)
