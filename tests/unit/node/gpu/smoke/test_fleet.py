"""The result of a worker's ending and output: every way to go wrong is named, and none is a pass."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from image_builder.node.gpu.model import Measurement, Worker
from image_builder.node.gpu.smoke import program
from image_builder.node.gpu.smoke.fleet import Ended, joined, judge

UUID = "GPU-12345678-9abc-def0-1234-56789abcdef0"
DONE = Measurement("kat.int", UUID, "done", 0.0, "mismatches", seed=7, seconds=1.5)
SUMMARY = Worker(UUID, "done", (), 132, 132, 1000, 950)


def _lines(*values: Any) -> bytes:
    return b"".join(json.dumps(asdict(value)).encode() + b"\n" for value in values)


def test_a_worker_that_said_all_is_done() -> None:
    outcome = judge(UUID, _lines(DONE, SUMMARY), b"", Ended(0))
    assert outcome == Worker(UUID, "done", (DONE,), 132, 132, 1000, 950)


@pytest.mark.parametrize(
    ("ended", "ending"),
    [
        (Ended(-9, late=True), "killed: deadline"),
        (Ended(None, late=True), "hung: unkillable"),
        (Ended(None), "hung: unkillable"),
        (Ended(-11), "crashed: signal 11"),
        (Ended(-9), "crashed: signal 9"),
        (Ended(-9, flooded=True), "error: more than 1048576 bytes of output"),
        (Ended(1), "error: exit status 1: node-agent: FAILED: gpu.cuda: cuInit"),
    ],
)
@pytest.mark.parametrize("output", [b"", _lines(DONE), _lines(DONE, SUMMARY), _lines(DONE)[:-5]])
def test_a_bad_end_counts_whatever_was_said_before(ended: Ended, ending: str, output: bytes) -> None:
    outcome = judge(UUID, output, b"node-agent: FAILED:\n gpu.cuda: cuInit\n", ended)
    assert outcome.ended == ending and outcome.gpu == UUID
    assert outcome.measurements == ((DONE,) if output.startswith(_lines(DONE)) else ())


def test_an_exit_status_without_a_word_says_so() -> None:
    assert judge(UUID, b"", b"", Ended(3)).ended == "error: exit status 3: (no output)"
    assert len(judge(UUID, b"", b"x" * 5000, Ended(3)).ended) < 400


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (b"", "error: it ended without a summary"),
        (_lines(DONE), "error: it ended without a summary"),
        (_lines(DONE, SUMMARY)[:-1], "error: line 2 is cut off"),
        (_lines(DONE) + b"rubbish\n" + _lines(SUMMARY), "error: line 2 is not a worker's: "),
        (_lines(DONE) + b"\xff\xfe\n", "error: line 2 is not a worker's: "),
        (b"[" * 200000 + b"\n", "error: line 1 is not a worker's: "),
        (b"[]\n", "error: line 1 is not a worker's: the document must be an object, not []"),
        (b'{"id": "kat.int"}\n', "error: line 1 is not a worker's: gpu is missing"),
        (_lines(SUMMARY, DONE), "error: line 2 is not a worker's: it follows the summary"),
        (_lines(SUMMARY, SUMMARY), "error: line 2 is not a worker's: it follows the summary"),
        (_lines(DONE, SUMMARY) + b"x", "error: line 3 is cut off"),
        (_lines(Measurement("kat.int", "GPU-other", "done", 0.0, "mismatches")), "it is about GPU-other"),
        (_lines(Worker("GPU-other", "done")), "it is about GPU-other"),
        (_lines(DONE).replace(b'"done"', b'"fine"'), "status must be one of"),
    ],
)
def test_words_that_are_not_a_workers_are_no_pass(output: bytes, complaint: str) -> None:
    outcome = judge(UUID, output, b"", Ended(0))
    assert outcome.ended.startswith("error: ") and complaint in outcome.ended


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_a_number_that_is_none_does_not_count_as_fast(number: bytes) -> None:
    output = _lines(DONE).replace(b"0.0, ", number + b", ", 1) + _lines(SUMMARY)
    assert number in output
    outcome = judge(UUID, output, b"", Ended(0))
    assert outcome.ended == f"error: line 1 is not a worker's: {number.decode()} is not a finite number"
    assert outcome.measurements == ()


def test_links_join_what_was_found_before() -> None:
    link = Measurement("bw.p2p", UUID, "done", 350.0, "GB/s")
    first = judge(UUID, _lines(DONE, SUMMARY), b"", Ended(0))
    assert joined(first, Worker(UUID, "done", (link,), 132), 7).measurements == (DONE, link)
    assert joined(first, Worker(UUID, "done", (link,), 132), 7).memory_tested_bytes == 950
    hung = joined(first, Worker(UUID, "killed: deadline"), 7)
    assert hung.ended == "killed: deadline" and hung.sms_seen == 132
    assert hung.measurements[1].status == "error" and "killed: deadline" in hung.measurements[1].detail


def test_a_worker_sees_its_own_gpu_and_nothing_of_this_process() -> None:
    variables = program.environment(UUID, ["GPU-b", "GPU-c"])
    assert variables["CUDA_VISIBLE_DEVICES"] == f"{UUID},GPU-b,GPU-c"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and variables["CUDA_CACHE_DISABLE"] == "1"
    assert set(variables) == {
        "PATH",
        "LC_ALL",
        "HOME",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_CACHE_DISABLE",
    }


def test_a_workers_command_is_this_agent() -> None:
    argv = program.worker_argv(UUID, "boot-full", 9, ["GPU-b", "GPU-c"])
    assert argv[1:] == [
        "-m",
        "image_builder.node",
        "gpu-worker",
        "--gpu",
        UUID,
        "--tier",
        "boot-full",
        "--seed",
        "9",
        "--peer",
        "GPU-b",
        "--peer",
        "GPU-c",
    ]
