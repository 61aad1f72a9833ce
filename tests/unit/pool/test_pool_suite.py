"""What the suite's runs do with a host before any program is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.errors import VerifyError
from image_builder.pool.hostkeys import Pinned
from image_builder.pool.model import Host, failed
from image_builder.pool.reach import Access
from image_builder.pool.suite import NO_RESULT, Runs, Suite


def test_an_address_of_any_letters_is_one_hosts_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run raises beyond its host's outcome ends the whole rollout."""

    def observe(*_: object) -> None:
        raise VerifyError("not asked here")

    monkeypatch.setattr(Runs, "_observe", observe)
    host = Host(name="a", address="gpü.example", pool="p", scale_set="s", vm_size="D16", image="w", vm_id="0")
    runs = Runs(Suite({"w": tmp_path / "facts.json"}, tmp_path, Path("python")))
    access = Access("root", tmp_path / "key", Pinned(tmp_path / "known"))
    line = f"{host.address} ssh-ed25519 AAAA\n"
    assert runs.run(host, access, line, 5) == failed("verify", NO_RESULT, "not asked here")
    assert (tmp_path / "a" / "known_hosts").read_text(encoding="utf-8") == line
