"""Removal of the caller's Ansible settings from the environment: they apply neither here nor in plays.

Importing this module removes them. It must be imported before Ansible, which reads its settings when it is first
imported.
"""

from __future__ import annotations

import os

# The location of the vault password isn't a setting.
_VAULT = "ANSIBLE_VAULT_PASSWORD_FILE"

settings = {
    name: value for name, value in os.environ.items() if name.startswith("ANSIBLE_") and name != _VAULT
}
"""What was taken away. Of that a download of collections has the servers and their tokens."""
for _name in settings:
    del os.environ[_name]
if _VAULT in os.environ:
    # Plays run in another directory, and no shell expands a `~` there.
    os.environ[_VAULT] = os.path.abspath(os.path.expanduser(os.environ[_VAULT]))
