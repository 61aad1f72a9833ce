"""The runtime for GPUs is added to the existing configuration of Docker and containerd, and removes nothing from it.

containerd 1.7 replaces a plugin's whole section with that of a later file: a drop-in that only has the runtime would
reset the pause image, the mirrors and the deadlines to defaults. The real containerd shows how it merges both files,
and the real Docker validates its own. Debian 12's engines are in the GPU image: tests/gpu/test_gpu_toolkit.py.
"""

from __future__ import annotations

import base64
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.system.namespace import run_isolated
from image_builder.system.sandbox import Root, open_root
from tests.support.images.builds import REPO, Workplace

pytestmark = pytest.mark.root

# What the role container_runtime also writes for the containerd in Docker's image.
MAIN = REPO / "tests/unit/golden/container_runtime/containerd-1.7.toml"
PLUGIN = "io.containerd.grpc.v1.cri"
DROP_IN = "etc/containerd/conf.d/99-nvidia.toml"
# As required by the role.
RUNTIMES = {"nvidia": {"path": "nvidia-container-runtime"}}


def rendered(main: bytes) -> str:
    """Return the drop-in that the role writes next to a main file."""
    template = (REPO / "roles/nvidia/templates/containerd.toml.j2").read_text(encoding="utf-8")
    variables: dict[str, JSON] = {
        "__nvidia_containerd_main": {"content": base64.b64encode(main).decode()},
        "__nvidia_containerd_plugin": PLUGIN,
        "__nvidia_containerd_cdi": True,
        "ansible_managed": "a test",
        "text": template,
    }
    return str(engine.Evaluator(variables).evaluate("{{ text }}"))


def dump(root: Root) -> dict[str, Any]:
    return tomllib.loads(root.run(["containerd", "config", "dump"]).stdout)


def test_drop_in_adds_the_runtime_and_changes_nothing_else(tmp_path: Path, worker: Workplace) -> None:
    seen_file = tmp_path / "seen.json"

    def isolated() -> int:
        with open_root(worker.trees("container_runtime"), tmp_path / "work") as root:
            shutil.copyfile(MAIN, root.path / "etc/containerd/config.toml")
            before = dump(root)
            place = root.path / DROP_IN
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(rendered(MAIN.read_bytes()), encoding="utf-8")
            seen_file.write_text(json.dumps([before, dump(root)]), encoding="utf-8")
        return 0

    assert run_isolated(isolated) == 0
    before, after = json.loads(seen_file.read_text(encoding="utf-8"))
    assert after["plugins"][PLUGIN]["containerd"]["runtimes"].pop("nvidia")["options"] == {
        "BinaryName": "/usr/bin/nvidia-container-runtime",
        "SystemdCgroup": True,
    }
    assert (
        after["plugins"][PLUGIN].pop("enable_cdi") is True
        and before["plugins"][PLUGIN].pop("enable_cdi") is False
    )
    # The program collects the files that it read in a map, so their order is random.
    assert sorted(after.pop("imports")) == sorted([*before.pop("imports"), f"/{DROP_IN}"])
    assert after == before


def test_docker_accepts_the_runtime_in_its_configuration(tmp_path: Path, worker: Workplace) -> None:
    seen_file = tmp_path / "seen.json"

    def isolated() -> int:
        with open_root(worker.trees("container_runtime"), tmp_path / "work") as root:
            path = root.path / "etc/docker/daemon.json"
            options = json.loads(path.read_text(encoding="utf-8"))
            result = {}
            for key in ("runtimes", "runtime"):
                path.write_text(json.dumps({**options, key: RUNTIMES}), encoding="utf-8")
                done = root.run(["dockerd", "--validate", "--config-file=/etc/docker/daemon.json"], ok=(0, 1))
                result[key] = done.returncode
            seen_file.write_text(json.dumps(result), encoding="utf-8")
        return 0

    assert run_isolated(isolated) == 0
    assert json.loads(seen_file.read_text(encoding="utf-8")) == {"runtimes": 0, "runtime": 1}
