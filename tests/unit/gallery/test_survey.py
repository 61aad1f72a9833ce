"""Rights: what a caller's roles allow in a resource group."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.gallery.survey import missing_rights

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
        # What one role denies another one allows.
        ([{"actions": ["*"], "notActions": ["*"]}, {"actions": ["Microsoft.Compute/disks/*"]}], []),
        ([], DISKS),
    ],
)
def test_all_rights_that_are_missing_are_named(permissions: list[dict[str, Any]], missing: list[str]) -> None:
    assert missing_rights(permissions, DISKS) == [
        f"the right Microsoft.Compute/{action} is missing" for action in missing
    ]
