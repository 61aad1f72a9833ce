"""Ansible's settings: its first import, which is this one, reads the ``ansible.cfg`` that ANSIBLE_CONFIG names.

A fault in that file is therefore reported as one for the user to fix, not as a failed import. Raises DefinitionError.
"""

from __future__ import annotations

import os

from image_builder.definition.values import Place
from image_builder.errors import DefinitionError, Problem

try:
    from ansible import constants as settings
    from ansible.plugins.loader import init_plugin_loader
except ImportError:
    raise
except Exception as error:  # Ansible's own classes, which can't be imported then
    _reason = " ".join(str(error).split())
    _file = Place(os.environ["ANSIBLE_CONFIG"])
    raise DefinitionError([Problem(str(_file), "ansible.cfg", _reason)]) from error

__all__ = ["init_plugin_loader", "settings"]
