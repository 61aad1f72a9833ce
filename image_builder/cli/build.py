"""The commands from a definition to published files: ``images``, ``validate``, ``lock``, ``plan`` and ``build``."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli import ci, render
from image_builder.cli.command import (
    AsJson,
    ExtraVars,
    Image,
    Inventories,
    Locked,
    Mirror,
    Output,
    StoreDir,
    VaultIds,
    complete_images,
    extensions,
    host_settings,
    read_inventory,
    register,
    show,
)
from image_builder.settings import DEFAULT_STORE, Settings
from image_builder.text import columns, human_seconds

if TYPE_CHECKING:
    from image_builder.bake.lock.model import Lock
    from image_builder.system.sandbox import Root


app = typer.Typer()


@register(app)
def images(
    inventory: Inventories = None,
    vault: VaultIds = None,
    extra_vars: ExtraVars = None,
    as_json: AsJson = False,
) -> int:
    """List the images of an inventory.

    Example:

        image-builder images -i inventories/azure_vmss
    """
    loaded_inventory = read_inventory(inventory, vault, extra_vars)
    show({"images": list(loaded_inventory.images)}, "\n".join(loaded_inventory.images), as_json=as_json)
    return 0


@register(app)
def validate(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMAGES]...", help="images or patterns  [default: all]", autocompletion=complete_images
        ),
    ] = None,
    inventory: Inventories = None,
    vault: VaultIds = None,
    extra_vars: ExtraVars = None,
    as_json: AsJson = False,
) -> int:
    """Check definitions and report all problems at once.

    Example:

        image-builder validate -i inventories/azure_vmss
    """
    from image_builder.errors import DefinitionError

    loaded_inventory = read_inventory(inventory, vault, extra_vars, of_user=True)
    chosen = loaded_inventory.select(names or ())
    if problems := loaded_inventory.problems(chosen):
        raise DefinitionError(problems)
    warnings = [str(warning) for warning in loaded_inventory.warnings(chosen)]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    show(
        {"images": list(chosen), "problems": [], "warnings": warnings},
        f"{', '.join(chosen)}: no problems",
        as_json=as_json,
    )
    return 0


@register(app, isolated=lambda **_: os.geteuid() == 0)
def lock(
    image: Image,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="[default: IMAGE.lock.json]")] = None,
    inventory: Inventories = None,
    vault: VaultIds = None,
    extra_vars: ExtraVars = None,
    store: StoreDir = DEFAULT_STORE,
    mirror: Mirror = None,
    as_json: AsJson = False,
) -> int:
    """Resolve the newest packages and images, and lock them by digest for the next builds.

    The image's next builds use this lock until there is a newer one. With your own store, this needs no root.

    Example:

        image-builder lock worker -o worker.lock.json
    """
    from image_builder.bake.build import make_lock
    from image_builder.bake.lock.model import Lock
    from image_builder.errors import UsageError
    from image_builder.system import host

    host.check_writable(store)
    settings = host_settings(store, mirror=mirror, vault=vault)
    definition = read_inventory(inventory, vault, extra_vars).define(image)
    if extensions().supplier.serves(definition):
        host.check_root()  # its images are made in a sandbox first
    path = output or Path(f"{image}.lock.json")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"can't write the lock to {path}", hint="give a file in an existing directory")
    before = Lock.load(path) if path.exists() else None
    with render.monitor(f"lock {image}") as monitor:
        new_lock = make_lock(definition, settings, monitor, extensions())
    new_lock.save(path)
    changes = _changed_packages(before, new_lock) if before else []
    packages = sum(len(g.packages) for g in new_lock.groups.values())
    images = f", {len(new_lock.images)} container images" if new_lock.images else ""
    text = [
        f"{path}: {packages} packages, {len(new_lock.archives)} archives{images}",
        *(f"  {c}" for c in changes),
    ]
    result = {
        "image": image,
        "lock": os.fspath(path),
        "packages": packages,
        "images": len(new_lock.images),
        "changes": changes,
    }
    show(result, "\n".join(text), as_json=as_json)
    return 0


def _changed_packages(before: Lock, now: Lock) -> list[str]:
    """Return how the versions in two locks differ, one line for each package or container image."""
    old, new = (
        {p.name: p.version for g in x.groups.values() for p in g.packages}
        | {i.ref: i.digest for i in x.images}
        for x in (before, now)
    )
    return [
        f"{name} {old.get(name, '(new)')} -> {new.get(name, '(gone)')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


@register(app)
def plan(
    image: Image,
    explain: Annotated[
        bool, typer.Option("--explain", help="show what changed since the last build")
    ] = False,
    locked: Locked = None,
    inventory: Inventories = None,
    vault: VaultIds = None,
    extra_vars: ExtraVars = None,
    store: StoreDir = DEFAULT_STORE,
    mirror: Mirror = None,
    as_json: AsJson = False,
) -> int:
    """Show an image's stages with their ids, and which of them a build would run.

    Example:

        image-builder plan worker --explain
    """
    from image_builder.bake.build import make_plan, obtain_lock
    from image_builder.bake.plan.explain import explain as reasons
    from image_builder.bake.store import Store

    settings = host_settings(store, mirror=mirror, vault=vault)
    definition = read_inventory(inventory, vault, extra_vars).define(image)
    with render.monitor(f"plan {image}") as monitor:
        used_lock = obtain_lock(definition, settings, monitor, extensions(), locked)
        resolved = make_plan(definition, used_lock, settings, extensions())
        for warning in resolved.warnings:
            monitor.note(f"warning: {warning}")
    kept_stages = Store(settings.store)
    stored = {s.id for s in resolved.stages if kept_stages.has(s.id)}
    rows = [("stage", "id", "state")]
    rows += [(s.name, s.id[:12], "there already" if s.id in stored else "to do") for s in resolved.stages]
    text, result = [columns(rows)], resolved.as_json()
    result["stored"] = [s.name for s in resolved.stages if s.id in stored]
    if explain:
        before = kept_stages.last_build(*definition.record_names)
        why = reasons(resolved, before, stored)
        result["reasons"] = {r.stage: list(r.changes) for r in why}
        text += ["", *(f"{r.stage}: {c}" for r in why for c in r.changes)]
        if not why:
            text.append(
                "nothing changed since the last build"
                if before
                else "this image was never built; other builds made its stages"
            )
    show(result, "\n".join(text), as_json=as_json)
    return 0


@register(app, isolated=True)
def build(
    image: Image,
    locked: Locked = None,
    output: Output = Path("output"),
    stop_after: Annotated[
        str | None,
        typer.Option("--stop-after", metavar="STAGE", help="run only this stage and its prerequisites"),
    ] = None,
    shell_on_failure: Annotated[
        bool,
        typer.Option("--shell-on-failure", help="open a shell in the sandbox of a failed stage"),
    ] = False,
    idle_limit: Annotated[
        float,
        typer.Option(
            "--idle-limit",
            metavar="MINUTES",
            envvar="IMAGE_BUILDER_IDLE_LIMIT",
            min=0.01,
            help="end a play in which no task starts or ends for longer than this",
        ),
    ] = Settings.idle_minutes,
    inventory: Inventories = None,
    vault: VaultIds = None,
    extra_vars: ExtraVars = None,
    store: StoreDir = DEFAULT_STORE,
    mirror: Mirror = None,
    summary: ci.Summary = None,
    as_json: AsJson = False,
) -> int:
    """Bake an image, verify it and publish its artifacts.

    Stages that are already in the store don't run again.

    Example:

        image-builder build worker --output /srv/images
    """
    from image_builder.bake import build as building
    from image_builder.system import host

    host.check_host(store)
    settings = host_settings(
        store, output=output.absolute(), mirror=mirror, vault=vault, idle_minutes=idle_limit
    )
    with ci.summary(summary, f"build {image}") as page:
        definition = read_inventory(inventory, vault, extra_vars).define(image)
        with render.monitor(f"build {image}") as monitor:

            def shell(root: Root) -> None:
                with render.paused(monitor):
                    print(f"a shell in {root.path}; exit it to continue", file=sys.stderr)
                    building.open_shell(root)

            result = building.build(
                definition,
                settings,
                monitor,
                extensions(),
                locked=locked,
                stop_after=stop_after,
                shell=shell if shell_on_failure else None,
            )
        page.stages(result)
    ran = sum(not stage["cached"] for stage in result.stages)
    text = (
        f"{result.artefact or result.image}  {ran} of {len(result.stages)} stages run, "
        f"{human_seconds(result.seconds)}"
    )
    show(dataclasses.asdict(result), text, as_json=as_json)
    return 0
