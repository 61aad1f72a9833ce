"""The result of a request, for every reading of instance, operation and node."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from image_builder.pool.scale_set.model import Instance
from image_builder.pool.scale_set.records import Replacement, Verb
from image_builder.pool.scale_set.verdict import Look, Node, Operation, Verdict, judge
from tests.support.arm.fleet import BUILDS, NEW, OLD

BEFORE, AFTER = Node("boot-1", BUILDS[OLD]), Node("boot-2", BUILDS[NEW])
UNTOUCHED = Instance("7", "vm", OLD, "Succeeded")
UPGRADED = replace(UNTOUCHED, image=NEW)
OTHER = Node("boot-2", BUILDS[OLD])


def sent(verb: Verb = "upgrade", boot_id: str = "boot-1") -> Replacement:
    return Replacement(
        at=0.0,
        verb=verb,
        scale_set="s",
        instance="7",
        vm_id="vm",
        boot_id=boot_id,
        version=NEW,
        build=BUILDS[NEW],
    )


def looks(instance: Instance | None, node: Node | None, seconds: float = 60.0) -> list[Look]:
    """Return two identical looks, some seconds apart."""
    return [Look(at, instance, node) for at in (100.0, 100.0 + seconds)]


@pytest.mark.parametrize(
    ("verb", "instance", "node", "verdict"),
    [
        ("upgrade", UNTOUCHED, BEFORE, "not accepted"),
        ("upgrade", UPGRADED, BEFORE, "done"),
        ("upgrade", UPGRADED, None, "done"),
        ("upgrade", replace(UNTOUCHED, state="Updating"), BEFORE, "running"),
        ("upgrade", replace(UPGRADED, state="Updating"), AFTER, "running"),
        ("upgrade", replace(UNTOUCHED, state="Failed"), BEFORE, "failed"),
        # A node that is silent, or has rebooted, may be in work: that is unknown.
        ("upgrade", UNTOUCHED, None, "unknown"),
        ("upgrade", UNTOUCHED, OTHER, "unknown"),
        ("reimage", UPGRADED, BEFORE, "not accepted"),
        ("reimage", UPGRADED, AFTER, "done"),
        ("reimage", UPGRADED, OTHER, "unknown"),
        ("reimage", UPGRADED, None, "unknown"),
        ("reimage", replace(UPGRADED, state="Updating"), None, "running"),
        ("reimage", None, AFTER, "gone"),
        ("restart", UPGRADED, BEFORE, "not accepted"),
        ("restart", UPGRADED, AFTER, "done"),
        ("restart", UPGRADED, None, "unknown"),
        ("restart", replace(UPGRADED, state="Updating"), BEFORE, "running"),
        ("reimage", replace(UPGRADED, vm_id="another"), AFTER, "gone"),
    ],
)
def test_a_lost_answer_is_read_from_instance_and_node(
    verb: Verb, instance: Instance | None, node: Node | None, verdict: Verdict
) -> None:
    assert judge(sent(verb), None, looks(instance, node)) == verdict


@pytest.mark.parametrize(
    ("operation", "instance", "verdict"),
    [
        (Operation("InProgress"), UNTOUCHED, "running"),
        (Operation("Succeeded"), UPGRADED, "done"),
        # It brought the instance to another model.
        (Operation("Succeeded"), UNTOUCHED, "unknown"),
        (Operation("Failed", "OSProvisioningTimedOut"), UPGRADED, "failed"),
        (Operation("Canceled"), UNTOUCHED, "failed"),
        (Operation("Failed", "OperationPreempted"), UNTOUCHED, "not accepted"),
        (Operation("Failed", "OperationPreempted"), UPGRADED, "done"),
        (Operation("Failed", "Conflict", "OperationPreempted: by a newer one"), UNTOUCHED, "not accepted"),
        (Operation("Canceled", "", "operationpreempted"), UPGRADED, "done"),
        (Operation("Succeeded"), None, "gone"),
    ],
)
def test_an_operation_tells_how_our_request_ended(
    operation: Operation, instance: Instance | None, verdict: Verdict
) -> None:
    assert judge(sent(), operation, looks(instance, BEFORE)) == verdict


def test_nothing_is_sent_again_before_a_minute_of_stillness() -> None:
    assert judge(sent(), None, looks(UNTOUCHED, BEFORE, 59.9)) == "unknown"
    assert judge(sent(), None, looks(UNTOUCHED, BEFORE, 60.0)[:1]) == "unknown"
    interrupted = [
        *looks(UNTOUCHED, BEFORE),
        Look(170.0, UNTOUCHED, None),
        *(Look(at, UNTOUCHED, BEFORE) for at in (180.0, 239.0)),
    ]
    assert judge(sent(), None, interrupted) == "unknown"
    assert judge(sent(), None, [*interrupted, Look(240.0, UNTOUCHED, BEFORE)]) == "not accepted"


@pytest.mark.parametrize(
    ("node", "verdict"), [(BEFORE, "not accepted"), (OTHER, "not accepted"), (AFTER, "unknown")]
)
def test_a_node_that_did_not_answer_before_is_known_by_its_build(node: Node, verdict: Verdict) -> None:
    assert judge(sent(boot_id=""), None, looks(UNTOUCHED, node)) == verdict


def test_only_what_is_at_rest_with_its_old_boot_is_ever_told_again() -> None:
    """Over all readings: 'not accepted' is the only verdict that lets a request be sent again."""
    states = ("Succeeded", "Failed", "Updating", "Creating", "Deleting", "Migrating")
    verbs: tuple[Verb, ...] = ("upgrade", "reimage", "restart")
    for verb, state, image, node in itertools.product(
        verbs, states, (OLD, NEW), (None, BEFORE, OTHER, AFTER)
    ):
        instance = Instance("7", "vm", image, state)
        if judge(sent(verb), None, looks(instance, node)) == "not accepted":
            assert (state, node) == ("Succeeded", BEFORE)
            assert verb != "upgrade" or image == OLD
