"""How many nodes may be tested at once, which, and when it must stop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.cluster.gate.retest import Candidate, Limits, Outcome, cap, grant, is_open

LIMITS = Limits(share=0.02, period=100, window=50, least=5, failing=0.2)
NOW = 1000.0


@pytest.mark.parametrize(("fleet", "most"), [(0, 0), (1, 1), (49, 1), (100, 2), (7500, 150)])
def test_cap(fleet: int, most: int) -> None:
    assert cap(fleet, LIMITS) == most


@pytest.mark.parametrize(
    ("outcomes", "opened"),
    [
        ([], False),
        ([(NOW, False)] * 4, False),
        ([(NOW, False)] * 5, True),
        ([(NOW, False)] * 2 + [(NOW, True)] * 8, False),
        ([(NOW, False)] * 3 + [(NOW, True)] * 8, True),
        ([(NOW - 51, False)] * 20, False),
    ],
)
def test_breaker(outcomes: list[tuple[float, bool]], opened: bool) -> None:
    assert is_open([Outcome(*outcome) for outcome in outcomes], NOW, LIMITS) is opened


def test_the_longest_untested_of_the_idle_come_first() -> None:
    granted = [
        Candidate("busy", 0, False),
        Candidate("new", NOW - 99, True),
        Candidate("old", 10, True),
        Candidate("older", 5, True),
    ]
    fleet = granted + [Candidate(f"n{n}", NOW, True) for n in range(96)]
    assert grant(fleet, [], NOW, LIMITS) == ["older", "old"]
    assert grant(fleet, [Outcome(NOW, False)] * 5, NOW, LIMITS) == []


@given(
    st.lists(st.builds(Candidate, st.uuids().map(str), st.floats(0, 2000), st.booleans(), st.booleans())),
    st.floats(0.001, 1),
)
def test_never_more_than_the_cap_are_under_test(fleet: list[Candidate], share: float) -> None:
    limits = Limits(share=share, period=100)
    under = sum(candidate.under_test for candidate in fleet)
    granted = grant(fleet, [], NOW, limits)
    assert under + len(granted) <= max(under, cap(len(fleet), limits))
    assert len(set(granted)) == len(granted)
