"""Vault: a secret must be available for checks, and never leaves the inventory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from ansible.parsing.vault import VaultLib, VaultSecret

from image_builder.definition import Inventory, layer_needs, resolved_variables
from image_builder.errors import DefinitionError, VaultError
from image_builder.settings import VaultId

Load = Callable[..., Inventory]
SECRET = "correct horse battery staple"
PASSWORD = "swordfish"
BOTH = "image_base: {suite: trixie}\nimage_layers: [system, runtime]\nruntime_token: t\n"


def encrypt(text: str) -> str:
    secret = VaultSecret(PASSWORD.encode())
    return str(VaultLib([("default", secret)]).encrypt(text, secret), "ascii")


@pytest.fixture
def password(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    return file


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    file = tmp_path / "wrong"
    file.write_text("sardine\n")
    return file


def inline(name: str, ciphertext: str) -> str:
    return f"{name}: !vault |\n{indent(ciphertext, '  ')}"


def everything(inventory: Inventory, name: str) -> str:
    definition = inventory.define(name)
    texts = [repr(definition), repr(inventory), json.dumps(dict(definition.variables))]
    texts += [json.dumps(resolved_variables(definition)), repr(layer_needs(definition, "system"))]
    return "\n".join(texts)


def test_inline_secret_never_leaves(load: Load, password: Path) -> None:
    ciphertext = encrypt(SECRET)
    text = inline("runtime_token", ciphertext)
    text += 'system_limits: {made: "Bearer {{ runtime_token }}"}\nruntime_version: "1.2"\n'
    inventory = load(password, group_vars__images=BOTH, group_vars__workers=text)
    assert inventory.problems() == []
    definition = inventory.define("worker")
    digest = hashlib.sha256(ciphertext.encode()).hexdigest()
    assert definition.variables["runtime_token"] == {"__vault__": digest}
    assert SECRET not in everything(inventory, "worker")
    resolved = resolved_variables(definition)
    assert resolved["runtime_version"] == "1.2"
    assert not {"runtime_token", "system_limits"} & resolved.keys()


def test_secret_inside_a_structure(load: Load, password: Path) -> None:
    text = "outer:\n  - inner: !vault |\n" + indent(encrypt(SECRET), "      ")
    inventory = load(password, group_vars__workers=text)
    outer: Any = inventory.define("worker").variables["outer"]
    assert set(outer[0]["inner"]) == {"__vault__"}
    assert SECRET not in everything(inventory, "worker")


def test_vaulted_file_never_leaves(load: Load, password: Path) -> None:
    ciphertext = encrypt(f"token: {SECRET}\nflag: true\nnothing:\nnested: [{{a: {SECRET}}}]\n")
    inventory = load(
        password, group_vars__workers__secrets=ciphertext, group_vars__workers__plain="open: 1\n"
    )
    variables = inventory.define("worker").variables
    digest = {"__vault__": hashlib.sha256(ciphertext.encode()).hexdigest()}
    assert [variables[n] for n in ("token", "flag", "nothing", "nested")] == [digest] * 4
    assert variables["open"] == 1
    assert SECRET not in everything(inventory, "worker")


def test_ciphertext_changes_the_stand_in(load: Load, password: Path) -> None:
    first = (
        load(password, group_vars__workers=inline("token", encrypt("a"))).define("worker").variables["token"]
    )
    second = (
        load(password, group_vars__workers=inline("token", encrypt("b"))).define("worker").variables["token"]
    )
    assert first != second


def test_password_from_the_environment(load: Load, password: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(password))
    assert load(group_vars__workers=inline("token", encrypt("a"))).problems() == []


def test_wrong_password_names_every_line(load: Load, wrong: Path) -> None:
    text = inline("one", encrypt(SECRET)) + "x: 1\n" + inline("two", encrypt(SECRET))
    inventory = load(wrong, group_vars__workers=text)
    with pytest.raises(VaultError) as raised:
        inventory.define("worker")
    first, second = str(raised.value).splitlines()
    assert first == "group_vars/workers.yml:1  one: can't be decrypted with this vault password"
    assert second.startswith("group_vars/workers.yml:")
    assert "two: can't be decrypted" in second
    assert "--vault-password-file" in str(raised.value.hint)
    assert inventory.define("plain").name == "plain", "an image without the secret doesn't need it"


def test_missing_password(load: Load) -> None:
    with pytest.raises(VaultError, match=r"workers.yml:1  one: is vaulted, and no vault password was given"):
        load(group_vars__workers=inline("one", encrypt(SECRET))).problems()


def test_passwords_with_labels_open_what_each_of_them_closed(load: Load, password: Path, wrong: Path) -> None:
    """As in Ansible, each password is tried, whatever its label."""
    text = inline("runtime_token", encrypt(SECRET))
    for vault in (
        [VaultId("dev", wrong), VaultId("prod", password)],
        [VaultId("prod", password), VaultId("dev", wrong)],
    ):
        token: Any = load(*vault, group_vars__workers=text).define("worker").variables["runtime_token"]
        assert set(token) == {"__vault__"}


def test_passwords_of_the_configuration_count(
    load: Load, password: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = inline("runtime_token", encrypt(SECRET))
    monkeypatch.setenv("ANSIBLE_VAULT_IDENTITY_LIST", f"prod@{password}")
    assert load(group_vars__workers=text).define("worker")


def test_vaulted_file_with_wrong_or_missing_password(load: Load, wrong: Path) -> None:
    ciphertext = encrypt(f"token: {SECRET}\n")
    with pytest.raises(
        VaultError, match=r"workers.yml:1: the file can't be decrypted with this vault password"
    ):
        load(wrong, group_vars__workers=ciphertext)
    with pytest.raises(
        VaultError, match=r"workers.yml:1: the file is vaulted, and no vault password was given"
    ):
        load(group_vars__workers=ciphertext)


def test_missing_password_file(load: Load, tmp_path: Path) -> None:
    with pytest.raises(VaultError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_builder_variable_may_not_be_vaulted(load: Load, password: Path) -> None:
    text = inline("secret", encrypt(SECRET)) + 'image_kernel_args: ["token={{ secret }}"]\n'
    inventory = load(password, group_vars__workers=text)
    assert [p.reason for p in inventory.problems()] == ["a builder variable can't hold a vaulted value"]


def test_vaulted_value_can_not_reach_the_lock(load: Load, password: Path) -> None:
    text = inline("secret", encrypt(SECRET))
    text += 'runtime_archive: {url: "https://x:{{ secret }}@a.example/", sha256: ab}\n'
    inventory = load(password, group_vars__images=BOTH, group_vars__workers=text)
    with pytest.raises(DefinitionError, match="a vaulted value would end in the lock") as raised:
        inventory.define("worker")
    assert SECRET not in str(raised.value)
