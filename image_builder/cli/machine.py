"""``image-builder boot`` and ``verify``: run artifacts as machines, and check machines and trees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli import ci, failure, render
from image_builder.cli.command import (
    AsJson,
    Facts,
    Output,
    StoreDir,
    VaultIds,
    complete_images,
    host_settings,
    register,
    show,
)
from image_builder.errors import ImageBuilderError, UsageError
from image_builder.settings import DEFAULT_STORE
from image_builder.text import human_seconds

if TYPE_CHECKING:
    from image_builder.machine.vm import ExtraDisk
    from image_builder.verify.boot import BootResult

app = typer.Typer()


Artefact = Annotated[
    str,
    typer.Argument(
        metavar="ARTIFACT",
        help="a disk, a build's directory, or an image's name",
        autocompletion=complete_images,
    ),
]
LocalDisks = Annotated[
    list[str] | None,
    typer.Option(
        "--local-disk",
        metavar="SIZE",
        help="a blank local disk such as 16G; repeatable  [default: one for an image with the layer `node`]",
    ),
]


@register(app)
def boot(
    artefact: Artefact,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="run the checks for booted machines, prove that your own checks can fail, then shut down",
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="with --verify: keep the machine running until Ctrl-C")
    ] = False,
    secure_boot: Annotated[
        bool | None,
        typer.Option(
            "--secure-boot/--no-secure-boot",
            help="whether the firmware enforces Secure Boot  [default: as image_secure_boot declares]",
        ),
    ] = None,
    local_disk: LocalDisks = None,
    no_local_disk: Annotated[bool, typer.Option("--no-local-disk", help="boot without local disks")] = False,
    facts: Facts = None,
    output: Output = Path("output"),
    store: StoreDir = DEFAULT_STORE,
    summary: ci.Summary = None,
    as_json: AsJson = False,
) -> int:
    """Boot an artifact in QEMU. The machine's writes are discarded, and reports go to OUTPUT/boot/ID of the build.

    Example:

        image-builder boot worker --verify
    """
    from image_builder.lab import pause
    from image_builder.system import host
    from image_builder.verify import boot as booting

    extra_disks = _local_disks(local_disk, none=no_local_disk)
    host.check_store(store)
    path = _artefact(artefact, output)
    out_dir = output.absolute() / "boot" / path.stem
    with ci.summary(summary, f"boot {path.name}") as page, render.monitor(f"boot {path.name}") as monitor:
        result = booting.boot(
            path,
            verify=verify,
            out_dir=out_dir,
            settings=host_settings(store, output=output.absolute()),
            monitor=monitor,
            pause_archive=pause.archive,
            facts=facts,
            keep=keep,
            secure_boot=secure_boot,
            extra_disks=extra_disks,
        )
        if result.suite:
            page.checks(result.suite)
            page.console(result.console_problems)
    _show(result, out_dir, as_json=as_json)
    return _judge(result.require_passed, as_json=as_json) if verify else 0


def _show(result: BootResult, out_dir: Path, *, as_json: bool) -> None:
    """Print how a boot ended, and the result of the checks."""
    from image_builder.verify import result as verification

    if result.suite:
        render.stderr_console().print(verification.table(result.suite))
    text = f"{result.image}: {result.system_state}, ssh after {human_seconds(result.ssh_seconds)}; reports in {out_dir}"
    show({**result.as_json(), "reports": out_dir}, text, as_json=as_json)


def _local_disks(sizes: list[str] | None, *, none: bool) -> tuple[ExtraDisk, ...] | None:
    """Return the disks that the command line requests, or None if the image decides. Raises UsageError if invalid."""
    from image_builder.verify.boot import local_disks

    if sizes and none:
        raise UsageError("--local-disk and --no-local-disk can't be used together")
    return local_disks(sizes or ()) if sizes or none else None


def _judge(require_passed: Callable[[], None], *, as_json: bool) -> int:
    """Return the exit status of a verdict whose result has already been printed."""
    try:
        require_passed()
    except ImageBuilderError as error:
        failure.report(error, on_stdout=not as_json)
        return error.exit_code
    return 0


def _artefact(name: str, output: Path) -> Path:
    """Return the path that ``name`` refers to: an existing path, or else the newest build of an image."""
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
    inventory: Annotated[
        list[Path] | None,
        typer.Option(
            "-i",
            "--inventory",
            metavar="PATH",
            help="the URL's host is in this inventory: use its connection variables; repeatable",
        ),
    ] = None,
    vault: VaultIds = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="directory for the reports  [default: one for the target below output/verify]",
        ),
    ] = None,
    store: StoreDir = DEFAULT_STORE,
    summary: ci.Summary = None,
    as_json: AsJson = False,
) -> int:
    """Run the checks on an unpacked image (DIR), a build (DIR with a manifest.json) or a live machine.

    Example:

        image-builder verify 'ssh://admin@node7?key=KEY&known_hosts=FILE' --facts facts.json
    """
    from image_builder.definition.connection import Connection
    from image_builder.pool.plan.inventory import read_connection
    from image_builder.verify import command as verifying
    from image_builder.verify import result as verification

    def known(host: str) -> Connection:
        return read_connection(inventory, host, vault or ()) if inventory else Connection()

    reports = (output or Path("output/verify", verifying.report_name(target))).absolute()
    with ci.summary(summary, f"verify {target}") as page, render.monitor(f"verify {target}") as monitor:
        monitor.note(f"reports in {reports}")
        result = verifying.verify(
            target,
            facts,
            reports,
            settings=host_settings(store),
            monitor=monitor,
            inventory=known,
        )
        page.checks(result)
    if as_json:
        print(json.dumps(result.as_json(), indent=1))
    else:
        render.stdout_console().print(verification.table(result))
    return _judge(lambda: verification.require_passed(result), as_json=as_json)
