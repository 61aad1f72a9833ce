"""The role's defaults, seen in the sandbox they were applied to."""

from __future__ import annotations

import json

from testinfra.host import Host

READ = "import json; from cloudinit import util; print(json.dumps(util.read_conf_with_confd('/etc/cloud/cloud.cfg')))"


def test_cloud_init_reads_its_configuration(host: Host) -> None:
    config = json.loads(host.check_output("python3 -c %s", READ))
    assert config["datasource_list"] == ["NoCloud", "Azure", "None"]
    assert config["datasource"]["Azure"]["apply_network_config"] is False
    assert config["network"] == {"config": "disabled"}
    assert config["system_info"]["default_user"]["name"] == "debian"
    assert config["system_info"]["default_user"]["sudo"] == ["ALL=(ALL) NOPASSWD:ALL"]
    assert not {"disk_setup", "mounts"} & set(config["cloud_init_modules"])


def test_pod_guard_makes_and_removes_its_rule(host: Host) -> None:
    """In the sandbox's own, empty network namespace."""
    unit = "/etc/systemd/system/azure-pod-guard.service"
    script = (
        f"sed -n s/^ExecStart=//p {unit} | sh -e; iptables --table mangle --list-rules FORWARD; echo --; "
        f"sed -n s/^ExecStop=-//p {unit} | sh -e; iptables --table mangle --list-rules FORWARD"
    )
    made, removed = host.check_output("unshare --net sh -ec %s", script).split("--\n", 1)
    assert (
        "-A FORWARD -d 168.63.129.16/32 -p tcp -m multiport --dports 80,32526" in made and "-j DROP" in made
    )
    assert "-A FORWARD -d 169.254.169.254/32 -p tcp -m multiport --dports 80 " in made
    assert "DROP" not in removed


def test_initramfs_hook_is_well_formed(host: Host) -> None:
    hook = "/etc/initramfs-tools/hooks/azure_guest"
    assert host.file(hook).mode == 0o755
    assert host.check_output(f"sh -n {hook} && {hook} prereqs") == "azure-disk"
