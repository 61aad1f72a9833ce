"""The caller's settings for Ansible in the environment are dropped: they count neither here nor in plays.

Importing this takes it away, so it comes before Ansible, which reads its settings when it is first imported. Plays get
this process's environment.
"""

from __future__ import annotations

import os

# Where the password of vaulted values is, is not a setting.
_VAULT = "ANSIBLE_VAULT_PASSWORD_FILE"

for _name in [name for name in os.environ if name.startswith("ANSIBLE_") and name != _VAULT]:
    del os.environ[_name]
if _VAULT in os.environ:
    # Plays run in another directory, and the shell expands no `~` there.
    os.environ[_VAULT] = os.path.abspath(os.path.expanduser(os.environ[_VAULT]))
