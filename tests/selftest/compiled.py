"""Compiled stages in the cache directory, so that a run with an empty store doesn't compile them again.

A stage's id covers everything that determines its bytes, so the copy under an id equals what the stage would produce.
It is used only if it is complete, every byte matches its manifest, and no other user can write to the directory.
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

# The kind of stage that occupies all processors for minutes and whose inputs rarely change.
KIND = "go"


def directory(cache: Path) -> Path:
    """Return the directory of the stages in a cache directory."""
    return cache / "compiled"


def restore(store: Store, place: Path) -> list[str]:
    """Copy cached stages into a store that lacks them; return their names, in order of their ids."""
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
    """Cache the newest stage of each name that was compiled in a store, and no others."""
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
        partial = place / f"{stage_id}.partial"  # not an id: if this call is killed, the next one removes it
        shutil.copytree(store.object(stage_id), partial, symlinks=True)
        partial.rename(place / stage_id)


def _is_private(place: Path) -> bool:
    try:
        info = place.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _sound_name(stage: Path) -> str:
    """Return the name of a complete stage that is stored under its own id; "" for anything else."""
    if differences(stage, contents=True):
        return ""
    meta = json.loads((stage / "meta.json").read_bytes())
    return str(meta["name"]) if (meta["id"], meta["kind"]) == (stage.name, KIND) else ""
