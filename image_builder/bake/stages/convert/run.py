"""The artifacts: the disk and the sealed tree in the requested formats.

    raw    the disk itself, a hard link to the disk stage's file: read it, never write to it
    qcow2  compressed with zstd: as fast to make as an uncompressed one and half its size, where zlib takes
           seven times as long; read by qemu since 5.1. Written in order (no ``-W``), so the bytes are the
           same each time
    vhd    fixed, for Azure: the disk's bytes and a footer, written here and not by qemu-img, which puts the
           time and a random id into it
    tar    the sealed tree, names sorted, owners as numbers, extended attributes kept

Product: ``<image>.<format>`` for each format.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from image_builder.bake import identity
from image_builder.bake.formats import vhd
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.disk.run import measure
from image_builder.canonical import JSON
from image_builder.errors import ImageBuilderError
from image_builder.system import sparse
from image_builder.system.sandbox import open_root

# qemu's default of 64 KiB takes half as long again to write and gives a larger file; more than this gains nothing.
_CLUSTER = "256k"
_TREE, _DISK, _OUT = "/run/tree", "/run/disk", "/run/out"
_PERCENT = re.compile(r"\((\d+(?:\.\d+)?)/100%\)")
# tar reports its position every so many records of 10 KiB.
_CHECKPOINT, _RECORD = 1000, 10240


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Write every format; return for each its file's name, size, virtual size and SHA-256.

    Raises ImageBuilderError for a disk that a format can't hold, CommandError.
    """
    image, formats = ctx.plan.options["image"], ctx.plan.options["formats"]
    written: list[tuple[Path, str, int, Future[str]]] = []
    # One file is hashed while the next one is written.
    with ThreadPoolExecutor(1) as pool:
        for kind in formats:
            target = ctx.product / f"{image}.{kind}"
            ctx.doing(f"writing {target.name}")
            virtual_size = _WRITERS[kind](ctx, target)
            written.append((target, kind, virtual_size, pool.submit(sparse.sha256, target)))
        ctx.doing("hashing")
        files: list[JSON] = [
            {
                "name": target.name,
                "format": kind,
                "bytes": target.stat().st_size,
                "virtual_size": virtual_size,
                "sha256": digest.result(),
            }
            for target, kind, virtual_size, digest in written
        ]
    return {"files": files}


def _progress(ctx: StageContext) -> sparse.Progress:
    return lambda done, total: ctx.monitor.stage_progress(ctx.plan.name, done, total, "B")


def _disk(ctx: StageContext) -> Path:
    return ctx.inputs["disk"] / "disk.raw"


def _write_raw(ctx: StageContext, target: Path) -> int:
    source = _disk(ctx)
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without links
        sparse.copy(source, target, _progress(ctx))
    return source.stat().st_size


def _write_qcow2(ctx: StageContext, target: Path) -> int:
    size = _disk(ctx).stat().st_size

    def show(line: str) -> None:
        if percent := _PERCENT.search(line):
            _progress(ctx)(int(float(percent[1]) * size / 100), size)

    with open_root(
        [ctx.inputs["tools"] / "tree"],
        ctx.work,
        binds={_DISK: ctx.inputs["disk"]},
        writable_binds={_OUT: ctx.product},
    ) as tools:
        argv = ["qemu-img", "convert", "-p", "-f", "raw", "-O", "qcow2", "-c"]
        argv += ["-o", f"compression_type=zstd,cluster_size={_CLUSTER}"]
        argv += [f"{_DISK}/disk.raw", f"{_OUT}/{target.name}"]
        tools.run(argv, log=ctx.log, on_line=show)
    return size


def _write_vhd(ctx: StageContext, target: Path) -> int:
    unique_id = uuid.UUID(identity.disk_uuid(ctx.plan.options["build_id"]))
    epoch = ctx.plan.options["source_date_epoch"]
    try:
        size = write_vhd(_disk(ctx), target, epoch, unique_id, _progress(ctx))
        with target.open("rb") as stream:
            vhd.read(stream)
    except vhd.VhdError as error:
        raise ImageBuilderError(f"{target.name}: {error}") from error
    return size


def write_vhd(
    disk: Path, target: Path, epoch: int, unique_id: uuid.UUID, progress: sparse.Progress | None = None
) -> int:
    """Write the raw ``disk`` as a fixed VHD and return the disk's size in bytes.

    The disk must be a whole number of MiB: rounding it up here would leave the GPT's backup somewhere before the
    end. Raises VhdError before anything is written.
    """
    footer = vhd.build_footer(disk.stat().st_size, epoch, unique_id)
    size = sparse.copy(disk, target, progress)
    with target.open("ab") as stream:
        stream.write(footer)
    return size


def _write_tar(ctx: StageContext, target: Path) -> int:
    epoch = ctx.plan.options["source_date_epoch"]
    with (
        open_root(ctx.lowers, ctx.work) as sealed,
        open_root(
            [ctx.inputs["tools"] / "tree"],
            ctx.work,
            binds={_TREE: sealed.path},
            writable_binds={_OUT: ctx.product},
        ) as tools,
    ):
        total = measure(sealed.path).bytes

        def show(line: str) -> None:
            if position := re.search(r"checkpoint (\d+)", line):
                _progress(ctx)(min(int(position[1]) * _RECORD, total), total)

        argv = ["tar", "--create", f"--file={_OUT}/{target.name}", f"--directory={_TREE}", "--sort=name"]
        argv += ["--format=posix", "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime"]
        argv += ["--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls"]
        argv += [f"--mtime=@{epoch}", "--clamp-mtime", f"--checkpoint={_CHECKPOINT}", "."]
        tools.run(argv, log=ctx.log, on_line=show)
    return target.stat().st_size


_WRITERS: Mapping[str, Callable[[StageContext, Path], int]] = {
    "raw": _write_raw,
    "qcow2": _write_qcow2,
    "vhd": _write_vhd,
    "tar": _write_tar,
}
