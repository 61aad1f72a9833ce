"""A layer: one playbook's changes on top of the stages below."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from image_builder.bake import ansible
from image_builder.bake.lock import repository
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.definition.model import ARCHIVES, INPUTS
from image_builder.definition.roles import RoleBook
from image_builder.errors import CommandError
from image_builder.settings import CONFIGURATION
from image_builder.system.sandbox import Root, open_root

# Packages start their daemons through invoke-rc.d, which asks this program first; 101 means "not allowed".
_POLICY = Path("usr/sbin/policy-rc.d")


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Run the layer's playbook in the sandbox; ``product/tree`` gets what it changed."""
    tree = ctx.product / "tree"
    tree.mkdir()
    binds = {f"{INPUTS}/{name}": path for name, path in ctx.inputs.items()}
    if ctx.repo:
        binds[repository.MOUNT_POINT] = ctx.repo
    if ctx.files:
        binds[ARCHIVES] = ctx.files
    with open_root(ctx.lowers, ctx.work / "root", upper=tree, binds=binds) as root, _no_services(root.path):
        if ctx.repo:
            _offer_packages(root, ctx)
        result = play(ctx, root, _playbook(ctx))
    return {"tasks_ok": result.ok, "tasks_changed": result.changed}


def _playbook(ctx: StageContext) -> Path:
    """Return the layer's playbook, from the user's repository or this one. No two have one of the same name."""
    name: str = ctx.plan.options["playbook"]
    places = (root / name for root in ctx.definition.roots)
    return next(place for place in places if place.is_file())


def play(ctx: StageContext, root: Root, playbook: Path) -> ansible.PlayResult:
    """Run a playbook in an open sandbox with the variables that every play of a bake gets."""
    book = RoleBook(ctx.definition.roots)
    try:
        return ansible.play(
            playbook,
            ctx.definition.name,
            inventories=ctx.definition.inventory_paths,
            root=root.path,
            environment_in_root={
                **root.environment,
                "APT_CONFIG": repository.APT_CONFIG_PATH,
                "SOURCE_DATE_EPOCH": str(ctx.plan.options["source_date_epoch"]),
            },
            variables=ctx.definition.play_variables,
            work=ctx.work,
            log=ctx.log,
            roles=book.role_folders,
            collections=book.collection_folders,
            config=ctx.definition.ansible_config or ctx.settings.repo_root / CONFIGURATION,
            doing=ctx.doing,
            vault=ctx.settings.vault,
            extra=ctx.definition.extra,
            python=ctx.settings.python,
            idle_minutes=ctx.settings.idle_minutes,
        )
    except CommandError:
        if ctx.shell:
            ctx.shell(root)
        raise


def _offer_packages(root: Root, ctx: StageContext) -> None:
    """Configure apt (through APT_CONFIG, outside the tree) for the locked packages and read their index."""
    ctx.doing("reading the package index")
    folder = root.path / Path(repository.APT_CONFIG_PATH).parent.relative_to("/")
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "apt.conf").write_text(repository.APT_CONFIG, encoding="utf-8")
    (folder / "sources.list").write_text(repository.SOURCES_LINE + "\n", encoding="utf-8")
    root.run(
        ["apt-get", "update", "-q", "--error-on=any"],
        env={"APT_CONFIG": repository.APT_CONFIG_PATH},
        log=ctx.log,
    )


@contextmanager
def _no_services(root: Path) -> Iterator[None]:
    """Keep packages from starting daemons while they are installed, without a trace in the tree."""
    policy = root / _POLICY
    if os.path.lexists(policy):
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()
