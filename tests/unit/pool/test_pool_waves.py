"""Waves: a partition of the hosts, canaries first, the same in every plan."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from image_builder.pool.plan.model import Host, at_least, at_most, ended, failed, quantile
from image_builder.pool.plan.policy import MAX_SLICE, Policy
from image_builder.pool.plan.waves import join_delays, plan_waves
from tests.support.pools.simulated.rollouts import make_hosts

_SHARES = st.one_of(
    st.integers(0, 900).map(str), st.decimals(0, 100, places=2, allow_nan=False).map(lambda d: f"{d:.2f}%")
)


def _host(number: int, size: str, zone: str, image: str) -> Host:
    return Host(
        name=f"n{number}",
        address=f"a{number}",
        pool="p",
        scale_set="s",
        vm_size=size,
        zone=zone,
        image=image,
    )


_HOSTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.sampled_from("xy")), max_size=120
).map(lambda cells: [_host(n, *cell) for n, cell in enumerate(cells)])
_POLICIES = st.builds(
    Policy,
    canaries=st.integers(1, 3),
    waves=st.lists(_SHARES, min_size=1, max_size=4).map(tuple),
    slice_hosts=st.integers(1, 40),
    max_unavailable=_SHARES,
    wave_budget=_SHARES,
    verify=_SHARES,
)


@given(_HOSTS, _POLICIES)
def test_every_host_is_in_one_wave_and_one_slice(hosts: list[Host], policy: Policy) -> None:
    waves = plan_waves(hosts, policy)
    assert Counter(name for wave in waves for name in wave.hosts) == Counter(h.name for h in hosts)
    most = at_least(policy.max_unavailable, len(hosts))
    for wave in waves:
        assert 1 <= len(wave.hosts) <= most
        assert set(wave.verify) <= set(wave.hosts)
        sizes = [len(part) for part in wave.slices]
        assert max(sizes) <= policy.slice_hosts and max(sizes) - min(sizes) <= 1
        assert wave.budget == at_most(policy.wave_budget, len(wave.hosts))


@given(_HOSTS, _POLICIES)
def test_canaries_come_first_and_cover_every_size_zone_and_image(hosts: list[Host], policy: Policy) -> None:
    cell = {host.name: host.cell for host in hosts}
    waves = plan_waves(hosts, policy)
    canaries = [wave for wave in waves if wave.name.startswith("canaries")]
    assert tuple(canaries) == waves[: len(canaries)]
    covered = Counter(cell[name] for wave in canaries for name in wave.hosts)
    sizes = Counter(cell.values())
    assert covered == {c: min(policy.canaries, count) for c, count in sizes.items()}
    assert all(set(wave.verify) == set(wave.hosts) for wave in canaries)


@given(_HOSTS, _POLICIES, st.randoms())
def test_the_order_of_the_inventory_changes_nothing(
    hosts: list[Host], policy: Policy, random: object
) -> None:
    mixed = list(hosts)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert plan_waves(mixed, policy) == plan_waves(hosts, policy)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_share_is_exact(part: int, total: int) -> None:
    share = f"{part / 100:.2f}%"
    assert at_most(share, total) == part * total // 10_000
    assert at_least(share, total) == max(1, -(-part * total // 10_000))
    assert at_most(str(part), total) == part


@pytest.mark.parametrize("text", ["", "-1", "5 %", "101%", "1.5", "%", "1e3", "100.1%", "five"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="must be a number of hosts or a percentage|more than all"):
        Policy(budget=text)


def test_7500_hosts_come_in_the_15_waves_that_the_documentation_counts() -> None:
    waves = plan_waves(make_hosts(7500), Policy())
    assert [len(wave.hosts) for wave in waves] == [8, 75, 375, *[600] * 11, 442]
    assert [wave.budget for wave in waves[:4]] == [0, 1, 7, 12]
    assert [wave.soak_seconds for wave in waves[:5]] == [900, 600, 600, 0, 0]
    assert [len(wave.slices) for wave in waves[2:4]] == [1, 2]
    assert MAX_SLICE == 500


def test_a_wave_is_a_sample_of_all_scale_sets() -> None:
    hosts = {host.name: host for host in make_hosts(7500)}
    wave = plan_waves(list(hosts.values()), Policy())[3]
    sets = Counter(hosts[name].scale_set for name in wave.hosts)
    # 600 hosts from 75 scale sets: 8 from each on average; in inventory order it would be 6 whole sets.
    assert len(sets) == 75 and max(sets.values()) < 24


def test_a_bring_up_verifies_all_canaries_and_a_sample_of_each_wave() -> None:
    waves = plan_waves(make_hosts(7500), Policy())
    assert [len(wave.verify) for wave in waves] == [8, 20, 38, *[60] * 11, 45]
    few = plan_waves(make_hosts(60), Policy(max_unavailable="100%", waves=("100%",)))
    assert [(len(wave.hosts), len(wave.verify)) for wave in few] == [(1, 1), (59, 20)]


def test_a_sample_is_of_all_slices_the_same_for_one_inventory_and_another_for_the_next() -> None:
    hosts = make_hosts(7500)
    wave, again, other = (plan_waves(hosts, Policy(), seed=seed)[3] for seed in ("a", "a", "b"))
    assert wave.verify == again.verify and wave.slices == other.slices
    assert not set(wave.verify) <= set(other.verify)
    assert all(len(set(part) & set(wave.verify)) > 15 for part in wave.slices)


@pytest.mark.parametrize("mode", ["verify", "check"])
def test_hosts_that_run_already_are_all_verified(mode: Literal["verify", "check"]) -> None:
    assert all(set(w.verify) == set(w.hosts) for w in plan_waves(make_hosts(7500), Policy(mode=mode)))


def test_a_policy_that_says_how_many_are_verified_is_followed() -> None:
    for policy in (Policy(verify="0%"), Policy(mode="check", verify="0%")):
        assert [len(wave.verify) for wave in plan_waves(make_hosts(7500), policy)] == [8, *[0] * 14]


def test_cells_with_canaries_behind_them_get_no_more() -> None:
    hosts = [_host(1, "a", "1", "x"), _host(2, "b", "1", "x")]
    waves = plan_waves(hosts, Policy(), covered=[hosts[0].cell], waves_before=4)
    assert [(wave.name, wave.hosts) for wave in waves] == [("canaries 4", ("n2",)), ("wave 5", ("n1",))]


@given(st.sets(st.text(min_size=1), max_size=60), st.sampled_from([0.5, 1.0, 5.0, 12.5]))
def test_join_slots_keep_the_rate(names: set[str], rate: float) -> None:
    delays = join_delays(names, rate)
    assert delays.keys() == names
    slots = sorted(delays.values())
    assert slots == [n / rate for n in range(len(names))]
    assert join_delays(sorted(names), rate) == delays


def test_equal_failures_have_one_signature() -> None:
    assert (
        failed("disk", 31, "nvme0n1").signature == failed("disk", 31, "nvme1n1").signature == "failed disk 31"
    )
    assert failed("disk", 32).signature != failed("disk", 31).signature
    assert ended("host key", "AAAA").signature == "host key"
    with pytest.raises(ValidationError):
        ended("failed")


def test_quantiles_are_of_the_nearest_rank() -> None:
    values = [float(n) for n in range(1, 21)]
    assert [quantile(values, q) for q in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 10, 19, 20, 20]
    assert quantile([7.0], 0.5) == 7
