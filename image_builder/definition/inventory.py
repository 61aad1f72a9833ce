"""Ansible's inventory as frozen ``ImageDefinition``s; all problems of all images are found before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.checks import check_problems
from image_builder.definition.collections import collection_problems
from image_builder.definition.host_variables import HostVariables, builder_variables, read_host_variables
from image_builder.definition.model import (
    BUILDER_NAMES,
    NOT_FOR_ROLES,
    PREFIX,
    ImageBase,
    ImageDefinition,
)
from image_builder.definition.placeholders import placeholders
from image_builder.definition.pools import pool_problems
from image_builder.definition.problems import (
    closely_named,
    idle_layers,
    role_problems,
    stage_problems,
    unpredictable_layers,
    variable_problems,
)
from image_builder.definition.roles import LAYERS, VARIABLES_BESIDE
from image_builder.definition.subnets import address_problems, shared_subnet_problems
from image_builder.definition.values import VAULT_HINT, Place
from image_builder.definition.versions import unknown_api_servers, version_problems
from image_builder.errors import DefinitionError, Problem, UsageError, VaultError
from image_builder.settings import REPO_ROOT, VaultId
from image_builder.text import did_you_mean

GROUP = "images"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Inventory:
    """A loaded inventory. ``images`` are the hosts of group ``images``, in the inventory's order.

    ``collections`` are the problems with the repository's collections: while there are any, no role can be checked.
    """

    paths: tuple[Path, ...]
    images: tuple[str, ...]
    roots: tuple[Path, ...]
    extra: tuple[str, ...]
    collections: tuple[Problem, ...]
    _source: engine.Source = field(repr=False, compare=False)
    # The same inventory as this program's own playbooks see it, if there are variables beside the user's playbooks.
    _source_of_ours: engine.Source | None = field(default=None, repr=False, compare=False)
    _hosts: dict[str, HostVariables] = field(default_factory=dict, repr=False, compare=False)
    _defined: dict[str, tuple[ImageDefinition | None, tuple[Problem, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _sound: dict[str, ImageDefinition] = field(default_factory=dict, repr=False, compare=False)

    def select(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the images that match any of the Ansible host patterns (``gpu:!h100``), or all if there are none.

        Raises UsageError if a pattern matches no image.
        """
        chosen: set[str] = set()
        requested = list(patterns)
        for pattern in requested:
            matched = {pattern} & set(self.images) or set(self._source.match(pattern)) & set(self.images)
            if not matched:
                raise UsageError(
                    f"no image matches `{pattern}`{did_you_mean(pattern, self.images)}",
                    hint=self._hint,
                )
            chosen |= matched
        return tuple(name for name in self.images if not requested or name in chosen)

    @property
    def _hint(self) -> str:
        return (
            f"images of {', '.join(str(Place(str(path))) for path in self.paths)}: {', '.join(self.images)}"
        )

    def variables(self, name: str) -> HostVariables:
        """Return an image's variables. Raises VaultError if a value can't be decrypted."""
        if name not in self._hosts:
            self._hosts[name] = read_host_variables(self._source, name)
        return self._hosts[name]

    def define(self, name: str) -> ImageDefinition:
        """Return one image's definition.

        Raises UsageError if there is no such image, VaultError if a value can't be decrypted, and DefinitionError with
        all problems.
        """
        if name not in self.images:
            raise UsageError(
                f"unknown image `{name}`{did_you_mean(name, self.images)}",
                hint=self._hint,
            )
        definition, problems = self._define(name)
        if problems or definition is None:
            raise DefinitionError(problems)
        return definition

    def problems(self, names: Iterable[str] | None = None) -> list[Problem]:
        """Return all problems of these images (or of all images), without duplicates, sorted.

        An example's placeholders for the user's own values are a problem in any file, whichever images are given.
        """
        chosen = list(names or self.images)
        wrong = {p for name in chosen for p in self._define(name)[1]}
        shared = shared_subnet_problems(self._source, chosen, self._defined_by_itself)
        return sorted({*wrong, *shared, *placeholders(self.paths)})

    def warnings(self, names: Iterable[str]) -> list[Problem]:
        """Return likely mistakes in images without problems, without duplicates, sorted."""
        problems: set[Problem] = set()
        for name in names:
            definition = self.define(name)
            problems.update(closely_named(definition, self.variables(name)))
            problems.update(unpredictable_layers(definition))
            problems.update(unknown_api_servers(definition, self._source))
        return sorted(problems)

    def _define(self, name: str) -> tuple[ImageDefinition | None, tuple[Problem, ...]]:
        if name not in self._defined:
            self._defined[name] = self._checked(name)
        return self._defined[name]

    def _defined_by_itself(self, name: str) -> ImageDefinition | None:
        """Return an image's definition even if its pools have problems; None if it has others or doesn't exist."""
        with suppress(VaultError):
            if name in self.images:
                self._define(name)
        return self._sound.get(name)

    def _checked(self, name: str) -> tuple[ImageDefinition | None, tuple[Problem, ...]]:
        variables = self.variables(name)
        magic = MappingProxyType(self._source.magic(name))
        place = self._source.host_place(name)
        builder, problems = builder_variables(name, variables, place, magic, self._hostvars)
        problems += check_problems(self.roots[0])
        try:
            problems += variable_problems(variables, self.roots)
        except engine.UnreadableError as error:
            return None, (*problems, Problem(str(error.place or ""), "roles", error.reason))
        if not _NAME.fullmatch(name):
            rule = "names directories and files: letters, digits, `.`, `_` and `-`, a letter or digit first"
            problems.append(Problem(str(self._source.host_place(name)), name, rule))
        if builder is None:
            return None, tuple(problems)
        base, missing = self._with_keyring(builder.image_base)
        if missing:
            problems.append(
                Problem(variables.where(["image_base", "keyring"]), "image_base.keyring", missing)
            )
        definition = ImageDefinition(
            name=name,
            **{key.removeprefix(PREFIX): value for key, value in builder} | {"base": base},
            **self._read_by_plays(name, builder.for_roles()),
            inventory_paths=self.paths,
            roots=self.roots,
            extra=self.extra,
            place_of=variables.place_of,
            where=variables.where,
        )
        problems += (
            self.collections
            or role_problems(definition, variables)
            or stage_problems(definition) + idle_layers(definition, self._source)
        )
        if not problems:
            self._sound[name] = definition
            problems += pool_problems(definition, self._source)
            problems += address_problems(definition, self._source)
            problems += version_problems(definition, variables, self._source)
        return definition, tuple(problems)

    def _read_by_plays(self, name: str, builder: Mapping[str, JSON]) -> dict[str, Any]:
        """Return the parts of a definition that plays read in the inventory, given the builder's own variables."""
        variables, ours = self.variables(name), self._source_of_ours
        extra = {k: v for k, v in variables.plain.items() if k in self._source.extra}
        return {
            "variables": _for_roles(variables, builder),
            "variables_of_ours": _for_roles(read_host_variables(ours, name), builder) if ours else None,
            "extra_variables": MappingProxyType(extra),
            "magic": MappingProxyType(self._source.magic(name)),
            "hostvars": self._hostvars,
        }

    def _hostvars(self) -> dict[str, JSON]:
        """Return every host's variables by host, like Ansible's ``hostvars``."""
        return {host: dict(self.variables(host).plain) for host in self._source.match("all")}

    def _with_keyring(self, base: ImageBase) -> tuple[ImageBase, str]:
        """Return ``base`` with its keyring's absolute path, and what is wrong with that path, if anything."""
        if base.keyring is None:
            return base, ""
        first = self.paths[0]
        keyring = (first if first.is_dir() else first.parent) / base.keyring
        problem = "" if keyring.is_file() else f"no such file: {keyring}"
        return base.model_copy(update={"keyring": keyring}), problem


def _for_roles(variables: HostVariables, builder: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a host's variables as roles see them."""
    own = {k: v for k, v in variables.plain.items() if k not in NOT_FOR_ROLES}
    return MappingProxyType({**own, **builder})


def reread(definition: ImageDefinition, vault: Sequence[VaultId]) -> ImageDefinition:
    """Return a definition with the variables that a play finds in the inventory now.

    The builder's own variables stay, since plays get them as they were checked. Raises what ``load_inventory`` does,
    and UsageError if the image is gone.
    """
    own, project = definition.repo_root, definition.roots[0]
    paths, extra = definition.inventory_paths, definition.extra
    inventory = load_inventory(paths, vault, repo_root=own, project=project, extra=extra)
    (name,) = inventory.select([definition.name])
    builder = {k: v for k, v in definition.variables.items() if k in BUILDER_NAMES}
    return replace(definition, **inventory._read_by_plays(name, builder))


def load_inventory(
    paths: Sequence[Path],
    vault: Sequence[VaultId] = (),
    *,
    repo_root: Path = REPO_ROOT,
    project: Path | None = None,
    extra: Sequence[str] = (),
) -> Inventory:
    """Read inventories as Ansible does, with the ``group_vars`` and ``host_vars`` next to them.

    ``project`` is the user's repository; by default it is ``repo_root``, this program's. ``extra`` are variables in the
    form that Ansible's ``-e`` accepts, with absolute paths of files.

    The passwords of vaulted values come from ``vault``, the ``ansible.cfg`` and ANSIBLE_VAULT_PASSWORD_FILE. Raises
    DefinitionError if an inventory can't be read or has no group ``images``, VaultError if a vaulted file can't be
    decrypted.
    """
    paths = tuple(p.absolute() for p in paths)
    if missing := [p for p in paths if not p.exists()]:
        reason = "no such file or directory"
        raise DefinitionError([Problem(str(Place(str(p))), "inventory", reason) for p in missing])
    here = Place(str(paths[0]))
    roots = tuple(dict.fromkeys((project or repo_root, repo_root)))
    try:
        source = engine.read_inventory(paths, vault, roots[0] / LAYERS, extra)
        images = source.group(GROUP)
        if images is None:
            groups = [str(g) for g in source.manager.groups]
            reason = f"no group `{GROUP}`{did_you_mean(GROUP, groups)}"
            raise DefinitionError([Problem(str(here), "inventory", reason)])
        if not images:
            raise DefinitionError([Problem(str(here), GROUP, "no image in this group")])
        for name in images:
            source.host_variables(name)  # reads every file that matters, so that vaulted ones are known
    except engine.UnreadableError as error:
        raise DefinitionError([Problem(str(error.place or here), "inventory", error.reason)]) from error
    if failures := source.vaulted.failures:
        lines = [f"{place}: the file {reason}" for place, reason in sorted(failures.items())]
        raise VaultError("\n".join(lines), hint=VAULT_HINT)
    apart = len(roots) > 1 and any((roots[0] / LAYERS / name).is_dir() for name in VARIABLES_BESIDE)
    ours = engine.read_inventory(paths, vault, repo_root / LAYERS, extra) if apart else None
    collections = tuple(collection_problems(roots[0]))
    return Inventory(paths, tuple(images), roots, tuple(extra), collections, source, ours)
