"""Exceptions to the hygiene checks, each with its reason. Patterns match whole paths."""

from __future__ import annotations

import re


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


# Programs that change identity: those that Debian's packages install, and no others.
SUID_SGID = {
    "/usr/bin/chage": 0o2755,
    "/usr/bin/chfn": 0o4755,
    "/usr/bin/chsh": 0o4755,
    "/usr/bin/crontab": 0o2755,
    "/usr/bin/dotlockfile": 0o2755,
    "/usr/bin/expiry": 0o2755,
    "/usr/bin/fusermount3": 0o4755,
    "/usr/bin/gpasswd": 0o4755,
    "/usr/bin/mount": 0o4755,
    "/usr/bin/newgidmap": 0o4755,
    "/usr/bin/newgrp": 0o4755,
    "/usr/bin/newuidmap": 0o4755,
    "/usr/bin/ntfs-3g": 0o4755,
    "/usr/bin/nvidia-modprobe": 0o4755,  # creates the GPUs' devices for any user of a CUDA program
    "/usr/bin/passwd": 0o4755,
    "/usr/bin/ssh-agent": 0o2755,
    "/usr/bin/su": 0o4755,
    "/usr/bin/sudo": 0o4755,
    "/usr/bin/umount": 0o4755,
    "/usr/lib/dbus-1.0/dbus-daemon-launch-helper": 0o4754,
    "/usr/lib/openssh/ssh-keysign": 0o4755,
    "/usr/lib/polkit-1/polkit-agent-helper-1": 0o4755,
    "/usr/sbin/mount.nfs": 0o4755,
    "/usr/sbin/pam_extrausers_chkpwd": 0o2755,
    "/usr/sbin/unix_chkpwd": 0o2755,
}

# What Calico copies to the nodes of its cluster: its plugins, and a driver next to the kubelet's.
CALICO_SUID = {
    f"{folder}/{name}": 0o4755
    for folder in ("/usr/lib/cni", "/opt/cni/bin")
    for name in ("calico", "calico-ipam", "install")
}
CALICO_UNOWNED = _any_of(r"/usr/libexec/kubernetes/kubelet-plugins/volume/exec/nodeagent~uds(/.*)?")

# Programs with file capabilities, and which ones (capabilities(7)), as a mask.
FILE_CAPABILITIES = {
    "/usr/bin/ping": 1 << 13,  # CAP_NET_RAW
}

# Directories that anyone may write to; all of them sticky.
STICKY = _any_of(
    "/tmp",
    "/var/tmp",
    "/var/crash",
    "/dev/shm",
    "/run/lock",
    "/var/lock",
    r"/tmp/\.(X11|ICE|XIM|font)-unix",
    r"/tmp/systemd-private-[^/]+/tmp",  # Debian 12 has /tmp on the root filesystem
    r"/var/tmp/.*",  # private ones of services and of cloud-init; in a sealed tree they may hold no files
)

# Links whose targets exist only on a running machine, or that Debian's packages ship dead.
DEAD_LINKS = _any_of(
    r"/var/lib/wtmpdb/wtmp\.db",  # the first login creates the log that it points to
    "/etc/mtab",  # /proc/self/mounts; dead where /proc isn't mounted
    r"/etc/resolv\.conf",  # the stub of systemd-resolved, below /run
    r"/etc/(vconsole\.conf|default/locale|localtime)",  # keyboard, locale: packages that an image may lack
    r"/etc/systemd/system/.*",  # masks and aliases; test_boot looks for failed units
    r"/usr/share/doc/.*",  # documentation may be excluded by dpkg's path filters
    r"/usr/share/man/.*",
    r"/usr/share/(keyrings|zoneinfo|locale|info)/.*",
    r"/(usr/)?lib/modules/[^/]+/(build|source)",  # kernel headers, which an image doesn't have
    r"/var/(run|lock)(/.*)?",
    r"/var/log/README",
    r"/var/lib/dbus/machine-id",
    r"/var/lib/(docker|containerd|kubelet)/.*",
    r"/usr/lib/python3(\.\d+)?/.*",
    r"/usr/share/bash-completion/.*",
)

# Files below /usr that no package owns: created by triggers and postinst scripts, or shipped by our roles.
UNOWNED = _any_of(
    r"/usr/lib(exec)?/.*/__pycache__/.*|/usr/share/.*/__pycache__/.*|.*/__pycache__",
    r"/usr/lib/modules/[^/]+/modules\.(alias|builtin\.alias|builtin\.alias\.bin|builtin\.bin|dep|devname|softdep|symbols|weakdep)(\.bin)?",
    r"/usr/lib/modules/[^/]+/(modules\.alias\.bin|modules\.symbols\.bin)",
    r"/usr/lib/modules/[^/]+/updates(/dkms(/nvidia(-\w+)*\.ko)?)?",  # built by the bake; test_gpu checks them
    r"/usr/lib(32|64|x32)",  # Debian 12's packages have /lib64, which is a link to it
    r"/usr/lib/udev/hwdb\.bin|/usr/lib/systemd/catalog/database",
    r"/usr/lib/locale/(C\.utf8|locale-archive)(/.*)?",
    r"/usr/share/info/dir(\.old)?|/usr/share/mime/.*|/usr/share/applications/mimeinfo\.cache",
    r"/usr/share/glib-2\.0/schemas/gschemas\.compiled|/usr/lib/x86_64-linux-gnu/gio/modules/giomodule\.cache",
    r"/usr/lib/(x86_64-linux-gnu/)?(gconv/gconv-modules\.cache|gdk-pixbuf.*)",
    r"/usr/share/(bash-completion|perl5|vim)/.*\.(cache|tags)",
    r"/usr/lib/ssl/(cert|certs|private).*",
    r"/usr/(bin|sbin|lib)/(awk|nawk|pager|editor|vi|ex|view|rmt|which|iptables.*|ip6tables.*|arptables.*|ebtables.*)",
    r"/usr/share/man/.*|/usr/lib/cni(/.*)?",
    r"/usr/share/python3/runtime\.d/.*|/usr/share/keyrings/.*",
    r"/usr/libexec/kubernetes(/kubelet-plugins(/volume(/exec)?)?)?",  # the kubelet creates it when it starts
    r"/usr/local(/.*)?",  # test_no_stray_local_files checks it
)
