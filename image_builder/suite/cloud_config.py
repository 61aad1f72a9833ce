"""cloud-init's configuration, merged as it merges it, without a start of its interpreter for half a second."""

from __future__ import annotations

import json
from typing import Any

import yaml
from answers import files, in_folder, once
from suite import output
from testinfra.host import Host

MAIN = "/etc/cloud/cloud.cfg"
# With one of these a file says how it is to be merged, or which others there are.
_DIFFERENT = {"conf_d", "merge_how", "merge_type"}
_ITS_OWN = f"import json; from cloudinit import util; print(json.dumps(util.read_conf_with_confd({MAIN!r})))"


def cloud_config(host: Host) -> dict[str, Any]:
    """Return the configuration of cloud.cfg and of the files beside it; read once for all checks of a target.

    cloud-init itself is asked where a file is out of the ordinary.
    """
    return once(host, cloud_config, lambda: merged_here(host) or its_own(host))


def its_own(host: Host) -> dict[str, Any]:
    """Return it as cloud-init merges it."""
    merged: dict[str, Any] = json.loads(output(host, "python3 -c %s", _ITS_OWN))
    return merged


def merged_here(host: Host) -> dict[str, Any] | None:
    """Return it merged here: later files first, and of what two have the first (util.read_conf_with_confd)."""
    texts = in_folder(host, f"{MAIN}.d", ".cfg")
    try:
        parts = [_load(texts[path]) for path in sorted(texts, reverse=True)]
        parts.append(_load(files(host)[MAIN]))
    except (KeyError, ValueError, yaml.YAMLError):
        return None
    if any(_DIFFERENT & set(part) for part in parts):
        return None
    actual: dict[str, Any] = {}
    for part in parts:
        actual = merge(actual, part)
    return actual


def _load(text: str) -> dict[str, Any]:
    """Return a file's content, nothing for an empty one; raises ValueError for what is not a mapping."""
    content = yaml.load(text, Loader=yaml.CSafeLoader)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"not a mapping: {content!r:.40}")
    return content


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return what either has; of a key that both have the first one's value, but mappings are merged in turn."""
    actual = dict(first)
    for key, value in second.items():
        if key not in actual:
            actual[key] = value
        elif isinstance(actual[key], dict) and isinstance(value, dict):
            actual[key] = merge(actual[key], value)
    return actual
