"""The door to other programs: what ends one ends what it started as well."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from image_builder import process
from image_builder.errors import CommandError

pytestmark = pytest.mark.root


@pytest.mark.parametrize("on_line", [None, lambda _line: None], ids=["at the end", "line by line"])
def test_a_timeout_does_not_wait_for_a_grandchild(on_line: Callable[[str], None] | None) -> None:
    started = time.monotonic()
    with pytest.raises(CommandError, match="timed out after 0.5 s"):
        process.run(["sh", "-c", "sleep 20 & wait"], timeout=0.5, on_line=on_line)
    assert time.monotonic() - started < 10
