"""Every check of the suite is seen red in some run of the tests: computed from definitions and what the runs select.

The runs themselves hold that each selected check is mutated (``mutants.blind``, ``mutants.unproven``).
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
from image_builder.settings import REPO_ROOT
from image_builder.stages.verify import SUITE, definition_facts
from tests import toolkits, variants
from tests.boot import test_boot_worker_gpu
from tests.declarations import DECLARATIONS, SELECTED
from tests.stages import test_gpu_mutations, test_gpu_toolkit, test_join_mutations

LAB = REPO_ROOT / "inventories" / "lab"
# Checks of a booted machine with containerd: only ``image-builder boot worker_containerd --verify`` makes them, sound.
# Signatures of a driver's modules: tests/integration/test_gpu_signing.py has modules with and without.
NEVER_RED = {
    "booted": {
        "test_preloaded_images_are_in_containerd",
        "test_preloaded_images_are_pinned",
        "test_preloaded_layers_are_in_containerd",
    },
    "offline": {"test_gpu_modules_are_signed"},
}

Checks = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def suite() -> Iterator[tuple[Any, Checks]]:
    """The module ``suite``, and the suite's checks by file and name."""
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
    """Return the checks that a run on this side of an image makes, ``select`` as ``observe_suite`` has it."""
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


def test_every_mutation_is_run(suite: tuple[Any, Checks], tmp_path: Path) -> None:
    lab = load_inventory([LAB])
    joining = load_inventory(test_join_mutations.INVENTORIES).define(test_join_mutations.IMAGE)
    toolkit = variants.define(toolkits.DECLARATION, tmp_path / "toolkit")
    mutated = selected(suite, lab.define("worker"), "offline")
    mutated |= selected(suite, lab.define("worker_gpu"), "offline", test_gpu_mutations.SELECTED)
    mutated |= selected(suite, joining, "offline", test_join_mutations.SELECTED)
    mutated |= selected(suite, toolkit, "offline", (test_gpu_toolkit.CHECKS,))
    for name, declaration in DECLARATIONS.items():
        declared = variants.define(declaration, tmp_path / name)
        mutated |= selected(suite, declared, "offline", SELECTED[name])

    everything = [item for functions in suite[1].values() for item in functions.items()]
    offline = {name for name, f in everything if "offline" in {mark.name for mark in marks(f)}}
    assert offline - mutated == NEVER_RED["offline"]

    booted = selected(suite, lab.define("worker"), "booted") - offline
    gpu = (*test_boot_worker_gpu.CHECKS, test_boot_worker_gpu.TOOLKIT)
    booted |= selected(suite, toolkit, "booted", gpu) - offline
    assert {name for name, _ in everything} - offline - booted == NEVER_RED["booted"]
