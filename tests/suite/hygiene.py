"""Mutations for test_hygiene.py: what a bake or a user may leave behind."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from tests.suite.offline import (
    Mutation,
    append,
    change,
    chmod,
    chown,
    link,
    mkdir,
    outside,
    record,
    remove,
    write,
)

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----\n"


def _below_the_tmpfs(root: Path, _variables: dict[str, Any]) -> None:
    """Leave a file in the tree's own /run, where the sandbox's tmpfs hides it."""
    from image_builder.system import namespace

    namespace.unmount(str(root / "run"))
    (root / "run/leftover").write_text("x", encoding="utf-8")
    namespace.mount("tmpfs", "tmpfs", str(root / "run"), "mode=755")


def capable(path: str, mask: int) -> Mutation:
    """Give a program capabilities that take effect when it starts, as ``setcap`` does."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        low, high = mask & 0xFFFFFFFF, mask >> 32
        attribute = struct.pack("<5I", 0x02000001, low, 0, high, 0)
        os.setxattr(outside(root, path), "security.capability", attribute)

    return mutate


record(
    "test_no_ssh_host_keys",
    write("/etc/ssh/ssh_host_rsa_key", KEY),
    write("/etc/ssh/ssh_host_ed25519_key.pub"),
)
record(
    "test_machine_id_is_empty",
    write("/etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
    remove("/etc/machine-id"),
)
record(
    "test_dbus_shares_the_machine_id", write("/var/lib/dbus/machine-id", "0123456789abcdef0123456789abcdef\n")
)
record(
    "test_no_authorized_keys",
    write("/root/.ssh/authorized_keys", "ssh-ed25519 AAAA builder\n"),
    write("/home/build/.ssh/authorized_keys2", ""),
)
record(
    "test_no_password_opens_an_account",
    change("/etc/shadow", r"^root:[^:]*:", "root:$y$j9T$abc$def:"),
    change("/etc/shadow", r"^root:[^:]*:", "root::"),
)
record("test_no_user_accounts", append("/etc/passwd", "build:x:1000:1000::/home/build:/bin/sh\n"))
record("test_no_shell_history", write("/root/.bash_history", "ls\n"), write("/root/.viminfo"))
record("test_homes_are_bare", write("/root/.cache/pip/x"), mkdir("/home/build"))
record(
    "test_no_cloud_init_state",
    mkdir("/var/lib/cloud/instances/i-1"),
    write("/var/log/cloud-init.log", ""),
)
record("test_no_apt_lists", write("/var/lib/apt/lists/mirror_dists_trixie_InRelease"))
record(
    "test_no_package_caches",
    write("/var/cache/apt/archives/x_1_all.deb"),
    write("/var/cache/apt/pkgcache.bin"),
    write("/var/lib/dpkg/status-old"),
)
record("test_logs_are_empty", write("/var/log/dpkg.log", "2026-01-01 install x\n"))
record("test_no_journal", write("/var/log/journal/0123456789abcdef0123456789abcdef/system.journal"))
record(
    "test_no_ansible_traces",
    mkdir("/root/.ansible/tmp"),
    write("/var/tmp/ansible-tmp-1-2-3/AnsiballZ_copy.py"),
)
record("test_no_account_backups", write("/etc/shadow-", "root:*:1::::::\n", 0o600))
record(
    "test_no_registry_credentials",
    write("/root/.docker/config.json", '{"auths": {"x": {"auth": "eA=="}}}'),
    write("/var/lib/kubelet/config.json", "{}"),
)
record(
    "test_no_client_credentials",
    write("/root/.netrc", "machine x login y password z\n"),
    write("/root/.azure/accessTokens.json", "[]"),
    write("/etc/apt/auth.conf.d/x.conf", "machine x login y password z\n"),
)
record(
    "test_no_node_identity",
    write("/etc/kubernetes/bootstrap-kubelet.conf", "{}\n", 0o600),
    write("/etc/kubernetes/node.env"),
    write("/etc/kubernetes/pki/ca.crt"),
    write("/etc/node-agent/node-config.json", "{}\n"),
    write("/etc/node-agent/join-taints.json", "[]\n"),
    write("/var/lib/node-agent/preflight.json", "{}\n"),
    write("/var/lib/kubelet/pki/kubelet.key", KEY),
    write("/var/lib/kubelet/image_manager/pulled/x"),
    write("/var/lib/kubelet/cpu_manager_state", "{}"),
    write("/var/lib/kubelet/memory_manager_state", "{}"),
    write("/var/lib/kubelet/dra_manager_state", "{}"),
    write("/root/.kube/config"),
)
record(
    "test_no_host_identity",
    write("/etc/nvme/hostnqn", "nqn.2014-08.org.nvmexpress:uuid:6b7c9a52-4a1e-4b0f-9c39-0d4f3a4b7b11\n"),
    write("/etc/nvme/hostid", "6b7c9a52-4a1e-4b0f-9c39-0d4f3a4b7b11\n"),
    write("/etc/iscsi/initiatorname.iscsi", "InitiatorName=iqn.1993-08.org.debian:01:3a5b8c7d9e\n"),
    write("/var/lib/agent/machine", "6B7C9A524A1E4B0F9C390D4F3A4B7B11\n"),
)
record("test_no_agent_state", write("/var/lib/waagent/ABCDEF.prv", KEY))
record("test_no_private_keys", write("/etc/somewhere/deep.txt", "intro\n" + KEY), write("/opt/tool/id", KEY))
record(
    "test_only_known_suid_programs", write("/usr/bin/backdoor", mode=0o4755), chmod("/usr/bin/env", 0o4755)
)
record(
    "test_only_known_file_capabilities",
    capable("/usr/bin/env", 1 << 7),  # CAP_SETUID
    capable("/usr/bin/env", 1 << 39),  # CAP_BPF: in the second word
    capable("/usr/bin/ping", 1 << 13 | 1 << 12),  # CAP_NET_ADMIN in addition to the allowed one
)
record("test_no_world_writable_files", chmod("/etc/hosts", 0o666), chmod("/etc/passwd", 0o646))
record(
    "test_world_writable_directories_are_known_and_sticky",
    chmod("/var/tmp", 0o777),
    mkdir("/opt/drop", 0o1777),
)
record("test_no_dead_links", link("/usr/bin/gone", "/usr/bin/no-such-program"), link("/etc/loop", "loop"))
record("test_every_file_has_a_known_owner", chown("/etc/issue", 4711, 0), chown("/usr/bin/env", 0, 4711))
record(
    "test_no_stray_files_in_usr",
    write("/usr/bin/stray", mode=0o755),
    write("/usr/lib/systemd/system/x.service"),
)
record(
    "test_no_random_seed", write("/var/lib/systemd/random-seed"), write("/var/lib/systemd/credential.secret")
)
record("test_no_resolver_of_the_builder", write("/etc/resolv.conf", "nameserver 192.0.2.1\n"))
record("test_no_service_blocker", write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n", 0o755))
record(
    "test_no_local_diversions",
    append("/var/lib/dpkg/diversions", "/usr/bin/env\n/usr/bin/env.distrib\n:\n"),
)
record("test_run_and_tmp_are_empty", _below_the_tmpfs, write("/var/tmp/leftover"))
record("test_no_path_of_the_sandbox", write("/etc/apt/apt.conf.d/99x", 'Dir "/run/image-builder/apt";\n'))
record("test_no_core_dumps", write("/core"), write("/var/lib/systemd/coredump/core.x.zst"))
record("test_nothing_in_unused_places", write("/srv/data"), write("/usr/src/driver/Makefile"))
record("test_no_edit_leftovers", write("/etc/fstab.bak"), write("/etc/ssh/sshd_config.dpkg-old"))
record(
    "test_no_leases_or_clock",
    write("/var/lib/systemd/timesync/clock", ""),
    write("/var/lib/dhcp/dhclient.leases"),
)
record(
    "test_no_user_crontabs_or_mail",
    write("/var/spool/cron/crontabs/root", "@reboot x\n"),
    write("/var/mail/root"),
)
record("test_no_stray_local_files", write("/usr/local/lib/x/__pycache__/x.pyc"))
record(
    "test_no_container_state",
    write("/var/lib/docker/engine-id"),
    write("/var/lib/containerd/io.containerd.metadata.v1.bolt/meta.db"),
)
