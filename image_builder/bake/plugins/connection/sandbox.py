"""Ansible connection plugin: run a task's commands in a sandbox's root.

The builder has already made the namespaces and the mounts (``image_builder/system/sandbox.py``); this plugin only
enters the merged root with chroot, without a network. Pipelining works, so a module travels over standard
input and leaves nothing behind. Files are copied by a program in the root: a link there, followed from outside, would
lead to a file on the build host.

The image is the only machine of a bake: a task for another one is refused. Facts that aren't the image's own, but those
of the machine that builds, are withheld.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.module_utils.json_utils import _filter_non_json_lines
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
        image:
            description: The host that the root stands for; if it is named, tasks may act on no other.
            type: str
            vars:
                - name: ansible_sandbox_image
        withheld:
            description: File to which the names of withheld facts are appended, one a line.
            type: path
            vars:
                - name: ansible_sandbox_withheld
"""

# The facts that the image's own files, users and programs decide. All others that `setup` knows (processors, memory,
# kernel, names, addresses, mounts, dates) are those of the machine that builds, and no id covers them.
_OF_IMAGE = re.compile(
    r"ansible_(?:distribution(?:_.+)?|os_family|lsb|pkg_mgr|service_mgr|system|architecture|machine"
    r"|userspace_(?:architecture|bits)|python|python_version|selinux_python_present|env|user_.+|(?:real|effective)_.+_id"
    r"|local|discovered_interpreter_python|gather_subset)"
)
# How facts of `setup`, and what it takes over from other programs, are named; `mount_facts` has names of its own.
_OF_MACHINE = re.compile(r"(?:ansible|facter|ohai)_.+|mount_points|aggregate_mounts")


class Connection(ConnectionBase):
    """One chroot per command; there is nothing to keep open."""

    transport = "sandbox"
    has_pipelining = True
    has_tty = False
    # A bake's commands already run as root, so `become: true` needs no sudo in the image.
    default_user = "root"
    # The other machine that the task at hand acts on.
    _elsewhere = ""

    def set_options(self, task_keys: Any = None, var_options: Any = None, direct: Any = None) -> None:
        super().set_options(task_keys=task_keys, var_options=var_options, direct=direct)
        task, image = task_keys or {}, self.get_option("image")
        local = str(task.get("connection")).rpartition(".")[2] == "local"
        target = "localhost" if local else task.get("delegate_to")
        self._elsewhere = target if image and target and target != image else ""

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
        return done.returncode, self._own_facts(done.stdout), done.stderr

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
        """Return the arguments that run a shell command in the root. Raises AnsibleConnectionFailure elsewhere."""
        if self._elsewhere:
            raise AnsibleConnectionFailure(
                f"this task acts on `{self._elsewhere}`, but a bake has only the image `{self.get_option('image')}`"
            )
        argv = [*self.get_option("enter"), "unshare", "--net", "--", "chroot", self.get_option("root")]
        argv += ["/usr/bin/env", "-i", *self.get_option("environment")]
        return [*argv, "/bin/sh", "-c", cmd]

    def _own_facts(self, output: bytes) -> bytes:
        """Return a module's output with none but the image's own facts."""
        if b'"ansible_facts"' not in output:
            return output
        try:
            text, _ = _filter_non_json_lines(
                output.decode(errors="surrogateescape")
            )  # `su` and login shells may print before it
            result = json.loads(text)
            facts = result["ansible_facts"]
            withheld = [
                name for name in facts if _OF_MACHINE.fullmatch(name) and not _OF_IMAGE.fullmatch(name)
            ]
        except (ValueError, KeyError, TypeError):  # not a module's result
            return output
        for name in withheld:
            del facts[name]
        if self.get_option("withheld"):
            with open(self.get_option("withheld"), "a", encoding="utf-8") as names:
                names.writelines(f"{name}\n" for name in withheld)
        return json.dumps(result).encode()

    def _copy(self, cmd: str, **streams: Any) -> None:
        done = subprocess.run(self._argv(cmd), stderr=subprocess.PIPE, check=False, **streams)
        if done.returncode != 0:
            raise AnsibleError(f"`{cmd}` in the sandbox: {done.stderr.decode(errors='replace').strip()}")

    def close(self) -> None:
        self._connected = False

    def reset(self) -> Any:
        """There is no state to reset."""
