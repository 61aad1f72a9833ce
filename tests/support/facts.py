"""Facts that tables and examples are held to: files of ../shared, which a checkout may have beside it.

A module that needs them names them in tests/allowed_skips.txt: alone, a checkout skips what needs them.
"""

from __future__ import annotations

import pytest

from image_builder.settings import REPO_ROOT

SHARED = REPO_ROOT.parent / "shared"
needs_facts = pytest.mark.skipif(
    not (SHARED / "facts").is_dir(), reason="no ../shared/facts beside this checkout"
)
