"""The kernel's packet rules as iptables lists them, and which ones may let a TCP packet by before a given rule."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple

# Targets after which a packet is gone, or goes on to the next rule.
_LETS_NOTHING_BY = {
    "",
    "DROP",
    "REJECT",
    "CLASSIFY",
    "CONNMARK",
    "DSCP",
    "LOG",
    "MARK",
    "NFLOG",
    "TCPMSS",
    "TRACE",
}
# Options that don't narrow a rule.
_NOTES = frozenset(("-m", "--comment", "-c", "-j"))


class Rule(NamedTuple):
    """A rule; ``options`` has each option's value by its name, with ``! `` before a negated one."""

    options: Mapping[str, str]
    text: str

    @property
    def target(self) -> str:
        return self.options.get("-j", "")

    def drops(self, address: str, ports: str) -> bool:
        """Return whether the rule drops all TCP packets to the ports of an address, whatever else they are."""
        expected = {"-d": f"{address}/32", "-p": "tcp", "--dports": ports}
        actual = {name: value for name, value in self.options.items() if name not in _NOTES}
        return self.target == "DROP" and actual == expected

    def may_match(self, address: str, port: int) -> bool:
        """Return whether a TCP packet to this address and port may match; conditions on anything else count as met."""
        fits: Mapping[str, Callable[[str], bool]] = {
            "-d": lambda value: ip_address(address) in ip_network(value, strict=False),
            "-p": lambda value: value in ("tcp", "6", "all", "0"),
            "--dport": lambda value: _has(value, port),
            "--dports": lambda value: _has(value, port),
        }
        return all(
            fits[name.removeprefix("! ")](value) is not name.startswith("! ")
            for name, value in self.options.items()
            if name.removeprefix("! ") in fits
        )


def _has(ports: str, port: int) -> bool:
    ranges = (part.partition(":") for part in ports.split(","))
    return any(int(low or 0) <= port <= int((high or 65535) if colon else low) for low, colon, high in ranges)


def parse(listed: str) -> dict[str, list[Rule]]:
    """Return the rules of each chain, in order, from the output of ``iptables --list-rules``."""
    chains: dict[str, list[Rule]] = {}
    for line in listed.splitlines():
        arguments = shlex.split(line)
        if arguments[:1] in (["-P"], ["-N"]):
            chains.setdefault(arguments[1], [])
        elif arguments[:1] == ["-A"]:
            chains.setdefault(arguments[1], []).append(Rule(_options(arguments[2:]), line))
    return chains


def _options(arguments: list[str]) -> dict[str, str]:
    actual: dict[str, str] = {}
    name, negation = "", ""
    for word in arguments:
        if word == "!":
            negation = "! "
        elif word.startswith("-") and not word.lstrip("-").isdigit():
            name, negation = negation + word, ""
            actual[name] = ""
        else:
            actual[name] = f"{actual[name]} {word}".strip()
    return actual


def ways_by(
    chains: Mapping[str, list[Rule]], rules: list[Rule], address: str, port: int, *, is_called: bool = False
) -> Iterator[str]:
    """Yield the rules in ``rules`` and the chains they call that may let a TCP packet to this address and port by.

    In a called chain RETURN is harmless: the packet goes on after the call.
    """
    harmless = _LETS_NOTHING_BY | ({"RETURN"} if is_called else set())
    for rule in rules:
        if not rule.may_match(address, port):
            continue
        goes_to = rule.options.get("-g", "")
        if rule.target in chains or (goes_to and is_called):
            yield from ways_by(chains, chains[rule.target or goes_to], address, port, is_called=True)
        elif goes_to or rule.target not in harmless:
            yield rule.text
