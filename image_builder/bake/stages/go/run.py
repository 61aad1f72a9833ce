"""Build Kubernetes programs from Debian's ``kubernetes`` source package: the kubelet (with dockershim, if its
version has one), or whatever its options name.

The source is fetched according to the lock; nothing here needs the network. It is compiled in a root of the release
that the source package belongs to, with that release's Go: 1.20 needs a Go that still supports GOPATH mode and has the
old standard library, and Go 1.19 (Debian 12) is the newest one that has been tried.

Product: one static, stripped program for each entry of the option ``programs``, ``VERSION`` (``1.20.2``) and
``copyright`` (Debian's). The same source, Go and options give the same bytes on any host.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

from image_builder.bake.stages import StageContext
from image_builder.bake.stages.go import openapi
from image_builder.bake.stages.go.openapi import BUILD, GO, IMPORT, TREE
from image_builder.canonical import JSON
from image_builder.errors import FetchError, LockError
from image_builder.system.sandbox import Root, open_root
from image_builder.system.trees import sha256

SOURCE_PACKAGE = "kubernetes"

_SOURCES = "/run/image-builder/sources"
# Both copies of the version variables are linked in: the one a program prints, and the client library's.
_VERSION_PACKAGES = (
    f"{IMPORT}/vendor/k8s.io/component-base/version",
    f"{IMPORT}/vendor/k8s.io/client-go/pkg/version",
)


def description(names: Collection[str]) -> str:
    """Return the .dsc among the files of a source package; raises LockError if the lock doesn't describe one."""
    descriptions = [name for name in names if name.endswith(".dsc")]
    if len(descriptions) != 1 or any("/" in name for name in names):
        raise LockError(
            f"{SOURCE_PACKAGE}: one .dsc and its files are needed, got {', '.join(names) or 'none'}"
        )
    return descriptions[0]


def linker_flags(version: str, source_version: str, epoch: int) -> str:
    """Return Go's ``-ldflags``: no symbols, no build id, and what ``--version`` prints.

    ``epoch`` (seconds, the date of the package's changelog) is used as the time of the build.
    """
    major, minor, _ = version.split(".", 2)
    date = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    values = {
        "gitVersion": f"v{version}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitCommit": f"debian/{source_version}",
        "gitTreeState": "archive",
        "buildDate": date,
    }
    defines = [
        f"-X={package}.{key}={value}" for package in _VERSION_PACKAGES for key, value in values.items()
    ]
    return " ".join(["-s", "-w", "-buildid=", *defines])


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Build the programs. Raises LockError, FetchError (a source file's hash), CommandError (the compiler)."""
    assert ctx.files is not None
    options = ctx.plan.options
    version, programs, digests = options["version"], options["programs"], options["sources"]
    dsc = description(digests)
    sources, build = ctx.work / "sources", ctx.work / "build"
    for directory in (sources, build):
        directory.mkdir()
    ctx.doing("checking the source package")
    collect_sources(digests, ctx.files, sources)
    with open_root(
        [ctx.inputs["build_root"] / "tree"],
        ctx.work / "root",
        binds={_SOURCES: sources},
        writable_binds={BUILD: build},
        env=_go_environment(),
    ) as root:
        ctx.doing("unpacking and patching the source")
        tree = f"{BUILD}/{TREE}"
        (build / "gopath/src/k8s.io").mkdir(parents=True)
        (build / "tmp").mkdir()
        root.run(["dpkg-source", "-x", f"{_SOURCES}/{dsc}", tree], log=ctx.log)
        source_version, epoch = _read_changelog(root, tree)
        if version not in source_version:
            raise LockError(f"{dsc} is version {source_version}, not {version}")
        if openapi.is_needed(programs):
            ctx.doing("describing the API's types")
            openapi.describe_types(root, build / TREE, ctx.log)
        flags = linker_flags(version, source_version, epoch)
        for program in programs:
            _compile(ctx, root, program, flags)
            _check_version(root, program, version)
            shutil.move(os.fspath(build / program), ctx.product / program)
        go_version = root.run([GO, "env", "GOVERSION"]).stdout.strip()
        shutil.copyfile(build / TREE / "debian/copyright", ctx.product / "copyright")
    (ctx.product / "VERSION").write_text(f"{version}\n", encoding="ascii")
    return {
        "version": version,
        "source_version": source_version,
        "go": go_version,
        "programs": {name: sha256(ctx.product / name) for name in programs},
    }


def _go_environment() -> dict[str, str]:
    return {
        "GOPATH": f"{BUILD}/gopath",
        "GO111MODULE": "off",
        "GOCACHE": f"{BUILD}/cache",
        "GOTMPDIR": f"{BUILD}/tmp",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
        "GOOS": "linux",
        "GOARCH": "amd64",
        "GOAMD64": "v1",
    }


def collect_sources(digests: Mapping[str, str], fetched: Path, target: Path) -> None:
    """Copy every file of the source package; ``digests`` maps its name to the locked SHA-256.

    Raises FetchError for a file that wasn't fetched or has other bytes.
    """
    for name, digest in digests.items():
        if not (fetched / name).is_file():
            raise FetchError(f"{SOURCE_PACKAGE}: {name} was not fetched")
        shutil.copyfile(fetched / name, target / name)
        if (actual := sha256(target / name)) != digest:
            raise FetchError(f"{name}: sha256 is {actual}, the lock says {digest}")


def _read_changelog(root: Root, tree: str) -> tuple[str, int]:
    """Return the source package's version and its date (seconds since 1970)."""
    argv = ["dpkg-parsechangelog", "-l", f"{tree}/debian/changelog"]
    version = root.run([*argv, "-S", "Version"]).stdout.strip()
    return version, int(root.run([*argv, "-S", "Timestamp"]).stdout)


def _compile(ctx: StageContext, root: Root, program: str, flags: str) -> None:
    package = f"{IMPORT}/cmd/{program}"
    ctx.doing(f"listing the packages of {program}")
    total = len(root.run([GO, "list", "-deps", package]).stdout.split())
    done = 0

    def show(line: str) -> None:
        nonlocal done
        if line and not line.startswith(("#", "+")) and " " not in line:
            done += 1
            ctx.doing(f"compiling {line.removeprefix(f'{IMPORT}/').removeprefix('vendor/')}")
            ctx.monitor.stage_progress(ctx.plan.name, min(done, total), total, "packages")

    build = ["build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", flags]
    root.run([GO, *build, "-o", f"{BUILD}/{program}", package], log=ctx.log, on_line=show)


def _check_version(root: Root, program: str, version: str) -> None:
    """Run the built program. Raises CommandError if it can't report its version, LockError if that is another one."""
    arguments = ["version", "-o", "short"] if program == "kubeadm" else ["--version"]
    answer = root.run([f"{BUILD}/{program}", *arguments]).stdout.split()
    if not answer or answer[-1] != f"v{version}":
        raise LockError(f"the {program} that was built calls itself {' '.join(answer)!r}, not v{version}")
