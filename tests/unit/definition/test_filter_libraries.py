"""Libraries that filters of Ansible and of common collections import: a play and a plan both have them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from image_builder.definition import engine

# As the C library hashes it.
SALT, PASSWORD = "saltstring", "Hello world!"
HASH = "$6$saltstring$svn8UoSVapNtMuq1ukKS4tPQd8iKwSMHWjl/O817G3uBnIFNjnQJuesI68u4OTLiBFdcbYEdFCoEOfaS35inz1"


def test_a_password_is_hashed() -> None:
    template = f"{{{{ '{PASSWORD}' | password_hash('sha512', '{SALT}', rounds=5000) }}}}"
    assert engine.Evaluator({}).evaluate(template) == HASH


@pytest.mark.parametrize("scheme", ["sha256", "sha512", "md5", "blowfish"])
def test_passwords_are_hashed_by_each_scheme_that_a_login_knows(scheme: str) -> None:
    hashed = engine.Evaluator({}).evaluate(f"{{{{ 'secret' | password_hash('{scheme}') }}}}")
    assert str(hashed).startswith(
        {"sha256": "$5$", "sha512": "$6$", "md5": "$1$", "blowfish": "$2b$"}[scheme]
    )


@pytest.mark.parametrize(
    ("module", "use", "result"),
    [
        (
            "netaddr",
            lambda m: [str(h) for h in m.IPNetwork("10.0.0.8/30").iter_hosts()],
            ["10.0.0.9", "10.0.0.10"],
        ),
        ("netaddr", lambda m: str(m.IPNetwork("fd00::1/64").network), "fd00::"),
        (
            "jmespath",
            lambda m: m.search("pools[?gpus > `0`].name", {"pools": [{"name": "a", "gpus": 8}]}),
            ["a"],
        ),
    ],
    ids=["ansible.utils.usable_range", "ansible.utils.ipaddr", "community.general.json_query"],
)
def test_what_filters_of_collections_import_works(module: str, use: Any, result: object) -> None:
    """As these filters use it: they are in collections, and only their libraries are ours."""
    assert use(importlib.import_module(module)) == result
