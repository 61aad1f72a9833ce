"""The unit of the role network_accounting; its molecule scenario has the rules in a real kernel."""

from __future__ import annotations

from tests.support.roles import templates


def test_what_stays_on_the_host_is_not_counted() -> None:
    """The traffic of local clients would count as the internet's: 127.0.0.0/8 is none of the internal networks."""
    for item in templates.value("network_accounting", "__network_accounting_units"):
        lines = templates.render(
            "network_accounting", "network-accounting.service.j2", item=item
        ).splitlines()
        program = f"ExecStop=-/usr/sbin/{item['family']['program']} --wait --table mangle --delete"
        for hook, chain in (
            ("INPUT ! --in-interface lo", "traffic-in"),
            ("FORWARD", "traffic-in"),
            ("OUTPUT ! --out-interface lo", "traffic-out"),
            ("FORWARD", "traffic-out"),
        ):
            assert lines.count(f"StandardInputText=--append {hook} --jump {chain}") == 1, hook
            assert lines.count(f"{program} {hook} --jump {chain}") == 1, hook
