"""Rights: what a caller's roles allow in a resource group, and what each command needs there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from image_builder.gallery.survey import IMAGE_RIGHTS, RIGHTS, missing_rights

DISKS = ["disks/read", "disks/beginGetAccess/action"]


@pytest.mark.parametrize(
    ("permissions", "missing"),
    [
        ([{"actions": ["*"]}], []),
        ([{"actions": ["microsoft.compute/*/read"]}, {"actions": ["Microsoft.Compute/disks/*"]}], []),
        ([{"actions": ["*/read"], "notActions": []}], ["disks/beginGetAccess/action"]),
        (
            [{"actions": ["*"], "notActions": ["Microsoft.Compute/disks/*/action"]}],
            ["disks/beginGetAccess/action"],
        ),
        # What one role denies, another one allows.
        ([{"actions": ["*"], "notActions": ["*"]}, {"actions": ["Microsoft.Compute/disks/*"]}], []),
        ([], DISKS),
    ],
)
def test_all_rights_that_are_missing_are_named(permissions: list[dict[str, Any]], missing: list[str]) -> None:
    assert missing_rights(permissions, DISKS) == [
        f"the right Microsoft.Compute/{action} is missing" for action in missing
    ]


def test_the_how_to_lists_the_rights_of_each_command(repo_root: Path) -> None:
    page = (repo_root / "docs/how-to/publish.md").read_text(encoding="utf-8")
    role = json.loads(page.partition("```json\n")[2].partition("```")[0])["Actions"]
    computes = {action.removeprefix("Microsoft.Compute/") for action in role if "Microsoft.Compute" in action}
    assert computes == {*RIGHTS["run"], *IMAGE_RIGHTS, "galleries/images/write"}
    rows = dict(re.findall(r"^\| (`[a-z]+`(?:, `[a-z]+`)*) \| (.*) \|$", page, re.MULTILINE))
    for command in RIGHTS.keys() - {"run", "prune --delete"}:
        (row,) = (rights for names, rights in rows.items() if f"`{command}`" in names)
        always, _, deleting = row.partition("; with `--delete` also ")
        assert re.findall(r"`(.*?)`", always) == list(RIGHTS[command])
        if deleting:
            more = set(RIGHTS[f"{command} --delete"]) - set(RIGHTS[command])
            assert set(re.findall(r"`(.*?)`", deleting)) == more
