"""Traffic is counted: rules that label what is internal and what is internet traffic."""

from __future__ import annotations

from typing import Any

from answers import output_once
from questions import RULES, merged
from suite import booted, needs, nothing, offline, starts_again, starts_at_boot
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
UNIT = "network-accounting.service"

accounting = needs("system", network_accounting_enabled=True)


def _expected(v: V) -> list[tuple[str, str]]:
    """Return the address condition and label of every counting rule for IPv4, as iptables writes them."""
    expected = []
    for direction, flag in (("in", "-s"), ("out", "-d")):
        expected += [
            (f"{flag} {cidr} ", f"internal-{direction}") for cidr in v["network_accounting_internal_cidrs"]
        ]
        expected.append((f"-A traffic-{direction} -m ", f"internet-{direction}"))
    return expected


@offline
@booted
@accounting
def test_traffic_will_be_counted(host: Host, tree: Tree, v: V) -> None:
    """At every boot, a unit creates a rule for each internal network and one for the rest, in both directions."""
    assert starts_at_boot(tree, UNIT)
    lines = merged(host, f"systemd/system/{UNIT}").splitlines()
    rules = [line for line in lines if line.startswith("StandardInputText=--append ")]
    starts_again(UNIT, lines)
    comment = v["network_accounting_comment"]
    for direction, flag in (("in", "source"), ("out", "destination")):
        labels = {
            f'"{comment} traffic=internal-{direction}"': f"--{flag} {cidr} "
            for cidr in v["network_accounting_internal_cidrs"]
        }
        labels[f'"{comment} traffic=internet-{direction}"'] = f"--append traffic-{direction} --match comment"
        nothing(label for label, match in labels.items() if not any(label in r and match in r for r in rules))
    hooks = [
        f"--append {at['hook']} --jump traffic-{at['direction']}" for at in v["__network_accounting_hooks"]
    ]
    nothing(hook for hook in hooks if not any(rule.endswith(hook) for rule in rules))


@booted
@accounting
def test_traffic_is_counted(host: Host, v: V) -> None:
    """The kernel has the rules, with our comments, and outgoing packets pass them."""
    rules = output_once(host, RULES).splitlines()
    for match, label in _expected(v):
        text = f'"{v["network_accounting_comment"]} traffic={label}"'
        assert any(match in rule and text in rule for rule in rules), f"no rule for {label}"
    outgoing = [rule for rule in rules if rule.startswith("-A OUTPUT") and "-j traffic-out" in rule]
    assert outgoing and " -c 0 0 " not in outgoing[0], f"{outgoing}"
