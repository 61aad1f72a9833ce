"""Ansible lookup: make the node agent's archive from its sources here, and return the path of the file."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
    name: node_agent_archive
    short_description: Make the node agent's archive
    description:
        - Packs image_builder/node of the checkout or the collection that the role is part of into one file, the
          same bytes everywhere, in Ansible's directory for temporary files.
    author: image-builder
    options: {}
"""
_ROOT = Path(__file__).resolve().parents[3]


class LookupModule(LookupBase):  # type: ignore[misc]
    """Returns a list of one path."""

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[str]:  # noqa: ARG002
        # A play of somebody else's may run where image_builder is not installed.
        if os.fspath(_ROOT) not in sys.path:
            sys.path.append(os.fspath(_ROOT))
        from image_builder.node import zipapp

        data = zipapp.archive(_ROOT / "image_builder/node")
        name = f"node-agent-{hashlib.sha256(data).hexdigest()[:16]}.pyz"
        path = Path(constants.DEFAULT_LOCAL_TMP) / name
        if not path.exists():
            path.write_bytes(data)
        return [os.fspath(path)]
