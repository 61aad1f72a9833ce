"""Ansible inventory -> frozen ImageDefinition; every problem of every image is found before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from image_builder.definition.model import (
    BUILDER_NAMES,
    NOT_FOR_ROLES,
    BuilderVariables,
    ImageBase,
    ImageDefinition,
    ImageDisk,
    ImagePull,
    PreloadedImage,
    parse_builder_variables,
)
from image_builder.definition.suggest import did_you_mean
from image_builder.definition.values import JSON, VAULT_HINT, VAULT_KEY, Place, is_vaulted, join_path
from image_builder.errors import DefinitionError, Problem, UsageError, VaultError
from image_builder.settings import REPO_ROOT

if TYPE_CHECKING:
    from image_builder.definition.engine import Source

GROUP = "images"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class HostVariables:
    """One host's variables: plain, with Ansible's tags, and where each was set."""

    plain: Mapping[str, JSON]
    tagged: Mapping[str, Any]
    places: Mapping[str, Place]

    def where(self, path: Sequence[str | int]) -> str:
        """Return ``file:line`` of the item at ``path``, or of the nearest thing around it."""
        from image_builder.definition import engine

        name = str(path[0])
        inner = engine.place_in(self.tagged[name], path[1:]) if name in self.tagged else None
        place = inner or self.places.get(name)
        return str(place) if place else ""


@dataclass(frozen=True)
class Inventory:
    """An inventory that was read. ``images`` are the hosts of group ``images``, in the inventory's order."""

    paths: tuple[Path, ...]
    images: tuple[str, ...]
    repo_root: Path
    _source: Source = field(repr=False, compare=False)
    _hosts: dict[str, HostVariables] = field(default_factory=dict, repr=False, compare=False)
    _defined: dict[str, tuple[ImageDefinition | None, tuple[Problem, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def select(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the images that match any Ansible host pattern (``gpu:!h100``); all without a pattern.

        Raises UsageError for a pattern that matches no image.
        """
        chosen: set[str] = set()
        requested = list(patterns)
        for pattern in requested:
            matched = {pattern} & set(self.images) or set(self._source.match(pattern)) & set(self.images)
            if not matched:
                raise UsageError(
                    f"no image matches `{pattern}`{did_you_mean(pattern, self.images)}",
                    hint=f"images of this inventory: {', '.join(self.images)}",
                )
            chosen |= matched
        return tuple(name for name in self.images if not requested or name in chosen)

    def variables(self, name: str) -> HostVariables:
        """Return an image's variables; raises VaultError for a value that can't be decrypted."""
        if name not in self._hosts:
            self._hosts[name] = _host_variables(self._source, name)
        return self._hosts[name]

    def define(self, name: str) -> ImageDefinition:
        """Return one image's definition; raises UsageError, VaultError, DefinitionError with all problems."""
        if name not in self.images:
            raise UsageError(
                f"unknown image `{name}`{did_you_mean(name, self.images)}",
                hint=f"images of this inventory: {', '.join(self.images)}",
            )
        definition, problems = self._define(name)
        if problems or definition is None:
            raise DefinitionError(problems)
        return definition

    def problems(self, names: Iterable[str] | None = None) -> list[Problem]:
        """Return everything that is wrong with these images (or all), each thing once, sorted."""
        return sorted({p for name in (names or self.images) for p in self._define(name)[1]})

    def warnings(self, names: Iterable[str]) -> list[Problem]:
        """Return what is no mistake for certain in images without problems, each thing once, sorted."""
        from image_builder.definition.problems import closely_named, unpredictable_layers

        problems: set[Problem] = set()
        for name in names:
            definition = self.define(name)
            problems.update(closely_named(definition, self.variables(name)))
            problems.update(unpredictable_layers(definition))
        return sorted(problems)

    def _define(self, name: str) -> tuple[ImageDefinition | None, tuple[Problem, ...]]:
        if name not in self._defined:
            self._defined[name] = self._checked(name)
        return self._defined[name]

    def _checked(self, name: str) -> tuple[ImageDefinition | None, tuple[Problem, ...]]:
        from image_builder.definition.pools import pool_problems
        from image_builder.definition.problems import role_problems, stage_problems, variable_problems

        variables = self.variables(name)
        builder, problems = builder_variables(name, variables, self._source.host_place(name))
        problems += variable_problems(variables, self.repo_root)
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
            base=base,
            layers=builder.image_layers,
            disk=builder.image_disk,
            formats=builder.image_formats,
            kernel_args=builder.image_kernel_args,
            secure_boot=builder.image_secure_boot,
            variables=MappingProxyType(
                {k: v for k, v in variables.plain.items() if k not in NOT_FOR_ROLES} | builder.for_roles()
            ),
            inventory_paths=self.paths,
            repo_root=self.repo_root,
            preload=builder.image_preload,
            preload_mode=builder.image_preload_mode,
            preload_verity=builder.image_preload_verity,
            pull=builder.image_pull,
            magic=MappingProxyType(self._source.magic(name, self.repo_root / "playbooks" / "layers")),
            hostvars=self._hostvars,
        )
        problems += role_problems(definition, variables) or stage_problems(definition)
        if not problems:
            problems += pool_problems(definition, self._source)
        return definition, tuple(problems)

    def _hostvars(self) -> dict[str, JSON]:
        """Return every host's variables, as ``hostvars`` has them, by host."""
        return {host: dict(self.variables(host).plain) for host in self._source.match("all")}

    def _with_keyring(self, base: ImageBase) -> tuple[ImageBase, str]:
        """Return ``base`` with its keyring's absolute path, and what is wrong with that."""
        if base.keyring is None:
            return base, ""
        first = self.paths[0]
        keyring = (first if first.is_dir() else first.parent) / base.keyring
        problem = "" if keyring.is_file() else f"no such file: {keyring}"
        return base.model_copy(update={"keyring": keyring}), problem


def load_inventory(
    paths: Sequence[Path], vault_password_file: Path | None = None, *, repo_root: Path = REPO_ROOT
) -> Inventory:
    """Read inventories as Ansible does, with ``group_vars`` and ``host_vars`` beside them.

    The vault password comes from the given file, else from ANSIBLE_VAULT_PASSWORD_FILE. Raises
    DefinitionError for what can't be read or has no group ``images``, VaultError for a vaulted file that
    can't be decrypted.
    """
    from image_builder.definition import engine

    paths = tuple(p.absolute() for p in paths)
    if missing := [p for p in paths if not p.exists()]:
        reason = "no such file or directory"
        raise DefinitionError([Problem(str(Place(str(p))), "inventory", reason) for p in missing])
    here = Place(str(paths[0]))
    try:
        source = engine.read_inventory(paths, vault_password_file, repo_root / "playbooks" / "layers")
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
    return Inventory(paths, tuple(images), repo_root, source)


def _host_variables(source: Source, name: str) -> HostVariables:
    from image_builder.definition import engine

    tagged, places = source.host_variables(name)
    failures = [
        f"{place or places[key]}  {key}: {reason}"
        for key, value in tagged.items()
        for place, reason in engine.undecryptable(value, source)
    ]
    if failures:
        raise VaultError("\n".join(sorted(failures)), hint=VAULT_HINT)
    plain: dict[str, JSON] = {}
    for key, value in tagged.items():
        vaulted_file = source.vaulted.digests.get(places[key].path)
        plain[key] = {VAULT_KEY: vaulted_file} if vaulted_file else engine.plain(value)
    plain["inventory_hostname"] = name
    plain["group_names"] = source.group_names(name)
    return HostVariables(MappingProxyType(plain), tagged, places)


def builder_variables(
    name: str, variables: HostVariables, host: Place
) -> tuple[BuilderVariables | None, list[Problem]]:
    """Template and check an image's ``image_*`` variables."""
    from image_builder.definition import engine

    evaluator = engine.Evaluator(variables.plain)
    values: dict[str, JSON] = {}
    problems: list[Problem] = []
    for key in sorted(BUILDER_NAMES & variables.plain.keys()):
        try:
            value = evaluator.evaluate(variables.plain[key])
        except engine.EvaluationError as error:
            problems.append(Problem(variables.where([key]), key, str(error)))
            continue
        if is_vaulted(value):
            problems.append(
                Problem(variables.where([key]), key, "a builder variable can't hold a vaulted value")
            )
            continue
        values[key] = value
    parsed = parse_builder_variables(values)
    if isinstance(parsed, BuilderVariables):
        return (None if problems else parsed), problems
    refused = {p.path for p in problems}
    for fault in parsed:
        path = join_path(fault.path)
        if path in refused:
            continue
        reason = fault.reason
        if fault.reason == "is missing" and len(fault.path) == 1:
            problems.append(Problem(str(host), path, f"image `{name}` doesn't have it"))
            continue
        if fault.reason == "unknown key":
            reason += _key_suggestion(fault.path)
        problems.append(Problem(variables.where(fault.path), path, reason))
    return None, problems


def _key_suggestion(path: Sequence[str | int]) -> str:
    models = {
        "image_base": ImageBase.model_fields,
        "image_disk": ImageDisk.model_fields,
        "image_preload": PreloadedImage.model_fields,
        "image_pull": ImagePull.model_fields,
    }
    fields = models.get(str(path[0]), {})
    return did_you_mean(str(path[-1]), fields)
