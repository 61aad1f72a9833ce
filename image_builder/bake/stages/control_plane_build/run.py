"""Build the lab's API server and scheduler from the source that its kubelet is built from.

As ``kubelet_build`` does it, whose options these are; a stage of its own, since the id of that one covers its file
and nobody's kubelet is to be compiled again for the lab's sake. The API server needs what Debian's package leaves
out: the descriptions of its types, which the source's own generator writes.

Product: one static program for each entry of ``programs``, and ``VERSION``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from image_builder.bake.stages import StageContext
from image_builder.bake.stages.kubelet_build.run import collect_sources, linker_flags, parse_options
from image_builder.canonical import JSON
from image_builder.errors import LockError
from image_builder.system.sandbox import Root, open_root

PROGRAMS = ("kube-apiserver", "kube-scheduler")
NEEDS_OPENAPI = "kube-apiserver"

_GO_ROOT = "/usr/lib/go-1.19"
_GO = f"{_GO_ROOT}/bin/go"
_BUILD = "/run/image-builder/build"
_SOURCES = "/run/image-builder/sources"
_IMPORT = "k8s.io/kubernetes"
_TREE = f"gopath/src/{_IMPORT}"
_MARK = "+k8s:openapi-gen="
# Where the generator looks for types: what the API server serves, its own groups and those it is made of.
_PLACES = ("pkg", "cmd", "vendor/k8s.io", "plugin")
# What speaks of the mark and has no types of the API.
_GENERATORS = ("code-generator", "kube-openapi", "pkg/generated")
_ENVIRONMENT = {
    "GOROOT": _GO_ROOT,
    "GOPATH": f"{_BUILD}/gopath",
    "GO111MODULE": "off",
    "GOCACHE": f"{_BUILD}/cache",
    "GOTMPDIR": f"{_BUILD}/tmp",
    "GOFLAGS": "",
    "CGO_ENABLED": "0",
    "GOOS": "linux",
    "GOARCH": "amd64",
    "GOAMD64": "v1",
    "PATH": f"{_GO_ROOT}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Build the programs. Raises LockError, FetchError (a source file's hash), CommandError (the compiler)."""
    options = parse_options(ctx.plan.options)
    sources, build = ctx.work / "sources", ctx.work / "build"
    for directory in (sources, build, build / "tmp", build / "gopath/src/k8s.io"):
        directory.mkdir(parents=True)
    collect_sources(options.sources, [ctx.inputs["sources"]], sources)
    with open_root(
        [ctx.inputs["build_root"] / "tree"],
        ctx.work / "root",
        binds={_SOURCES: sources},
        writable_binds={_BUILD: build},
        env=_ENVIRONMENT,
    ) as root:
        ctx.doing("unpacking and patching the source")
        tree = f"{_BUILD}/{_TREE}"
        root.run(["dpkg-source", "-x", f"{_SOURCES}/{options.dsc}", tree], log=ctx.log)
        changelog = ["dpkg-parsechangelog", "-l", f"{tree}/debian/changelog", "-S"]
        source_version = root.run([*changelog, "Version"]).stdout.strip()
        epoch = int(root.run([*changelog, "Timestamp"]).stdout)
        types = 0
        if NEEDS_OPENAPI in options.programs:
            types = _describe_types(ctx, root, build / _TREE)
        flags = linker_flags(options.version, source_version, epoch)
        for program in options.programs:
            _compile(ctx, root, program, flags)
            _check_version(root, program, options.version)
            shutil.move(os.fspath(build / program), ctx.product / program)
    (ctx.product / "VERSION").write_text(f"{options.version}\n", encoding="ascii")
    return {"version": options.version, "source_version": source_version, "described_packages": types}


def described_packages(tree: Path) -> list[str]:
    """Return the import paths whose files carry the generator's mark, sorted; ``tree`` is the unpacked source."""
    found = set()
    for place in _PLACES:
        # vendor/k8s.io is links into staging: the paths must stay those of vendor, which are what is imported.
        for folder, _, names in os.walk(tree / place, followlinks=True):
            marked = (
                name.endswith(".go")
                and not name.endswith("_test.go")
                and _MARK in Path(folder, name).read_text(encoding="utf-8", errors="replace")
                for name in names
            )
            if "testdata" not in folder and any(marked):
                found.add(f"{_IMPORT}/{os.path.relpath(folder, tree)}")
    return sorted(path for path in found if not any(f"/{name}/" in f"{path}/" for name in _GENERATORS))


def _describe_types(ctx: StageContext, root: Root, tree: Path) -> int:
    """Write ``pkg/generated/openapi``; return of how many packages it speaks."""
    ctx.doing("describing the API's types")
    generator = f"{_BUILD}/openapi-gen"
    root.run(
        [_GO, "build", "-o", generator, f"{_IMPORT}/vendor/k8s.io/kube-openapi/cmd/openapi-gen"], log=ctx.log
    )
    packages = described_packages(tree)
    root.run(
        [
            # In the source's tree: what it imports is looked for from there.
            *("/usr/bin/env", "-C", f"{_BUILD}/{_TREE}"),
            generator,
            "--logtostderr",
            f"--go-header-file={_BUILD}/{_TREE}/hack/boilerplate/boilerplate.generatego.txt",
            f"--input-dirs={','.join(packages)}",
            f"--output-package={_IMPORT}/pkg/generated/openapi",
            "--output-file-base=zz_generated.openapi",
            f"--output-base={_BUILD}/gopath/src",
            f"--report-filename={_BUILD}/violations",
        ],
        log=ctx.log,
    )
    return len(packages)


def _compile(ctx: StageContext, root: Root, program: str, flags: str) -> None:
    ctx.doing(f"compiling {program}")
    build = ["build", "-trimpath", "-buildvcs=false", "-ldflags", flags]
    root.run([_GO, *build, "-o", f"{_BUILD}/{program}", f"{_IMPORT}/cmd/{program}"], log=ctx.log)


def _check_version(root: Root, program: str, version: str) -> None:
    said = root.run([f"{_BUILD}/{program}", "--version"]).stdout.split()
    if not said or said[-1] != f"v{version}":
        raise LockError(f"the {program} that was built calls itself {' '.join(said)!r}, not v{version}")
