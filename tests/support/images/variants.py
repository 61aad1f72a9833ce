"""Images that are declared differently from the baked ones: the roles are applied once more, on a baked image.

That way, the project's own roles configure what only other definitions have, in a sandbox as in a bake, but without
another bake. Packages and programs that Debian's archive doesn't have are stand-ins: a name, a version, a program that
prints it.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from image_builder.bake.lock import repository
from image_builder.bake.lock.model import Lock, LockedPackage
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.layer import run as layer
from image_builder.bake.store import Store
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.system import process
from image_builder.system.namespace import run_isolated
from image_builder.verify.runner import definition_facts, write_facts
from tests.support.images.builds import REPO, Workplace


@dataclass(frozen=True)
class StandIn:
    """A minimal package: ``files`` maps paths to mode and text, ``script`` is its postinst."""

    name: str
    version: str
    repository: str
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    script: str = ""


@dataclass(frozen=True)
class Declaration:
    """What is declared on top of the lab's ``image`` as of its stage ``above``: variables (YAML), the layers that apply
    them, and what those layers install."""

    image: str
    variables: str
    layers: tuple[str, ...]
    packages: tuple[StandIn, ...] = ()
    archives: tuple[bytes, ...] = ()
    above: str = "seal"


@dataclass(frozen=True)
class Variant:
    """``tree`` is what the roles changed, on top of the trees in ``lowers`` (topmost first); ``facts`` is the
    facts.json of an image that is declared this way."""

    tree: Path
    lowers: tuple[Path, ...]
    facts: Path

    @property
    def trees(self) -> tuple[Path, ...]:
        return (self.tree, *self.lowers)

    def archive(self) -> bytes:
        """Return the changes as a gzipped tar archive of /. Raises ValueError if something was removed."""
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
            for folder, folders, files in os.walk(self.tree):
                for path in (Path(folder, name) for name in sorted(folders + files)):
                    if stat.S_ISCHR(path.lstat().st_mode):  # overlayfs's whiteout
                        raise ValueError(f"{path} was removed")
                    if path.is_symlink() or path.is_file():
                        tar.add(path, arcname=path.relative_to(self.tree), recursive=False)
        return stream.getvalue()


def build_packages(packages: Sequence[StandIn], work: Path) -> list[LockedPackage]:
    """Build stand-ins into ``work``, named by their SHA-256, as a store keeps packages."""
    locked = []
    for package in packages:
        tree, name = work / package.name, package.name
        control = (
            f"Package: {name}\nVersion: {package.version}\nArchitecture: amd64\n"
            "Maintainer: tests <tests@packages.test>\nDescription: stands in for the package of this name\n"
        )
        scripts = {"DEBIAN/postinst": (0o755, package.script)} if package.script else {}
        for place, (mode, text) in {**package.files, **scripts, "DEBIAN/control": (0o644, control)}.items():
            (tree / place).parent.mkdir(parents=True, exist_ok=True)
            (tree / place).write_text(text, encoding="utf-8")
            (tree / place).chmod(mode)
        process.run(["dpkg-deb", "--root-owner-group", "--build", tree, work / f"{name}.deb"])
        data = (work / f"{name}.deb").read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        (work / f"{name}.deb").rename(work / digest)
        locked.append(
            LockedPackage(
                name=name,
                version=package.version,
                architecture="amd64",
                sha256=digest,
                size=len(data),
                path=f"{name}.deb",
                repository=package.repository,
            )
        )
    return locked


def define(declaration: Declaration, inventory: Path) -> ImageDefinition:
    """Return the image definition of a declaration; ``inventory`` is a directory to create for it."""
    (inventory / "host_vars").mkdir(parents=True)
    (inventory / "hosts.yml").write_text(f"images: {{hosts: {{{declaration.image}: }}}}\n", encoding="utf-8")
    (inventory / f"host_vars/{declaration.image}.yml").write_text(declaration.variables, encoding="utf-8")
    return load_inventory([REPO / "inventories/lab", inventory]).define(declaration.image)


def apply(built: Workplace, declaration: Declaration, work: Path) -> Variant:
    """Apply a declaration to a built image with the project's roles."""
    lowers = built.trees(declaration.above)
    declared = define(declaration, work / "inventory")
    for name in ("cache", "work", "product", "archives"):
        (work / name).mkdir()
    for content in declaration.archives:
        (work / "archives" / hashlib.sha256(content).hexdigest()).write_bytes(content)
    plays = (
        f"- ansible.builtin.import_playbook: {REPO}/playbooks/layers/{n}.yml" for n in declaration.layers
    )
    (work / "layers.yml").write_text("\n".join(plays), encoding="utf-8")
    packages = build_packages(declaration.packages, work / "cache")
    repository.write_repository(packages, declared.base.suite, work / "cache", work / "repo")
    inputs = ["module_build"] if "gpu" in declaration.layers else []
    context = StageContext(
        plan=StagePlan(
            "variant", "layer", {"playbook": os.fspath(work / "layers.yml"), "source_date_epoch": 0}
        ),
        definition=declared,
        work=work / "work",
        product=work / "product",
        lowers=lowers,
        ground=(),
        inputs={stage: built.object(stage) / "product" for stage in inputs},
        repo=work / "repo",
        files=work / "archives",
        monitor=Monitor(),
        log=work / "log",
        settings=Settings(store=built.store),
    )

    def isolated() -> int:
        layer.run(context)
        return 0

    status = run_isolated(isolated)
    assert status == 0, (work / "log").read_text(encoding="utf-8")[-6000:]
    lock = Lock.load(built.lock)
    made = {Store(built.store).meta(tree.parent.parent.name)["name"] for tree in lowers}
    below = [package for name in made & lock.groups.keys() for package in lock.group(name).packages]
    installed = [
        {"name": p.name, "version": p.version, "architecture": p.architecture}
        for p in {(p.name, p.architecture): p for p in (*below, *packages)}.values()
    ]
    written = work / "facts.json"
    write_facts(written, definition_facts(declared, "0" * 64, installed, preload=[]))
    return Variant(work / "product/tree", lowers, written)
