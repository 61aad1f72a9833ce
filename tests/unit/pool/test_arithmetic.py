"""The figures of a rollout of 7,500 hosts: those that a person gets with pen and paper, and the page's."""

from __future__ import annotations

import math

import pytest

from image_builder.pool.plan.policy import Policy
from image_builder.settings import REPO_ROOT
from tests.bench.pools import by_hand

PAGE = REPO_ROOT / "docs/reference/pools.md"
HOSTS, CANARIES = 7500, 8
JOINS_A_SECOND, CADENCE_MINUTES = 5, 4
# Canaries, 1 %, 5 %, then no wave of more than 600: the rest of 7,042 hosts is twelve.
EARLY = (CANARIES, 75, 375)
LATE = math.ceil((HOSTS - sum(EARLY)) / 600)
LAST = HOSTS - sum(EARLY) - (LATE - 1) * 600
# Soaks of 15, 10 and 10 minutes, each after the wave's last join slot and the minute in which hosts join; then a wave
# every four minutes; finally the last wave's slots and its minute.
MINUTES = (
    sum(hosts / JOINS_A_SECOND / 60 + 1 + soak for hosts, soak in zip(EARLY, (15, 10, 10), strict=True))
    + (LATE - 1) * CADENCE_MINUTES
    + LAST / JOINS_A_SECOND / 60
    + 1
)
EXPECTED = {
    "scale sets of 100": "75",
    "waves": f"15: 8, 75, 375, {LATE} x <= 600",
    "image replicas (one for 50 VMs at once)": "12",
    "joins: cap, mean of a full wave": "5/s, 2.5/s",
    "jitter window of the largest wave": "120 s",
    "clock, lower bound by the join rate": "25 min",
    "clock, with soaks and cadence": f"{MINUTES:.0f} min",
    "  and 10 min of active preflight": f"{MINUTES + 10:.0f} min",
    # A lease every 10 s, a status every 5 min: the kubelet's own defaults.
    "leases once joined": "750 PUT/s",
    "node status once joined": "25/s",
    # 17 GB each.
    "image bytes, were they pulled": "127.5 TB",
    "  at 100 Gbit/s": "2.8 h",
    # 2 % of each, and a tenth at once.
    "budget of the run, of a full wave": "150, 12",
    "unavailable at once": "750",
}


@pytest.fixture(scope="module")
def table() -> list[tuple[str, str]]:
    return by_hand(HOSTS, Policy())


def test_the_arithmetic_is_that_of_pen_and_paper(table: list[tuple[str, str]]) -> None:
    assert (LATE, LAST) == (12, 442)
    assert dict(table) == EXPECTED


def test_the_page_has_the_table_as_it_is_printed(table: list[tuple[str, str]]) -> None:
    printed = "".join(f"  {label:<42}{value}\n" for label, value in table)
    assert f"{HOSTS} hosts, by arithmetic\n{printed}\n" in PAGE.read_text(encoding="utf-8")
