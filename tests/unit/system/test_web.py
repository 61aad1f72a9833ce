"""The way outside: the host's environment takes precedence over what a definition declares."""

from __future__ import annotations

import pytest
import urllib3

from image_builder.system.web import Outbound, pool

DECLARED = Outbound({"https_proxy": "http://declared.test:3128", "no_proxy": ".direct.test"})


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def _proxy(url: str, outbound: Outbound) -> str | None:
    found = pool(url, outbound).proxy
    return found.host if found else None


def test_a_declared_proxy_counts_for_its_scheme_and_with_its_exceptions() -> None:
    assert _proxy("https://registry.test", DECLARED) == "declared.test"
    assert _proxy("https://registry.test", Outbound()) is None
    assert _proxy("http://registry.test", DECLARED) is None
    assert _proxy("https://a.direct.test", DECLARED) is None


def test_each_variable_of_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@here.test:3128")
    assert _proxy("https://registry.test", DECLARED) == "here.test"
    assert _proxy("https://a.direct.test", DECLARED) is None
    monkeypatch.setenv("no_proxy", "*")
    assert _proxy("https://registry.test", DECLARED) is None


def test_declared_authorities_join_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_builder.system.web.trusted_authorities", lambda: b"the host's\n")
    connections = pool("https://registry.test", Outbound(authorities=b"declared\n"))
    assert isinstance(connections, urllib3.PoolManager)
    assert connections.connection_pool_kw["ca_cert_data"] == "the host's\ndeclared\n"
    assert "ca_cert_data" not in pool("https://registry.test").connection_pool_kw
