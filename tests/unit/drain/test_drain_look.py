"""What a Job adds to what is known of its pods."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from image_builder.drain.look import Job, job_from

START = "2026-01-01T00:00:00Z"


def job(**parts: Any) -> Job:
    return job_from({"metadata": {"name": "train", **parts.pop("meta", {})}, **parts})


def test_when_a_job_must_have_ended() -> None:
    ends = job(spec={"activeDeadlineSeconds": 60}, status={"startTime": START}).deadline
    assert ends == datetime.fromisoformat(START).timestamp() + 60
    assert job(spec={}, status={"startTime": START}).deadline is None
    assert job(spec={"activeDeadlineSeconds": 60}).deadline is None


def test_who_controls_a_job() -> None:
    reference = {"apiVersion": "jobset.x-k8s.io/v1", "kind": "JobSet", "name": "big", "uid": "u"}
    assert job(meta={"ownerReferences": [reference]}).parent is None
    parent = job(meta={"ownerReferences": [{**reference, "controller": True}]}).parent
    assert str(parent) == "JobSet big"
