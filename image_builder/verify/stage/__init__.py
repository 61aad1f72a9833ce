"""The plan of the verification stage: the sealed tree, what must be in it, and the suite that checks it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import Draft, StageKind
from image_builder.bake.stages.seal import SEAL
from image_builder.canonical import JSON, digest
from image_builder.definition import ImageDefinition, published_variables
from image_builder.settings import CHECKS
from image_builder.system.trees import files_in, named_digests

_SUITE = "image_builder/suite"


def _plan(draft: Draft) -> Iterator[StagePlan]:
    options: dict[str, JSON] = {
        "build_id": draft.id(SEAL),
        "facts": digest(published_variables(draft.definition)),
        "packages": _packages(draft),
        "preload": [
            image.model_dump(mode="json")
            for image in draft.definition.preload
            if draft.lock.locked_image(image.ref)
        ],
        "pytest": importlib.metadata.version("pytest"),
        "testinfra": importlib.metadata.version("pytest-testinfra"),
    }
    own = _own_checks(draft.definition)
    code = {**draft.code(KIND), **named_digests(own)}
    yield StagePlan(KIND.name, KIND.name, options, code, draft.tree_ids, places=own)


def _own_checks(definition: ImageDefinition) -> dict[str, Path]:
    """Return the files of the user's own checks and mutations, by the names under which they count.

    An editor's lock, a link that leads nowhere, isn't one: it may be gone before the checks have run.
    """
    if (folder := definition.checks) is None:
        return {}
    return {f"{CHECKS}/{file.relative_to(folder)}": file for file in filter(Path.is_file, files_in(folder))}


def _packages(draft: Draft) -> list[dict[str, JSON]]:
    """Return the packages that must be installed in the image: all that the lock has for its stages."""
    packages = [p for name in ("base", *draft.definition.layers) for p in draft.lock.group(name).packages]
    return [
        {"name": p.name, "version": p.version, "architecture": p.architecture}
        for p in sorted(packages, key=lambda p: (p.name, p.architecture))
    ]


KIND = StageKind(
    "verify", "image_builder.verify.stage.run", _plan, (_SUITE,), reports=("junit.xml", "verify.json")
)
