"""Access to the machine, and what it permits: sshd, accounts, file modes, denied modules."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from answers import output_once
from questions import boot_sysctls, live_sysctls
from suite import booted, differences, needs, nothing, offline, output, read
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]

with_system = needs("system")


def _sshd(host: Host) -> dict[str, str]:
    """Return sshd's effective settings as sshd reports them, with names in lower case.

    sshd refuses to report them without a host key, which an image doesn't have; it then gets a temporary one.
    """
    script = (
        "[ -d /run/sshd ] || mkdir /run/sshd; sshd -T 2>/dev/null && exit; "
        "d=$(mktemp -d) && ssh-keygen -q -t ed25519 -N '' -f $d/key && "
        "sshd -T -h $d/key; status=$?; rm -rf $d; exit $status"
    )
    lines = output_once(host, script).splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


@offline
@booted
@with_system
def test_sshd_settings(host: Host, v: V) -> None:
    """sshd accepts its configuration, and each declared setting is in effect."""
    lists = ("KexAlgorithms", "MACs", "Ciphers")
    expected = {n.lower(): str(x).lower() for n, x in v["__hardening_sshd"].items() if n not in lists}
    actual = {name: value.lower() for name, value in _sshd(host).items()}
    nothing(differences(expected, actual))


@offline
@booted
@with_system
def test_sshd_algorithms(host: Host, v: V) -> None:
    """sshd doesn't offer the algorithms that are denied, and still offers others."""
    actual = _sshd(host)
    for name in ("KexAlgorithms", "MACs", "Ciphers"):
        offered = actual[name.lower()].split(",")
        assert len(offered) > 1, f"{name}: {offered}"
        setting = str(v["__hardening_sshd"].get(name, "-"))
        if setting.startswith("-"):
            denied = setting[1:].split(",")
            nothing(f"{name} {each}" for each in offered if any(fnmatchcase(each, d) for d in denied))
        else:
            assert offered == setting.split(","), f"{name}: {offered}"


@offline
@booted
@with_system
def test_hypervisor_has_no_door_of_its_own(tree: Tree) -> None:
    """systemd doesn't open sshd to the hypervisor (AF_VSOCK), which would bypass every firewall."""
    name = "systemd-ssh-generator"
    mask = tree.get(f"/etc/systemd/system-generators/{name}")
    assert f"/usr/lib/systemd/system-generators/{name}" not in tree or (mask and mask.link == "/dev/null")


@offline
@booted
@with_system
def test_no_trust_by_host_name(tree: Tree) -> None:
    """No host is trusted because of its name."""
    nothing(tree.matching(r"(/root|/home/[^/]+)/\.[rs]hosts|/etc/(hosts|shosts)\.equiv"))


@offline
@booted
@with_system
def test_modules_are_denied(host: Host, v: V) -> None:
    """Denied modules can be loaded neither by name nor by alias."""
    lines = {" ".join(line.split()) for line in output_once(host, "modprobe --showconfig").splitlines()}
    expected = [
        f"{how} {m}{end}"
        for m in v["hardening_denied_modules"]
        for how, end in (("install", " /bin/false"), ("blacklist", ""))
    ]
    assert expected, "no module is denied"
    nothing(line for line in expected if line not in lines)


@offline
@booted
@with_system
def test_needed_modules_are_not_denied(host: Host, v: V) -> None:
    """No configuration denies the modules for UDF (Azure's data), FAT (the ESP) or containers."""
    needed = {
        name.replace("-", "_")
        for name in ["udf", "vfat", *v["__hardening_needed_modules"], *v["system_modules"]]
    }
    lines = (line.split() for line in output_once(host, "modprobe --showconfig").splitlines())
    denied = [w for w in lines if w and w[0] in ("install", "blacklist") and w[1].replace("-", "_") in needed]
    nothing(" ".join(fields) for fields in denied)


@offline
@booted
@with_system
def test_hardening_sysctls_are_configured(host: Host, v: V) -> None:
    """Every declared kernel protection is set at boot, and no later file overrides it."""
    expected = {name: str(value) for name, value in v["hardening_sysctl"].items()}
    nothing(differences(expected, boot_sysctls(host)))


@offline
@booted
@with_system
def test_declared_file_modes(tree: Tree, v: V) -> None:
    """Every declared file has its declared mode and belongs to root."""
    modes = {path: int(mode, 8) for path, mode in v["hardening_file_modes"].items()}
    nothing(
        f"{path} {tree[path].mode:o}"
        for path, mode in modes.items()
        if (tree[path].mode, tree[path].uid) != (mode, 0)
    )


@offline
@booted
def test_account_files_are_protected(host: Host, tree: Tree) -> None:
    """Everybody can read the account names, but only root and the group shadow can read the password hashes."""
    groups = {line.split(":")[0]: line.split(":")[2] for line in read(host, "/etc/group").splitlines()}
    shadow = int(groups["shadow"])
    expected = {
        "/etc/passwd": (0o644, 0, 0),
        "/etc/group": (0o644, 0, 0),
        "/etc/shadow": (0o640, 0, shadow),
        "/etc/gshadow": (0o640, 0, shadow),
    }
    actual = {path: (tree[path].mode, tree[path].uid, tree[path].gid) for path in expected}
    nothing(differences(expected, actual))


@offline
@booted
def test_root_is_the_only_root(host: Host) -> None:
    """No other account has root's id, and no two accounts share an id."""
    users = [line.split(":") for line in read(host, "/etc/passwd").splitlines()]
    assert [user[0] for user in users if user[2] == "0"] == ["root"]
    ids = [user[2] for user in users]
    nothing(f"{user[0]} shares {user[2]}" for user in users if ids.count(user[2]) > 1)


@offline
@booted
def test_system_accounts_have_no_shell(host: Host) -> None:
    """No system account has a login shell."""
    closed = ("/usr/sbin/nologin", "/sbin/nologin", "/bin/false", "/usr/bin/false", "/bin/sync")
    users = [line.split(":") for line in read(host, "/etc/passwd").splitlines()]
    daemons = [user for user in users if 0 < int(user[2]) < 1000 or int(user[2]) >= 60000]
    nothing(f"{user[0]} {user[6]}" for user in daemons if user[6] not in closed)


@offline
@booted
def test_system_files_are_roots_to_write(tree: Tree) -> None:
    """Only a file's owner and root's group can change programs or configuration."""
    actual = tree.where(
        lambda s: s.kind in "fd" and bool(s.mode & 0o002 or (s.mode & 0o020 and s.gid)),
        *("/usr", "/etc", "/boot", "/opt"),
    )
    nothing(f"{e.path} {e.uid}:{e.gid} {e.mode:o}" for e in actual)


@offline
@booted
def test_programs_belong_to_root(tree: Tree) -> None:
    """Every program, library and unit belongs to root."""
    actual = tree.where(lambda s: s.uid != 0, "/usr", "/boot", "/opt", "/etc/systemd")
    nothing(f"{e.path} {e.uid}" for e in actual)


@offline
@booted
@needs("system", azure_guest_cloud_init=True)
def test_sudo_is_sound(host: Host) -> None:
    """sudo accepts its rules."""
    output_once(host, "visudo --check --quiet")


@offline
@needs("system", azure_guest_cloud_init=True)
def test_nobody_is_sudoer_by_default(host: Host) -> None:
    """The image lets nobody become root without a password; only first boot may allow it."""
    actual = host.run("grep -rhE '^[^#].*NOPASSWD' /etc/sudoers /etc/sudoers.d")
    assert actual.rc == 1, f"{actual.stdout}{actual.stderr}"


@booted
@with_system
def test_hardening_sysctls_are_live(host: Host, v: V) -> None:
    """The running kernel has the declared protections."""
    expected = {name: str(value) for name, value in v["hardening_sysctl"].items()}
    nothing(differences(expected, live_sysctls(host, v)))


@booted
@with_system
def test_denied_modules_stay_out(host: Host, v: V) -> None:
    """No denied module is loaded, and modprobe wouldn't load any that the kernel has."""
    loaded = {line.split()[0] for line in read(host, "/proc/modules").splitlines()}
    nothing(module for module in v["hardening_denied_modules"] if module in loaded)
    command = "for m in {}; do modprobe --dry-run --verbose $m 2>/dev/null; done; true"
    lines = output(host, command.format(" ".join(v["hardening_denied_modules"]))).splitlines()
    # The dependencies of a denied module are loaded before it is denied.
    loadable = {line.split()[1].rpartition("/")[2].partition(".")[0] for line in lines if "insmod " in line}
    nothing(sorted(loadable & set(v["hardening_denied_modules"])))
