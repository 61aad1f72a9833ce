"""Ansible's settings: its first import, which is this one, reads the ``ansible.cfg`` that ANSIBLE_CONFIG names.

So what is wrong with that file is the user's to mend, and no failure of an import. Raises DefinitionError.
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
except Exception as error:  # its own classes, which are not to be had then
    _reason = " ".join(str(error).split())
    _file = Place(os.environ["ANSIBLE_CONFIG"])
    raise DefinitionError([Problem(str(_file), "ansible.cfg", _reason)]) from error

__all__ = ["init_plugin_loader", "settings"]
