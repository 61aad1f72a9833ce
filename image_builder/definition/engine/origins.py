"""Origins of values, from Ansible's tags: files read with tags, places of values, and plain data without tags."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible._internal._datatag._tags import Origin, TrustedAsTemplate
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import AnsibleVaultError, VaultHelper, VaultLib, is_encrypted

from image_builder.canonical import JSON
from image_builder.definition.values import VAULT_HINT, VAULT_KEY, Place
from image_builder.errors import VaultError

_VAULTED = (
    "is vaulted as a whole, which only files of variables may be, and files that tasks send: "
    "encrypt its values instead (ansible-vault encrypt_string)"
)
# Those of the inventory that was read last.
_passwords: list[tuple[str, Any]] = []


class UnreadableError(Exception):
    """An inventory, playbook or role file could not be read or parsed."""

    def __init__(self, place: Place | None, reason: str) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason


def unreadable(error: AnsibleError) -> UnreadableError:
    """Return an UnreadableError for an error of Ansible's, with the place that it names."""
    origin: Origin | None = None
    cause: BaseException | None = error
    while cause and not (origin and origin.path):
        obj = getattr(cause, "obj", None)
        origin = obj if isinstance(obj, Origin) else Origin.get_tag(obj)
        cause = cause.__cause__ or cause.__context__
    place = Place(origin.path, origin.line_num or 0) if origin and origin.path else None
    return UnreadableError(place, " ".join(str(error.message).split()))


_QUICK = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_parsed: dict[Path, tuple[int, int, Any]] = {}


def use_passwords(passwords: Sequence[tuple[str, Any]]) -> None:
    """Use these passwords from now on to decrypt files of roles and layers."""
    _passwords[:] = passwords


def vault_reason(passwords: object) -> str:
    """Return why a vaulted file can't be read."""
    if passwords:
        return "can't be decrypted with this vault password"
    return "is vaulted, and no vault password was given"


def ciphertext_digest(path: Path) -> str:
    """Return the SHA-256 of a file that is vaulted as a whole, an empty string for any other. Raises OSError."""
    with path.open("rb") as file:
        is_vaulted = is_encrypted(file.read(32))
    return hashlib.sha256(path.read_bytes()).hexdigest() if is_vaulted else ""


def decrypted_text(path: Path) -> str:
    """Return the text of a vaulted file. Raises VaultError if it can't be decrypted."""
    try:
        return str(VaultLib(_passwords).decrypt(path.read_bytes()).decode("utf-8", "replace"))
    except AnsibleVaultError as error:
        message = f"{Place(str(path), 1)}: the file {vault_reason(_passwords)}"
        raise VaultError(message, hint=VAULT_HINT) from error


def vaulted_variables(path: Path) -> list[str]:
    """Return the names of the variables in a vaulted file.

    Raises VaultError if it can't be decrypted, UnreadableError if its content is anything else.
    """
    content = DataLoader().load(decrypted_text(path), str(path))
    if not isinstance(content, Mapping):
        raise UnreadableError(Place(str(path), 1), _VAULTED)
    return [str(name) for name in content]


def read_yaml(path: Path) -> Any:
    """Return a YAML file's content with its tags, parsed only once while it is unchanged.

    The variables of a file that is vaulted as a whole have stand-ins. Raises UnreadableError if the file can't be read
    or parsed, VaultError if it can't be decrypted.
    """
    try:
        stat = path.stat()
        if (cached := _parsed.get(path)) and cached[:2] == (stat.st_mtime_ns, stat.st_size):
            return cached[2]
        if ciphertext := ciphertext_digest(path):
            content = {name: {VAULT_KEY: ciphertext} for name in vaulted_variables(path)}
        else:
            content = DataLoader().load_from_file(str(path), unsafe=True, trusted_as_template=True)
    except OSError as error:
        raise UnreadableError(Place(str(path)), str(error.strerror)) from error
    except AnsibleError as error:
        failure = unreadable(error)
        raise UnreadableError(failure.place or Place(str(path)), failure.reason) from error
    _parsed[path] = (stat.st_mtime_ns, stat.st_size, content)
    return content


def read_untagged_yaml(path: Path) -> Any:
    """Return a YAML file's content without tags, ten times as fast. Raises UnreadableError if it can't be read."""
    try:
        return yaml.load(path.read_bytes(), _QUICK)  # noqa: S506 (a safe one)
    except (OSError, yaml.YAMLError):
        return read_yaml(path)  # reports what is wrong, and where


def place_of(value: Any) -> Place | None:
    """Return where a value was written, if Ansible knows (it doesn't for booleans and null)."""
    origin = Origin.get_tag(value)
    return Place(origin.path, origin.line_num or 0) if origin and origin.path else None


def place_in(value: Any, path: Sequence[str | int]) -> Place | None:
    """Return the place of the item at ``path`` in ``value``: its key's line, else its nearest parent's."""
    place = None
    for part in path:
        if isinstance(value, Mapping) and part in value:
            key = next(k for k in value if k == part)
            place = place_of(key) or place_of(value[part]) or place
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            place = place_of(value[part]) or place
        else:
            break
        value = value[part]
    return place


def untagged(value: Any) -> JSON:
    """Return a scalar as Python's own type; anything that isn't a number, a boolean or None becomes a string."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return "".join(str(value))  # a plain str, whatever str() returned


def plain(value: Any) -> JSON:
    """Return a value as JSON without tags, each inline vaulted string replaced by its stand-in.

    A string marked ``!unsafe`` isn't a template; it is wrapped in ``{% raw %}`` so that it isn't evaluated as one.
    """
    if ciphertext := VaultHelper.get_ciphertext(value, with_tags=False):
        return {VAULT_KEY: hashlib.sha256(ciphertext.encode()).hexdigest()}
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    text = untagged(value)
    if not isinstance(text, str):
        return text
    if "{" in text and not TrustedAsTemplate.is_tagged_on(value) and Origin.is_tagged_on(value):
        return "{% raw %}" + text + "{% endraw %}"
    return text
