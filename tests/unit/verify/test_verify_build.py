"""A published build is hashed before anything in it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.errors import VerifyError
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.verify.command import verify
from tests.support.images.manifests import DOCUMENTS, manifest, write


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda disk: disk.write_bytes(b"other bytes"), "worker.raw is not what the manifest says"),
        (lambda disk: disk.unlink(), "worker.raw is missing, which the manifest names"),
    ],
    ids=["changed", "missing"],
)
def test_a_file_that_is_not_the_published_one(
    tmp_path: Path, harm: Callable[[Path], object], told: str
) -> None:
    files = {"worker.raw": b"disk"}
    build = write(tmp_path / "build", {**files, **DOCUMENTS, "manifest.json": manifest(files).render()})
    harm(build / "worker.raw")
    settings = Settings(store=tmp_path / "store")
    with pytest.raises(VerifyError, match=told):
        verify(str(build), None, tmp_path / "out", settings=settings, monitor=Monitor())
