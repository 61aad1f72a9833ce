"""The lab's images: built from locked packages, pushed to the lab's own registry, whose storage is the product.

Product: ``registry/``, what ``image_builder.lab.registry.serve`` serves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.errors import ImageBuilderError
from image_builder.lab import images, large, pause
from image_builder.lab.registry import serve
from image_builder.system.sandbox import open_root


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Make and push the pause image and the large one; return their digests and sizes."""
    assert ctx.repo is not None
    tools = ctx.inputs["tools"] / "tree"
    storage = ctx.product / "registry"
    storage.mkdir()
    layers = ctx.work / "layers"
    layers.mkdir()
    debs = _debs(ctx.repo)
    # Under the same path in the root, so that the caller's file names hold there.
    with open_root([tools], ctx.work / "tools", writable_binds={os.fspath(layers): layers}) as root:
        ctx.doing("making the large image")
        by_reference = {
            large.REFERENCE: large.build_large(
                [[_deb(debs, name) for name in names] for names in large.LARGE_LAYERS],
                layers,
                lambda argv: root.run(argv, log=ctx.log),
            ),
            pause.REFERENCE: images.pause_image(layers / "pause.tar.gz"),
        }
    with serve(tools, storage, ctx.work, writable=True) as registry:
        for reference, image in by_reference.items():
            ctx.doing(f"pushing {reference}")
            name, _, tag = reference.partition("/")[2].partition(":")
            images.push(registry, name, tag, image)
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


def _debs(repo: Path) -> dict[str, Path]:
    """Return the packages of a flat repository by name."""
    return {path.name.partition("_")[0]: path for path in sorted(repo.rglob("*.deb"))}


def _deb(debs: Mapping[str, Path], name: str) -> Path:
    try:
        return debs[name]
    except KeyError:
        raise ImageBuilderError(
            f"the lab's large image needs the package {name}, which is not locked"
        ) from None
