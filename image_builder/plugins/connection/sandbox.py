"""Ansible connection plugin: run a task's commands in a sandbox's root.

The builder has already made the namespaces and the mounts (``image_builder/sandbox.py``); this plugin only
enters the merged root with chroot, without a network. Pipelining works, so a module travels over standard
input and leaves nothing behind; a file that must be copied goes straight to its path below the root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleFileNotFound
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
    name: sandbox
    short_description: Run tasks in the merged root of a sandbox
    description:
        - Enters a prepared root with chroot, in an empty network namespace and with a clean environment.
    author: image-builder
    options:
        root:
            description: The merged root on the controller's side.
            type: path
            required: true
            vars:
                - name: ansible_sandbox_root
        enter:
            description: Command line that the one which enters the root is appended to.
            type: list
            elements: str
            default: []
            vars:
                - name: ansible_sandbox_enter
        environment:
            description: Environment of every command, as NAME=VALUE items.
            type: list
            elements: str
            default: []
            vars:
                - name: ansible_sandbox_environment
"""


class Connection(ConnectionBase):
    """One chroot per command; there is nothing to keep open."""

    transport = "sandbox"
    has_pipelining = True
    has_tty = False

    def _connect(self) -> Connection:
        root = self.get_option("root")
        if not os.path.ismount(root):
            raise AnsibleConnectionFailure(f"{root} is not a mounted sandbox root")
        self._connected = True
        return self

    def exec_command(
        self, cmd: str, in_data: bytes | None = None, sudoable: bool = True
    ) -> tuple[int, bytes, bytes]:
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        argv = [*self.get_option("enter"), "unshare", "--net", "--", "chroot", self.get_option("root")]
        argv += ["/usr/bin/env", "-i", *self.get_option("environment")]
        argv += ["/bin/sh", "-c", cmd]
        done = subprocess.run(argv, input=in_data or b"", capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def _outside(self, path: str) -> str:
        """Return the path on the controller's side of a path in the sandbox."""
        return os.path.join(self.get_option("root"), os.path.normpath(path).lstrip("/"))

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        if not os.path.exists(in_path):
            raise AnsibleFileNotFound(f"{in_path} does not exist")
        shutil.copyfile(in_path, self._outside(out_path))

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        shutil.copyfile(self._outside(in_path), out_path)

    def close(self) -> None:
        self._connected = False

    def reset(self) -> Any:
        """There is no state to reset."""
