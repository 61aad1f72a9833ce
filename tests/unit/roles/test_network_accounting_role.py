"""The unit of the role network_accounting; its molecule scenario has the rules in a real kernel."""

from __future__ import annotations

import re

from tests.support.roles import templates


def test_what_stays_on_the_host_is_not_counted() -> None:
    """The traffic of local clients would count as the internet's: 127.0.0.0/8 is none of the internal networks."""
    for item in templates.value("network_accounting", "__network_accounting_units"):
        lines = templates.render(
            "network_accounting", "network-accounting.service.j2", item=item
        ).splitlines()
        for hook, chain in (
            ("INPUT ! --in-interface lo", "traffic-in"),
            ("FORWARD", "traffic-in"),
            ("OUTPUT ! --out-interface lo", "traffic-out"),
            ("FORWARD", "traffic-out"),
        ):
            assert lines.count(f"StandardInputText=--append {hook} --jump {chain}") == 1, hook


def test_rules_of_an_earlier_unit_are_deleted() -> None:
    """Those had no `! -i lo`: beside the new ones, they would count every packet a second time."""
    for item in templates.value("network_accounting", "__network_accounting_units"):
        text = templates.render("network_accounting", "network-accounting.service.j2", item=item)
        program = item["family"]["program"]
        first = next(line for line in text.splitlines() if line.startswith("ExecStop="))
        assert first.startswith(f"ExecStop=-/bin/sh -c '{program}-save --table mangle | sed -En ")
        assert first.endswith(f" | xargs --no-run-if-empty --max-lines=1 {program}'")
        (condition,) = re.findall('"/(.*)/s/', first)
        for rule, ours in (
            ("-A INPUT -j traffic-in", True),
            ("-A OUTPUT ! -o lo -j traffic-out", True),
            ("-A FORWARD -j traffic-internal", False),
            ('-A traffic-in -m comment --comment "x traffic=internet-in" -j RETURN', False),
        ):
            assert bool(re.search(condition, rule)) is ours, rule
