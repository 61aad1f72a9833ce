"""Nonces that nobody keeps: of one machine, node and minute, the same at each replica."""

from __future__ import annotations

import re

from image_builder.cluster.broker.nonces import SECONDS, Nonces, until_next
from tests.joins import VM_ID

NODE, NOW = "vmss-h100-a000017", 1_800_000_000.0
NONCES = Nonces(lambda: b"the key of the certificate")


def test_a_nonce_is_ten_digits_of_one_machine_node_and_minute() -> None:
    nonce = NONCES.current(VM_ID, NODE, NOW)
    assert re.fullmatch("[0-9]{10}", nonce)
    assert NONCES.current(VM_ID, NODE, NOW + SECONDS - 1) == nonce
    others = [
        NONCES.current(VM_ID, NODE, NOW + SECONDS),
        NONCES.current(VM_ID[::-1], NODE, NOW),
        NONCES.current(VM_ID, NODE + "8", NOW),
        Nonces(lambda: b"another key").current(VM_ID, NODE, NOW),
    ]
    assert len({nonce, *others}) == 5
    # They are spread, whatever they are made of.
    assert len({NONCES.current(VM_ID, f"node-{number}", NOW) for number in range(1000)}) == 1000


def test_it_is_taken_for_a_minute_or_two_by_each_replica() -> None:
    nonce = NONCES.current(VM_ID, NODE, NOW + SECONDS - 1)
    replica = Nonces(lambda: b"the key of the certificate")
    assert replica.is_valid(nonce, VM_ID, NODE, NOW)
    assert replica.is_valid(nonce, VM_ID, NODE, NOW + 2 * SECONDS - 1)
    assert not replica.is_valid(nonce, VM_ID, NODE, NOW + 2 * SECONDS)
    assert not replica.is_valid(nonce, VM_ID, NODE, NOW - 1)
    assert not replica.is_valid(nonce, VM_ID, NODE + "8", NOW)
    assert not replica.is_valid("", VM_ID, NODE, NOW) and not replica.is_valid("ä", VM_ID, NODE, NOW)


def test_who_used_one_is_told_when_the_next_is_there() -> None:
    assert until_next(NOW + 5) == 55.0 and until_next(NOW) == SECONDS
