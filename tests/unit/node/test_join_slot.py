"""The moments at which nodes join: spread evenly, each node always at the same one."""

from __future__ import annotations

import uuid

from image_builder.node.join.binding import slot


def _machines(count: int) -> list[str]:
    return [str(uuid.uuid5(uuid.NAMESPACE_DNS, f"vm-{number}")) for number in range(count)]


def test_7500_machines_never_join_much_faster_than_the_rate() -> None:
    window = 7500 / 5.0
    slots = sorted(slot(vm_id, window) for vm_id in _machines(7500))
    assert slots[0] >= 0 and slots[-1] < window
    per_second = [0] * int(window)
    for one in slots:
        per_second[int(one)] += 1
    # 5 on average; with independent arrivals, fewer than 1 in 1,000 fleets has more than 18 in one of 1,500 seconds.
    assert max(per_second) <= 18
    per_minute = [sum(per_second[at : at + 60]) for at in range(0, int(window), 60)]
    assert all(230 <= count <= 370 for count in per_minute)  # 300 ± four standard deviations


def test_small_waves_are_spread_too() -> None:
    slots = sorted(slot(vm_id, 120.0) for vm_id in _machines(600))
    quarters = [sum(1 for one in slots if low <= one < low + 30) for low in (0, 30, 60, 90)]
    assert all(105 <= count <= 195 for count in quarters)


def test_a_machine_keeps_its_slot_however_its_id_is_written() -> None:
    vm_id = "02aab8a4-74ef-476e-8182-f6d2ba4166a6"
    assert slot(vm_id, 120) == slot(vm_id.upper(), 120)
    assert slot(vm_id, 240) == 2 * slot(vm_id, 120)
    assert len({slot(one, 1.0) for one in _machines(7500)}) == 7500


def test_a_window_of_nothing_is_no_wait() -> None:
    assert slot("02aab8a4", 0) == 0
