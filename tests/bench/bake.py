"""The time that a bake takes, compared with one mmdebstrap of the same packages and the same disk tools.

    .venv/bin/python tests/bench/bake.py [--image worker] [--store DIR] [--smallest] [--json]

Needs root, and a store in which the image was built once: packages, tools tree and the kubelet's build are
taken from there (they are cached in daily use); everything else is built from scratch in a second store next to it.

For the image without its preloads, since mmdebstrap has none:

    cold_ratio       our cold build / (mmdebstrap of all packages in one go + systemd-repart + qemu-img), goal <= 1.2
    warm_seconds     a build in which nothing changed, the whole command, goal <= 2
    last_role_ratio  a build after one byte of the last layer's role changed / the cold build, goal <= 0.15
    peak_mib         the builder's own largest resident size, goal <= 300

For the image as its inventory defines it, with the images that it preloads served by the lab's registry:

    preload_role_ratio  the same as last_role_ratio
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.bake import identity  # noqa: E402
from image_builder.bake.lock import repository  # noqa: E402
from image_builder.bake.lock.model import Lock  # noqa: E402
from image_builder.bake.lock.repository import write_repository  # noqa: E402
from image_builder.bake.stages.root import PACKAGES  # noqa: E402
from image_builder.bake.stages.root.run import mmdebstrap  # noqa: E402
from image_builder.bake.store import Store  # noqa: E402
from image_builder.node import files  # noqa: E402
from image_builder.settings import DEFAULT_STORE  # noqa: E402
from image_builder.system import namespace  # noqa: E402
from image_builder.system.sandbox import open_overlay, open_root  # noqa: E402
from image_builder.system.trees import remove_tree  # noqa: E402
from tests.bench import report  # noqa: E402
from tests.bench.report import Row  # noqa: E402

# A user's Python keeps its bytecode.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
# The lab's own images stand for those in some registry; they aren't part of the bake.
_KEPT = ("tools", "build_root", "kubelet_build", "lab_images")
# The role that an image's last layer ends with, if it isn't a worker.
_LAST_ROLES = {"minimal": "hardening"}
GOALS = {
    "cold_ratio": ("<=", 1.2),
    "warm_seconds": ("<=", 2.0),
    "last_role_ratio": ("<=", 0.15),
    "peak_mib": ("<=", 300.0),
}


def write_inventory(folder: Path, *, preload: bool) -> None:
    """Copy the lab's inventory to ``folder``/inventory; unless ``preload``, its images preload nothing."""
    inventory = folder / "inventory"
    shutil.copytree(REPO / "inventories/lab", inventory)
    if not preload:
        variables = inventory / "group_vars/workers.yml"
        head, _, rest = variables.read_text().partition("image_preload:\n")
        variables.write_text(head + rest.partition("\n\n")[2])


def build(repo: Path, image: str, work: Path) -> tuple[float, dict[str, Any]]:
    """Run the command as a user does; return (wall seconds, its JSON)."""
    places: list[str | Path] = [
        "--store",
        work / "store",
        "--output",
        work / "output",
        "-i",
        work / "inventory",
    ]
    started = time.monotonic()
    done = subprocess.run(
        [repo / "image-builder", "build", image, *places, "--json"],
        cwd=repo,  # its roles must not be those of another project
        env=_ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.monotonic() - started, json.loads(done.stdout)


def seed_store(source: Path, image: str, work: Path) -> Lock:
    """Fill a new store, by hard links, with what daily use would have cached; return the image's lock."""
    kept = Store(source)
    target = work / "store"
    store = Store(target)
    store.prepare()
    for stage_id in kept.ids():
        if kept.meta(stage_id)["name"] in _KEPT:
            subprocess.run(["cp", "-al", kept.object(stage_id), store.object(stage_id)], check=True)
    for folder in ("debs", "files"):
        subprocess.run(["cp", "-al", f"{source / folder}/.", target / folder], check=True)
    # The lock of the last build: a newer one may need other build tools, and then the kubelet is compiled again.
    locks = (source / "locks").glob(f"{image}@*.lock.json")
    shutil.copy(max(locks, key=lambda lock: lock.stat().st_mtime), target / "locks" / f"{image}.lock.json")
    subprocess.run(
        [REPO / "image-builder", "plan", image, "--store", target, "-i", work / "inventory"],
        cwd=REPO,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (lock,) = (target / "locks").glob(f"{image}@*.lock.json")
    return Lock.load(lock)


def reference(lock: Lock, store: Store, definition_formats: list[str], work: Path) -> float:
    """Make a disk of the same packages with only the tools; return the wall-clock seconds."""
    tools = next(store.product(i) for i in store.ids() if store.meta(i)["name"] == "tools") / "tree"
    groups = [g for name, g in lock.groups.items() if name not in ("tools", "build_root")]
    packages = [p for group in groups for p in group.packages]
    seconds = work / "seconds"

    def run() -> int:
        repo = work / "repo"
        write_repository(packages, groups[0].suite, store.path / "debs", repo)
        tree, out = work / "tree", work / "out"
        tree.mkdir()
        out.mkdir()
        _write_partitions(out / "repart.d")
        started = time.monotonic()
        with (
            open_overlay([], work / "target", upper=tree) as target,
            open_root(
                [tools],
                work / "tools",
                binds={repository.MOUNT_POINT: repo},
                writable_binds={"/mnt": target, "/out": out},
            ) as root,
        ):
            names = sorted({p.name for p in packages} | set(PACKAGES))
            mmdebstrap(
                root.run,
                "/mnt",
                suite=groups[0].suite,
                architecture="amd64",
                include=names,
                repo=repository.MOUNT_POINT,
                epoch=lock.source_date_epoch,
                log=work / "reference.log",
                doing=lambda _what: None,
            )
            _make_disk(root.run, definition_formats, work / "reference.log")
        files.syncfs(out)
        seconds.write_text(str(time.monotonic() - started))
        return 0

    if os.fork() == 0:
        os._exit(namespace.run_isolated(run))
    _, status = os.wait()
    if status:
        raise SystemExit(f"the reference failed: see {work / 'reference.log'}")
    return float(seconds.read_text())


def _write_partitions(folder: Path) -> None:
    folder.mkdir()
    (folder / "10-esp.conf").write_text(
        "[Partition]\nType=esp\nFormat=vfat\nSizeMinBytes=512M\nSizeMaxBytes=512M\n"
    )
    (folder / "20-root.conf").write_text(
        "[Partition]\nType=root\nFormat=ext4\nCopyFiles=/mnt:/\nMinimize=guess\n"
    )


def _make_disk(run: Any, formats: list[str], log: Path) -> None:
    seed = identity.disk_uuid("reference")
    argv = ["systemd-repart", "--offline=yes", "--empty=create", "--size=auto", "--dry-run=no"]
    run([*argv, f"--seed={seed}", "--definitions=/out/repart.d", "/out/disk.raw"], log=log)
    if "qcow2" in formats:
        run(["qemu-img", "convert", "-c", "-O", "qcow2", "/out/disk.raw", "/out/disk.qcow2"], log=log)
    if "vhd" in formats:
        fixed = ["-o", "subformat=fixed,force_size"]
        run(["qemu-img", "convert", "-O", "vpc", *fixed, "/out/disk.raw", "/out/disk.vhd"], log=log)


def changed_checkout(image: str, work: Path) -> Path:
    """Return a copy of this checkout with one more byte in a template of the last layer's role."""
    copy = work / "checkout"
    shutil.copytree(REPO, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "output", ".venv"))
    (copy / ".venv").symlink_to(REPO / ".venv")
    role = _LAST_ROLES.get(image, "kubelet")
    template = min((copy / "roles" / role / "templates").iterdir())
    with template.open("a") as file:
        file.write("\n")
    return copy


@contextmanager
def workplace(image: str, source: Path, *, preload: bool) -> Iterator[tuple[Path, Lock]]:
    """Yield a directory with a store and an inventory, and the image's lock; the directory is removed afterwards."""
    work = Path(tempfile.mkdtemp(prefix="bench-bake-", dir=source.parent))
    try:
        write_inventory(work, preload=preload)
        yield work, seed_store(source, image, work)
    finally:
        remove_tree(work)  # as it is: its stages share their files with the source's


def measure(image: str, source: Path) -> dict[str, Any]:
    with workplace(image, source, preload=False) as (work, lock):
        cold, told = build(REPO, image, work)
        warm, _ = build(REPO, image, work)
        role, _ = build(changed_checkout(image, work), image, work)
        formats = [
            f["format"]
            for f in json.loads((Path(told["artefact"]) / "manifest.json").read_text())["artefacts"]
        ]
        (work / "reference").mkdir()
        plain = reference(lock, Store(work / "store"), formats, work / "reference")
    found = {
        "image": image,
        "cold_seconds": round(cold, 1),
        "reference_seconds": round(plain, 1),
        "cold_ratio": round(cold / plain, 2),
        "warm_seconds": round(warm, 2),
        "last_role_seconds": round(role, 1),
        "last_role_ratio": round(role / cold, 3),
        "peak_mib": round(float(told["peak_mib"]), 1),
    }
    return found if image in _LAST_ROLES else found | with_preloads(image, source)


def with_preloads(image: str, source: Path) -> dict[str, Any]:
    with workplace(image, source, preload=True) as (work, _):
        whole, _ = build(REPO, image, work)
        role, _ = build(changed_checkout(image, work), image, work)
    return {
        "whole_seconds": round(whole, 1),
        "preload_role_seconds": round(role, 1),
        "preload_role_ratio": round(role / whole, 3),
    }


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--image", default="worker")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    options = report.parse(parser, image="minimal")
    found = measure(options.image, options.store)
    rows = [
        Row("cold build", f"{found['cold_seconds']} s", f"{found['reference_seconds']} s", "cold_ratio"),
        Row("nothing changed", f"{found['warm_seconds']} s", "", "warm_seconds"),
        Row("last role", f"{found['last_role_seconds']} s", f"{found['cold_seconds']} s", "last_role_ratio"),
        Row("peak memory", f"{found['peak_mib']} MiB", "", "peak_mib"),
    ]
    if "whole_seconds" in found:
        seconds = f"{found['preload_role_seconds']} s", f"{found['whole_seconds']} s"
        rows.append(Row("last role, preloads", *seconds, "preload_role_ratio"))
    return report.conclude(options, found, GOALS, rows)


if __name__ == "__main__":
    sys.exit(main())
