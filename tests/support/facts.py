"""Facts that tables and examples are checked against: files of ../shared, which may exist next to a checkout.

A module that needs them is listed in tests/allowed_skips.txt: a checkout without ../shared skips its tests.
"""

from __future__ import annotations

import pytest

from image_builder.settings import REPO_ROOT

SHARED = REPO_ROOT.parent / "shared"
needs_facts = pytest.mark.skipif(
    not (SHARED / "facts").is_dir(), reason="no ../shared/facts beside this checkout"
)
