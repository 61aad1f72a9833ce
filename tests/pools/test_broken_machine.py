"""A machine is broken in the ways that a user has recorded: a check that isn't shown to detect any of them is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from image_builder.errors import VerifyError
from image_builder.machine.ssh import SshAddress
from image_builder.verify.runner import require_red
from tests.support.pools.fleet import USER, Fleet

pytestmark = [pytest.mark.root, pytest.mark.hosts]

CHECKS = """\
import pytest
from suite import booted, offline

@booted
def test_first(host):
    assert not host.file("/run/first").exists

@booted
@pytest.mark.parametrize("word", ["one", "second-sound"])
def test_second(host, word):
    assert host.check_output(f"echo {word}") == word
    assert not host.file("/run/second").exists

@offline
@booted
def test_of_the_tree(host):
    assert False, "it was seen red on a sealed tree"
"""
RAISED = {"break": "touch /run/first", "mend": "rm /run/first"}
Mutations = Mapping[str, Sequence[str | Mapping[str, str]]]


@pytest.fixture
def prove(pool: Fleet, tmp_path: Path) -> Iterator[Callable[[Mutations], None]]:
    """Return a function that runs the machine's checks against these mutations."""
    host, known_hosts, checks = pool.hosts[0], tmp_path / "known_hosts", tmp_path / "checks"
    known_hosts.write_text(f"{host.address} {(pool.folder / 'host-0.pub').read_text()}")
    facts = {"image": "x", "build_id": "0", "packages": [], "variables": {"image_layers": []}}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    checks.mkdir()
    (checks / "test_own.py").write_text(CHECKS)
    url = SshAddress(USER, host.address, host.port, pool.key, known_hosts).url

    def judge(mutations: Mutations) -> None:
        (checks / "mutations.yml").write_text(json.dumps({**mutations, "test_of_the_tree": ["false"]}))
        require_red(
            f"broken:{url}",
            tmp_path / "facts.json",
            tmp_path,
            checks,
            marker="booted",
            python=Path(sys.executable),
            log=tmp_path / "log",
            timeout=300,
        )

    yield judge
    pool.run(0, "rm", "-f", "/run/first", "/run/second", "/run/both")


def unproven(prove: Callable[[Mutations], None], mutations: Mutations) -> dict[str, str]:
    """Return what is reported about each check that nothing shows to be able to fail."""
    with pytest.raises(VerifyError) as error:
        prove(mutations)
    assert "mutations.yml must turn its check red" in str(error.value.hint)
    first, *lines = error.value.message.splitlines()
    assert first == "nothing shows that these checks of your own can fail:"
    return dict(line.strip().removeprefix("test_own.py::").split(": ", 1) for line in lines if "::" in line)


def test_each_check_is_seen_green_and_then_red(prove: Callable[[Mutations], None], pool: Fleet) -> None:
    prove(
        {
            "test_second": [{"break": "touch /run/second", "mend": "rm /run/second"}],
            "test_first": [RAISED] * 2,
        }
    )
    assert pool.run(0, "ls", "/run").split().count("first") == 0, "what was broken is mended"
    prove({"test_first": [RAISED, "touch /run/first"]})


@pytest.mark.parametrize(
    ("mutations", "expected"),
    [
        ({"test_first": [RAISED, "touch /run/other"]}, {"test_first[1-broken]": "passed"}),
        (
            {"test_first": ["touch /run/first", RAISED]},
            {"test_first[1-sound]": "failed: "},
        ),
        (
            {"test_first": ["touch /run/both /run/first"], "test_second": ["mv /run/first /run/second"]},
            {"test_second[second-sound-0-broken]": "error: RuntimeError: mv"},
        ),
        (
            {"test_first": ["rm /run/nothing"]},
            {"test_first[0-broken]": "error: RuntimeError: rm /run/nothing"},
        ),
        (
            {"test_first": [{**RAISED, "mend": "rm /run/first /run/nothing"}]},
            {"test_first[0-broken]": "error: RuntimeError: rm /run/first /run/nothing: ended with 1"},
        ),
    ],
    ids=["blind", "not mended", "by parameter", "not broken", "not to be mended"],
)
def test_what_shows_nothing_is_named(
    prove: Callable[[Mutations], None], mutations: Mutations, expected: Mapping[str, str]
) -> None:
    said = unproven(prove, mutations)
    for check, outcome in expected.items():
        assert said[check].startswith(outcome), said
