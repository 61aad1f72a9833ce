"""The lab's pause image, byte by byte."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
from pathlib import Path

from image_builder.lab import pause


def _members(archive: bytes) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {}
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = (member, file.read())
        return found


def test_program_is_one_segment_that_covers_the_whole_file() -> None:
    elf = pause.program()
    magic, kind, machine, _, entry, header_at, sections_at = struct.unpack_from("<16sHHIQQQ", elf)
    assert magic.startswith(b"\x7fELF\x02\x01\x01")
    assert (kind, machine, sections_at) == (2, 62, 0)
    load, flags, offset, virtual, _, in_file, in_memory, align = struct.unpack_from(
        "<IIQQQQQQ", elf, header_at
    )
    assert (load, flags, offset) == (1, 5, 0), "one PT_LOAD segment, readable and executable, never writable"
    assert in_file == in_memory == len(elf)
    assert virtual % align == 0
    assert virtual + header_at + 56 < entry < virtual + len(elf)


def test_program_waits_for_the_signals_of_its_mask() -> None:
    elf = pause.program()
    (mask,) = struct.unpack_from("<Q", elf, 120)
    assert mask == 1 << 1 | 1 << 14 | 1 << 16  # SIGINT 2, SIGTERM 15, SIGCHLD 17
    # Both system calls that take the mask read it from there.
    assert elf.count(struct.pack("<I", 0x400000 + 120)) == 2


def test_jumps_end_at_instructions() -> None:
    """Each short jump leads to the start of the part that it should reach."""
    elf = pause.program()
    wait = elf.index(b"\xbf" + struct.pack("<I", 0x400000 + 120))  # mov edi, mask
    reap = elf.index(b"\x6a\xff\x5f")  # push -1; pop rdi
    jumps = {bytes([op]): elf.index(bytes([op]), elf.index(b"\x83\xf8\x11") + 3) for op in (0x74, 0x78)}
    targets = {op: at + 2 + struct.unpack_from("<b", elf, at + 1)[0] for op, at in jumps.items()}
    assert targets == {b"\x74": reap, b"\x78": wait}
    loop, again = len(elf) - 4, len(elf) - 2
    assert elf[loop] == 0x7F and loop + 2 + struct.unpack_from("<b", elf, loop + 1)[0] == reap
    assert elf[again] == 0xEB and again + 2 + struct.unpack_from("<b", elf, again + 1)[0] == wait


def test_archive_is_what_docker_load_takes() -> None:
    files = _members(pause.archive("registry.example/pause:9"))
    (manifest,) = json.loads(files["manifest.json"][1])
    assert manifest["RepoTags"] == ["registry.example/pause:9"]
    config = files[manifest["Config"]][1]
    assert manifest["Config"] == f"{hashlib.sha256(config).hexdigest()}.json"
    (layer_name,) = manifest["Layers"]
    layer = files[layer_name][1]
    described = json.loads(config)
    assert described["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert (described["os"], described["architecture"]) == ("linux", "amd64")
    program, content = _members(layer)["pause"]
    assert described["config"]["Entrypoint"] == ["/pause"]
    assert program.mode == 0o755 and content == pause.program()


def test_archive_depends_on_its_reference_alone(tmp_path: Path) -> None:
    assert pause.archive() == pause.archive(pause.REFERENCE) != pause.archive("registry.example/pause:9")
    for member, _ in _members(pause.archive()).values():
        assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
    digest = pause.write_archive(tmp_path / "pause.tar")
    assert digest == hashlib.sha256((tmp_path / "pause.tar").read_bytes()).hexdigest()
