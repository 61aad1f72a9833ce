"""The settings that the role may write; everything wrong with them is reported at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from image_builder.node import mounts
from image_builder.node.decode import decode
from image_builder.node.disk import layout
from image_builder.node.disk.settings import Bind, Cache, Directory, Selector, Settings, parse
from image_builder.node.errors import NodeError
from image_builder.node.health.application import parse as parse_endpoint
from image_builder.node.health.settings import parse as parse_health
from image_builder.node.join.settings import parse as parse_join
from image_builder.node.preflight.settings import parse as parse_preflight
from image_builder.node.preload_settings import Promotion, load_all

REPO = Path(__file__).resolve().parents[3]


def test_nothing_is_the_default() -> None:
    assert parse({}) == Settings()


def test_everything() -> None:
    found = parse(
        {
            "policy": "prefer",
            "mount_point": "/data",
            "filesystem": "ext4",
            "label": "sixteen.bytes_ok",
            "selector": {"kind": "configured", "model": "X*", "serials": ["a*"], "minimum_bytes": 5},
            "expected_disks": 2,
            "wait_seconds": 0.5,
            "incomplete_array": "rebuild",
            "wipe": ["gpt"],
            "directories": [{"path": "docker", "mode": "0710"}, {"path": "a/b"}],
            "cache": {"path": "cache", "quota_bytes": None},
            "binds": [{"source": "pods", "target": "/var/lib/kubelet/pods"}],
        }
    )
    assert found == Settings(
        "prefer",
        "/data",
        "ext4",
        "sixteen.bytes_ok",
        Selector("configured", "X*", ("a*",), (), 5),
        2,
        0.5,
        "rebuild",
        ("gpt",),
        (Directory("docker", 0o710), Directory("a/b", 0o755)),
        Cache("cache"),
        (Bind("pods", "/var/lib/kubelet/pods"),),
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "long label": ({"label": "thirteen.byte"}, "1 to 12"),
    "label of two words": ({"label": "a b"}, "label"),
    "relative": ({"mount_point": "mnt"}, 'mount_point must be an absolute path, and not /, not "mnt"'),
    "root": ({"mount_point": "/"}, "mount_point must be an absolute path"),
    "selector of everything": (
        {"selector": {"kind": "configured"}},
        "selector.kind configured needs a model",
    ),
    "azure with a model": ({"selector": {"model": "X"}}, "selector.model is only for kind configured"),
    "quota on ext4": (
        {"filesystem": "ext4", "cache": {"path": "cache", "quota_bytes": 5}},
        "cache.quota_bytes needs the filesystem xfs",
    ),
    "out": ({"directories": [{"path": "../etc"}]}, "directories[0].path must be a path below"),
    "the agent's own": ({"cache": {"path": ".node/x"}}, "cache.path must be a path below"),
    "bind to nowhere": (
        {"binds": [{"source": "a", "target": "b"}]},
        'binds[0].target must be an absolute path, and not /, not "b"',
    ),
    "mode": ({"directories": [{"path": "a", "mode": "rwx"}]}, "directories[0].mode must be an octal string"),
    "mode of YAML": ({"directories": [{"path": "a", "mode": 493}]}, 'octal string such as "0755", not 493'),
    "in use": ({"wipe": ["gpt", "busy"]}, "wipe must not have busy"),
    "negative": ({"expected_disks": -1}, "expected_disks must be at least 0, not -1"),
    "forever": ({"wait_seconds": 10_000}, "wait_seconds must be 0 to 300, not 10000"),
}


@pytest.mark.parametrize(("found", "words"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(found: dict[str, Any], words: str) -> None:
    with pytest.raises(NodeError) as caught:
        parse(found)
    assert caught.value.code == "settings" and words in caught.value.message


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(NodeError) as caught:
        parse({"policy": "x", "filesystem": "y", "zzz": 1})
    assert all(word in caught.value.message for word in ("policy", "filesystem", "zzz"))


def rendered(role: str, name: str, **variables: Any) -> Any:
    """Return the settings that a role renders: its defaults, ``variables`` and its vars, lowest precedence first."""
    folder, loader = REPO / "roles" / role, DataLoader()
    files = [
        loader.load_from_file(str(folder / file), trusted_as_template=True)
        for file in ("defaults/main.yml", "vars/main.yml")
    ]
    text = Templar(loader, {**files[0], **variables, **files[1]}).template(
        trust_as_template("{{ " + name + " | to_json }}")
    )
    return json.loads(text)


def test_role_writes_the_agents_names_and_defaults() -> None:
    written = rendered("local_disk", "__local_disk_settings")
    assert set(written) == set(Settings.__dataclass_fields__)
    assert parse(written) == Settings(cache=Cache("cache"))


def test_numbers_from_a_command_line_are_numbers() -> None:
    """``-e NAME=VALUE`` gives Ansible a string; the agent doesn't accept one as a number."""
    written = rendered(
        "local_disk",
        "__local_disk_settings",
        local_disk_expected_disks="2",
        local_disk_wait_seconds="30",
        local_disk_cache_quota_bytes="5",
        local_disk_label=7,
    )
    assert parse(written) == Settings(expected_disks=2, wait_seconds=30, label="7", cache=Cache("cache", 5))
    promote = rendered(
        "image_preload",
        "__image_preload_settings",
        image_preload_promote="false",
        image_preload_promote_bytes_per_second="0",
        image_preload_promote_reserve_percent="20",
    )["promote"]
    assert decode(Promotion, promote) == Promotion(enabled=False, bytes_per_second=0, reserve_percent=20)
    preflight = rendered(
        "gpu_preflight", "__gpu_preflight_settings", gpu_preflight_hard="yes", gpu_preflight_retest_days="0"
    )
    assert (parse_preflight(preflight).hard, parse_preflight(preflight).retest_days) == (True, 0)
    join = rendered("node_join", "__node_join_settings", node_join_clock_seconds="30")
    assert parse_join(join).clock_seconds == 30
    health = rendered("node_health", "__node_health_settings", node_health_flaps="4")
    assert parse_health(health).flaps == 4
    endpoint = rendered("node_health", "__node_health_endpoint_settings", node_health_endpoint_port="8080")
    assert parse_endpoint(endpoint).port == 8080


@pytest.mark.parametrize("promote", [True, False])
def test_agent_takes_the_preloads_settings_as_the_role_renders_them(promote: bool, tmp_path: Path) -> None:
    written = rendered("image_preload", "__image_preload_settings", image_preload_promote=promote)
    (tmp_path / "preload.json").write_text(json.dumps(written))
    settings = load_all(tmp_path)
    assert settings.promotion == Promotion(enabled=promote)
    assert settings.preload.verity and settings.preload.kubelet_healthz


def test_list_of_mounts_is_read(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        "36 35 98:0 /sub /mnt/with\\040space rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue\n"
        "37 35 0:5 / /dev rw - devtmpfs udev rw\n"
    )
    assert mounts.listed(tmp_path) == [
        mounts.Mount("98:0", "/sub", "/mnt/with space", "ext3", "/dev/root"),
        mounts.Mount("0:5", "/", "/dev", "devtmpfs", "udev"),
    ]


def test_what_is_no_superblock_of_an_array_is_none() -> None:
    assert layout.raid(b"") is None and layout.raid(bytes(16384)) is None
    wrong = bytearray(16384)
    wrong[4096:4104] = bytes.fromhex("fc4e2ba901000000")
    assert layout.raid(bytes(wrong)) is None  # no device has a role in it
