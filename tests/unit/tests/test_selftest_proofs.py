"""The dependencies of a test file, and which of its proofs count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image_builder.settings import REPO_ROOT
from tests.selftest import proofs
from tests.selftest.proofs import SECONDS, WINGS, Proofs, depends_on

FILES = {
    name: name.upper()
    for name in (
        "image_builder/bake/build.py",
        "image_builder/pool/run/engine.py",
        "image_builder/cluster/limits.py",
        "roles/system/tasks/main.yml",
        "tests/support/servers.py",
        "tests/bake/test_own.py",
        "tests/bake/test_other.py",
        "tests/unit/test_names.py",
        "docs/how-to/install.md",
    )
}
ALWAYS = {
    "image_builder/bake/build.py",
    "roles/system/tasks/main.yml",
    "tests/support/servers.py",
    "tests/bake/test_own.py",
}


@pytest.mark.parametrize(
    ("imported", "text", "more"),
    [
        (set(), "", set()),
        ({"image_builder/pool/run/engine.py"}, "", {"image_builder/pool/run/engine.py"}),
        (set(), 'run("pool", "plan")', {"image_builder/pool/run/engine.py"}),
        (set(), "pool/main/b/bash.deb", set()),
        (set(), "the lab's cluster", {"image_builder/cluster/limits.py"}),
        (set(), 'REPO / "docs"', {"docs/how-to/install.md"}),
        ({"tests/bake/test_other.py"}, "", {"tests/bake/test_other.py"}),
    ],
)
def test_a_file_depends_on_all_but_other_tests_and_wings_that_it_does_not_lead_to(
    imported: set[str], text: str, more: set[str]
) -> None:
    content = depends_on("tests/bake/test_own.py", FILES, frozenset(imported), text)
    assert set(content) == ALWAYS | more
    assert all(content[name] == FILES[name] for name in content)


def test_wings_are_there() -> None:
    for prefix in (prefix for prefixes in WINGS.values() for prefix in prefixes):
        assert (REPO_ROOT / prefix).exists(), prefix


def test_a_proof_counts_for_a_week_and_for_one_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "tests/bake/test_own.py"
    own.parent.mkdir(parents=True)
    own.write_text("def test_it(): pass")
    content = {"tests/bake/test_own.py": "1"}
    monkeypatch.setattr(proofs, "_checkout", lambda _root: content)

    def look_up() -> Proofs:
        return Proofs.look_up(tmp_path / "proofs", "root", tmp_path)

    first = look_up()
    assert not first.days
    first.write(tmp_path)
    Proofs.read(tmp_path).add("tests/bake/test_own.py")
    assert list(look_up().days) == ["tests/bake/test_own.py"]
    content["roles/system/tasks/main.yml"] = "2"
    assert not look_up().days
    del content["roles/system/tasks/main.yml"]
    (proof,) = (tmp_path / "proofs").iterdir()
    old = proof.stat().st_mtime - SECONDS - 60
    os.utime(proof, (old, old))
    assert not look_up().days and not proof.exists()


def test_without_git_nothing_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests/bake").mkdir(parents=True)
    (tmp_path / "tests/bake/test_own.py").touch()
    monkeypatch.setattr(proofs, "_checkout", lambda _root: {})
    nothing = Proofs.look_up(tmp_path / "proofs", "root", tmp_path)
    nothing.add("tests/bake/test_own.py")
    assert not nothing.names and not list((tmp_path / "proofs").iterdir())
