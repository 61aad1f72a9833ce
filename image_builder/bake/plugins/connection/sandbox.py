"""Ansible connection plugin: run a task's commands in a sandbox's root.

The builder has already made the namespaces and the mounts (``image_builder/system/sandbox.py``); this plugin only
enters the merged root with chroot, without a network. Pipelining works, so a module travels over standard
input and leaves nothing behind. Files are copied by a program in the root: a link there, followed from outside, would
lead to a file on the build host.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
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
    # A bake's commands already run as root, so `become: true` needs no sudo in the image.
    default_user = "root"

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
        done = subprocess.run(self._argv(cmd), input=in_data or b"", capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        if not os.path.exists(in_path):
            raise AnsibleFileNotFound(f"{in_path} does not exist")
        with open(in_path, "rb") as source:
            self._copy(f"cat > {shlex.quote(out_path)}", stdin=source)

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        with open(out_path, "wb") as target:
            self._copy(f"cat < {shlex.quote(in_path)}", stdin=subprocess.DEVNULL, stdout=target)

    def _argv(self, cmd: str) -> list[str]:
        """Return the arguments that run a shell command in the root."""
        argv = [*self.get_option("enter"), "unshare", "--net", "--", "chroot", self.get_option("root")]
        argv += ["/usr/bin/env", "-i", *self.get_option("environment")]
        return [*argv, "/bin/sh", "-c", cmd]

    def _copy(self, cmd: str, **streams: Any) -> None:
        done = subprocess.run(self._argv(cmd), stderr=subprocess.PIPE, check=False, **streams)
        if done.returncode != 0:
            raise AnsibleError(f"`{cmd}` in the sandbox: {done.stderr.decode(errors='replace').strip()}")

    def close(self) -> None:
        self._connected = False

    def reset(self) -> Any:
        """There is no state to reset."""
