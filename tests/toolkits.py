"""NVIDIA's container toolkit as far as it can be had: stand-ins for its packages, installed by the project's own roles.

NVIDIA's repository is out of reach of the tests. The stand-ins have what the roles build on: the names, a version,
programs that tell it and note how they are called, units that are enabled by their package, a udev rule that starts
one of them. The runtime hands on to runc. What the real programs do with a GPU these don't, and nothing claims it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from image_builder import process, repository
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.events import NullMonitor
from image_builder.lock import LockedPackage
from image_builder.namespace import run_isolated
from image_builder.plan.model import StagePlan
from image_builder.settings import Settings
from image_builder.stages import StageContext, layer
from image_builder.stages.verify import definition_facts, write_facts
from tests.builds import REPO, Workplace

VERSION = "1.20.0"
# Where the programs note how they are called; of the boot, as what they would do is.
NOTES = "/run/nvidia-stand-in"
CDI_UNIT = "nvidia-cdi-refresh.service"

# What an inventory says to have the toolkit.
VARIABLES = f"""
nvidia_container_toolkit_version: "{VERSION}"
nvidia_container_toolkit_repository:
  {{uris: ["https://packages.test/toolkit"], suites: ["/"], signed_by: /usr/share/keyrings/toolkit.gpg}}
container_runtime_docker_options: {{runtimes: {{nvidia: {{path: nvidia-container-runtime}}}}}}
"""
# Both layers that know of the toolkit, in their order.
PLAYBOOK = "\n".join(
    f"- ansible.builtin.import_playbook: {REPO}/playbooks/layers/{name}.yml"
    for name in ("container_runtime", "gpu")
)

_NOTE = f'echo "${{0##*/}} $*" >> {NOTES}'
_RUNTIME = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA Container Runtime version {VERSION}, a stand-in"; exit; fi
{_NOTE}
exec runc "$@"
"""
_CTK = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA Container Toolkit CLI version {VERSION}, a stand-in"; exit; fi
{_NOTE}
"""
# Worse than any one version of the real unit: it waits for the whole boot, and fails without a GPU.
_UNIT = """[Unit]
Description=A stand-in for the toolkit's own unit
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/usr/bin/nvidia-smi -L
[Install]
WantedBy=multi-user.target
"""
_PATH = """[Unit]
Description=A stand-in for the toolkit's own trigger
[Path]
PathChanged=/lib/modules/%v/modules.dep
[Install]
WantedBy=multi-user.target
"""
_RULE = f"""# A stand-in: whenever the driver's module appears, even for a moment.
SUBSYSTEM=="module", ACTION=="add", KERNEL=="nvidia", TAG+="systemd", ENV{{SYSTEMD_WANTS}}+="{CDI_UNIT}"
"""
_POSTINST = f"""#!/bin/sh
set -e
deb-systemd-helper enable {CDI_UNIT} nvidia-cdi-refresh.path
"""
# By package: its files, and the script that is run when it is installed.
PACKAGES: Mapping[str, tuple[Mapping[str, tuple[int, str]], str]] = {
    "libnvidia-container1": ({}, ""),
    "libnvidia-container-tools": ({}, ""),
    "nvidia-container-toolkit-base": (
        {
            "usr/bin/nvidia-container-runtime": (0o755, _RUNTIME),
            "usr/bin/nvidia-ctk": (0o755, _CTK),
            "usr/lib/systemd/system/nvidia-cdi-refresh.path": (0o644, _PATH),
            f"usr/lib/systemd/system/{CDI_UNIT}": (0o644, _UNIT),
            "usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules": (0o644, _RULE),
        },
        _POSTINST,
    ),
    "nvidia-container-toolkit": ({}, ""),
}


@dataclass(frozen=True)
class Toolkit:
    """A GPU image to which the roles have given the toolkit: ``tree`` is what they changed, above the trees of
    ``lowers`` (topmost first), ``facts`` the facts.json of an image that is declared so."""

    tree: Path
    lowers: tuple[Path, ...]
    facts: Path

    def archive(self) -> bytes:
        """Return the change as a tar archive of /; raises ValueError where something was taken away."""
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
            for folder, folders, files in os.walk(self.tree):
                for path in (Path(folder, name) for name in sorted(folders + files)):
                    if stat.S_ISCHR(path.lstat().st_mode):  # overlay's mark
                        raise ValueError(f"{path} was removed")
                    if path.is_symlink() or path.is_file():
                        tar.add(path, arcname=path.relative_to(self.tree), recursive=False)
        return stream.getvalue()


def stand_ins(work: Path) -> list[LockedPackage]:
    """Build the packages; they lie in ``work`` by their SHA-256, as a store keeps packages."""
    found = []
    for name, (files, script) in PACKAGES.items():
        tree = work / name
        control = (
            f"Package: {name}\nVersion: {VERSION}-1\nArchitecture: amd64\nMaintainer: tests <tests@packages.test>\n"
            "Description: stands in for NVIDIA's package of this name\n"
        )
        scripts = {"DEBIAN/postinst": (0o755, script)} if script else {}
        for place, (mode, text) in {**files, **scripts, "DEBIAN/control": (0o644, control)}.items():
            (tree / place).parent.mkdir(parents=True, exist_ok=True)
            (tree / place).write_text(text, encoding="utf-8")
            (tree / place).chmod(mode)
        process.run(["dpkg-deb", "--root-owner-group", "--build", tree, work / f"{name}.deb"])
        data = (work / f"{name}.deb").read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        (work / f"{name}.deb").rename(work / digest)
        found.append(
            LockedPackage(
                name=name,
                version=f"{VERSION}-1",
                architecture="amd64",
                sha256=digest,
                size=len(data),
                path=f"{name}.deb",
                repository="nvidia-container-toolkit",
            )
        )
    return found


def definition(work: Path) -> ImageDefinition:
    """Return the lab's GPU image with the toolkit declared."""
    (work / "host_vars").mkdir(parents=True)
    (work / "hosts.yml").write_text("images: {hosts: {worker_gpu: }}\n", encoding="utf-8")
    (work / "host_vars/worker_gpu.yml").write_text(VARIABLES, encoding="utf-8")
    return load_inventory([REPO / "inventories/lab", work]).define("worker_gpu")


def install(built: Workplace, work: Path) -> Toolkit:
    """Have the roles give the toolkit to the image that was built, in a sandbox as in a bake."""
    lowers, facts = built.sealed()
    declared = definition(work / "inventory")
    for name in ("cache", "work", "product"):
        (work / name).mkdir()
    (work / "layers.yml").write_text(PLAYBOOK, encoding="utf-8")
    packages = stand_ins(work / "cache")
    repository.write_repository(packages, declared.base.suite, work / "cache", work / "repo")
    context = StageContext(
        plan=StagePlan(
            "toolkit", "layer", {"playbook": os.fspath(work / "layers.yml"), "source_date_epoch": 0}
        ),
        definition=declared,
        work=work / "work",
        product=work / "product",
        lowers=lowers,
        ground=(),
        inputs={"module_build": built.object("module_build") / "product"},
        repo=work / "repo",
        archives=None,
        monitor=NullMonitor(),
        log=work / "log",
        settings=Settings(store=built.store),
    )

    def isolated() -> int:
        layer.run(context)
        return 0

    status = run_isolated(isolated)
    assert status == 0, (work / "log").read_text(encoding="utf-8")[-6000:]
    told = json.loads(facts.read_bytes())
    more = [{"name": p.name, "version": p.version, "architecture": p.architecture} for p in packages]
    written = work / "facts.json"
    write_facts(written, definition_facts(declared, told["build_id"], [*told["packages"], *more], preload=[]))
    return Toolkit(work / "product/tree", lowers, written)


@pytest.fixture(scope="session")
def toolkit(worker_gpu: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Toolkit:
    """The GPU image with the container toolkit's stand-in."""
    return install(worker_gpu, tmp_path_factory.mktemp("toolkit"))
