"""The lab's pause image: an archive for ``docker load`` and ``ctr images import``, made from scratch.

The lab has nowhere to pull a pause image from, and doesn't need to: the program is a static ELF file of some
200 bytes, and the archive is a tar of three small files. The same reference gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# `lab.internal` is the lab's own domain (.internal is reserved for private use): the name resolves only where
# the lab's registry has been added to /etc/hosts. A node that tries to pull an image instead of already having
# it fails at once.
HOST = "registry.lab.internal"
REFERENCE = f"{HOST}/pause:1.0"

_BASE = 0x400000  # where the file is mapped; a page boundary below 2 GiB, so addresses fit 32 bits
_HEADERS = 64 + 56  # ELF header and one program header
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


def program() -> bytes:
    """Return the ELF file of the pause program (x86-64 Linux, static, no library).

    It blocks SIGINT, SIGTERM and SIGCHLD and waits for them, one at a time: on SIGCHLD it reaps every child
    that has ended, on the others it exits with status 0. Blocking matters: PID 1 of a namespace doesn't even receive
    a signal that is neither blocked nor handled, so a program that only calls pause(2) would have to be
    killed, after the runtime's grace period.
    """
    mask = struct.pack("<Q", sum(1 << (number - 1) for number in _SIGNALS))
    code = _code(mask_address=_BASE + _HEADERS)
    size = _HEADERS + len(mask) + len(code)
    elf = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01".ljust(16, b"\0"),  # 64 bit, little endian, version 1, System V
        2,  # ET_EXEC
        62,  # EM_X86_64
        1,  # version
        _BASE + _HEADERS + len(mask),  # entry: right behind the signal mask
        64,  # program headers follow this header
        0,  # no section headers
        0,  # flags
        64,  # size of this header
        56,  # size of a program header
        1,  # number of program headers
        0,  # size, number and string index of section headers
        0,
        0,
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)  # PT_LOAD, read + execute
    return elf + segment + mask + code


def _code(mask_address: int) -> bytes:
    """Return the machine code. System call numbers are those of x86-64; arguments: rdi rsi rdx r10."""
    address = struct.pack("<I", mask_address)
    start = b"".join(
        (
            b"\x31\xff",  # xor edi, edi           how = SIG_BLOCK
            b"\xbe" + address,  # mov esi, mask
            b"\x31\xd2",  # xor edx, edx           the old mask isn't needed
            b"\x6a\x08\x41\x5a",  # push 8; pop r10        a mask has 8 bytes
            b"\x6a\x0e\x58",  # push 14; pop rax       rt_sigprocmask
            b"\x0f\x05",  # syscall
        )
    )
    wait = b"".join(
        (
            b"\xbf" + address,  # mov edi, mask
            b"\x31\xf6",  # xor esi, esi           no siginfo
            b"\x31\xd2",  # xor edx, edx           no timeout
            b"\x6a\x08\x41\x5a",  # push 8; pop r10
            b"\xb8\x80\0\0\0",  # mov eax, 128           rt_sigtimedwait
            b"\x0f\x05",  # syscall
        )
    )
    leave = b"".join(
        (
            b"\x31\xff",  # xor edi, edi           status 0
            b"\x6a\x3c\x58",  # push 60; pop rax       exit
            b"\x0f\x05",  # syscall
        )
    )
    reap = b"".join(
        (
            b"\x6a\xff\x5f",  # push -1; pop rdi       any child
            b"\x31\xf6",  # xor esi, esi           its status isn't needed
            b"\x6a\x01\x5a",  # push 1; pop rdx        WNOHANG
            b"\x45\x31\xd2",  # xor r10d, r10d         no rusage
            b"\x6a\x3d\x58",  # push 61; pop rax       wait4
            b"\x0f\x05",  # syscall
            b"\x85\xc0",  # test eax, eax
        )
    )
    # After the wait: rax is the signal, or negative (EINTR: wait again).
    is_child = b"\x83\xf8\x11"  # cmp eax, 17            SIGCHLD
    is_error = b"\x85\xc0"  # test eax, eax
    leave_size, branch = len(leave), 2
    after_wait = is_child + b"\x74" + _short(len(is_error) + branch + leave_size)  # je reap
    back = len(wait) + len(after_wait) + len(is_error) + branch
    after_wait += is_error + b"\x78" + _short(-back)  # js wait
    reap += b"\x7f" + _short(-(len(reap) + branch))  # jg reap: there may be more
    rounds = len(wait) + len(after_wait) + leave_size + len(reap) + branch
    return start + wait + after_wait + leave + reap + b"\xeb" + _short(-rounds)  # jmp wait


def _short(distance: int) -> bytes:
    """Return the operand of a short jump: the distance in bytes from the end of the instruction."""
    return struct.pack("<b", distance)


def layer() -> bytes:
    """Return the image's only layer, a tar."""
    return _tar({"pause": (0o755, program())})


def configuration() -> dict[str, Any]:
    """Return the image's configuration; the digest of its encoding is the image's id."""
    return {
        "architecture": "amd64",
        "config": {"Entrypoint": ["/pause"], "Env": [], "User": "65535:65535", "WorkingDir": "/"},
        "created": "1970-01-01T00:00:00Z",
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "image-builder lab pause"}],
        "os": "linux",
        "rootfs": {"diff_ids": [f"sha256:{hashlib.sha256(layer()).hexdigest()}"], "type": "layers"},
    }


def archive(reference: str = REFERENCE) -> bytes:
    """Return the image archive (``manifest.json``, configuration, one layer) tagged with ``reference``."""
    content = layer()
    layer_digest = hashlib.sha256(content).hexdigest()
    config = encode(configuration())
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = [{"Config": config_name, "Layers": [layer_name], "RepoTags": [reference]}]
    return _tar(
        {
            config_name: (0o644, config),
            layer_name: (0o644, content),
            "manifest.json": (0o644, encode(manifest)),
        }
    )


def write_archive(path: Path, reference: str = REFERENCE) -> str:
    """Write the archive to ``path`` and return its sha256 (hex)."""
    content = archive(reference)
    path.write_bytes(content)
    os.chmod(path, 0o644)
    return hashlib.sha256(content).hexdigest()


def encode(value: object) -> bytes:
    """Return a configuration or a manifest as the bytes that its digest covers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _tar(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Return a tar of ``files`` (name: mode, content), owned by root, dated 1970."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, (mode, content) in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = mode, len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
