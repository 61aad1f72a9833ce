"""The role's defaults, seen in the sandbox they were applied to, as the programs concerned read them."""

from __future__ import annotations

from testinfra.host import Host


def test_sshd_has_the_settings(host: Host) -> None:
    settings = dict(line.split(" ", 1) for line in host.check_output("sshd -G").splitlines() if " " in line)
    assert settings["permitrootlogin"] == "no"
    assert settings["passwordauthentication"] == "no"
    assert settings["maxstartups"] == "100:30:400"
    assert "group14" not in settings["kexalgorithms"] and "curve25519-sha256" in settings["kexalgorithms"]


def test_denied_modules_can_not_be_loaded(host: Host) -> None:
    config = host.check_output("modprobe --showconfig")
    assert "install rds /bin/false" in config and "blacklist rds" in config
    assert "install vfat" not in config and "install udf" not in config


def test_files_have_their_modes(host: Host) -> None:
    assert host.file("/root").mode == 0o700
    assert host.file("/etc/ssh/sshd_config").mode == 0o600
