"""No traces of the bake, the builder or any user are left in the image."""

from __future__ import annotations

import json
from typing import Any

from allowed import (
    CALICO_SUID,
    CALICO_UNOWNED,
    DEAD_LINKS,
    FILE_CAPABILITIES,
    STICKY,
    SUID_SGID,
    UNOWNED,
)
from answers import output_once
from questions import diversions, owned_files, with_merged_usr
from suite import booted, is_member, load, needs, nothing, offline, output, read
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
_HOME = r"(/root|/home/[^/]+)"
# Prints the capability attribute of each file of the root filesystem that has one; an image may lack getcap.
_CAPABILITIES = """
import json, os

found = {}
for folder, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
    for path in (os.path.join(folder, name) for name in names):
        try:
            found[path] = os.getxattr(path, "security.capability", follow_symlinks=False).hex()
        except OSError:
            pass
print(json.dumps(found))
"""


@offline
def test_no_ssh_host_keys(tree: Tree) -> None:
    """The image has no host keys; every machine makes its own."""
    nothing(tree.matching(r"/etc/ssh/ssh_host_.*"))


@offline
def test_machine_id_is_empty(host: Host) -> None:
    """The machine id file exists and holds no id, so systemd gives every machine its own at first boot."""
    assert read(host, "/etc/machine-id").strip() in ("", "uninitialized")


@offline
@booted
def test_dbus_shares_the_machine_id(tree: Tree) -> None:
    """D-Bus has no second machine id of its own."""
    entry = tree.get("/var/lib/dbus/machine-id")
    assert entry is None or entry.link == "/etc/machine-id", f"{entry}"


@offline
def test_no_authorized_keys(tree: Tree) -> None:
    """The image has no authorized keys, so nobody's key opens it."""
    nothing(tree.matching(r".*/authorized_keys2?|/etc/ssh/authorized_keys.*"))


@offline
@booted
def test_no_password_opens_an_account(host: Host) -> None:
    """No account has a password hash, and none has an empty password."""
    open_to = [
        line.split(":")[0]
        for line in read(host, "/etc/shadow").splitlines()
        if line.split(":")[1] not in ("*", "!", "!!", "!*", "*NP*")
    ]
    nothing(open_to)


@offline
def test_no_user_accounts(host: Host) -> None:
    """The image has only system accounts; users come at first boot."""
    users = [line.split(":") for line in read(host, "/etc/passwd").splitlines()]
    nothing([user[0] for user in users if 1000 <= int(user[2]) < 60000])


@offline
def test_no_shell_history(tree: Tree) -> None:
    """No shell, pager, editor or client has left a history."""
    names = r"\.(.*_history|.*history|lesshst|viminfo|wget-hsts|python_history|selected_editor)"
    nothing(tree.matching(rf"{_HOME}/{names}"))


@offline
def test_homes_are_bare(tree: Tree) -> None:
    """root's home has only the files that belong there, and /home is empty."""
    expected_files = {
        "/root/.bashrc",
        "/root/.profile",
        "/root/.ssh",
        "/root/.docker",
        "/root/.docker/config.json",
    }
    nothing([entry.path for entry in tree.under("/root", "/home") if entry.path not in expected_files])


@offline
def test_no_cloud_init_state(tree: Tree) -> None:
    """cloud-init has no state left, so it treats a machine's first boot as the first boot."""
    leftovers = tree.matching(
        r"/var/lib/cloud/(instances?|data|sem|seed|handlers|scripts/per-instance)/.*|/var/lib/cloud/instance"
    )
    nothing(leftovers + tree.matching(r"/var/log/cloud-init.*|/etc/netplan/50-cloud-init\.yaml"))


@offline
def test_no_apt_lists(tree: Tree) -> None:
    """The image has no package lists from the bake, which would be stale and reveal the mirror."""
    lists = [
        e.path for e in tree.under("/var/lib/apt/lists") if e.kind == "f" and not e.path.endswith("/lock")
    ]
    nothing(lists)


@offline
def test_no_package_caches(tree: Tree) -> None:
    """The image has no downloaded packages, no caches of apt or man, and no backups of debconf or dpkg."""
    cached = [
        e.path
        for e in tree.under("/var/cache/apt", "/var/cache/man")
        if e.kind == "f" and not e.path.endswith("/lock")
    ]
    nothing(
        cached
        + tree.matching(r"/var/cache/debconf/.*-old|/var/lib/dpkg/(status|diversions|statoverride)-old")
    )


@offline
def test_logs_are_empty(tree: Tree) -> None:
    """Every log file is empty, so logs begin on the machine."""
    nothing([e.path for e in tree.under("/var/log") if e.kind == "f" and e.size])


@offline
def test_no_journal(tree: Tree) -> None:
    """The image has no journal, so a machine has only its own."""
    nothing([e.path for e in tree.under("/var/log/journal")])


@offline
@booted
def test_no_ansible_traces(tree: Tree) -> None:
    """Ansible's directories, modules and retry files are gone."""
    nothing(tree.matching(r".*/\.ansible(/.*)?|.*/(ansible[-_.]tmp|\.ansible_).*", having="ansible"))
    nothing(tree.matching(r".*/AnsiballZ_.*", having="AnsiballZ_"))
    nothing(tree.matching(r".*\.retry", having=".retry"))
    nothing(tree.matching(r"/etc/ansible(/.*)?|/(var/)?tmp/ansible.*"))


@offline
def test_no_account_backups(tree: Tree) -> None:
    """The image has none of the backups of account files that useradd and passwd leave."""
    nothing(tree.matching(r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-|/etc/\.pwd\.lock"))


@offline
@booted
def test_no_registry_credentials(host: Host, tree: Tree) -> None:
    """The image has no registry logins; a client's configuration may only name credential helpers."""
    clients = tree.matching(rf"{_HOME}/\.docker/config\.json")
    for path in clients:
        nothing(f"{path}: {key}" for key in load(host, path) if key != "credHelpers")
    nothing(tree.matching(rf"{_HOME}/\.dockercfg|/var/lib/kubelet/(config\.json|\.dockercfg)"))
    nothing(tree.matching(r"/etc/(docker|containerd)/.*(auth|login)[^/]*\.json"))
    nothing(tree.matching(r".*/containers/auth\.json", having="/containers/auth.json"))


@offline
@booted
def test_no_client_credentials(tree: Tree) -> None:
    """The image has no credentials for clouds, git, package indexes or the like."""
    files = r"netrc|git-credentials|pypirc|npmrc|pgpass|vault-token|my\.cnf"
    folders = "aws|azure|config/gcloud|gnupg"
    nothing(tree.matching(rf"{_HOME}/\.({files}|({folders})/.*)"))
    nothing(tree.matching(r"/etc/apt/auth\.conf(\.d/.+)?|/\.netrc"))


@offline
def test_no_node_identity(tree: Tree) -> None:
    """The node has never joined a cluster: no kubeconfig, token or certificate, no configuration, no saved state."""
    nothing(tree.matching(rf"{_HOME}/\.kube/.*|/etc/kubernetes/(.*\.conf|node\.env|pki/.*)"))
    nothing(tree.matching(r"/var/lib/kubelet/((pki|image_manager)/.*|(bootstrap-)?kubeconfig)"))
    nothing(tree.matching(r"/var/lib/kubelet/(cpu|memory|dra)_manager_state"))
    nothing(tree.matching(r"/etc/node-agent/(node-config|join-taints)\.json|/var/lib/node-agent/.+"))


@offline
def test_no_host_identity(host: Host) -> None:
    """No file in /etc or /var/lib has a line that is only a name of a machine: a UUID, a host id, an NQN, an IQN."""
    uuid = "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"
    pattern = f"(nqn[.].*)?{uuid}|[0-9a-f]{{32}}|(InitiatorName=)?iqn[.].+|MY_HOSTID=.+"
    actual = host.run(f"grep -rIlixE --exclude-dir=dpkg --exclude=machine-id -e '{pattern}' /etc /var/lib")
    assert actual.rc in (0, 1), actual.stderr
    nothing(actual.stdout.split())


@offline
def test_no_agent_state(tree: Tree) -> None:
    """Azure's agent has no certificates, no goal state and no provisioning marker."""
    nothing([entry.path for entry in tree.under("/var/lib/waagent")])


@offline
def test_no_private_keys(host: Host) -> None:
    """No file in /etc, /root, /home, /var, /opt, /srv or /usr/local contains a PEM or OpenSSH private key."""
    pattern = "-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY"
    places = "/etc /root /home /var /opt /srv /usr/local"
    actual = host.run(f"grep -rIlE --exclude-dir=doc -e '{pattern}' {places}")
    assert actual.rc in (0, 1), actual.stderr
    nothing(actual.stdout.split())


@offline
@booted
def test_only_known_suid_programs(host: Host, tree: Tree, v: V) -> None:
    """SUID and SGID programs are those on the list, with its modes, or Calico's on a node of a cluster."""
    allowed = SUID_SGID | (CALICO_SUID if is_member(host, v) else {})
    actual = tree.where(lambda s: s.kind == "f" and bool(s.mode & 0o6000))
    own = (e for e in actual if not e.path.startswith("/var/lib/docker"))
    nothing(f"{e.path} {e.mode:o}" for e in own if allowed.get(e.path) != e.mode)


# Only on the sealed tree: a machine would be asked about each of its files.
@offline
def test_only_known_file_capabilities(host: Host) -> None:
    """Programs with file capabilities are the ones on the list, with the capabilities on the list."""
    actual = json.loads(output(host, "python3 -c %s", _CAPABILITIES))
    masks = {path: _mask(bytes.fromhex(value)) for path, value in actual.items()}
    nothing(f"{path} {mask:#x}" for path, mask in masks.items() if FILE_CAPABILITIES.get(path) != mask)


def _mask(attribute: bytes) -> int:
    """Return the capabilities, permitted or inheritable, of a file's attribute as Linux keeps it (vfs_cap_data)."""
    numbers = [int.from_bytes(attribute[at : at + 4], "little") for at in range(4, len(attribute), 4)]
    low, high = numbers[:2], numbers[2:4]
    return (low[0] | low[1]) | (high[0] | high[1] if high else 0) << 32


@offline
@booted
def test_no_world_writable_files(tree: Tree) -> None:
    """Only its owner and group can write to a file."""
    nothing(e.path for e in tree.where(lambda s: s.kind == "f" and bool(s.mode & 0o002)))


@offline
@booted
def test_world_writable_directories_are_known_and_sticky(tree: Tree) -> None:
    """Every world-writable directory is on the list and sticky, so nobody can remove another user's files."""
    actual = tree.where(lambda s: s.kind == "d" and bool(s.mode & 0o002))
    nothing([e.path for e in actual if not e.mode & 0o1000 or not STICKY.fullmatch(e.path)])


@offline
@booted
def test_no_dead_links(tree: Tree) -> None:
    """Every link has a target, except for known ones and those to what only a running machine has."""
    dead = tree.where(lambda s: s.kind == "l" and s.points_to in "NL?")
    elsewhere = ("/proc/", "/run/", "/dev/", "/sys/", "/tmp/", "/var/run/", "/mnt/local")
    actual = [e for e in dead if not e.link.startswith(elsewhere) and not DEAD_LINKS.fullmatch(e.path)]
    nothing([f"{e.path} -> {e.link}" for e in actual])


@offline
@booted
def test_every_file_has_a_known_owner(host: Host, tree: Tree) -> None:
    """Every uid and gid of a file belongs to a known account or group."""
    uids = {int(line.split(":")[2]) for line in read(host, "/etc/passwd").splitlines()}
    gids = {int(line.split(":")[2]) for line in read(host, "/etc/group").splitlines()}
    nothing(e.path for e in tree.where(lambda s: s.uid not in uids or s.gid not in gids))


@offline
@booted
def test_no_stray_files_in_usr(host: Host, tree: Tree, v: V) -> None:
    """Everything below /usr comes from a package, a package's script or the alternatives, or is a listed exception."""
    diverted = {with_merged_usr(place) for _, place, _ in diversions(host)}
    unowned = [path for path in tree.without("/usr", owned_files(host)) if not UNOWNED.fullmatch(path)]
    if is_member(host, v):
        unowned = [path for path in unowned if not CALICO_UNOWNED.fullmatch(path)]
    nothing(
        path
        for path in unowned
        if path not in diverted and not tree[path].link.startswith("/etc/alternatives/")
    )


@offline
def test_no_random_seed(tree: Tree) -> None:
    """The image has no random seed or credential key, so no two machines start from the same one."""
    nothing(tree.matching(r"/var/lib/systemd/(random-seed|credential\.secret)|/var/lib/urandom/.*"))


@offline
def test_no_resolver_of_the_builder(host: Host, tree: Tree) -> None:
    """/etc/resolv.conf doesn't name the builder's name servers."""
    entry = tree.get("/etc/resolv.conf")
    if entry is not None and entry.kind == "f":
        assert "nameserver" not in read(host, "/etc/resolv.conf")
    assert entry is None or entry.kind in "fl", f"{entry}"


@offline
@booted
def test_no_service_blocker(tree: Tree) -> None:
    """The files that kept services from starting in the sandbox are gone."""
    nothing(tree.matching(r"/usr/sbin/policy-rc\.d|/(usr/)?sbin/(start-stop-daemon|initctl)\.(REAL|distrib)"))


@offline
@booted
def test_no_local_diversions(host: Host) -> None:
    """No file of a package was diverted by hand."""
    nothing([path for path, _, package in diversions(host) if package == ":"])


@offline
def test_run_and_tmp_are_empty(host: Host) -> None:
    """/run, /tmp and /var/tmp have no files, not even below the sandbox's own mounts."""
    look = (
        "for d in /run /tmp; do if mountpoint -q $d; then umount -l $d || exit 1; fi; done; "
        "find /run /tmp /var/tmp -mindepth 1 ! -type d"
    )
    nothing(output(host, "unshare --mount --propagation private -- /bin/sh -c %s", look).splitlines())


@offline
@booted
def test_no_path_of_the_sandbox(host: Host) -> None:
    """No configuration refers to directories that existed only in the sandbox."""
    look = "grep -rIl /run/image-builder /etc /usr/local /var/lib/systemd || [ $? = 1 ]"
    nothing(output_once(host, look).split())


@offline
@booted
def test_no_core_dumps(tree: Tree) -> None:
    """The image has no core dumps of programs that crashed in the bake."""
    nothing(
        tree.matching(r"/core(\.\d+)?|/(root|var/tmp|var/crash|var/lib/systemd/coredump)/.*(core|crash).*")
    )


@offline
def test_nothing_in_unused_places(tree: Tree) -> None:
    """/srv, /media, /mnt, /usr/src and /lost+found have no files."""
    files = [e.path for e in tree.under("/srv", "/media", "/mnt", "/usr/src", "/lost+found") if e.kind != "d"]
    nothing(files)


@offline
@booted
def test_no_edit_leftovers(tree: Tree) -> None:
    """/etc has no backups left by editors, package tools or patch."""
    nothing(
        tree.matching(r"/etc/.*(~|\.(dpkg-(old|new|dist|tmp)|ucf-(old|new|dist)|bak|orig|rej|sw[op]|save))")
    )


@offline
def test_no_leases_or_clock(tree: Tree) -> None:
    """The image has no DHCP lease, network state or last seen time of another machine."""
    pattern = r"/var/lib/(dhcp|dhcpcd|NetworkManager|systemd/(timesync|timers|network|rfkill|backlight))/.+"
    nothing(tree.matching(pattern))


@offline
@booted
def test_no_user_crontabs_or_mail(tree: Tree) -> None:
    """The image has no user's cron jobs and no mail."""
    files = [e.path for e in tree.under("/var/spool/cron", "/var/mail", "/var/spool/mail") if e.kind == "f"]
    nothing(files)


@offline
def test_no_stray_local_files(tree: Tree) -> None:
    """/usr/local and /opt have no caches, archives or logs from installing programs."""
    nothing(
        [
            e.path
            for e in tree.under("/usr/local", "/opt")
            if e.kind == "f" and e.path.endswith((".pyc", ".log", ".tmp", ".deb", ".tar.gz", ".tgz"))
        ]
    )


@offline
@needs("container_runtime")
def test_no_container_state(tree: Tree) -> None:
    """The engines have never run: there are no images, containers or engine ids."""
    states = tree.under(
        "/var/lib/docker", "/var/lib/containerd", "/mnt/local", "/var/lib/cni", "/run/containerd"
    )
    nothing([e.path for e in states if e.kind != "d"] + tree.matching("/etc/docker/key.json"))
