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
        "-A INPUT ! -i lo -j traffic-in",
        "-A FORWARD -j traffic-in",
        "-A OUTPUT ! -o lo -j traffic-out",
        "-A FORWARD -j traffic-out",
        f'-A traffic-in -s 10.0.0.0/8 {comment}internal-in" -j RETURN',
        f'-A traffic-in {comment}internet-in" -j RETURN',
        f'-A traffic-out -d 10.0.0.0/8 {comment}internal-out" -j RETURN',
        f'-A traffic-out {comment}internet-out" -j RETURN',
    ):
        assert rules.count(rule) == 1, rule


def test_packets_are_counted_and_pass(host: Host) -> None:
    link = (
        "ip link add net0 type veth peer name net1; ip address add 192.0.2.1/24 dev net0; ip link set net0 up"
    )
    send = f"{link}; ip link set net1 up; ping -c 1 -W 1 -q 192.0.2.2 || true"  # nobody answers
    rules = isolated(host, f"{START}; ({send}) >&2; {LIST} --verbose")
    internet = [rule for rule in rules if "traffic=internet-out" in rule]
    assert len(internet) == 1 and " -c 0 0" not in internet[0]


def test_what_stays_on_the_host_is_not_counted(host: Host) -> None:
    send = "ip link set lo up; ping -c 2 -q 127.0.0.1"
    rules = isolated(host, f"{START}; {send} >&2; {LIST} --verbose")
    counters = [rule for rule in rules if "traffic=" in rule]
    assert len(counters) == 4 and all(" -c 0 0" in rule for rule in counters), counters


def test_restart_leaves_each_rule_once_and_others_alone(host: Host) -> None:
    other = "iptables --table mangle --append OUTPUT --jump ACCEPT"
    rules = isolated(host, f"{other}; {START}; {STOP}; {START}; {LIST}")
    assert rules.count("-A OUTPUT -j ACCEPT") == 1
    assert rules.count("-A INPUT ! -i lo -j traffic-in") == 1
    rules = isolated(host, f"{other}; {START}; {STOP}; {LIST}")
    assert [rule for rule in rules if not rule.startswith("-P")] == ["-A OUTPUT -j ACCEPT"]


def test_restart_replaces_the_rules_of_an_earlier_unit(host: Host) -> None:
    """They counted what stays on the host, too."""
    earlier = START.replace(" | ", " | sed 's/ ! --[a-z]*-interface lo//' | ")
    rules = isolated(host, f"{earlier}; {LIST}")
    assert {"-A INPUT -j traffic-in", "-A OUTPUT -j traffic-out"} < set(rules)
    rules = isolated(host, f"{earlier}; {STOP}; {START}; {LIST}")
    assert rules == isolated(host, f"{START}; {LIST}")
