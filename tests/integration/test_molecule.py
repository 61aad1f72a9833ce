"""Molecule scenarios of roles, on the tree of a real image: converge, idempotence, check mode, its own tests.

Each takes a minute or more, so one is run by default; ``IMAGE_BUILDER_MOLECULE`` names others, by commas, that
need no package beyond the small image's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builds import Workplace

pytestmark = pytest.mark.root

ROLES = os.environ.get("IMAGE_BUILDER_MOLECULE", "network_accounting").split(",")


@pytest.mark.parametrize("role", ROLES)
def test_scenario(role: str, minimal: Workplace, repo_root: Path) -> None:
    trees = [minimal.object(name) / "product" / "tree" for name in ("system", "base")]
    done = subprocess.run(
        [sys.executable, repo_root / ".config/molecule/run", role, "test"],
        env={**os.environ, "IMAGE_BUILDER_TREES": ":".join(map(os.fspath, trees))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "idempotence" in done.stdout
    assert "passed" in done.stdout
