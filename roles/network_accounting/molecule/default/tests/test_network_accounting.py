"""The role's defaults, seen in the sandbox they were applied to, and its rules in a real kernel."""

from __future__ import annotations

from testinfra.host import Host

UNIT = "/etc/systemd/system/network-accounting.service"
START = f"sed -n s/^StandardInputText=//p {UNIT} | iptables-restore --wait --noflush"
STOP = f"sed -n s/^ExecStop=-//p {UNIT} | sh -e"
LIST = "iptables --wait --table mangle --list-rules"


def isolated(host: Host, script: str) -> list[str]:
    return str(host.check_output("unshare --net sh -ec %s", script)).splitlines()


def test_rules_are_made(host: Host) -> None:
    rules = isolated(host, f"{START}; {LIST}")
    comment = '-m comment --comment "iptables-exporter node traffic='
    for rule in (
        "-A INPUT -j traffic-in",
        "-A FORWARD -j traffic-in",
        "-A OUTPUT -j traffic-out",
        "-A FORWARD -j traffic-out",
        f'-A traffic-in -s 10.0.0.0/8 {comment}internal-in" -j RETURN',
        f'-A traffic-in {comment}internet-in" -j RETURN',
        f'-A traffic-out -d 10.0.0.0/8 {comment}internal-out" -j RETURN',
        f'-A traffic-out {comment}internet-out" -j RETURN',
    ):
        assert rules.count(rule) == 1, rule


def test_packets_are_counted_and_pass(host: Host) -> None:
    send = "ip link set lo up; ping -c 2 -q 127.0.0.1"
    rules = isolated(host, f"{START}; {send} >&2; {LIST} --verbose")
    internet = [rule for rule in rules if "traffic=internet-out" in rule]
    assert len(internet) == 1 and " -c 0 0" not in internet[0]


def test_restart_leaves_each_rule_once_and_others_alone(host: Host) -> None:
    other = "iptables --table mangle --append OUTPUT --jump ACCEPT"
    rules = isolated(host, f"{other}; {START}; {STOP}; {START}; {LIST}")
    assert rules.count("-A OUTPUT -j ACCEPT") == 1
    assert rules.count("-A INPUT -j traffic-in") == 1
    rules = isolated(host, f"{other}; {START}; {STOP}; {LIST}")
    assert [rule for rule in rules if not rule.startswith("-P")] == ["-A OUTPUT -j ACCEPT"]
