"""The caller's settings for Ansible in the environment are dropped: they count neither here nor in plays.

Importing this takes it away, so it comes before Ansible, which reads its settings when it is first imported. Plays get
this process's environment.
"""

from __future__ import annotations

import os

# The password of vaulted values is not a setting.
_PASSED_ON = frozenset({"ANSIBLE_VAULT_PASSWORD_FILE"})

for _name in [name for name in os.environ if name.startswith("ANSIBLE_")]:
    if _name not in _PASSED_ON:
        del os.environ[_name]
