"""The disk: a GPT with an EFI system partition and the sealed tree as root, byte for byte reproducible.

systemd-repart writes the partition table into an empty file; mkfs.vfat, mcopy and mke2fs then fill the
partitions in place, at their offsets. Nothing is mounted, no loop device is used, and the tree's bytes are
written once: repart's own ``CopyFiles=`` would copy them twice more, take them in directory order, and
leave out /boot. The result of mke2fs depends only on the tree: it walks in name order, and sets times after
SOURCE_DATE_EPOCH to that.

Product: ``disk.raw``, sparse, a whole number of MiB.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from image_builder.bake import boot_partition, identity
from image_builder.bake.formats import gpt
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.errors import ImageBuilderError
from image_builder.system import sparse
from image_builder.system.sandbox import Root, open_root

MIB = 1 << 20
_BLOCK = 4096
_BYTES_PER_INODE = 16384
# Room for the table and its backup; also aligns the partitions.
_MARGIN_MIB = 1
_TREE, _ESP, _OUT, _WORK = "/run/tree", "/run/esp", "/run/out", "/run/work"
_DISK_NAME = "disk.raw"
_DISK = f"{_OUT}/{_DISK_NAME}"


@dataclass(frozen=True)
class Content:
    """What a tree needs in ext4: bytes in whole blocks, and inodes."""

    bytes: int
    entries: int


@dataclass(frozen=True)
class Layout:
    """The layout of the disk to make. Sizes are in MiB."""

    build_id: str
    esp_mib: int
    root_mib: int

    @property
    def size(self) -> int:
        """Return the disk's size in bytes."""
        return (self.esp_mib + self.root_mib + 2 * _MARGIN_MIB) * MIB

    def partitions(self) -> tuple[gpt.Partition, ...]:
        """Return the partitions as they must be found on the finished disk."""
        esp, root = (identity.partition_uuid(self.build_id, name) for name in ("esp", "root"))
        start, esp_size = _MARGIN_MIB * MIB, self.esp_mib * MIB
        return (
            gpt.Partition(1, gpt.TYPE_ESP, esp, "esp", start, esp_size),
            gpt.Partition(2, gpt.TYPE_ROOT_X86_64, root, "root", start + esp_size, self.root_mib * MIB),
        )


def measure(tree: Path) -> Content:
    """Return what the files below ``tree`` need, counting hard links once and leaving out other mounts."""
    size, entries = 0, 1
    inodes: set[tuple[int, int]] = set()
    device = tree.stat().st_dev
    folders = [os.fspath(tree)]
    while folders:
        names = 0
        with os.scandir(folders.pop()) as listing:
            for entry in listing:
                info = entry.stat(follow_symlinks=False)
                names += len(entry.name) + 12
                if stat.S_ISDIR(info.st_mode):
                    entries += 1
                    if info.st_dev == device:
                        folders.append(entry.path)
                elif info.st_nlink == 1 or (info.st_dev, info.st_ino) not in inodes:
                    inodes.add((info.st_dev, info.st_ino))
                    entries += 1
                    size += _file_blocks(info) * _BLOCK
        size += -(-names // _BLOCK) * _BLOCK
    return Content(size, entries)


def _file_blocks(info: os.stat_result) -> int:
    """Return a file's blocks: ext4 keeps link targets under 60 bytes, and devices, in the inode."""
    if stat.S_ISREG(info.st_mode) or (stat.S_ISLNK(info.st_mode) and info.st_size >= 60):
        return -(-info.st_size // _BLOCK)
    return 0


def minimal_root_mib(content: Content) -> int:
    """Return the minimum size in MiB of a root partition for ``content``, including ext4's own needs.

    These are the inode tables (1/64 of the partition), the journal (up to 128 MiB at the sizes used here), the reserved
    descriptors, and the space for extents and bitmaps.
    """
    inodes = content.entries * 256
    return (content.bytes * 105 // 100 + inodes) * 64 // 63 // MIB + 160


def plan_layout(build_id: str, disk: Mapping[str, Any], content: Content) -> Layout:
    """Return the disk's layout; raises ImageBuilderError when the tree doesn't fit.

    ``auto`` leaves a fifth of the content free, and at least 256 MiB: enough to boot and to grow the partition.
    """
    least, size = minimal_root_mib(content), disk["root_size_mib"]
    if size == "auto":
        root = least + max(256, content.bytes // 5 // MIB)
        return Layout(build_id, disk["esp_size_mib"], root)
    if size < least:
        raise ImageBuilderError(
            f"the tree needs a root partition of {least} MiB, image_disk.root_size_mib is {size}",
            hint=f"set image_disk.root_size_mib to {least + 256} or more, or to auto",
        )
    return Layout(build_id, disk["esp_size_mib"], int(size))


def repart_definitions(layout: Layout) -> dict[str, str]:
    """Return systemd-repart's definition files by name. The partitions stay empty: we fill them."""
    files = {}
    for partition, kind in zip(layout.partitions(), ("esp", "root-x86-64"), strict=True):
        files[f"{partition.number}0-{partition.name}.conf"] = (
            f"[Partition]\nType={kind}\nLabel={partition.name}\nUUID={partition.uuid}\n"
            f"SizeMinBytes={partition.size}\nSizeMaxBytes={partition.size}\n"
        )
    return files


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Make the disk. Raises ImageBuilderError for a tree that can't boot or doesn't fit, CommandError."""
    options = ctx.plan.options
    build_id, epoch = options["build_id"], options["source_date_epoch"]
    esp, work = ctx.work / "esp", ctx.work / "made"
    for path in (esp, work):
        path.mkdir()
    with open_root(ctx.lowers, ctx.work) as sealed:
        ctx.doing("measuring the tree")
        content = measure(sealed.path)
        layout = plan_layout(build_id, options["disk"], content)
        kernel = boot_partition.find_kernel(sealed.path)
        arguments = boot_partition.kernel_arguments(
            identity.partition_uuid(build_id, "root"), options["kernel_args"]
        )
        config = boot_partition.grub_config(f"{ctx.definition.name} {build_id[:12]}", arguments)
        with open_root(
            [ctx.inputs["tools"] / "tree"],
            ctx.work,
            binds={_TREE: sealed.path, _ESP: esp},
            writable_binds={_OUT: ctx.product, _WORK: work},
            env={"SOURCE_DATE_EPOCH": str(epoch), "MTOOLS_SKIP_CHECK": "1"},
        ) as tools:
            _make_table(ctx, tools, layout, work)
            # In parallel: the root filesystem takes longest, and no byte of the disk belongs to both partitions.
            with ThreadPoolExecutor(1) as pool:
                filled = pool.submit(_fill_root, ctx, tools, layout, content)
                files = boot_partition.assemble(sealed.path, esp, kernel, config, epoch)
                proof = None
                if options["secure_boot"]:
                    proof = boot_partition.prove_secure_boot(tools, esp, _ESP, work, _WORK)
                _fill_esp(ctx, tools, layout, [f.as_posix() for f in files])
                filled.result()
                ctx.doing("reading the disk back")
                hashed = pool.submit(sparse.sha256, ctx.product / _DISK_NAME)
                table = check(ctx.product / _DISK_NAME, layout)
                _check_filesystems(ctx, tools, layout)
    return {
        "bytes": table.size,
        "allocated_bytes": (ctx.product / _DISK_NAME).stat().st_blocks * 512,
        "disk_uuid": table.disk_uuid,
        "partitions": [asdict(p) for p in table.partitions],
        "kernel": kernel.version,
        "kernel_args": arguments,
        "content_bytes": content.bytes,
        "secure_boot": asdict(proof) if proof else None,
        "files": [{"name": _DISK_NAME, "sha256": hashed.result()}],
    }


def _make_table(ctx: StageContext, tools: Root, layout: Layout, work: Path) -> None:
    ctx.doing("writing the partition table")
    (work / "definitions").mkdir()
    for name, text in repart_definitions(layout).items():
        (work / "definitions" / name).write_text(text, encoding="utf-8")
    argv = ["systemd-repart", "--offline=yes", "--empty=create", f"--size={layout.size}"]
    argv += [f"--seed={identity.disk_seed(layout.build_id)}", f"--definitions={_WORK}/definitions"]
    tools.run([*argv, "--architecture=x86-64", "--dry-run=no", "--json=short", _DISK], log=ctx.log)


def _fill_esp(ctx: StageContext, tools: Root, layout: Layout, files: list[str]) -> None:
    esp = layout.partitions()[0]
    volume_id = identity.filesystem_uuid(layout.build_id, "esp")[:8]
    # FAT32 with 512-byte sectors: smaller FATs and larger sectors are refused by some firmware.
    argv = ["mkfs.vfat", "-F", "32", "-S", "512", "-n", "ESP", "-i", volume_id, "--invariant", "--mbr=n"]
    argv += [f"--offset={esp.start // gpt.SECTOR}", _DISK, str(esp.size // 1024)]
    tools.run(argv, log=ctx.log)
    image = ["-i", f"{_DISK}@@{esp.start}"]
    folders = sorted({os.fspath(parent) for f in files for parent in Path(f).parents} - {"."})
    tools.run(["mmd", *image, *(f"::{folder}" for folder in folders)], log=ctx.log)
    for folder in folders:
        inside = [f"{_ESP}/{f}" for f in files if os.path.dirname(f) == folder]
        if inside:
            tools.run(["mcopy", *image, "-m", *inside, f"::{folder}/"], log=ctx.log)


def _fill_root(ctx: StageContext, tools: Root, layout: Layout, content: Content) -> None:
    ctx.doing(f"filling both partitions, with {content.bytes // MIB} MiB for the root filesystem")
    root = layout.partitions()[1]
    uuid = identity.filesystem_uuid(layout.build_id, "root")
    # The partition is a hole: neither mke2fs nor, after boot, the kernel needs to write zeros.
    extended = f"offset={root.start},nodiscard,assume_storage_prezeroed=1,hash_seed={uuid}"
    inodes = max(root.size // _BYTES_PER_INODE, content.entries * 5 // 4)
    argv = ["mke2fs", "-q", "-t", "ext4", "-L", "root", "-U", uuid, "-b", str(_BLOCK), "-I", "256"]
    # On a full disk, root has one percent left; programs before 1.47 (rescue machines) refuse a disk with an orphan
    # file.
    argv += ["-m", "1", "-O", "^orphan_file", "-N", str(inodes), "-E", extended]
    argv += ["-d", _TREE, _DISK, f"{root.size // 1024}k"]
    tools.run(argv, log=ctx.log)


def check(disk: Path, layout: Layout) -> gpt.Gpt:
    """Return the partition table on ``disk``. Raises ImageBuilderError if it isn't the planned one."""
    try:
        with disk.open("rb") as stream:
            table = gpt.read(stream)
    except gpt.GptError as error:
        raise ImageBuilderError(f"the partition table that was written is wrong: {error}") from error
    written = replace(table, partitions=tuple(replace(p, attributes=0) for p in table.partitions))
    planned = gpt.Gpt(identity.disk_uuid(layout.build_id), layout.size, layout.partitions())
    if written != planned:
        raise ImageBuilderError(
            f"the disk is not what was planned:\n  found   {written}\n  planned {planned}"
        )
    return table


def _check_filesystems(ctx: StageContext, tools: Root, layout: Layout) -> None:
    esp, root = layout.partitions()
    tools.run(["e2fsck", "-fn", f"{_DISK}?offset={root.start}"], log=ctx.log)
    for path in (boot_partition.SHIM, boot_partition.KERNEL, boot_partition.INITRD):
        tools.run(["mdir", "-b", "-i", f"{_DISK}@@{esp.start}", f"::{path}"], log=ctx.log)
