"""The seal: remove what the machines that boot an image must not share, and give it its identity.

First, the image's own programs are asked about the configuration that the layers wrote (``bake/trial.py``). The role
``image_seal`` removes what is known by name. Afterwards, this module removes what that play itself leaves
behind, searches the bytes of the files that a bake makes for traces of this host, and writes the files that identify
the build.
"""

from __future__ import annotations

import base64
import hashlib
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from image_builder.bake import identity, trial
from image_builder.bake.pull.credentials import credentials_for
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.layer.run import play
from image_builder.canonical import JSON
from image_builder.definition import problem_in
from image_builder.errors import DefinitionError, ImageBuilderError
from image_builder.system.sandbox import open_root
from image_builder.system.trees import remove_tree

# What the sealing play itself leaves behind. The rest is up to the role; image_builder/suite looks for all of it.
_EMPTIED = ("tmp", "var/tmp")
_REMOVED = ("root/.ansible", "home/*/.ansible")
# Where a bake makes files; the rest of the tree is package files, whose bytes the lock determines.
_SEARCHED = ("etc", "home", "opt", "root", "srv", "usr/local", "var")
# Files from registries: known by digest, and gigabytes in size.
_FOREIGN = ("opt/preloaded_docker_images.tar", "opt/preload/store.erofs")
# A shorter path would be found by chance; so would the host's name, for which image_builder/suite checks a few places.
_SHORTEST_TRACE = 6
# Nothing waits for the ESP (`nofail`); a virtual machine that gets little CPU time may take minutes to find it.
_FSTAB = """\
# Written by image-builder for this build's own partitions.
PARTUUID={root} / ext4 defaults,x-systemd.growfs 0 1
PARTUUID={esp} /boot/efi vfat umask=0077,nofail,x-systemd.device-timeout=5min 0 2
"""


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Run the seal playbook, scrub, search, and write fstab and ``/etc/image-release``.

    Raises DefinitionError if a program of the image refuses its configuration, ImageBuilderError if a file still has a
    trace of the bake.
    """
    ctx.doing("asking the image's programs about their configuration")
    if refusals := trial.hold(ctx.lowers, ctx.work / "trial", ctx.log):
        raise DefinitionError([problem_in(ctx.definition, str(each), each.file) for each in refusals])
    tree = ctx.product / "tree"
    tree.mkdir()
    with open_root(ctx.lowers, ctx.work / "root", upper=tree) as root:
        result = play(ctx, root, ctx.settings.repo_root / ctx.plan.options["playbook"])
        ctx.doing("scrubbing")
        removed = 0
        for path in _doomed(root.path):
            _remove(path)
            removed += 1
        ctx.doing("searching for traces of the bake")
        if leaks := list(find_traces(root.path, _traces(ctx))):
            shown = "\n  ".join(f"{path}: {trace}" for path, trace in leaks[:10])
            raise ImageBuilderError(f"{len(leaks)} files hold what is the bake's own:\n  {shown}")
        _write_identity(ctx, root.path)
    return {"tasks_changed": result.changed, "scrubbed": removed}


def _doomed(root: Path) -> Iterator[Path]:
    for name in _EMPTIED:
        if (root / name).is_dir() and not (root / name).is_mount():
            yield from sorted((root / name).iterdir())
    for pattern in _REMOVED:
        yield from sorted(root.glob(pattern))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _traces(ctx: StageContext) -> dict[str, str]:
    """Return the strings that only a bake on this host can have put into a file, and how each is shown."""
    texts = {
        _unmistakable(ctx.settings.store, "staging"),
        *(_unmistakable(root, "roles") for root in ctx.definition.roots),
        os.fspath(ctx.work.parent.parent.name),
        ctx.settings.mirror or "",
    }
    traces = {word: word for word in sorted(texts)} | _secrets(ctx)
    return {word: shown for word, shown in traces.items() if len(word) >= _SHORTEST_TRACE}


def _secrets(ctx: StageContext) -> dict[str, str]:
    """Return the registries' credentials in the forms that a file may have, and how each is shown when it is found."""
    secrets = {}
    for registry in {image.ref.partition("/")[0] for image in ctx.definition.preload}:
        if credentials := credentials_for(registry):
            pair = f"{credentials.username}:{credentials.password}".encode()
            for word in (credentials.password, credentials.token, base64.b64encode(pair).decode()):
                secrets[word] = f"the credentials for {registry}"
    return secrets


def _unmistakable(place: Path, inside: str) -> str:
    """Return a path to look for: one with a single name, such as /store, is part of many paths in packages."""
    return os.fspath(place if len(place.parts) > 2 else place / inside)


def find_traces(root: Path, traces: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Search the bytes of every file where a bake makes files; yield (path, the trace that it has, as it is shown).

    A configuration file exactly as its package ships it doesn't count: cloud-init's names Debian's mirror.
    """
    needles = [(shown, word.encode()) for word, shown in traces.items()]
    shipped = _shipped(root)
    for name in _SEARCHED:
        for folder, _, files in os.walk(root / name):
            for file in files:
                path = Path(folder, file)
                if path.is_symlink() or not path.is_file():
                    continue
                where = os.fspath(path.relative_to(root))
                if where in _FOREIGN:
                    continue
                leaks = _held(path, needles)
                if leaks and shipped.get(where) != _md5(path):
                    yield from ((where, trace) for trace in leaks)


def _held(path: Path, needles: Sequence[tuple[str, bytes]]) -> list[str]:
    """Return which strings a file contains. It is mapped, not read: a model's weights may be larger than memory."""
    if not path.stat().st_size:
        return []
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return [shown for shown, word in needles if data.find(word) >= 0]


def _md5(path: Path) -> str:
    """Return the digest that dpkg records for configuration files."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _shipped(root: Path) -> dict[str, str]:
    """Return the MD5 of each configuration file as packaged, by path, from dpkg's status."""
    status = root / "var/lib/dpkg/status"
    text = status.read_text(encoding="utf-8", errors="replace") if status.is_file() else ""
    return {m[1]: m[2] for m in re.finditer(r"^ /(\S+) ([0-9a-f]{32})\b", text, re.MULTILINE)}


def _write_identity(ctx: StageContext, root: Path) -> None:
    """Write the files that identify the build; its id is this stage's own, so no earlier stage can know it."""
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
        # As in the output directory, and short enough for a Kubernetes label (63 characters).
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
