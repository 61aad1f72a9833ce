"""A record of a manual run belongs to the code that it was made with, and a page says when that code has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.settings import REPO_ROOT
from tests.support import provenance
from tests.support.provenance import Subject

SUBJECT = Subject(("image_builder/part/command.py",), "tests/part/run.py", ("roles/part",))
FILES = {
    "image_builder/part/__init__.py": "",
    "image_builder/part/command.py": "from image_builder.part import near\n",
    "image_builder/part/near.py": "def run():\n    from image_builder.far import distant\n",
    "image_builder/part/sizes.json": "{}",
    "image_builder/part/beside.py": "",
    "image_builder/far.py": "distant = 1\n",
    "image_builder/other.py": "",
    "tests/part/run.py": "from image_builder import other\nfrom tests.part import steps, page\n",
    "tests/part/steps.py": "",
    "tests/part/page.py": "",
    "tests/part/record.json": "{}",
    "roles/part/tasks/main.yml": "[]",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("image_builder/part/near.py", "from image_builder.far import distant\n", True),
        ("image_builder/far.py", "distant = 2\n", True),
        ("image_builder/far.py", "distant = 1  # as before\n", False),
        ("image_builder/part/sizes.json", "[]", True),
        ("image_builder/part/beside.py", "a = 1\n", False),
        ("image_builder/other.py", "a = 1\n", False),
        ("tests/part/steps.py", "a = 1\n", True),
        ("tests/part/page.py", "a = 1\n", False),
        ("tests/part/record.json", "[]", False),
        ("roles/part/tasks/main.yml", "[{}]", True),
        ("roles/part/tasks/more.yml", "[]", True),
    ],
)
def test_a_digest_is_of_what_is_imported_and_what_judges(
    checkout: Path, name: str, text: str, counts: bool
) -> None:
    before = provenance.digest(SUBJECT, checkout)
    (checkout / name).write_text(text)
    assert (provenance.digest(SUBJECT, checkout) != before) is counts


def test_a_place_that_is_gone_is_an_error(checkout: Path) -> None:
    (checkout / "tests/part/run.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"tests/part/run\.py"):
        provenance.digest(SUBJECT, checkout)


@pytest.mark.parametrize(
    ("subject", "names"),
    [
        (
            provenance.JOIN,
            "image_builder/node/net/imds.py image_builder/node/files.py image_builder/node/net/retry.py "
            "image_builder/cluster/gate/approver.py tests/e2e/join_machine.py tests/support/control_plane/gates.py",
        ),
        (
            provenance.LOCAL_DISK,
            "image_builder/node/mounts.py image_builder/node/child.py image_builder/node/report.py "
            "image_builder/node/gpu/sizes.json tests/boot/steps.py tests/boot/rows.py tests/support/disks/foreign.py "
            "tests/boot/guest/probe.py",
        ),
        (provenance.PENDING_PODS, "image_builder/bake/pull/retry.py tests/e2e/machine.py tests/e2e/link.py"),
        (
            provenance.ROLL,
            "image_builder/pool/steps/roll.py image_builder/pool/scale_set/roll.py tests/e2e/roll_facts.py "
            "tests/support/arm/scale_sets.py",
        ),
        (
            provenance.SLICES,
            "image_builder/pool/steps/slice.py tests/e2e/slices_run.py tests/support/slices_howto.py",
        ),
    ],
    ids=["join", "local disk", "pending pods", "roll", "slices"],
)
def test_a_page_says_that_its_record_is_of_earlier_code(subject: Subject, names: str) -> None:
    assert {REPO_ROOT / name for name in names.split()} <= subject.files()
    assert provenance.note({"code": provenance.digest(subject)}, subject) == []
    assert "From earlier code" in "".join(provenance.note({"code": "0" * 64}, subject))
    assert "From earlier code" in "".join(provenance.note({}, subject))
