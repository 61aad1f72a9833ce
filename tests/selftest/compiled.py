"""Compiled stages, kept in the cache directory: a run on an empty store need not compile what an earlier one did.

A stage's id stands for all that decides its bytes, so what is kept under an id is what the stage would make. It is
taken only as a whole: with every byte as its manifest says, from a directory that nobody else can write.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

from image_builder.bake.store import Store
from image_builder.bake.tree_manifest import differences
from image_builder.system.trees import remove_tree

# The kind of stage that takes minutes of all processors, and whose inputs hardly ever change.
KIND = "go"


def directory(cache: Path) -> Path:
    """Return where stages are kept in a cache directory."""
    return cache / "compiled"


def restore(store: Store, place: Path) -> list[str]:
    """Put kept stages into a store that lacks them; return their names, in order of their ids."""
    if not _is_private(place):
        return []
    restored = []
    with store.in_use(), store.staging() as staging:
        for kept in sorted(place.iterdir()):
            with store.claim(kept.name):
                if store.has(kept.name):
                    continue
                copy = staging / kept.name
                shutil.copytree(kept, copy, symlinks=True)
                if name := _sound_name(copy):
                    copy.rename(store.object(kept.name))
                    restored.append(name)
    return restored


def keep(store: Store, place: Path) -> None:
    """Keep the newest stage of each name that was compiled in a store, and no other."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(place):
        return
    newest: dict[str, tuple[float, str]] = {}
    for stage_id in store.ids():
        meta = store.meta(stage_id)
        if meta["kind"] == KIND:
            made = (store.object(stage_id) / "meta.json").stat().st_mtime
            newest[meta["name"]] = max(newest.get(meta["name"], (0.0, "")), (made, stage_id))
    wanted = {stage_id for _, stage_id in newest.values()}
    for kept in place.iterdir():
        if kept.name not in wanted:
            remove_tree(kept)
    for stage_id in wanted - set(os.listdir(place)):
        partial = place / f"{stage_id}.partial"  # of no id: the next call removes it where this one is killed
        shutil.copytree(store.object(stage_id), partial, symlinks=True)
        partial.rename(place / stage_id)


def _is_private(place: Path) -> bool:
    try:
        info = place.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _sound_name(stage: Path) -> str:
    """Return the name of a whole stage under its own id; "" for anything else."""
    if differences(stage, contents=True):
        return ""
    meta = json.loads((stage / "meta.json").read_bytes())
    return str(meta["name"]) if (meta["id"], meta["kind"]) == (stage.name, KIND) else ""
