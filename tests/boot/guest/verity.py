"""Damage the preload store at many offsets, one at a time, and record the effects. Runs on the node; prints JSON.

Argument: the number of offsets. They are spread over the whole file: the filesystem and its hash tree. Each time,
the agent maps and mounts the store under a separate name, and the damaged block (in the tree: a block whose hash
was hit) is read past all caches. The answer: {"offset": "EIO" | "refused" | "same" | "OTHER"}.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, "/usr/local/sbin/node-agent")

from image_builder.node import store
from image_builder.node.errors import NodeError

AT = Path("/run/boot-matrix/verity")
HASHES = store.BLOCK // 32


def main() -> None:
    baked = store.read_manifest()
    store.MAPPING = "boot-matrix"
    copy = Path("/var/tmp/boot-matrix.erofs")
    subprocess.run(["cp", baked.file, copy], check=True)
    baked = dataclasses.replace(baked, file=copy)
    count = int(sys.argv[1])
    offsets = [baked.bytes * (2 * number + 1) // (2 * count) for number in range(count - 4)]
    tree = tree_of(baked)
    # The tree is a hundredth of the file, so some offsets are placed in it deliberately, among them its top.
    offsets += [tree + 40 + step * (baked.bytes - tree - store.BLOCK) // 4 for step in range(4)]
    found = {str(offset): damage(baked, offset) for offset in offsets}
    copy.unlink()
    shutil.rmtree(AT)
    print(json.dumps(found))


def damage(baked: store.Store, offset: int) -> str:
    blocks = [offset // store.BLOCK] if offset < tree_of(baked) else covered(baked, offset)
    before = [block(baked.file, number) for number in blocks]
    flip(baked.file, offset)
    try:
        store.open_store(baked, verity=True, at=AT)
    except NodeError:
        return "refused"
    else:
        results = {read(number, old) for number, old in zip(blocks, before, strict=True)}
        store.close_store(AT)
        return next((word for word in ("OTHER", "EIO") if word in results), "same")
    finally:
        flip(baked.file, offset)


def covered(baked: store.Store, offset: int) -> list[int]:
    """Return a data block whose path to the root passes through the hash at ``offset``; none after the last hash."""
    total = tree_of(baked) // store.BLOCK
    number = (offset - tree_of(baked)) // store.BLOCK
    levels, left = [], total
    while left > 1:
        left = -(-left // HASHES)
        levels.append(left)
    reach = 1
    starts, position = {}, 0
    for level in reversed(range(len(levels))):  # the top level comes first
        starts[level] = position
        position += levels[level]
    for level, count in enumerate(levels):
        reach *= HASHES
        if starts[level] <= number < starts[level] + count:
            first = (number - starts[level]) * reach + offset % store.BLOCK // 32 * (reach // HASHES)
            return [min(first, total - 1)]
    return []


def tree_of(baked: store.Store) -> int:
    assert baked.verity is not None
    return baked.verity.hash_offset


def block(file: Path, number: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(number * store.BLOCK)
        return stream.read(store.BLOCK)


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))
        stream.flush()
        os.fsync(stream.fileno())


def read(number: int, old: bytes) -> str:
    """Read a block of the mapping past all caches; return how it compares with ``old``."""
    fd = os.open(f"/dev/mapper/{store.MAPPING}", os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, store.BLOCK) as page:
            os.preadv(fd, [page], number * store.BLOCK)
            return "same" if page[:] == old else "OTHER"
    except OSError as error:
        return "EIO" if error.errno == errno.EIO else str(error)
    finally:
        os.close(fd)


main()
