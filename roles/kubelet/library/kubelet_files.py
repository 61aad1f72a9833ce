#!/usr/bin/python
"""Ansible module: bring directories, files and links to where the kubelet looks for them, all in one run.

With Ansible's own modules each of them costs one or two starts of an interpreter on the node.
"""

from __future__ import annotations

import filecmp
import lzma
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: kubelet_files
short_description: Directories, files and links of root's, in one run
description:
    - Makes what is missing and mends what differs, in the order given. Everything belongs to root.
    - A file is written beside its place and renamed, so that a reader sees the old one or the new one.
options:
    entries:
        description: What must be there.
        type: list
        elements: dict
        required: true
        suboptions:
            dest: {description: Absolute path., type: path, required: true}
            mode: {description: Octal mode of a directory or a file., type: str, default: "0600"}
            state: {description: What it is., type: str, choices: [directory, file, link], default: file}
            content: {description: A file's text., type: str}
            src: {description: A file on the node to copy, or what a link names., type: path}
            unpack: {description: Unpack C(src) while copying; it is compressed by xz., type: bool, default: false}
author: [image-builder]
attributes:
    check_mode: {support: full}
    diff_mode: {support: full}
"""
EXAMPLES = r"""
- name: Create a directory and a file in it
  kubelet_files:
    entries:
      - {dest: /etc/kubernetes, state: directory, mode: "0755"}
      - {dest: /etc/kubernetes/kubelet.yaml, content: "kind: KubeletConfiguration\n"}
"""
RETURN = r"""
changed_paths:
    description: What was made or mended, or would be.
    returned: always
    type: list
    elements: str
"""

_CHUNK = 1 << 20
ENTRY: dict[str, dict[str, Any]] = {
    "dest": {"type": "path", "required": True},
    "mode": {"type": "str", "default": "0600"},
    "state": {"type": "str", "choices": ["directory", "file", "link"], "default": "file"},
    "content": {"type": "str", "no_log": False},
    "src": {"type": "path"},
    "unpack": {"type": "bool", "default": False},
}


class OccupiedError(Exception):
    """Something else is in the place of an entry, and removing it could lose data."""


def apply(entry: Mapping[str, Any], *, check: bool) -> bool:
    """Bring one entry about, or only look when ``check``; tell whether it was missing or differed.

    Raises OccupiedError, OSError naming the file, and EOFError or LZMAError for one that can't be unpacked.
    """
    return {"directory": _directory, "file": _file, "link": _link}[entry["state"]](entry, check)


def text_of(path: str) -> str:
    """Return what is in a file, or nothing when there is none or it is no text."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _directory(entry: Mapping[str, Any], check: bool) -> bool:
    dest, mode = entry["dest"], int(entry["mode"], 8)
    if not os.path.isdir(dest):
        if os.path.lexists(dest):
            raise OccupiedError(f"{dest} is there and no directory")
        if not check:
            _make_directories(dest, mode)
        return True
    if _is_roots(os.stat(dest), mode):
        return False
    if not check:
        os.chown(dest, 0, 0)
        os.chmod(dest, mode)
    return True


def _make_directories(path: str, mode: int) -> None:
    """Make a directory and those above it that are missing, all with the same mode whatever the umask is."""
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        _make_directories(above, mode)
    os.mkdir(path)
    os.chmod(path, mode)


def _file(entry: Mapping[str, Any], check: bool) -> bool:
    dest, mode = entry["dest"], int(entry["mode"], 8)
    there = os.lstat(dest) if os.path.lexists(dest) else None
    if there and stat.S_ISDIR(there.st_mode):
        raise OccupiedError(f"{dest} is a directory and must be a file")
    if there and stat.S_ISREG(there.st_mode) and _has_content(entry):
        if _is_roots(there, mode):
            return False
        if not check:
            os.chown(dest, 0, 0)
            os.chmod(dest, mode)
        return True
    if not check:
        _write(entry, mode)
    return True


def _has_content(entry: Mapping[str, Any]) -> bool:
    dest = entry["dest"]
    if entry["unpack"]:
        return _is_unpacked(entry["src"], dest)
    if entry["src"]:
        return filecmp.cmp(entry["src"], dest, shallow=False)
    with open(dest, "rb") as stream:
        return stream.read() == str(entry["content"]).encode()


def _is_unpacked(packed: str, dest: str) -> bool:
    """Tell whether ``dest`` holds what ``packed`` unpacks to."""
    with lzma.open(packed) as expected, open(dest, "rb") as actual:
        while chunk := expected.read(_CHUNK):
            if actual.read(len(chunk)) != chunk:
                return False
        return not actual.read(1)


def _write(entry: Mapping[str, Any], mode: int) -> None:
    """Write a file beside its place and rename it there. Its directory must be there."""
    dest = entry["dest"]
    fd, partial = tempfile.mkstemp(prefix=f".{os.path.basename(dest)}.", dir=os.path.dirname(dest))
    try:
        with os.fdopen(fd, "wb") as stream:
            if entry["src"]:
                with (lzma.open if entry["unpack"] else open)(entry["src"], "rb") as source:
                    shutil.copyfileobj(source, stream, _CHUNK)
            else:
                stream.write(entry["content"].encode())
            os.fchown(stream.fileno(), 0, 0)
            os.fchmod(stream.fileno(), mode)
        os.rename(partial, dest)
    except BaseException:
        os.unlink(partial)
        raise


def _link(entry: Mapping[str, Any], check: bool) -> bool:
    dest, src = entry["dest"], entry["src"]
    if os.path.islink(dest):
        if os.readlink(dest) == src:
            return False
    elif os.path.lexists(dest):
        raise OccupiedError(f"{dest} is there and no link")
    if not check:
        partial = f"{dest}.{os.getpid()}"
        os.symlink(src, partial)
        os.rename(partial, dest)
    return True


def _is_roots(info: os.stat_result, mode: int) -> bool:
    return (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (mode, 0, 0)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "entries": {"type": "list", "elements": "dict", "required": True, "options": ENTRY},
        },
        supports_check_mode=True,
    )
    changed: list[str] = []
    diff: list[dict[str, str]] = []
    for entry in module.params["entries"]:
        dest = entry["dest"]
        if entry["state"] == "file" and (entry["content"] is None) == (entry["src"] is None):
            module.fail_json(msg=f"{dest}: a file needs content or src, one of them")
        if entry["state"] == "link" and entry["src"] is None:
            module.fail_json(msg=f"{dest}: a link needs src")
        before = text_of(dest) if entry["content"] is not None else ""
        try:
            if not apply(entry, check=module.check_mode):
                continue
        except (OccupiedError, OSError, EOFError, lzma.LZMAError) as error:
            at = "" if isinstance(error, (OccupiedError, OSError)) else f"{entry['src']}: "
            module.fail_json(msg=f"{at}{error}", changed_paths=changed)
        changed.append(dest)
        headers = {"before_header": dest, "after_header": f"{dest} ({entry['mode']})"}
        diff.append({**headers, "before": before, "after": entry["content"] or ""})
    module.exit_json(changed=bool(changed), changed_paths=changed, diff=diff)


if __name__ == "__main__":
    main()
