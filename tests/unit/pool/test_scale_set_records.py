"""A predecessor's journal, as the process that resumes its run reads it."""

from __future__ import annotations

from pathlib import Path

from image_builder.pool.scale_set.records import (
    Accepted,
    Record,
    Replacement,
    Settled,
    Suspension,
    Verb,
    open_journal,
    read_journal,
    requests,
    suspended,
)


def _sent(verb: Verb, instance: str = "1") -> Replacement:
    where = {
        "scale_set": "s",
        "instance": instance,
        "vm_id": "v",
        "boot_id": "b",
        "version": "1",
        "build": "x",
    }
    return Replacement.model_validate({"at": 1.0, "verb": verb, **where})


def _settled(instance: str = "1") -> Settled:
    return Settled(at=2.0, scale_set="s", instance=instance, outcome="done")


RECORDS: list[Record] = [
    _sent("upgrade"),
    _sent("upgrade", "2"),
    Accepted(at=1.5, scale_set="s", instance="1", operation="https://arm/1"),
    _settled(),
    Suspension(at=2.0, scale_set="s", service="AutomaticRepairs"),
    Suspension(at=2.0, scale_set="other", service="AutomaticRepairs"),
    _sent("reimage"),
]


def test_requests_of_an_instance_have_what_became_of_them() -> None:
    first, second = requests(RECORDS, "s", "1")
    assert (first.sent.verb, first.operation, first.settled) == ("upgrade", "https://arm/1", _settled())
    assert (second.sent.verb, second.operation, second.settled) == ("reimage", "", None)
    assert [request.sent.verb for request in requests(RECORDS, "s", "2")] == ["upgrade"]
    assert requests(RECORDS, "other", "1") == []


def test_what_was_suspended_is_resumed_once() -> None:
    assert suspended(RECORDS, "s") == {"AutomaticRepairs"}
    over = Suspension(at=3.0, scale_set="s", service="AutomaticRepairs", over=True)
    assert suspended([*RECORDS, over], "s") == set()


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "roll.jsonl"
    with open_journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
    assert read_journal(path) == RECORDS
