"""An example's placeholders for the user's own values are found wherever they were left, at their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.definition.placeholders import placeholders
from image_builder.settings import REPO_ROOT
from tests.support.shipped import shipped
from tests.unit.definition.conftest import Load, lines

MARK = "is marked REPLACE: put in your own value, and remove the mark"
ZEROS = "a checksum of zeros is a placeholder: put in the file's own SHA-256"


def test_marks_in_values_blocks_and_comments_behind_a_value(load: Load) -> None:
    all_vars = f"""
        # REPLACE what follows; this line alone is no placeholder.
        site_registry: example.azurecr.io  # REPLACE
        site_key: |
          -----BEGIN PGP PUBLIC KEY BLOCK-----

          REPLACE
          -----END PGP PUBLIC KEY BLOCK-----
        site_programs:
          - url: https://archive.example/a
            sha256: "{"0" * 64}"
        site_irreplaceable: IRREPLACEABLE
        site_digest: "{"0" * 40}"
        site_sql: "REPLACE INTO x"
        site_query: REPLACE INTO x
        site_named: {{a: 'REPLACE_ME', b: c}}
        site_address: https://REPLACE.example
        """
    loaded = load(
        group_vars__all=all_vars, host_vars__plain="x: [REPLACE]\n", group_vars__nobody="y: REPLACE\n"
    )
    assert lines(loaded) == [
        f"group_vars/all.yml:10  sha256: {ZEROS}",
        f"group_vars/all.yml:15  site_named: {MARK}",
        f"group_vars/all.yml:16  site_address: {MARK}",
        f"group_vars/all.yml:2  site_registry: {MARK}",
        f"group_vars/all.yml:6  site_key: {MARK}",
        f"group_vars/nobody.yml:1  y: {MARK}",
        f"host_vars/plain.yml:1  x: {MARK}",
    ]
    assert len(loaded.problems(["plain"])) == 7, "whichever image is asked for"


def test_a_single_file_and_what_lies_beside_it(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.ini"
    inventory.write_text("[images]\nworker site=REPLACE\n; REPLACE\n")
    (tmp_path / "other.yml").write_text("a: REPLACE\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "images").mkdir()
    (tmp_path / "group_vars" / "images" / "keys.yml").write_text("key: |\n  REPLACE\n")
    (tmp_path / "group_vars" / ".keys.yml.swp").write_text("REPLACE")
    found = [Path(p.where).name for p in placeholders([inventory])]
    assert found == ["keys.yml:2", "hosts.ini:2"], "not what another inventory may be"


@pytest.mark.parametrize("name", ["azure_vmss", "lab"])
def test_the_examples_hold_what_their_comments_say(name: str) -> None:
    """Each line with REPLACE that isn't a comment is reported, and no other line."""
    folder = REPO_ROOT / "inventories" / name
    marked = [
        (file.name, number)
        for file in folder.rglob("*.yml")
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if "REPLACE" in text and not text.lstrip().startswith("#")
    ]
    problems = shipped(name).problems()
    assert sorted(Path(p.where).name for p in problems) == sorted(f"{n}:{line}" for n, line in marked)
    assert (len(marked) > 5) == (name == "azure_vmss")
