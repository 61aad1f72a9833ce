"""Seal: take away what must not be shared by the machines that boot an image, and give it its identity.

The role ``image_seal`` does what can be told by name. Afterwards this module removes what the bake itself
leaves (Ansible's included), at the level of bytes, and writes the files that name the build.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from image_builder import identity
from image_builder.plan.model import JSON
from image_builder.sandbox import open_root
from image_builder.stages import StageContext
from image_builder.stages.layer import play
from image_builder.store import remove_tree

PLAYBOOK = "playbooks/seal.yml"

# Directories that stay, with their modes, without content.
_EMPTIED = ("tmp", "var/tmp", "var/cache/ldconfig", "var/cache/man", "var/lib/cloud")
# Directories in which every directory stays, as the packages made them, and every file goes.
_WITHOUT_FILES = ("var/cache/apt", "var/lib/apt/lists", "var/log")
# Paths and glob patterns of what is removed.
_REMOVED = (
    "root/.ansible",
    "root/.cache",
    "root/.bash_history",
    "home/*/.ansible",
    "etc/*-",
    "etc/.pwd.lock",
    "etc/ssh/ssh_host_*",
    "etc/hostname",
    "var/cache/debconf/*-old",
    "var/lib/dpkg/*-old",
    "var/lib/dbus/machine-id",
    "var/lib/systemd/random-seed",
    "var/lib/systemd/credential.secret",
    "var/lib/systemd/catalog/database",
)
_FSTAB = """\
# Written by image-builder for this build's own partitions.
PARTUUID={root} / ext4 defaults,x-systemd.growfs 0 1
PARTUUID={esp} /boot/efi vfat umask=0077,nofail,x-systemd.device-timeout=90s 0 2
"""


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Run the seal playbook, scrub, and write fstab and ``/etc/image-release``."""
    tree = ctx.product / "tree"
    tree.mkdir()
    with open_root(ctx.lowers, ctx.work / "root", upper=tree) as root:
        result = play(ctx, root, ctx.settings.repo_root / PLAYBOOK)
        ctx.doing("scrubbing")
        removed = sum(1 for path in _doomed(root.path) if _remove(path))
        _write_identity(ctx, root.path)
    return {"tasks_changed": result.changed, "scrubbed": removed}


def _doomed(root: Path) -> Iterator[Path]:
    for name in _EMPTIED:
        if (root / name).is_dir() and not (root / name).is_mount():
            yield from sorted((root / name).iterdir())
    for name in _WITHOUT_FILES:
        for path in sorted((root / name).rglob("*")):
            if path.is_symlink() or not path.is_dir():
                yield path
    for pattern in _REMOVED:
        yield from sorted(root.glob(pattern))


def _remove(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
    return True


def _write_identity(ctx: StageContext, root: Path) -> None:
    """Write the files that name the build; its id is this stage's own, so no earlier stage can know it."""
    build_id = ctx.plan.id
    definition = ctx.definition
    _write(
        root / "etc/fstab",
        _FSTAB.format(
            root=identity.partition_uuid(build_id, "root"), esp=identity.partition_uuid(build_id, "esp")
        ),
    )
    release = {
        "IMAGE_NAME": definition.name,
        "IMAGE_BUILD_ID": build_id,
        # As the output directory has it, and short enough for a label of Kubernetes (63 characters).
        "IMAGE_BUILD": build_id[:12],
        "IMAGE_DISTRIBUTION": definition.base.distribution,
        "IMAGE_SUITE": definition.base.suite,
        "IMAGE_LAYERS": " ".join(definition.layers),
        "IMAGE_SOURCE_DATE_EPOCH": str(ctx.plan.options["source_date_epoch"]),
    }
    _write(root / "etc/image-release", "".join(f'{key}="{value}"\n' for key, value in release.items()))
    _write(root / "etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")


def _write(path: Path, text: str) -> None:
    if os.path.lexists(path):
        path.unlink()
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
