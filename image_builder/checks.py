"""The commands that look at what is there: artefacts, machines, the store, this project itself."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder import failure, render
from image_builder.command import host_settings, register, show
from image_builder.errors import ImageBuilderError, StoreError, UsageError
from image_builder.options import AsJson, Facts, Output, StoreDir
from image_builder.settings import DEFAULT_STORE

if TYPE_CHECKING:
    from image_builder.store import Store

app = typer.Typer()
store_app = typer.Typer(
    help="Look after the store.\n\nExample:\n\n\b\n  image-builder store gc --keep 2",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@register(app)
def boot(
    artefact: Annotated[str, typer.Argument(help="a disk, the directory of a build, or an image's name")],
    verify: Annotated[
        bool, typer.Option("--verify", help="run the checks for booted machines, then switch it off")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="with --verify: leave it running until Ctrl-C")
    ] = False,
    secure_boot: Annotated[
        bool, typer.Option("--secure-boot", help="with a firmware that enforces it")
    ] = False,
    local_disk: Annotated[
        list[str] | None,
        typer.Option(
            "--local-disk",
            metavar="SIZE",
            help="a blank local disk such as 16G; repeatable  [default: one for an image with the layer `node`]",
        ),
    ] = None,
    no_local_disk: Annotated[bool, typer.Option("--no-local-disk", help="without any local disk")] = False,
    facts: Facts = None,
    output: Output = Path("output"),
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Boot an artefact in QEMU; the machine's writes go to a throw-away layer.

    Reports go to OUTPUT/boot/NAME.

    Example:

        image-builder boot worker --verify
    """
    from image_builder import boot as booting
    from image_builder import host
    from image_builder.report import verification

    if local_disk and no_local_disk:
        raise UsageError("--local-disk and --no-local-disk exclude each other")
    disks = booting.local_disks(local_disk or ()) if local_disk or no_local_disk else None
    host.check_store(store)
    path = _artefact(artefact, output)
    out_dir = output.absolute() / "boot" / path.stem
    with render.monitor(f"boot {path.name}") as monitor:
        result = booting.boot(
            path,
            verify=verify,
            out_dir=out_dir,
            settings=host_settings(store, output=output.absolute()),
            monitor=monitor,
            facts=facts,
            keep=keep,
            secure_boot=secure_boot,
            extra_disks=disks,
        )
    if result.suite:
        render.stderr_console().print(verification.table(result.suite))
    text = f"{result.image}: {result.system_state}, ssh after {render.human_seconds(result.ssh_seconds)}"
    show({**result.as_json(), "reports": out_dir}, f"{text}; reports in {out_dir}", as_json=as_json)
    return _judge(result.require_passed) if verify else 0


def _judge(require_passed: Callable[[], None]) -> int:
    """Return the status of a verdict. The result was printed already: on stdout it stays the only document."""
    try:
        require_passed()
    except ImageBuilderError as error:
        print(failure.text(error), file=sys.stderr)
        return error.exit_code
    return 0


def _artefact(name: str, output: Path) -> Path:
    """Return the path that ``name`` means: a path as it is, else the newest build of an image."""
    path, latest = Path(name), output / name / "latest"
    if not path.exists() and latest.exists():
        return latest.resolve()
    if not path.exists():
        raise UsageError(
            f"no such file, directory or built image: {name}", hint=f"image-builder build {name}"
        )
    return path.resolve()


@register(app, isolated=lambda target, **_: not target.startswith("ssh://"))
def verify(
    target: Annotated[
        str,
        typer.Argument(metavar="DIR|URL", help="a directory, or ssh://user@host:port?key=…&known_hosts=…"),
    ],
    facts: Facts = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="where the reports go")] = Path(
        "output/verify"
    ),
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Run the checks on an unpacked image (DIR), on a build (DIR with a manifest.json) or on a live machine.

    Example:

        image-builder verify 'ssh://admin@node7?key=KEY&known_hosts=FILE' --facts facts.json
    """
    from image_builder import verify as verifying
    from image_builder.report import verification

    with render.monitor(f"verify {target}") as monitor:
        result = verifying.verify(
            target, facts, output.absolute(), settings=host_settings(store), monitor=monitor
        )
    if as_json:
        print(json.dumps(result.as_json(), indent=1))
    else:
        render.stdout_console().print(verification.table(result))
    return _judge(lambda: verification.require_passed(result))


@register(store_app)
def gc(
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=0, help="keep the last N builds of each image")
    ],
    downloads: Annotated[
        bool,
        typer.Option(
            "--downloads", help="also remove downloads that the lock of no image's last build names"
        ),
    ] = False,
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Remove the stages that the last builds of the images don't need.

    Example:

        image-builder store gc --keep 2
    """

    def told() -> None:
        print("waiting for what uses the store: builds, and the lab until `lab down`", file=sys.stderr)

    removed = _existing_store(store).gc(keep, told, downloads=downloads)
    files = f" and {len(removed.downloads)} downloads" if downloads else ""
    text = f"{len(removed.stages)} stages{files} removed, {render.human_bytes(removed.bytes)} freed"
    result = {"removed": removed.stages, "downloads": removed.downloads, "bytes": removed.bytes}
    show(result, text, as_json=as_json)
    return 0


@register(store_app, name="verify")
def store_verify(store: StoreDir = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """Hash everything in the store and name what is damaged. Control files of packages are repaired.

    Example:

        image-builder store verify
    """
    kept = _existing_store(store)
    damages = kept.verify()
    rows = [(d.name, d.id[:12], d.what + (", and is repaired" if d.repaired else "")) for d in damages]
    text = render.columns(rows) or f"{len(kept.ids())} stages, no damage"
    result = {"stages": len(kept.ids()), "damages": [dataclasses.asdict(d) for d in damages]}
    show(result, text, as_json=as_json)
    if damages:
        print(f"error: {len({d.id for d in damages})} things are damaged in {store}", file=sys.stderr)
        if all(d.repaired for d in damages):
            print("hint: all of it was repaired; is the disk sound?", file=sys.stderr)
        else:
            print("hint: remove what is named and build again", file=sys.stderr)
        return StoreError.exit_code
    return 0


def _existing_store(path: Path) -> Store:
    from image_builder.store import Store

    if not (path / "objects").is_dir():
        raise StoreError(f"no store at {path}", hint="image-builder build makes one")
    return Store(path.absolute())


@register(app, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(
    context: typer.Context,
    fast: Annotated[
        bool, typer.Option("--fast", help="lint, types and unit tests only; needs no root")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="what is too long for every commit as well: some hours")
    ] = False,
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Run this project's own checks: lint, types, unit tests, then those that need root beside those that boot.

    What follows is for pytest.

    Example:

        image-builder test --fast -k lock
    """
    from image_builder import selftest

    if fast and everything:
        raise UsageError("--fast and --all contradict each other")
    return selftest.run(context.args, fast=fast, store=store.absolute(), as_json=as_json, nightly=everything)
