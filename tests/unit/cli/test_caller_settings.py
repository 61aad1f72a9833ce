"""The caller's settings for Ansible that are kept: the location of a password, and nothing else."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from image_builder.cli.command import host_settings
from image_builder.definition.engine import caller
from image_builder.settings import VaultId


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ANSIBLE_")]:
        monkeypatch.delenv(name)  # put back at the end


def test_settings_for_ansible_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
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
    settings = host_settings(tmp_path, vault=[VaultId.parse(given)])
    assert settings.vault == (VaultId("default", tmp_path / path),)
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", given)
    importlib.reload(caller)
    assert os.environ["ANSIBLE_VAULT_PASSWORD_FILE"] == str(tmp_path / path)


def test_a_label_comes_before_a_file_unless_it_is_a_part_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me@home").touch()
    found = [VaultId.parse(text) for text in ("prod@keys/a", "@keys/a", "me@home", "me@away")]
    assert [(vault_id.label, str(vault_id.file.relative_to(tmp_path))) for vault_id in found] == [
        ("prod", "keys/a"),
        ("default", "keys/a"),
        ("default", "me@home"),
        ("me", "away"),
    ]
