"""The lab's images: built from locked packages, pushed to the lab's own registry, whose storage is the product.

Product: ``registry/``, which ``image_builder.lab.registry.serve`` serves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.errors import ImageBuilderError
from image_builder.lab import images, pause, software
from image_builder.lab.registry import serve
from image_builder.system.sandbox import open_root


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Build and push the pause image and those that the options name; return their digests and sizes."""
    assert ctx.repo is not None
    tools = ctx.inputs["tools"] / "tree"
    storage = ctx.product / "registry"
    storage.mkdir()
    layers = ctx.work / "layers"
    layers.mkdir()
    by_reference = {pause.REFERENCE: images.pause_image(layers / "pause.tar.gz")}
    debs = _debs(ctx.repo)
    # Under the same path in the root, so that the caller's file names are valid there.
    with open_root([tools], ctx.work / "tools", writable_binds={os.fspath(layers): layers}) as root:
        for reference in _references(ctx.plan.options):
            name = _name_and_tag(reference)[0]
            ctx.doing(f"making {reference}")
            by_layer = [[_deb(debs, deb) for deb in names] for names in software.IMAGES[reference]]
            (layers / name).mkdir()
            by_reference[reference] = software.build_image(
                name, by_layer, layers / name, lambda argv: root.run(argv, log=ctx.log)
            )
    with serve(tools, storage, ctx.work, writable=True) as registry:
        for reference, image in by_reference.items():
            ctx.doing(f"pushing {reference}")
            images.push(registry, *_name_and_tag(reference), image)
    return {
        "images": {
            reference: {
                "digest": image.digest,
                "bytes": sum(layer.size for layer in image.layers),
                "unpacked_bytes": sum(layer.tar_size for layer in image.layers),
            }
            for reference, image in by_reference.items()
        }
    }


def _references(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(options["images"])


def _name_and_tag(reference: str) -> tuple[str, str]:
    name, _, tag = reference.partition("/")[2].partition(":")
    return name, tag


def _debs(repo: Path) -> dict[str, Path]:
    """Return the packages of a flat repository, by name."""
    return {path.name.partition("_")[0]: path for path in sorted(repo.rglob("*.deb"))}


def _deb(debs: Mapping[str, Path], name: str) -> Path:
    try:
        return debs[name]
    except KeyError:
        raise ImageBuilderError(
            f"an image of the lab needs the package {name}, which is not locked"
        ) from None
