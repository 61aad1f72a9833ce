"""A record of a run by hand is about the code that it was made with, and a page says when that has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import provenance


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "package/__pycache__").mkdir(parents=True)
    (tmp_path / "package/module.py").write_text("a = 1\n")
    (tmp_path / "package/__pycache__/module.pyc").write_text("made")
    return tmp_path


def test_a_digest_is_of_names_and_bytes_and_nothing_that_is_made(checkout: Path) -> None:
    before = provenance.digest(["package"], checkout)
    (checkout / "package/__pycache__/module.pyc").write_text("made again")
    assert provenance.digest(["package"], checkout) == before
    (checkout / "package/module.py").write_text("a = 2\n")
    changed = provenance.digest(["package"], checkout)
    (checkout / "package/module.py").rename(checkout / "package/other.py")
    assert len({before, changed, provenance.digest(["package"], checkout)}) == 3
    with pytest.raises(FileNotFoundError):
        provenance.digest(["gone"], checkout)


@pytest.mark.parametrize(
    "places", [provenance.JOIN, provenance.SLICES, provenance.LOCAL_DISK, provenance.PENDING_PODS]
)
def test_a_page_says_that_its_record_is_of_earlier_code(places: tuple[str, ...]) -> None:
    assert provenance.note({"code": provenance.digest(places)}, places) == []
    assert "not run again" in "".join(provenance.note({"code": "0" * 64}, places))
    assert "not run again" in "".join(provenance.note({}, places))
