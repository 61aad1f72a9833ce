"""The message of the day."""

from __future__ import annotations

from typing import Any

from suite import booted, needs, offline, read
from testinfra.host import Host


@offline
@booted
@needs("site")
def test_banner_names_the_owner(host: Host, v: dict[str, Any]) -> None:
    """The message of the day names the owner that the inventory sets."""
    assert read(host, "/etc/motd") == f"This machine belongs to {v['site_banner_owner']}.\n"
