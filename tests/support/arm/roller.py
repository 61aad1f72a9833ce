"""A driver in a process of its own, which a test can kill: it rolls one instance of a scale set to completion."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.records import open_journal
from image_builder.pool.scale_set.roll import Patience, driving, roll_instance
from image_builder.pool.scale_set.verdict import Node
from image_builder.system.resource_manager import ResourceManager
from tests.support.arm.model import SUBSCRIPTION

# Tenths of a second where a real fleet takes minutes.
PATIENCE = Patience(look=0.02, settle=0.3, request=30.0, boot=30.0, minute=0.1)


def roll(
    url: str, environment: Mapping[str, str], scale_set: str, version_id: str, folder: Path, number: str
) -> None:
    """Roll an instance; ``folder`` holds the journal, what each node reports, and the outcome."""
    os.environ.update(environment)

    def node() -> Node | None:
        content = json.loads((folder / "nodes.json").read_text()).get(number)
        return Node(**content) if content else None

    with (
        ResourceManager(SUBSCRIPTION, endpoint=url) as manager,
        open_journal(folder / "roll.jsonl") as journal,
    ):
        client = Client(manager)
        with driving(client, scale_set, "run-1", journal, patience=PATIENCE) as drive:
            version = client.version(version_id)
            assert version is not None
            drive.set_image(client.scale_set(scale_set), version_id)
            instance = client.instance(scale_set, number)
            assert instance is not None
            ending = roll_instance(drive, number, instance.vm_id, version, node)
    (folder / "ending").write_text(f"{ending.kind} {ending.reason}".strip())
