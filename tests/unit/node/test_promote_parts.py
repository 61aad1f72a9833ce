"""Edge cases of small parts of the promotion: settings, what workers share and report, the kubelet."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import preload_settings
from image_builder.node.data_root import Link
from image_builder.node.errors import NodeError
from image_builder.node.promote import command, copy, workers
from image_builder.node.promote.copy import SourceError
from image_builder.node.promote.plan import Item
from image_builder.node.promote.shared import Shared
from image_builder.node.promote.workers import Job, disk_error

# -- settings ------------------------------------------------------------------------------------------------------


def _load(tmp_path: Path, **promote: Any) -> preload_settings.Settings:
    document = {"engine": "docker", "data_root": "/d", "mount_point": "/m", "promote": promote}
    (tmp_path / "preload.json").write_text(json.dumps(document))
    return preload_settings.load_all(tmp_path)


@pytest.mark.parametrize(
    "promote",
    [
        {"workers": 0},
        {"workers": 65},
        {"bytes_per_second": -1},
        {"settle_seconds": -0.1},
        {"wait_seconds": -0.1},
        {"reserve_percent": -0.1},
        {"reserve_percent": 100},
    ],
)
def test_settings_have_limits(promote: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        _load(tmp_path, **promote)
    assert caught.value.code == "settings"


@pytest.mark.parametrize(
    "promote",
    [
        {"workers": 1, "bytes_per_second": 0, "settle_seconds": 0, "wait_seconds": 0, "reserve_percent": 0},
        {"workers": 64, "reserve_percent": 99.9},
    ],
)
def test_limits_themselves_are_allowed(promote: dict[str, Any], tmp_path: Path) -> None:
    promotion = _load(tmp_path, **promote).promotion
    assert {name: getattr(promotion, name) for name in promote} == promote


# -- workers -------------------------------------------------------------------------------------------------------


def test_bytes_under_way_are_those_of_every_worker() -> None:
    with Shared(3, 0) as shared:
        for worker in range(3):
            shared.set_in_flight(worker, 10**worker)
        with shared.locked():
            assert shared.in_flight() == 111


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "promote.space"),
        (errno.EDQUOT, "promote.space"),
        (errno.EIO, "promote.io"),
        (errno.EROFS, "promote.io"),
    ],
)
def test_what_is_full_is_told_from_what_is_broken(number: int, code: str) -> None:
    assert disk_error(OSError(number, "", "here")) == (code, f"here: {os.strerror(number)}")


@pytest.mark.parametrize(
    ("number", "damaged"),
    [
        (errno.EIO, True),
        (errno.EUCLEAN, True),
        (errno.EBADMSG, True),
        (errno.ENODATA, True),
        (errno.ENOENT, False),
        (errno.ENOMEM, False),
        (errno.EACCES, False),
    ],
)
def test_which_errors_are_damage_of_the_store(
    number: int, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SourceError(number, "name")

    monkeypatch.setattr(workers, "copy_tree", fail)
    job = Job([Item(Link(tmp_path, tmp_path, "", True), 0, 0)], tmp_path, 0, False)
    said: list[dict[str, Any]] = []
    with Shared(1, 0) as shared:
        workers._copy_items(job, shared, 0, said.append)
    assert [(told["code"], told["damaged"]) for told in said] == [("promote.store", damaged)]


def test_a_file_shorter_than_it_says_is_damage(tmp_path: Path) -> None:
    with (tmp_path / "copy").open("wb") as target:
        with pytest.raises(SourceError) as caught:
            copy._write_rest(target.fileno(), b"ab", 3, "name")
        assert caught.value.code == errno.EIO
        copy._write_rest(target.fileno(), b"abc", 3, "name")
    assert (tmp_path / "copy").read_bytes() == b"abc"


# -- the kubelet ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("healthz", "program"), [("", "/usr/bin/kubelet"), ("http://127.0.0.1:1/", None)])
def test_there_may_be_no_kubelet_to_wait_for(
    healthz: str, program: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: program)
    chosen = _load(tmp_path, settle_seconds=0)
    assert command._wait(replace(chosen, preload=replace(chosen.preload, kubelet_healthz=healthz)))
