"""What the caller has set for Ansible: the place of a password, and nothing else."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from image_builder.cli.command import host_settings
from image_builder.definition.engine import caller


def test_settings_for_ansible_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ANSIBLE_")]:
        monkeypatch.delenv(name)  # put back at the end
    monkeypatch.setenv("ANSIBLE_HASH_BEHAVIOUR", "merge")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", "/password")
    importlib.reload(caller)
    assert {name for name in os.environ if name.startswith("ANSIBLE_")} == {"ANSIBLE_VAULT_PASSWORD_FILE"}


@pytest.mark.parametrize(("given", "path"), [("password", "work/password"), ("~/password", "home/password")])
def test_a_password_files_path_does_not_depend_on_where_ansible_runs(
    given: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = host_settings(tmp_path, vault_password_file=Path(given))
    assert settings.vault_password_file == tmp_path / path
