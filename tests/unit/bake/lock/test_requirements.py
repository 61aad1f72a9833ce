"""The questions that a lock has to answer, and those that it may leave open."""

from __future__ import annotations

from image_builder.bake.lock.model import Lock
from image_builder.bake.lock.requirements import Requirements

REQUIRED, OPTIONAL, NEW = (f"registry.example/{name}:1" for name in ("required", "optional", "new"))


def test_a_lock_may_leave_out_only_images_that_are_not_required() -> None:
    needs = Requirements() | Requirements(
        preload=(REQUIRED, OPTIONAL, NEW), optional=frozenset({OPTIONAL, NEW})
    )
    lock = Lock(
        image="worker", source_date_epoch=1, repositories={}, groups={}, left_out=[REQUIRED, OPTIONAL]
    )
    assert (needs | Requirements()).unlocked_images(lock) == [REQUIRED, NEW]
