#!/usr/bin/python
"""Ansible module: put a driver's kernel modules into their place, and prove that they are what was asked for.

What counts is what lies on the disk for exactly one kernel. No program's exit status is believed.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: nvidia_modules
short_description: NVIDIA's kernel modules, for one kernel, proven
description:
    - Copies built modules to where they belong, runs C(depmod), and writes down what they are.
    - Fails with everything that is wrong, unless each module is for the kernel, of the version and of the flavour.
options:
    source: {description: Product of the stage that built them; empty to only prove., type: str, default: ""}
    booted: {description: Whether to take the running kernel if several are installed., type: bool, default: false}
    driver: {description: The driver's version., type: str, required: true}
    flavour: {description: The modules' flavour., type: str, choices: [open, proprietary], required: true}
    signed: {description: Whether all must be signed., type: bool, default: false}
    signers: {description: Who may have signed them; empty for anyone., type: list, elements: str, default: []}
    record: {description: File to write what they are to., type: path, required: true}
    facts: {description: What else the record holds., type: dict, default: {}}
author: [image-builder]
attributes:
    check_mode: {support: full}
    diff_mode: {support: none}
"""
EXAMPLES = r"""
- name: Install the modules that the bake has built
  nvidia_modules:
    source: /run/image-builder/inputs/module_build
    driver: 535.261.03
    flavour: open
    record: /etc/node-agent/gpu-driver.json
"""
RETURN = r"""
kernel:
    description: The kernel that the modules are for.
    returned: success
    type: str
"""

# What a GPU doesn't work without, by the names that the modules bear.
NAMES = ("nvidia", "nvidia_uvm", "nvidia_modeset")
LICENSES = {"open": ("Dual MIT/GPL", "MIT"), "proprietary": ("NVIDIA",)}
ROOT = Path("/")

Modinfo = Callable[[str, str], Mapping[str, str]]
"""Called with a kernel and a module's name; returns its fields, none where there is no such module."""


def kernels(root: Path) -> list[str]:
    """Return the kernels that can be booted."""
    return sorted(path.name.partition("-")[2] for path in (root / "boot").glob("vmlinuz-*"))


def pairs(source: Path, root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield every file of the product with its place."""
    files = source / "files"
    for path in sorted(files.rglob("*")):
        if path.is_file():
            yield path, root / path.relative_to(files)


def outdated(source: Path, root: Path) -> list[tuple[Path, Path]]:
    """Return the files that are missing or differ, with their places."""
    return [
        (path, place)
        for path, place in pairs(source, root)
        if not place.is_file() or not filecmp.cmp(path, place, shallow=False)
    ]


def strays(source: Path, root: Path) -> list[Path]:
    """Return modules of a driver beside those of the product: an older build, or another package's."""
    ours = {place for _, place in pairs(source, root)}
    found = (root / "usr/lib/modules").glob("*/**/nvidia*.ko*")
    return sorted(path for path in found if path not in ours and re.match(r"nvidia([-_.]|$)", path.name))


def describe(kernel: str, modinfo: Modinfo) -> dict[str, dict[str, str]]:
    """Return what the modules that would be loaded say of themselves, by name; {} for a missing one."""
    found = {}
    for name in NAMES:
        fields = modinfo(kernel, name)
        path = Path(fields.get("filename", "/nonexistent"))
        if path.is_file():
            keys = ("version", "vermagic", "license", "signer")
            data = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = {**{key: fields.get(key, "") for key in keys}, "sha256": data}
        else:
            found[name] = {}
    return found


def problems(modules: Mapping[str, Mapping[str, str]], kernel: str, wanted: Mapping[str, Any]) -> list[str]:
    """Tell what is wrong with the modules, a sentence each."""
    found = []
    for name, fields in modules.items():
        if not fields:
            found.append(f"the kernel {kernel} has no module {name}")
            continue
        if fields["vermagic"].split(" ")[0] != kernel:
            found.append(f"{name} is for {fields['vermagic'].split(' ')[0] or 'no kernel'}, not {kernel}")
        if fields["version"] != wanted["driver"]:
            found.append(f"{name} is version {fields['version'] or '?'}, not {wanted['driver']}")
        if fields["license"] not in LICENSES[wanted["flavour"]]:
            found.append(f"{name} has the license {fields['license']!r}, so it is not {wanted['flavour']}")
        if wanted["signed"] and not fields["signer"]:
            found.append(f"{name} is signed by nobody, and Secure Boot would refuse it")
        if wanted["signers"] and fields["signer"] not in wanted["signers"]:
            found.append(
                f"{name} is signed by {fields['signer'] or 'nobody'}, not {', '.join(wanted['signers'])}"
            )
    return found


def leftovers(root: Path, driver: str) -> list[str]:
    """Tell of DKMS's trees of another version, and of keys that sign modules."""
    found = [
        f"/{path.relative_to(root)} is of another version than {driver}"
        for pattern in ("var/lib/dkms/nvidia*/[0-9]*", "usr/src/nvidia*-[0-9]*")
        for path in sorted(root.glob(pattern))
        if not path.name.endswith(driver)
    ]
    keys = ("var/lib/dkms/mok.key", "var/lib/shim-signed/mok/MOK.priv")
    return found + [f"/{key} would be every node's private key" for key in keys if (root / key).exists()]


def parse(text: str) -> dict[str, str]:
    """Return the fields of ``modinfo --null``; of one that stands there often the first.

    They are NAME=VALUE, only the file's name is written as for people.
    """
    found: dict[str, str] = {}
    for field in text.split("\0"):
        name, _, value = field.partition(":" if field.startswith("filename:") else "=")
        found.setdefault(name.strip(), value.strip())
    return found


def install(module: AnsibleModule, source: Path, kernel: str) -> bool:
    """Bring the product's files into their places and take others away; tell whether anything differed."""
    todo, gone = outdated(source, ROOT), strays(source, ROOT)
    if not (todo or gone) or module.check_mode:
        return bool(todo or gone)
    for path in gone:
        path.unlink()
    for path, place in todo:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f".{place.name}.part")
        shutil.copyfile(path, part)
        part.chmod(0o644)
        part.rename(place)
    module.run_command(["depmod", "-a", kernel], check_rc=True)
    return True


def write(path: Path, text: str, *, check: bool) -> bool:
    """Write a file of root's, whole or not at all; tell whether it differed."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    if not check:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.chmod(0o644)
        os.replace(part, path)
    return True


def chosen(installed: Sequence[str], running: str) -> str:
    """Return the kernel to look at; raises ValueError unless it is the only one or the running one."""
    if len(installed) > 1 and running in installed:
        return running
    if len(installed) != 1:
        raise ValueError(f"one kernel is needed, there are {', '.join(installed) or 'none'}")
    return installed[0]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "str", "default": ""},
            "booted": {"type": "bool", "default": False},
            "driver": {"type": "str", "required": True},
            "flavour": {"type": "str", "choices": ["open", "proprietary"], "required": True},
            "signed": {"type": "bool", "default": False},
            "signers": {"type": "list", "elements": "str", "default": []},
            "record": {"type": "path", "required": True},
            "facts": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )

    def modinfo(kernel: str, name: str) -> Mapping[str, str]:
        status, text, _ = module.run_command(["modinfo", "--null", "-k", kernel, name])
        return parse(text) if status == 0 else {}

    wanted: dict[str, Any] = module.params
    try:
        kernel = chosen(kernels(ROOT), os.uname().release if wanted["booted"] else "")
    except ValueError as error:
        module.fail_json(msg=str(error))
        raise  # not reached: that ends the program
    source = Path(wanted["source"]) if wanted["source"] else None
    built = json.loads((source / "modules.json").read_text(encoding="utf-8")) if source else {}
    if source and built["kernel"] != kernel:
        module.fail_json(msg=f"the modules were built for {built['kernel']}, the image has {kernel}")
    changed = install(module, source, kernel) if source else False
    if module.check_mode and changed:
        module.exit_json(changed=True, kernel=kernel)
    modules = describe(kernel, modinfo)
    if found := problems(modules, kernel, wanted) + leftovers(ROOT, wanted["driver"]):
        module.fail_json(msg="; ".join(found))
    record = {
        "driver": wanted["driver"],
        "flavour": wanted["flavour"],
        "kernel": kernel,
        "compiler": built.get("compiler", ""),
        "modules": modules,
        **wanted["facts"],
    }
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    changed |= write(Path(wanted["record"]), text, check=module.check_mode)
    module.exit_json(changed=changed, kernel=kernel)


if __name__ == "__main__":
    main()
