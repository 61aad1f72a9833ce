"""The wheel's metadata: an installed program evaluates definitions with the same dependencies as a checkout."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from image_builder.bake.stages.layer import EVALUATORS


def test_packages_whose_versions_are_in_ids_are_those_of_the_lock(repo_root: Path) -> None:
    pinned = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["dependencies"]
    locked = re.findall(r"^[\w.-]+==[^ ]+", (repo_root / "requirements.lock").read_text(), re.MULTILINE)
    for name in EVALUATORS:
        versions = [line for line in locked if line.startswith(f"{name}==")]
        assert len(versions) == 1 and versions[0] in pinned, f"{name}: update pyproject.toml"
