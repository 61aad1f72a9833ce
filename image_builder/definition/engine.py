"""The only door to Ansible's Python API: inventories, origins of values, Vault, templates, argument specs.

Importing it costs about 0.3 s, so the rest of the package does so when an inventory is loaded, not before.
Tags that carry a value's origin are internal to ansible-core 2.19; a unit test holds them in place.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.definition.values import JSON, VAULT_HINT, VAULT_KEY, Place, is_template, strings, words
from image_builder.errors import VaultError
from image_builder.settings import REPO_ROOT

# Ansible reads its settings when it is first imported. Children get an environment of their own, so this
# reaches nobody else.
os.environ["ANSIBLE_CONFIG"] = str(REPO_ROOT / "ansible.cfg")
os.environ["ANSIBLE_DUPLICATE_YAML_DICT_KEY"] = "error"
os.environ["ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED"] = "true"
os.environ["ANSIBLE_LOCAL_TEMP"] = tempfile.gettempdir()

from ansible import constants as settings
from ansible._internal._datatag._tags import Origin, TrustedAsTemplate
from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import (
    AnsibleVaultError,
    EncryptedString,
    VaultHelper,
    VaultLib,
    get_file_vault_secret,
)
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar, trust_as_template
from ansible.vars.manager import VariableManager
from ansible.vars.plugins import get_vars_from_inventory_sources

# Its directory for modules to run from, made on import and removed at exit: a killed process would leave it.
with suppress(OSError):
    Path(settings.DEFAULT_LOCAL_TMP).rmdir()
init_plugin_loader([])


class EvaluationError(Exception):
    """A template could not be evaluated."""


class UnreadableError(Exception):
    """An inventory, playbook or role file could not be read or parsed."""

    def __init__(self, place: Place | None, what: str) -> None:
        super().__init__(what)
        self.place = place
        self.what = what


@dataclass
class VaultedFiles:
    """What the loader met: SHA-256 of each vaulted file's ciphertext, and the files it could not decrypt."""

    digests: dict[str, str] = field(default_factory=dict)
    failures: dict[Place, str] = field(default_factory=dict)


class _Loader(DataLoader):  # type: ignore[misc]
    """A DataLoader that notes vaulted files, and goes on past those that it can't decrypt."""

    def __init__(self, vaulted: VaultedFiles) -> None:
        super().__init__()
        self.vaulted = vaulted

    def _decrypt_if_vault_data(self, b_data: bytes) -> tuple[bytes, bool]:
        try:
            data, plain_source = super()._decrypt_if_vault_data(b_data)
        except AnsibleVaultError:
            origin = Origin.get_tag(b_data)
            self.vaulted.failures[Place(origin.path if origin else "?", 1)] = _vault_reason(
                self._vault.secrets
            )
            return Origin.get_or_create_tag(b_data, None).tag(b""), False
        if not plain_source and (origin := Origin.get_tag(b_data)):
            self.vaulted.digests[origin.path] = hashlib.sha256(bytes(b_data)).hexdigest()
        return data, plain_source


def _vault_reason(secrets: object) -> str:
    if secrets:
        return "can't be decrypted with this vault password"
    return "is vaulted, and no vault password was given"


@dataclass
class Source:
    """An inventory that was read, by Ansible's own rules."""

    loader: Any
    manager: Any
    variables: Any
    vaulted: VaultedFiles

    def host_variables(self, name: str) -> tuple[dict[str, Any], dict[str, Place]]:
        """Return a host's inventory variables with their tags, and the place where each was set.

        Raises UnreadableError.
        """
        host = self.manager.get_host(name)
        keys: dict[str, Place] = {}
        try:
            scopes = self._scopes(host)
            merged = self.variables.get_vars(host=host, include_hostvars=False)
        except AnsibleError as error:
            raise unreadable(error) from error
        for scope in scopes:
            for key, value in scope.items():
                keys[str(key)] = place_of(key) or place_of(value) or self.host_place(name)
        ours = {k: merged[k] for k in keys if k in merged and k not in ("inventory_file", "inventory_dir")}
        for key, value in ours.items():
            # Two files of one group's directory are merged before we see them; then the value knows better.
            if (at := place_of(value)) and at.path != keys[key].path:
                keys[key] = at
        return ours, keys

    def _scopes(self, host: Any) -> list[Mapping[str, Any]]:
        """Return every mapping that sets variables for ``host``, weakest first."""
        groups = sorted(host.get_groups(), key=lambda g: (g.depth, g.priority, g.name))
        every = [g for g in groups if g.name == "all"]
        rest = [g for g in groups if g.name != "all"]

        return [
            *(g.get_vars() for g in every + rest),
            *(self._beside(g) for g in every + rest),
            host.vars,
            self._beside(host),
        ]

    def _beside(self, entity: Any) -> Mapping[str, Any]:
        """Return what the files of a group or a host set."""
        found: Mapping[str, Any] = get_vars_from_inventory_sources(
            self.loader, self.manager._sources, [entity], "task"
        )
        return found

    def group(self, name: str) -> list[str] | None:
        """Return the hosts of a group, in the inventory's order, or None where there is no such group."""
        if name not in self.manager.groups:
            return None
        return [str(h.name) for h in self.manager.groups[name].get_hosts()]

    def own_variables(self) -> list[Mapping[str, Any]]:
        """Return what each group sets itself, beside its hosts and in its files; groups that set nothing left out."""
        found = [{**g.get_vars(), **self._beside(g)} for g in self.manager.groups.values()]
        return [variables for variables in found if variables]

    def group_names(self, host: str) -> list[str]:
        """Return the groups of a host as Ansible's ``group_names`` has them."""
        return sorted(str(g.name) for g in self.manager.get_host(host).get_groups() if g.name != "all")

    def match(self, pattern: str) -> list[str]:
        """Return the hosts that an Ansible host pattern matches."""
        return [str(h.name) for h in self.manager.get_hosts(pattern)]

    def host_place(self, name: str) -> Place:
        """Return where a host stands. Ansible knows its inventory file; the line is looked for."""
        file = Path(str(self.manager.get_host(name).vars.get("inventory_file") or self.manager._sources[0]))
        text = file.read_text(errors="replace") if file.is_file() else ""
        entry = re.compile(rf"\s*[\"']?{re.escape(name)}[\"']?(\s|:|$)")
        lines = (n for n, line in enumerate(text.splitlines(), 1) if entry.match(line))
        return Place(str(file), next(lines, 0))


def read_inventory(paths: Sequence[Path], password_file: Path | None, playbooks: Path) -> Source:
    """Read inventories; raises UnreadableError, and VaultError for a password file that can't be read.

    Files that can't be decrypted are noted in the result's ``vaulted``.
    """
    _forget_directories()
    vaulted = VaultedFiles()
    loader = _Loader(vaulted)
    # group_vars beside the playbooks count in a play, so they count here.
    loader.set_basedir(str(playbooks))
    loader.set_vault_secrets(_secrets(loader, password_file))
    try:
        manager = InventoryManager(loader=loader, sources=[str(p) for p in paths])
        variables = VariableManager(loader=loader, inventory=manager)
    except AnsibleError as error:
        raise _parse_failure(paths, loader) or unreadable(error) from error
    return Source(loader, manager, variables, vaulted)


def _parse_failure(paths: Sequence[Path], loader: Any) -> UnreadableError | None:
    """Return what is wrong with an inventory's YAML: Ansible says only that it can't be parsed."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            if file.is_file() and file.suffix in (".yml", ".yaml", ".json"):
                try:
                    loader.load_from_file(str(file), cache="none")
                except AnsibleError as error:
                    return unreadable(error)
    return None


def _secrets(loader: Any, password_file: Path | None) -> list[tuple[str, Any]]:
    given = password_file or settings.config.get_config_value("DEFAULT_VAULT_PASSWORD_FILE")
    if not given:
        return []
    try:
        secret = get_file_vault_secret(filename=str(given), vault_id="default", loader=loader)
        secret.load()
    except AnsibleError as error:
        raise VaultError(f"{Place(str(given))}: {error.message}", hint=VAULT_HINT) from error
    return [("default", secret)]


def _forget_directories() -> None:
    """Empty the process-wide caches of the group_vars plugin, or a second load would miss new files."""
    plugin = sys.modules.get("ansible.plugins.vars.host_group_vars")
    for name in ("CANONICAL_PATHS", "FOUND", "NAK"):
        if cache := getattr(plugin, name, None):
            cache.clear()


def unreadable(error: AnsibleError) -> UnreadableError:
    """Return Ansible's error with the place that it names."""
    origin: Origin | None = None
    cause: BaseException | None = error
    while cause and not (origin and origin.path):
        obj = getattr(cause, "obj", None)
        origin = obj if isinstance(obj, Origin) else Origin.get_tag(obj)
        cause = cause.__cause__ or cause.__context__
    place = Place(origin.path, origin.line_num or 0) if origin and origin.path else None
    return UnreadableError(place, " ".join(str(error.message).split()))


_parsed: dict[Path, tuple[int, int, Any]] = {}


def read_yaml(path: Path) -> Any:
    """Return a YAML file's content with its tags, parsed once while unchanged; raises UnreadableError."""
    try:
        stat = path.stat()
        if (known := _parsed.get(path)) and known[:2] == (stat.st_mtime_ns, stat.st_size):
            return known[2]
        content = DataLoader().load_from_file(str(path), unsafe=True, trusted_as_template=True)
    except OSError as error:
        raise UnreadableError(Place(str(path)), str(error.strerror)) from error
    except AnsibleError as error:
        failure = unreadable(error)
        raise UnreadableError(failure.place or Place(str(path)), failure.what) from error
    _parsed[path] = (stat.st_mtime_ns, stat.st_size, content)
    return content


def place_of(value: Any) -> Place | None:
    """Return where a value was written, where Ansible knows (not for booleans and null)."""
    origin = Origin.get_tag(value)
    return Place(origin.path, origin.line_num or 0) if origin and origin.path else None


def place_in(value: Any, path: Sequence[str | int]) -> Place | None:
    """Return where the item at ``path`` in ``value`` stands: its key's line, else its nearest parent's."""
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


def plain(value: Any) -> JSON:
    """Return a value as JSON without tags, each inline vaulted string replaced by its stand-in.

    A string marked ``!unsafe`` is not a template; it is wrapped in ``{% raw %}``, so that it stays none.
    """
    if ciphertext := VaultHelper.get_ciphertext(value, with_tags=False):
        return {VAULT_KEY: hashlib.sha256(ciphertext.encode()).hexdigest()}
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    text = "".join(str(value))  # a plain str, whatever str() returned
    if "{" in text and not TrustedAsTemplate.is_tagged_on(value) and Origin.is_tagged_on(value):
        return "{% raw %}" + text + "{% endraw %}"
    return text


def undecryptable(value: Any, source: Source) -> list[tuple[Place | None, str]]:
    """Return the place and the reason of every inline vaulted string that can't be decrypted."""
    if isinstance(value, EncryptedString):
        try:
            VaultLib(source.loader._vault.secrets).decrypt(VaultHelper.get_ciphertext(value, with_tags=False))
        except AnsibleError:
            return [(place_of(value), _vault_reason(source.loader._vault.secrets))]
        return []
    if isinstance(value, Mapping):
        return [f for item in value.values() for f in undecryptable(item, source)]
    if isinstance(value, list):
        return [f for item in value for f in undecryptable(item, source)]
    return []


def _trusted(value: JSON) -> Any:
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, Mapping):
        return {k: _trusted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_trusted(v) for v in value]
    return value


class Evaluator:
    """Evaluates templates over a set of variables, themselves templates, as a play would."""

    def __init__(self, variables: Mapping[str, JSON]) -> None:
        self._templar = Templar(loader=DataLoader(), variables={k: _trusted(v) for k, v in variables.items()})

    def evaluate(self, value: JSON) -> JSON:
        """Return ``value`` with every template in it evaluated; raises EvaluationError."""
        if not is_template(value):
            return value
        try:
            return _result(self._templar.template(_trusted(value)))
        except AnsibleError as error:
            # How deep, and how that is worded, is Python's own affair.
            what = str(error.message).partition(": maximum recursion")[0]
            raise EvaluationError(" ".join(what.split())) from error

    def settle(self, name: str, value: JSON) -> None:
        """Let a variable be its final value, which is no template: others that use it needn't evaluate it."""
        self._templar.available_variables[name] = value


def evaluate_all(
    variables: Mapping[str, JSON], wanted: Collection[str]
) -> tuple[dict[str, JSON], dict[str, str]]:
    """Evaluate the ``wanted`` variables; return the values, and for the rest why they have none.

    Each is evaluated after those that it names, so none twice: a template costs a millisecond to compile.
    """
    evaluator = Evaluator(variables)
    values: dict[str, JSON] = {}
    failures: dict[str, str] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        seen.add(name)
        inside = {word for text in strings(variables[name]) if is_template(text) for word in words(text)}
        for other in sorted(inside & wanted_set - seen):
            visit(other)
        try:
            values[name] = evaluator.evaluate(variables[name])
        except EvaluationError as error:
            failures[name] = str(error)
        else:
            evaluator.settle(name, values[name])

    wanted_set = set(wanted)
    for name in wanted:
        if name not in seen:
            visit(name)
    return values, failures


def _result(value: Any) -> JSON:
    if isinstance(value, Mapping):
        return {str(k): _result(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_result(v) for v in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return "".join(str(value))


def argument_faults(name: str, option: Mapping[str, Any], value: JSON) -> list[str]:
    """Return what an argument spec says against a value, as Ansible checks it before a role runs."""
    result = ArgumentSpecValidator({name: dict(option)}).validate({name: value})
    # Ansible lists valid booleans in the order of a set: another one in each run.
    return [str(e).partition(" Valid booleans include")[0] for e in result.error_messages]
