"""A program that is missing from the directory of programs, or isn't the one that the inventory names."""

from __future__ import annotations

import hashlib
import lzma
import subprocess
from pathlib import Path

import pytest

from image_builder.bake.lock.fetch import PROGRAMS
from image_builder.errors import FetchError
from tests.support.images.builds import IMAGE, REPO, Workplace

pytestmark = pytest.mark.root

KUBELET = lzma.compress(b"#!/bin/sh\necho Kubernetes v1.36.2\n")
SHA256 = hashlib.sha256(KUBELET).hexdigest()
VARIABLES = f"""---
image_layers: [system, kubernetes]
container_runtime_engine: containerd
container_runtime_containerd_version: "2.1"
kubelet_version: "1.36.2"
kubelet_mode: standalone
kubelet_source:
  type: archive
  url: file:kubernetes/kubelet.xz
  sha256: {SHA256}
"""
LINE = VARIABLES.splitlines().index(f"  sha256: {SHA256}") + 1


def test_what_is_wrong_with_a_program_is_told_with_its_file_and_line(
    workplace: Workplace, published: dict[str, str], tmp_path: Path
) -> None:
    inventory, programs = tmp_path / "inventory", tmp_path / "programs"
    subprocess.run(["cp", "-a", REPO / "inventories/lab", inventory], check=True)
    (inventory / "host_vars" / f"{IMAGE}.yml").write_text(VARIABLES)
    kubelet = programs / "kubernetes/kubelet.xz"
    kubelet.parent.mkdir(parents=True)
    where = f"kubelet.xz ({inventory}/host_vars/{IMAGE}.yml:{LINE})"

    def refused(directory: str) -> str:
        done = workplace.build("--stop-after", "kubernetes", inventory=inventory, env={PROGRAMS: directory})
        assert done.status == FetchError.exit_code, done.stderr
        assert where in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert workplace.published() == published
        assert not (workplace.store / "files" / SHA256).exists()
        return done.stderr

    assert f"{PROGRAMS} doesn't say where that is" in refused("")
    assert f"file:{kubelet}: No such file or directory" in refused(str(programs))
    kubelet.write_bytes(KUBELET[:-1])
    assert f"locked is {SHA256}" in refused(str(programs))

    kubelet.write_bytes(KUBELET)
    done = workplace.build("--stop-after", "kubernetes", inventory=inventory, env={PROGRAMS: str(programs)})
    assert done.status == 0, done.stderr
    assert str(programs) not in workplace.record(".lock.json").read_text()
