"""Inventories, read by Ansible's own rules, including their vaulted parts."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible import constants as settings
from ansible import context
from ansible._internal._datatag._tags import Origin, TrustedAsTemplate
from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager
from ansible.module_utils.ansible_release import __version__
from ansible.module_utils.common.collections import ImmutableDict
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import (
    AnsibleVaultError,
    EncryptedString,
    VaultHelper,
    VaultLib,
    get_file_vault_secret,
)
from ansible.utils.vars import load_extra_vars
from ansible.vars.manager import VariableManager
from ansible.vars.plugins import get_vars_from_inventory_sources, get_vars_from_path

from image_builder.definition.engine.origins import (
    UnreadableError,
    place_of,
    unreadable,
    use_passwords,
    vault_reason,
)
from image_builder.definition.values import VAULT_HINT, Place
from image_builder.errors import VaultError
from image_builder.settings import VaultId


@dataclass
class VaultedFiles:
    """The vaulted files that the loader found: the SHA-256 of each ciphertext, and the files it couldn't decrypt."""

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
            self.vaulted.failures[Place(origin.path if origin else "?", 1)] = vault_reason(
                self._vault.secrets
            )
            return Origin.get_or_create_tag(b_data, None).tag(b""), False
        if not plain_source and (origin := Origin.get_tag(b_data)):
            self.vaulted.digests[origin.path] = hashlib.sha256(bytes(b_data)).hexdigest()
        return data, plain_source


def _overlaid(scopes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the variables of several scopes, weakest first, each under the key that sets it: the key has its place."""
    variables: dict[str, Any] = {}
    for key, value in (item for scope in scopes for item in scope.items()):
        variables.pop(key, None)  # a dictionary would keep the first key
        variables[key] = value
    return variables


@dataclass
class Source:
    """An inventory that has been read by Ansible's own rules."""

    loader: Any
    manager: Any
    variables: Any
    vaulted: VaultedFiles
    _group_files: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Return the extra variables, which win over all others."""
        extra: Mapping[str, Any] = self.variables.extra_vars
        return extra

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
        for key, value in self.extra.items():
            keys[str(key)] = place_of(key) or place_of(value) or Place("-e")
        ours = {k: merged[k] for k in keys if k in merged and k not in ("inventory_file", "inventory_dir")}
        for key, value in ours.items():
            # Two files of one group's directory are merged before we see them; then the value's own place is right.
            if (at := place_of(value)) and at.path != keys[key].path:
                keys[key] = at
        return ours, keys

    def _scopes(self, host: Any) -> list[Mapping[str, Any]]:
        """Return every mapping that sets variables for ``host``, weakest first."""
        return [*self._group_scopes(host.get_groups()), host.vars, self._beside(host)]

    def _group_scopes(self, groups: Iterable[Any]) -> list[Mapping[str, Any]]:
        """Return every mapping that sets variables in some of a host's groups, weakest first, in Ansible's order."""
        ordered = sorted(groups, key=lambda g: (g.depth, g.priority, g.name))
        return [*(g.get_vars() for g in ordered), *(self._files_of(g) for g in ordered)]

    def _files_of(self, group: Any) -> Mapping[str, Any]:
        """Return what the files of a group set. They are searched for once, for all images and their checks."""
        if group.name not in self._group_files:
            self._group_files[group.name] = self._beside(group)
        return self._group_files[group.name]

    def _beside(self, entity: Any) -> Mapping[str, Any]:
        """Return what the files of a group or a host set, both next to the inventories and next to the playbooks."""
        variables = get_vars_from_inventory_sources(self.loader, self.manager._sources, [entity], "task")
        beside = get_vars_from_path(self.loader, self.loader.get_basedir(), [entity], "task")
        return {**variables, **beside}

    def group(self, name: str) -> list[str] | None:
        """Return the hosts of a group, in the inventory's order, or None if there is no such group."""
        if name not in self.manager.groups:
            return None
        return [str(h.name) for h in self.manager.groups[name].get_hosts()]

    def own_variables(self) -> list[Mapping[str, Any]]:
        """Return what each group itself sets, in the inventory and in its files, without groups that set nothing."""
        own = (_overlaid(self._group_scopes([group])) for group in self.manager.groups.values())
        return [variables for variables in own if variables]

    def inherited_variables(self) -> list[Mapping[str, Any]]:
        """Return what the groups of a host set together, once for all hosts in the same groups.

        What hosts set themselves is left out. A group without groups or hosts below it counts as if it had a host,
        because a pool may not have any yet.
        """
        return [_overlaid(self._group_scopes(chain)) for chain in self._chains()]

    def inherited_variables_by_group(self, variable: str) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
        """Return the ``inherited_variables`` that include a variable, each with the names of the groups it comes from.

        These are a host's lowest groups that set or inherit it, or all of its lowest groups if none does: a host may
        be in others too, such as one for its rack.
        """
        found: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
        for chain in self._chains():
            inherited = _overlaid(self._group_scopes(chain))
            if variable in inherited:
                names = {str(group.name) for group in chain}
                lowest = [g for g in chain if not any(str(c.name) in names for c in g.child_groups)]
                having = [
                    g for g in lowest if variable in _overlaid(self._group_scopes([*g.get_ancestors(), g]))
                ]
                found.append((tuple(sorted(str(g.name) for g in having or lowest)), inherited))
        return found

    def _chains(self) -> list[list[Any]]:
        """Return the groups of each host with those above them, once for all hosts in the same groups."""
        groups = self.manager.groups.values()
        chains = [host.get_groups() for host in self.manager.hosts.values()]
        chains += [[*g.get_ancestors(), g] for g in groups if not g.child_groups and not g.hosts]
        return list({frozenset(str(g.name) for g in chain): chain for chain in chains}.values())

    def group_names(self, host: str) -> list[str]:
        """Return the groups of a host as Ansible's ``group_names`` has them."""
        return sorted(str(g.name) for g in self.manager.get_host(host).get_groups() if g.name != "all")

    def magic(self, host: str) -> dict[str, Any]:
        """Return the variables that Ansible itself sets for a host, whatever the play."""
        of_host = self.manager.get_host(host)
        own = of_host.vars
        version = [int(part) for part in __version__.split(".")[:3]]
        return {
            **of_host.get_magic_vars(),
            "inventory_dir": own.get("inventory_dir"),
            "inventory_file": own.get("inventory_file"),
            "groups": {str(n): [str(h.name) for h in g.get_hosts()] for n, g in self.manager.groups.items()},
            "ansible_version": {
                "full": __version__,
                "string": __version__,
                **dict(zip(("major", "minor", "revision"), version, strict=True)),
            },
        }

    def match(self, pattern: str) -> list[str]:
        """Return the hosts that an Ansible host pattern matches."""
        return [str(h.name) for h in self.manager.get_hosts(pattern)]

    def host_place(self, name: str) -> Place:
        """Return the place of a host. Ansible knows its inventory file; the line is found by a search."""
        file = Path(str(self.manager.get_host(name).vars.get("inventory_file") or self.manager._sources[0]))
        text = file.read_text(errors="replace") if file.is_file() else ""
        entry = re.compile(rf"\s*[\"']?{re.escape(name)}[\"']?(\s|:|$)")
        lines = (n for n, line in enumerate(text.splitlines(), 1) if entry.match(line))
        return Place(str(file), next(lines, 0))


def read_inventory(
    paths: Sequence[Path], vault: Sequence[VaultId], playbooks: Path, extra: Sequence[str] = ()
) -> Source:
    """Read inventories. ``extra`` are variables in the form that Ansible's ``-e`` accepts.

    Raises UnreadableError if an inventory can't be read, and VaultError if a password file can't. Files that can't be
    decrypted are recorded in the result's ``vaulted``.
    """
    _forget_directories()
    vaulted = VaultedFiles()
    loader = _Loader(vaulted)
    # The group_vars next to the playbooks apply to a play, so they apply here.
    loader.set_basedir(str(playbooks))
    passwords = _secrets(loader, vault)
    loader.set_vault_secrets(passwords)
    use_passwords(passwords)
    try:
        manager = InventoryManager(loader=loader, sources=[str(p) for p in paths])
        variables = VariableManager(loader=loader, inventory=manager)
    except AnsibleError as error:
        raise _parse_failure(paths, loader) or unreadable(error) from error
    try:
        variables._extra_vars = _extra_variables(loader, extra)
    except AnsibleError as error:
        if vaulted.failures:
            return Source(loader, manager, variables, vaulted)  # whose caller reports them
        failure = unreadable(error)
        raise UnreadableError(failure.place or Place("-e"), failure.reason) from error
    return Source(loader, manager, variables, vaulted)


def _parse_failure(paths: Sequence[Path], loader: Any) -> UnreadableError | None:
    """Return what is wrong with an inventory's YAML; Ansible itself says only that it can't be parsed."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            if file.is_file() and file.suffix in (".yml", ".yaml", ".json"):
                try:
                    loader.load_from_file(str(file), cache="none")
                except AnsibleError as error:
                    return unreadable(error)
    return None


def _secrets(loader: Any, vault: Sequence[VaultId]) -> list[tuple[str, Any]]:
    """Read the passwords: first those of the ``ansible.cfg``, as in Ansible, then those that were given."""
    secrets = []
    for vault_id in (*_configured_vault(), *vault):
        try:
            secret = get_file_vault_secret(
                filename=str(vault_id.file), vault_id=vault_id.label, loader=loader
            )
            secret.load()
        except AnsibleError as error:
            raise VaultError(f"{Place(str(vault_id.file))}: {error.message}", hint=VAULT_HINT) from error
        secrets.append((vault_id.label, secret))
    return secrets


def _extra_variables(loader: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Return the variables of ``-e``, read by Ansible's own function, which takes them from the command line."""
    before = context.CLIARGS
    context.CLIARGS = ImmutableDict(extra_vars=tuple(map(TrustedAsTemplate().tag, texts)))
    load_extra_vars.extra_vars = None
    try:
        extra: dict[str, Any] = load_extra_vars(loader)
        return extra
    finally:
        context.CLIARGS = before
        load_extra_vars.extra_vars = None


def _configured_vault() -> list[VaultId]:
    read = settings.config.get_config_value
    listed = (VaultId.parse(text) for text in read("DEFAULT_VAULT_IDENTITY_LIST") or ())
    file = read("DEFAULT_VAULT_PASSWORD_FILE")
    return [*listed, *([VaultId("default", Path(file))] if file else [])]


def _forget_directories() -> None:
    """Empty the process-wide caches of the group_vars plugin, or a second load would miss new files."""
    plugin = sys.modules.get("ansible.plugins.vars.host_group_vars")
    for name in ("CANONICAL_PATHS", "FOUND", "NAK"):
        if cache := getattr(plugin, name, None):
            cache.clear()


def undecryptable(value: Any, source: Source) -> list[tuple[Place | None, str]]:
    """Return the place and the reason of every inline vaulted string that can't be decrypted."""
    if isinstance(value, EncryptedString):
        try:
            VaultLib(source.loader._vault.secrets).decrypt(VaultHelper.get_ciphertext(value, with_tags=False))
        except AnsibleError:
            return [(place_of(value), vault_reason(source.loader._vault.secrets))]
        return []
    if isinstance(value, Mapping):
        return [f for item in value.values() for f in undecryptable(item, source)]
    if isinstance(value, list):
        return [f for item in value for f in undecryptable(item, source)]
    return []
