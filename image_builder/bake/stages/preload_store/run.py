"""The preload store: the engines' unpacked layers, as one read-only filesystem that a node mounts (``node/store.py``).

A layer's files are stored once, whichever engines and images have them, as long as their trees are equal: containerd
gives a directory without an entry in the layer the owner and mode that it has below, so its tree depends on the chain.
A chain that has one layer several times gets a directory for each, since overlayfs refuses one directory twice. An
engine's other data is packed
as it is, with a link in place of these files; what belonged to the daemon that ran has been removed before
(``pull/*.strip``). EROFS with lz4 and clusters of 4 KiB: every kernel since 5.4 reads it, and one page of a program
costs one page of disk.

Product: ``tree/opt/preload/store.erofs``, its dm-verity hash tree after the filesystem, and ``store.json``, which has
the root hash, or the file's SHA-256 if the definition does without dm-verity.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from image_builder.bake import identity, layer_tree
from image_builder.bake.lock.model import Image
from image_builder.bake.pull.engines import ENGINES
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.preload.run import IMAGES, LAYERS
from image_builder.canonical import JSON
from image_builder.errors import ImageBuilderError
from image_builder.node import layout
from image_builder.node.seed import records
from image_builder.node.store import BLOCK, FORMAT
from image_builder.system.sandbox import Root, open_root
from image_builder.system.trees import sha256

_FOLDER = layout.STORE_FILE.parent.relative_to("/")
_PACK, _OUT = "/run/pack", "/run/out"
_FILE = f"{_OUT}/{layout.STORE_FILE.name}"
# Modules of the image's kernel that the node needs.
_EROFS, _VERITY = "erofs", "dm-verity"


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Pack the layers of every engine. Raises ImageBuilderError if metadata isn't root's or the kernel is unfit."""
    options = ctx.plan.options
    images = Image.listed(options["images"])
    require_kernel(ctx.ground, verity=options["verity"])
    folder = ctx.product / "tree" / _FOLDER
    folder.mkdir(parents=True)
    states = {name: path / "state" for name, path in ctx.inputs.items() if name in ENGINES}
    pack = ctx.work / "pack"
    archived = [image.ref for image in images if image.mode == "archive"]
    if archived:
        others = [image for image in images if image.mode != "archive"]
        states = {name: _only(ctx, name, state, others) for name, state in states.items()}
    folders = {name: json.loads((ctx.inputs[name] / LAYERS).read_bytes()) for name in states}
    layers: dict[str, Path] = {}
    links: dict[Path, str] = {}
    for diff_id, alike in _trees(states, folders, images):
        for number, trees in enumerate(alike):
            directory = f"{diff_id[7:]}.{number}" if number else diff_id[7:]
            layers[directory] = trees[0]
            links |= dict.fromkeys(trees, directory)
    for name, state in states.items():
        own = {os.fspath(p.relative_to(state)): d for p, d in links.items() if p.is_relative_to(state)}
        _metadata(state, own, pack / name)
    require_root(pack)
    for name in states:
        records.pack(pack / name)
    (pack / layout.LAYERS).mkdir()
    for directory in layers:
        (pack / layout.LAYERS / directory).mkdir()
    epoch = options["source_date_epoch"]
    for path in (pack, *_all(pack)):
        if (
            path.is_dir() or path.lstat().st_nlink == 1
        ):  # other files are those of the state, and have its times
            os.utime(path, (epoch, epoch), follow_symlinks=False)
    ctx.doing(f"packing {len(layers)} layers")
    binds = {_PACK: pack}
    binds |= {f"{_PACK}/{layout.LAYERS}/{directory}": path for directory, path in layers.items()}
    with open_root(
        [ctx.inputs["tools"] / "tree"], ctx.work / "tools", binds=binds, writable_binds={_OUT: folder}
    ) as tools:
        argv = ["mkfs.erofs", "--quiet", "-zlz4", f"-C{BLOCK}", f"-T{epoch}", "--mkfs-time"]
        argv += [f"-U{identity.filesystem_uuid(ctx.plan.id, 'preload')}"]
        tools.run([*argv, _FILE, _PACK], log=ctx.log, on_line=_raise_error)
        salt = _salt(images)
        verity = _add_hashes(tools, folder / layout.STORE_FILE.name, salt) if options["verity"] else None
    document = _manifest(ctx, images, states, layers, folder / layout.STORE_FILE.name, verity)
    target = ctx.product / "tree" / layout.MANIFEST.relative_to("/")
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for path in (target, folder / layout.STORE_FILE.name):
        path.chmod(0o644)
    return {"bytes": document["bytes"], "layers": len(layers), "verity": verity}


def _raise_error(line: str) -> None:
    """Raise ImageBuilderError if this line of mkfs.erofs is an error; after a failed write, 1.8 may never end."""
    if line.startswith("<E>"):
        raise ImageBuilderError(f"mkfs.erofs: {line.removeprefix('<E>').strip()}")


def require_kernel(trees: tuple[Path, ...], *, verity: bool) -> None:
    """Raise ImageBuilderError if the image's kernel can't read the store, or can't check it but should."""
    for tree in trees:
        modules = tree / "usr/lib/modules"
        for version in sorted(os.listdir(modules)) if modules.is_dir() else ():
            names = _modules(modules / version)
            if names and _EROFS not in names:
                raise ImageBuilderError(
                    f"kernel {version} has no EROFS: no node could mount the preload store"
                )
            if names and verity and _VERITY not in names:
                raise ImageBuilderError(
                    f"kernel {version} has no dm-verity: the preload store could not be checked",
                    hint="image_preload_verity: false takes it unchecked",
                )


def _modules(folder: Path) -> set[str]:
    """Return the names of a kernel's modules, built in or not; empty if there is no list of them."""
    names: set[str] = set()
    for name in ("modules.dep", "modules.builtin"):
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            names |= {
                m[1].replace("_", "-") for m in re.finditer(r"^\S*?([^/\s]+)\.ko\b", text, re.MULTILINE)
            }
    return names


def _only(ctx: StageContext, engine: str, state: Path, images: Sequence[Image]) -> Path:
    """Return a copy of a data root with only these images: nodes load the others from the archive."""
    module = ENGINES[engine]
    copied = ctx.work / f"state-{engine}"
    copied.mkdir()
    module.copy(state, copied)
    with (
        open_root(
            ctx.ground, ctx.work / "root", writable_binds={module.DATA_ROOT: copied}, network=True
        ) as root,
        module.running(root, downloads=1, endpoints={}, log=ctx.log) as running,
    ):
        running.keep_only(images)
    module.strip(copied)
    return copied


def _trees(
    states: Mapping[str, Path], folders: Mapping[str, Mapping[str, Sequence[str]]], images: Sequence[Image]
) -> Iterator[tuple[str, list[list[Path]]]]:
    """Yield each diff id and its unpacked trees, in groups: the trees of a group can share one directory.

    ``folders`` has, by engine and reference, the paths of an image's layers. Files have the same content in all trees
    of a diff id, which the engines have checked; the directories may differ.
    """
    places: dict[str, dict[Path, int]] = {}
    for name, state in states.items():
        for image in images:
            times = Counter[str]()
            for folder, layer in zip(folders[name].get(image.ref, ()), image.layers, strict=False):
                if (state / folder).is_dir():
                    places.setdefault(layer.diff_id, {})[state / folder] = times[layer.diff_id]
                times[layer.diff_id] += 1
    for diff_id, trees in places.items():
        groups: dict[tuple[int, str], list[Path]] = {}
        for tree, occurrence in trees.items():
            facts = layer_tree.fingerprint(tree) if len(trees) > 1 else ""
            groups.setdefault((occurrence, facts), []).append(tree)
        yield diff_id, list(groups.values())


def _metadata(state: Path, layers: Mapping[str, str], target: Path) -> None:
    """Copy an engine's data other than its layers, as hard links; each layer becomes a link to its directory."""
    target.parent.mkdir(exist_ok=True)
    target.mkdir(mode=stat.S_IMODE(state.stat().st_mode))
    for folder, folders, names in os.walk(state):
        here = Path(folder).relative_to(state)
        for name in list(folders):
            path = here / name
            if os.fspath(path) in layers or (name == "diff" and here.parts[:1] == ("overlay2",)):
                folders.remove(name)
                if directory := layers.get(os.fspath(path)):
                    up = os.path.relpath("/", Path("/", target.name, path).parent)
                    (target / path).symlink_to(f"{up}/{layout.LAYERS}/{directory}")
            elif (state / path).is_symlink():
                folders.remove(name)
                (target / path).symlink_to(os.readlink(state / path))
            else:
                (target / path).mkdir()
                (target / path).chmod(stat.S_IMODE((state / path).stat().st_mode))
        for name in names:
            source = state / here / name
            if source.is_symlink():
                (target / here / name).symlink_to(os.readlink(source))
            else:
                os.link(source, target / here / name)


def require_root(tree: Path) -> None:
    """Raise ImageBuilderError if metadata isn't root's: an engine keeps whatever owner it finds."""
    for path in _all(tree):
        info = path.lstat()
        if (info.st_uid, info.st_gid) != (0, 0):
            raise ImageBuilderError(
                f"{path.relative_to(tree)} belongs to {info.st_uid}:{info.st_gid}, not to root"
            )


def _all(tree: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(tree):
        yield from (Path(folder, name) for name in (*folders, *names))


def _salt(images: Sequence[Image]) -> str:
    """Return the salt of the hash tree: different for different images, the same for the same ones."""
    return hashlib.sha256("\n".join(sorted(image.manifest for image in images)).encode()).hexdigest()


def _add_hashes(tools: Root, file: Path, salt: str) -> dict[str, JSON]:
    """Append the dm-verity hash tree of ``file`` to it; return how to find it."""
    size = file.stat().st_size
    if size % BLOCK:
        with file.open("r+b") as stream:
            stream.truncate(size := -(-size // BLOCK) * BLOCK)
    argv = ["veritysetup", "format", "--no-superblock", f"--hash-offset={size}", f"--salt={salt}"]
    argv += [f"--data-block-size={BLOCK}", f"--hash-block-size={BLOCK}", f"--data-blocks={size // BLOCK}"]
    output = tools.run([*argv, "--hash=sha256", _FILE, _FILE]).stdout
    root_hash = re.search(r"^Root hash:\s*([0-9a-f]{64})$", output, re.MULTILINE)
    if not root_hash:
        raise ImageBuilderError(f"veritysetup printed no root hash:\n{output}")
    return {"root_hash": root_hash[1], "salt": salt, "hash_offset": size}


def _manifest(
    ctx: StageContext,
    images: Sequence[Image],
    states: Mapping[str, Path],
    layers: Mapping[str, Path],
    file: Path,
    verity: Mapping[str, JSON] | None,
) -> dict[str, Any]:
    """Return store.json."""
    engines = {}
    listed: dict[str, Any] = {}
    for name in states:
        pulled = json.loads((ctx.inputs[name] / IMAGES).read_bytes())
        engine = pulled["engine"]
        program = next(path for tree in ctx.ground if (path := tree / engine["binary"].lstrip("/")).is_file())
        engines[name] = {
            "version": engine["version"],
            "binary": engine["binary"],
            "bytes": program.stat().st_size,
        }
        entries = {entry["ref"]: entry for entry in pulled["images"]}
        # The store doesn't promise an image that an engine had to leave out.
        listed = {ref: entry for ref, entry in listed.items() if ref in entries} if listed else entries
    records = {image.ref: image for image in images}
    return {
        "format": FORMAT,
        "id": ctx.plan.id,
        "file": os.fspath(layout.STORE_FILE),
        "bytes": file.stat().st_size,
        "verity": verity,
        "sha256": None if verity else sha256(file),
        "engines": engines,
        "images": [
            {**entry, "mode": records[ref].mode, "required": records[ref].required}
            for ref, entry in listed.items()
        ],
        "layers": [
            {"diff_id": layout.diff_id_of(directory), "directory": directory, "bytes": _bytes(path)}
            for directory, path in layers.items()
        ],
    }


def _bytes(tree: Path) -> int:
    """Return the size of a tree on a disk: files and directories in whole blocks, hard links once.

    It is computed from sizes: what a filesystem has allocated depends on its history.
    """
    sizes: dict[int, int] = {}
    for path in (tree, *_all(tree)):
        info = path.lstat()
        if stat.S_ISREG(info.st_mode):
            sizes[info.st_ino] = -(-info.st_size // BLOCK) * BLOCK
        elif stat.S_ISDIR(info.st_mode):
            sizes[info.st_ino] = BLOCK
    return sum(sizes.values())
