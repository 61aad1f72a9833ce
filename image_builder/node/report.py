"""``node-agent status``: what has happened since the node booted, and where its images' layers are served from.

Starts no programs: it reads only the status file, the store's manifest, and the names in the data root.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from image_builder.node import layout, settings, status
from image_builder.node.data_root import Links, scan
from image_builder.node.store import Image, chain, read_manifest


@dataclass(frozen=True)
class Served:
    """Where an image's layers come from: how many from the store and how many from the local disk."""

    ref: str
    mode: str
    store: int
    local: int
    source: str


def serve(image: Image, links: Links, preload: Mapping[str, Any]) -> Served:
    """Return where an image of the store is served from.

    ``preload`` is the status section: only it knows which images were loaded from the archive and which are missing.
    """
    layers = [
        (layer.chain.removeprefix("sha256:"), layer.diff_id.removeprefix("sha256:"))
        for layer in chain(image.diff_ids)
    ]
    promoted = links.local or frozenset()
    store = sum(diff_id in links.served and chain_id not in promoted for chain_id, diff_id in layers)
    broken = sum(diff_id in links.broken and chain_id not in promoted for chain_id, diff_id in layers)
    # For containerd, only the number of local layers is known, not which layers they are.
    local_layers = (
        links.directories if links.local is None else sum(chain_id in promoted for chain_id, _ in layers)
    )
    local = min(local_layers, len(layers) - store)
    if broken:
        source = f"LOST: {broken} layers lead nowhere"
    elif preload and store + local < len(layers):
        source = f"MISSING: {len(layers) - store - local} layers are nowhere"
    elif any(str(problem).startswith(f"{image.ref} ") for problem in preload.get("problems", [])):
        source = "MISSING"
    elif image.ref in preload.get("loaded", {}):
        source = "archive"
    elif not preload:
        source = "not looked at yet"
    elif store == len(layers):
        source = "preload store"
    else:
        source = "local disk and preload store" if store else "local disk"
    return Served(image.ref, image.mode, store, local, source)


def report(state: Mapping[str, Any], images: Iterable[Image], links: Links) -> dict[str, Any]:
    """Return everything that is known: the status, the ``images``, and the ``layers`` in the data root.

    ``user_namespaces``: whether pods with ``hostUsers: false`` are supported. They are not while any layer is a link.
    """
    preload = state.get("preload", {})
    return {
        **state,
        "images": [asdict(serve(image, links, preload)) for image in images],
        "layers": {
            "links": len(links.served),
            "broken": len(links.broken),
            "directories": links.directories,
        },
        # containerd makes an idmapped mount of the directory that holds all layers, but a link points outside it.
        "user_namespaces": not links.served,
    }


def text(document: Mapping[str, Any]) -> str:
    """Return a report as text for people."""
    lines = ["ready" if document.get("ready") else "NOT READY", ""]
    rows = [("", "state", "seconds", "what and why")]
    rows += [_row(name, document[name]) for name in (*status.SECTIONS, *status.OPTIONAL) if name in document]
    lines += table(rows)
    missing = [name for name in status.SECTIONS if name not in document]
    if missing:
        lines.append(f"nothing is known yet of: {', '.join(missing)}")
    if document["images"]:
        heads = [("image", "mode", "from the store", "from the disk", "served from")]
        images = [
            (i["ref"], i["mode"], str(i["store"]), str(i["local"]), i["source"]) for i in document["images"]
        ]
        lines += ["", *table([*heads, *images])]
    layers = document["layers"]
    lines += [
        "",
        f"layers in the data root: {layers['links']} links into the preload store "
        f"({layers['broken']} lead nowhere), {layers['directories']} directories",
    ]
    if not document["user_namespaces"]:
        lines.append("pods with hostUsers: false are not supported before the promotion is done")
    return "\n".join(lines) + "\n"


def _row(name: str, section: Mapping[str, Any]) -> tuple[str, str, str, str]:
    code = f"{section['code']}: " if section.get("code") else ""
    parts = [f"{code}{section.get('reason', '')}".strip(), _DETAILS.get(name, _nothing)(section)]
    return (name, str(section["state"]), f"{section.get('seconds', '')}", "; ".join(w for w in parts if w))


def _nothing(_section: Mapping[str, Any]) -> str:
    return ""


def _disk(section: Mapping[str, Any]) -> str:
    members = [
        f"{member.get('serial') or member.get('model') or 'disk'} ({int(member.get('bytes', 0)) / 1e9:.0f} GB)"
        for member in section.get("members", [])
    ]
    parts = [section.get("action"), section.get("filesystem"), section.get("mount_point"), *members]
    return " ".join(str(part) for part in parts if part)


def _preload(section: Mapping[str, Any]) -> str:
    if "images" not in section:
        return ""
    return (
        f"{section['images']} images: {section.get('seeded', 0)} seeded, {section.get('there', 0)} there already, "
        f"{len(section.get('loaded', {}))} from the archive"
    )


def _promotion(section: Mapping[str, Any]) -> str:
    if not section.get("total"):
        return ""
    return (
        f"{section.get('done', 0)} of {section['total']} copied to the local disk, "
        f"{int(section.get('bytes', 0)) / 1e9:.2f} GB"
    )


_DETAILS = {"disk": _disk, "preload": _preload, "promotion": _promotion}


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def run(
    *,
    as_json: bool,
    store: Path = layout.MANIFEST,
    places: status.Places = status.Places(),  # noqa: B008 (frozen)
) -> int:
    """Print the report; return 0 if the node is ready, else 1. Raises NodeError."""
    chosen = settings.load("preload", places.etc)
    state = status.read(places.run)
    images = read_manifest(store).images if os.path.lexists(store) else ()
    links = scan(Path(chosen.get("data_root", "/nonexistent")), str(chosen.get("engine", "")))
    document = report(state, images, links)
    sys.stdout.write(json.dumps(document, indent=1) + "\n" if as_json else text(document))
    return 0 if document.get("ready") else 1
