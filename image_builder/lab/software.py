"""The lab's images of real programs, in six layers each: `software` of 230 MiB, and `large` of more than a gigabyte.

A shell runs in both, and every file comes from Debian. The lab's nodes preload `software`, which is enough for
everything except time and size. `large` stands in for the 17 GB images of real pools, in which a few files are read
and most aren't; it is built only for definitions that preload it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from image_builder.lab.images import Image, Layer, Run, layer_from_debs, make_image
from image_builder.lab.registry import HOST

REFERENCE = f"{HOST}/software:1.0"
LARGE_REFERENCE = f"{HOST}/large:1.0"
SUITE = "trixie"
Layers = tuple[tuple[str, ...], ...]
# Packages from main, layer by layer, lowest first. Each layer is self-contained: everything that a package depends
# on, except what only its maintainer scripts need, is in the same layer or below.
# A system that runs a shell and coreutils; base-files has the links of the merged /usr.
_SYSTEM = (
    *("base-files", "bash", "coreutils", "dash", "debianutils", "gcc-14-base", "libacl1", "libattr1"),
    *("libc6", "libcap2", "libgcc-s1", "libgmp10", "libpcre2-8-0", "libselinux1", "libssl3t64"),
    *("libsystemd0", "libtinfo6", "libzstd1", "mawk", "openssl-provider-legacy", "zlib1g"),
)
# Installed sizes in MiB: 53, 39, 29, 57, 24, 30.
_SOFTWARE: Layers = (
    _SYSTEM,
    # Two libraries, one of 30 MB.
    ("libicu76", "libstdc++6"),
    # Thousands of small files, here and in the next two.
    (
        *("libbz2-1.0", "libdb5.3t64", "libexpat1", "libffi8", "liblzma5", "libncursesw6"),
        *("libpython3.13-minimal", "libpython3.13-stdlib", "libreadline8t64", "libsqlite3-0", "libuuid1"),
        *("media-types", "netbase", "python3.13", "python3.13-minimal", "readline-common", "tzdata"),
    ),
    (
        *("libcrypt1", "libgdbm-compat4t64", "libgdbm6t64", "libperl5.40", "perl", "perl-base"),
        "perl-modules-5.40",
    ),
    ("libc-dev-bin", "libc6-dev", "libcrypt-dev", "linux-libc-dev", "rpcsvc-proto"),
    (
        *("binutils", "binutils-common", "binutils-x86-64-linux-gnu", "libbinutils", "libctf-nobfd0"),
        *("libctf0", "libgprofng0", "libjansson4", "libsframe1"),
    ),
)
# Installed sizes in MiB: 53, 162, 104, 246, 254, 265.
_LARGE: Layers = (
    _SYSTEM,
    # One library of 120 MB with its dependencies.
    (
        *("libbsd0", "libedit2", "libffi8", "libllvm19", "liblzma5", "libmd0", "libstdc++6", "libxml2"),
        *("libz3-4", "llvm-19-linker-tools", "llvm-19-runtime"),
    ),
    ("libclang-cpp19", "libclang1-19"),
    # More than ten thousand small files.
    ("golang-1.24-go", "golang-1.24-src"),
    ("libstd-rust-1.85", "libstd-rust-dev"),
    (
        *("binutils", "binutils-common", "binutils-x86-64-linux-gnu", "cpp", "cpp-14"),
        *("cpp-14-x86-64-linux-gnu", "cpp-x86-64-linux-gnu", "g++", "g++-14", "g++-14-x86-64-linux-gnu"),
        *("g++-x86-64-linux-gnu", "gcc", "gcc-14", "gcc-14-x86-64-linux-gnu", "gcc-x86-64-linux-gnu"),
        *("libasan8", "libatomic1", "libbinutils", "libc-dev-bin", "libc6-dev", "libcc1-0", "libcrypt-dev"),
        *("libcrypt1", "libctf-nobfd0", "libctf0", "libgcc-14-dev", "libgomp1", "libgprofng0", "libhwasan0"),
        *("libisl23", "libitm1", "libjansson4", "liblsan0", "libmpc3", "libmpfr6", "libquadmath0"),
        *("libsframe1", "libstdc++-14-dev", "libtsan2", "libubsan1", "linux-libc-dev", "rpcsvc-proto"),
    ),
)
IMAGES: Mapping[str, Layers] = {REFERENCE: _SOFTWARE, LARGE_REFERENCE: _LARGE}
_SETTINGS = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"], "Cmd": ["/bin/sh"]}


def build_image(name: str, debs_by_layer: Sequence[Sequence[Path]], out: Path, run: Run) -> Image:
    """Write the packages' layers to the directory ``out`` as ``0.tar.gz``, … and return their image.

    Several layers are built at a time; ``out`` needs room for all of them and for the tars of those in progress
    (300 MB each). ``run`` and errors are as in ``images.layer_from_debs``.
    """

    def build(number: int) -> Layer:
        return layer_from_debs(debs_by_layer[number], out / f"{number}.tar.gz", run)

    numbers = range(len(debs_by_layer))
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        layers = list(workers.map(build, numbers))
    return make_image(layers, _SETTINGS, [f"image-builder lab {name}, layer {number}" for number in numbers])
