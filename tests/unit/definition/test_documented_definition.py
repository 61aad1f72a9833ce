"""The definition that the how-to shows passes `validate` without a remark."""

from __future__ import annotations

import re
from pathlib import Path

from image_builder.definition import load_inventory
from image_builder.settings import REPO_ROOT


def test_the_how_tos_example_is_a_valid_definition(tmp_path: Path) -> None:
    text = (REPO_ROOT / "docs/how-to/define-an-image.md").read_text()
    files = re.findall(r"^   ```yaml\n   # (\S+)\n(.*?)^   ```", text, re.MULTILINE | re.DOTALL)
    for name, content in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    inventory = load_inventory([tmp_path / "my-pool"])
    assert inventory.images == ("gpu_worker",)
    assert inventory.problems(inventory.images) == []
