"""The descriptions of the API's types, which the API server needs and Debian's source package leaves out; the
source's own generator writes them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from image_builder.system.sandbox import Root

GO_ROOT = "/usr/lib/go-1.19"
GO = f"{GO_ROOT}/bin/go"
# The build's directory in its root, and the source in it.
BUILD = "/run/image-builder/build"
IMPORT = "k8s.io/kubernetes"
TREE = f"gopath/src/{IMPORT}"
_SERVER = "kube-apiserver"
_MARK = "+k8s:openapi-gen="
# Where the generator looks for types: what the API server serves, its own groups and those it is made of.
_PLACES = ("pkg", "cmd", "vendor/k8s.io", "plugin")
# Code that mentions the mark but has no API types.
_GENERATORS = ("code-generator", "kube-openapi", "pkg/generated")
# The generator calls Go itself.
_ENVIRONMENT = {"GOROOT": GO_ROOT, "PATH": f"{GO_ROOT}/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def is_needed(programs: Sequence[str]) -> bool:
    """Return whether one of the programs serves the API."""
    return _SERVER in programs


def describe_types(root: Root, tree: Path, log: Path) -> None:
    """Generate ``pkg/generated/openapi`` in the source; ``tree`` is the source's path outside ``root``."""
    generator = f"{BUILD}/openapi-gen"
    root.run([GO, "build", "-o", generator, f"{IMPORT}/vendor/k8s.io/kube-openapi/cmd/openapi-gen"], log=log)
    root.run(
        [
            # Run in the source tree: imports are resolved from there.
            *("/usr/bin/env", "-C", f"{BUILD}/{TREE}"),
            generator,
            "--logtostderr",
            f"--go-header-file={BUILD}/{TREE}/hack/boilerplate/boilerplate.generatego.txt",
            f"--input-dirs={','.join(described_packages(tree))}",
            f"--output-package={IMPORT}/pkg/generated/openapi",
            "--output-file-base=zz_generated.openapi",
            f"--output-base={BUILD}/gopath/src",
            f"--report-filename={BUILD}/violations",
        ],
        env=_ENVIRONMENT,
        log=log,
    )


def described_packages(tree: Path) -> list[str]:
    """Return the import paths whose files carry the generator's mark, sorted; ``tree`` is the unpacked source."""
    packages = set()
    for place in _PLACES:
        # vendor/k8s.io consists of links into staging: the paths must stay those in vendor, which are imported.
        for folder, _, names in os.walk(tree / place, followlinks=True):
            marked = (
                name.endswith(".go")
                and not name.endswith("_test.go")
                and _MARK in Path(folder, name).read_text(encoding="utf-8", errors="replace")
                for name in names
            )
            if "testdata" not in folder and any(marked):
                packages.add(f"{IMPORT}/{os.path.relpath(folder, tree)}")
    return sorted(path for path in packages if not any(f"/{name}/" in f"{path}/" for name in _GENERATORS))
