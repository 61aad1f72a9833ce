"""The caller's settings for Ansible in the environment are dropped: they count neither here nor in plays.

Importing this takes it away, so it comes before Ansible, which reads its settings when it is first imported. Plays get
this process's environment.
"""

from __future__ import annotations

import os

# Where the password of vaulted values is, is not a setting.
_VAULT = "ANSIBLE_VAULT_PASSWORD_FILE"

settings = {
    name: value for name, value in os.environ.items() if name.startswith("ANSIBLE_") and name != _VAULT
}
"""What was taken away. Of that a download of collections has the servers and their tokens."""
for _name in settings:
    del os.environ[_name]
if _VAULT in os.environ:
    # Plays run in another directory, and the shell expands no `~` there.
    os.environ[_VAULT] = os.path.abspath(os.path.expanduser(os.environ[_VAULT]))
