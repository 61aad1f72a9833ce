"""Every NVML answer in raw form: the call, its return code, the bytes, the time it took.

One process makes the calls; another watches it. A call that doesn't return costs a few seconds and is recorded as hung,
and a new process makes the remaining calls.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ctypes import byref, c_int, c_uint, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

from image_builder.node.gpu import nvml
from tests.bench.first_contact import nvml_calls
from tests.bench.first_contact.context import Context, append, checkout, lines, program
from tests.bench.first_contact.nvml_calls import Call

ANSWERS = "answers.jsonl"
HUNG = "hung"
CALL_SECONDS = 6.0  # a call that takes longer counts as hung
_NO_FUNCTION = nvml.FUNCTION_NOT_FOUND
_VALUE_NAMES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def step(context: Context) -> dict[str, Any]:
    """Make all calls, with as many processes as it takes; return the number of answers by code."""
    path = context.directory / ANSWERS
    hung = 0
    while context.left() > 1:
        before = len(lines(path))
        status = _watched(context, path)
        if status == 0:
            break
        done = lines(path)
        if not done or "code" in done[-1]:
            if len(done) == before:
                raise RuntimeError(f"the calling process ended with {status} before it called")
            continue
        hung += status is None
        # The last call was begun and has no answer: it hangs, or terminated the process.
        append(path, {**done[-1], "code": HUNG if status is None else f"status {status}"})
    codes: dict[str, int] = {}
    for answer in lines(path):
        if "code" in answer:
            codes[str(answer["code"])] = codes.get(str(answer["code"]), 0) + 1
    return {"answers": codes, "hung": hung}


def _watched(context: Context, path: Path) -> int | None:
    """Run one calling process; return its status, None if it stopped answering and was killed."""
    argv = [*program(), "nvml", "--out", str(path)]
    child = subprocess.Popen(argv, cwd=checkout(), stdin=subprocess.DEVNULL)
    size, since = -1, time.monotonic()
    try:
        while child.poll() is None:
            time.sleep(0.02)
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > min(CALL_SECONDS, max(1.0, context.left())):
                return None
        return child.returncode
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(1)


def ask(path: Path) -> int:
    """Make every call for which the file has no answer, and append each answer; return 0."""
    answered = {key(record) for record in lines(path) if "code" in record}
    with nvml.opened() as library:
        for record, answer in questions(library, dict(_handles(library))):
            if key(record) not in answered:
                append(path, record)
                append(path, {**record, **answer()})
    return 0


def questions(
    library: nvml.Library, handles: Mapping[int, c_void_p]
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Yield the record of every call, and the function that makes the call."""
    for call, gpu in _calls(handles):
        yield _record(call, gpu), partial(_answer, library, call, gpu, handles)
    for number, scope in sorted(nvml_calls.fields(), key=lambda field: field[1]):
        for gpu, handle in handles.items():
            record = {"call": "nvmlDeviceGetFieldValues", "gpu": gpu, "numbers": [number, scope]}
            yield record, partial(_field, library, handle, number, scope)


def _record(call: Call, gpu: int | None) -> dict[str, Any]:
    record: dict[str, Any] = {"call": call.function, "gpu": gpu, "numbers": list(call.numbers)}
    return record if call.peer is None else {**record, "peer": call.peer}


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return a question's identity."""
    return record["call"], record["gpu"], record.get("peer"), tuple(record["numbers"])


def _handles(library: nvml.Library) -> Iterator[tuple[int, c_void_p]]:
    for index in range(library.number("nvmlDeviceGetCount_v2")):
        handle = c_void_p()
        with suppress(nvml.NvmlError):
            library.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
            yield index, handle


def _calls(handles: Mapping[int, c_void_p]) -> Iterator[tuple[Call, int | None]]:
    for call in nvml_calls.of_system():
        yield call, None
    for index in handles:
        for call in nvml_calls.of_gpu(index, len(handles)):
            yield call, index


def _answer(
    library: nvml.Library, call: Call, gpu: int | None, handles: Mapping[int, c_void_p]
) -> dict[str, Any]:
    arguments: list[Any] = [handles[index] for index in (gpu, call.peer) if index is not None]
    arguments += [c_uint(number) for number in call.numbers]
    holders: list[tuple[str, Any, int]] = []  # name, output buffer, its position among the arguments
    for name, kind in call.outputs:
        if name == "text":
            buffer = ctypes.create_string_buffer(kind)
            holders.append((name, buffer, len(arguments)))
            arguments += [buffer, c_uint(kind)]
            continue
        version = nvml_calls.VERSIONS.get(kind)
        holder = nvml.versioned(kind, version) if version else kind()
        if name == "in-out":
            count = c_uint(len(holder))
            holders.append(("count", count, len(arguments)))
            arguments.append(byref(count))
        holders.append((name, holder, len(arguments)))
        arguments.append(byref(holder))
    began = time.perf_counter()
    code = _called(library, call.function, arguments)
    spent = round((time.perf_counter() - began) * 1e6)
    written = {
        name: {"at": place, "value": _readable(holder), "bytes": bytes(holder).hex()}
        for name, holder, place in holders
    }
    return {"code": code, "error": _word(code), "us": spent, **({"out": written} if code == 0 else {})}


def _called(library: nvml.Library, function: str, arguments: list[Any]) -> int:
    try:
        library.call(function, *arguments)
    except nvml.NvmlError as error:
        return error.code
    return 0


def _field(library: nvml.Library, handle: c_void_p, number: int, scope: int) -> dict[str, Any]:
    request = (nvml.FieldValue * 1)(nvml.FieldValue(fieldId=number, scopeId=scope))
    began = time.perf_counter()
    code = _called(library, "nvmlDeviceGetFieldValues", [handle, c_int(1), request])
    spent = round((time.perf_counter() - began) * 1e6)
    answer = request[0]
    code = code or answer.nvmlReturn
    value = getattr(answer.value, _VALUE_NAMES.get(answer.valueType, "ullVal"))
    out = {"type": answer.valueType, "value": value, "bytes": bytes(answer.value).hex()}
    return {"code": code, "error": _word(code), "us": spent, **({"out": out} if code == 0 else {})}


def _word(code: int) -> str:
    if code == 0:
        return ""
    return {nvml.NOT_SUPPORTED: "not supported", _NO_FUNCTION: "no such function"}.get(
        code, nvml.ERRORS.get(code, "error")
    )


def _readable(holder: Any) -> Any:
    """Return an output value in a form that JSON can represent."""
    if isinstance(holder, ctypes.Array):
        if holder._type_ is ctypes.c_char:
            return holder.value.decode("utf-8", "replace")
        return [_readable(item) for item in holder]
    if isinstance(holder, ctypes.Structure):
        return {name: _readable(getattr(holder, name)) for name, *_ in holder._fields_}
    value = getattr(holder, "value", holder)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
