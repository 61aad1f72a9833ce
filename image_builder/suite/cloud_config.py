"""cloud-init's configuration, merged the way cloud-init does, without spending half a second on its interpreter."""

from __future__ import annotations

import json
from typing import Any

import yaml
from answers import files, in_folder, once
from suite import output
from testinfra.host import Host

MAIN = "/etc/cloud/cloud.cfg"
# Keys by which a file says how to merge it, or which other files there are.
_DIFFERENT = {"conf_d", "merge_how", "merge_type"}
_ITS_OWN = f"import json; from cloudinit import util; print(json.dumps(util.read_conf_with_confd({MAIN!r})))"


def cloud_config(host: Host) -> dict[str, Any]:
    """Return the merged configuration of cloud.cfg and its drop-ins, read once for all checks of a target.

    If a file is out of the ordinary, cloud-init itself merges them.
    """
    return once(host, cloud_config, lambda: merged_here(host) or its_own(host))


def its_own(host: Host) -> dict[str, Any]:
    """Return the configuration as cloud-init itself merges it."""
    merged: dict[str, Any] = json.loads(output(host, "python3 -c %s", _ITS_OWN))
    return merged


def merged_here(host: Host) -> dict[str, Any] | None:
    """Return the configuration merged here, later files winning (util.read_conf_with_confd), or None if it can't be."""
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
    """Return a file's content, an empty mapping for an empty file. Raises ValueError if it isn't a mapping."""
    content = yaml.load(text, Loader=yaml.CSafeLoader)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"not a mapping: {content!r:.40}")
    return content


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two mappings, and the mappings in them; for any other key in both, the first one's value wins."""
    actual = dict(first)
    for key, value in second.items():
        if key not in actual:
            actual[key] = value
        elif isinstance(actual[key], dict) and isinstance(value, dict):
            actual[key] = merge(actual[key], value)
    return actual
