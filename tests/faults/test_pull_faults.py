"""Registries, disks and engines that fail during a pull: what comes of it, what is said, and what it costs.

All faults of one engine that may be met at once are: each has an image of its own, and one daemon has them all. The
proxy's books tell them apart by the repository's name.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from image_builder import process
from image_builder.errors import PullError
from image_builder.lab import certificate, registry
from image_builder.lab.registry import HOST, PORT
from image_builder.lock import LockedImage
from image_builder.pull.credentials import VARIABLE
from image_builder.pull.model import Limits
from image_builder.pull.puller import Wanted
from image_builder.pull.registry import Endpoint, locate
from image_builder.sandbox import open_root
from tests.builds import Workplace
from tests.faults.registry_proxy import Fault
from tests.pulls import ENGINES, MB, PLATFORM, Lab, Result, isolated, kill, new_address, processes, wait_until

pytestmark = pytest.mark.root

# containerd writes a layer in steps of 1 MiB: of what comes after the last whole one nothing is seen.
SIZE = 6 * MB
AFTER = 2_500_000
# Docker waits 5 s before it goes on where it broke off.
PATIENT = Limits(progress_seconds=30.0)
HASTY = Limits(progress_seconds=4.0)
PACED = Limits(progress_seconds=4.0, min_rate=1_500_000, rate_seconds=3.0)
ATTEMPTS = 3
REFUSED, EXPIRED, PRIVATE = "refused.lab.internal", "expired.lab.internal", "private.lab.internal"


@dataclass(frozen=True)
class Case:
    """What goes wrong with one image; a fault's path is a regular expression below the image's repository.

    ``{layer}`` in it is the digest of the large layer. ``words`` are in the message, ``attempts`` are made.
    """

    faults: tuple[Fault, ...] = ()
    limits: Limits = PATIENT
    host: str = HOST
    words: str = ""
    attempts: int = ATTEMPTS


def _layer(kind: Any, **more: Any) -> Fault:
    return Fault(kind, path="/blobs/{layer}", **{"after": AFTER, **more})


def _limit(engine: str, attempts: int | None, *headers: tuple[str, str]) -> tuple[Fault, ...]:
    """Refuse a manifest with 429 for so many of our attempts.

    Docker asks once, by GET, then we ask how long to wait. containerd: we look for what lets in, it asks six times
    by HEAD without a pause, then we.
    """
    asked = {"docker": {"GET": 1, "HEAD": 1}, "containerd": {"HEAD": 8}}[engine]
    return tuple(
        Fault(
            "status",
            path="/manifests/",
            status=429,
            times=None if attempts is None else attempts * times,
            headers=headers,
            method=method,
        )
        for method, times in asked.items()
    )


def transient(engine: str) -> Mapping[str, Case]:
    """Return what is met by trying again."""
    return {
        "reset": Case((_layer("reset", times=1),)),
        "short": Case((_layer("short", times=1),)),
        "status503": Case((_layer("status", status=503, times=2),)),
        "manifest503": Case((Fault("status", path="/manifests/", status=503, times=2),)),
        "limited": Case(_limit(engine, 2)),
        "limited_for": Case(_limit(engine, 2, ("Retry-After", "3"))),
        "stall": Case((_layer("stall", times=1, after=300_000),), HASTY),
        "wrong_once": Case((_layer("wrong", times=1),)),
        "drip": Case((_layer("drip", rate=2_200_000, after=0),), PACED),
    }


def permanent(engine: str) -> Mapping[str, Case]:
    """Return what no patience helps against."""
    docker = engine == "docker"
    redirects = "stopped after 10 redirects"
    return {
        "stall_always": Case(
            # containerd goes on where the attempt before ended: all of them get less than the whole.
            (_layer("stall", after=1_500_000),),
            HASTY,
            words="no progress for 0:04 min; layer {layer}: downloading",
        ),
        "silent": Case((_layer("stall", after=0),), HASTY, words="no progress for 0:04 min; layer {layer}: "),
        "slow": Case((_layer("drip", rate=600_000, after=0),), PACED, words="; layer {layer}: downloading, "),
        "wrong": Case(
            (_layer("wrong"),),
            words="verification failed" if docker else "unexpected commit digest",
            attempts=2,
        ),
        "redirect": Case((Fault("redirect_loop", path="/manifests/"),), words=redirects, attempts=1),
        # Docker tries again by itself and doesn't say why.
        "redirect_layer": Case(
            (_layer("redirect_loop"),),
            HASTY,
            words="layer {layer}: retrying" if docker else redirects,
            attempts=ATTEMPTS if docker else 1,
        ),
        "limited_always": Case(
            _limit(engine, None, ("Retry-After", "1")), words="the registry asks to wait 1 s (attempt 3)"
        ),
        "limited_for_long": Case(
            _limit(engine, None, ("Retry-After", "100000")),
            words="the registry asks to wait 100000 s",
            attempts=1,
        ),
        "unknown": Case(words="not found", attempts=1),
        "refused": Case(host=REFUSED, words="refused"),
        "expired": Case(host=EXPIRED, words="certificate has expired", attempts=1),
    }


def _unknown(image: LockedImage) -> LockedImage:
    digest = f"sha256:{'0' * 64}"
    return image.model_copy(update={"digest": digest, "manifest": digest})


def _large(image: LockedImage) -> str:
    return max(image.layers, key=lambda layer: layer.size).digest


def _placed(fault: Fault, name: str, image: LockedImage) -> Fault:
    return replace(fault, path=f"^/v2/{name}{fault.path.replace('{layer}', _large(image))}")


def partial(state: Path) -> list[str]:
    """Return the parts of blobs in a data root, of either engine."""
    ingest = state / "io.containerd.content.v1.content/ingest"
    return [p.name for p in (*state.rglob("GetImageBlob*"), *ingest.glob("*"))]


# -- faults of the registry ------------------------------------------------------------------------------------


def meet_faults(lab: Lab) -> Result:
    """Pull one image for each case, some at once; then those that failed once more, without faults."""
    cases = {**transient(lab.engine), **permanent(lab.engine)}
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    lab.serve_proxy(EXPIRED, not_after=yesterday)
    lab.endpoints[REFUSED] = Endpoint(REFUSED, new_address(), PORT, lab.endpoints[HOST].ca)
    pushed = {name: lab.push(name, SIZE) for name in cases}
    wanted = {
        name: image.model_copy(update={"ref": f"{cases[name].host}/{name}:1"})
        for name, image in pushed.items()
    }
    wanted["unknown"] = _unknown(wanted["unknown"])
    moved = lab.push("moved", MB)
    moved_to = lab.push("moved", 2 * MB)
    lab.proxy.faults = [_placed(f, name, wanted[name]) for name, case in cases.items() for f in case.faults]
    state = lab.folder("state")

    def meet(engine: Any, name: str) -> Result:
        image, case = wanted[name], cases[name]
        found = lab.pull(engine, [image], limits=case.limits, attempts=ATTEMPTS)
        asked = [r for r in lab.proxy.requests if r.path.startswith(f"/v2/{name}/")]
        layers = [r for r in asked if any(layer.digest in r.path for layer in image.layers)]
        return {
            **found,
            "ref": image.ref,
            "layer": _large(image).removeprefix("sha256:")[:12],
            "bytes": image.size,
            "wire": sum(r.sent for r in layers),
            "ranges": [r.range for r in layers if r.range],
            "manifests": [r.started for r in asked if "/manifests/" in r.path],
            "has": engine.has(image),
        }

    with lab.running(state) as engine:
        # Not all at once: a program that waits for one of few processors is as slow as a registry.
        with ThreadPoolExecutor(8) as threads:
            met = threads.map(lambda name: meet(engine, name), cases)
            result: Result = {"cases": dict(zip(cases, met, strict=True))}
        result["moved"] = {**lab.pull(engine, [moved]), "has": [engine.has(moved), engine.has(moved_to)]}
        lab.proxy.faults = ()
        again = [pushed[name] for name in permanent(lab.engine)]
        before = len(lab.proxy.requests)
        result["again"] = lab.pull(engine, again, limits=PATIENT, attempts=1)
        result["again"]["has"] = [engine.has(image) for image in again]
        result["again"]["wire"] = sum(r.sent for r in lab.proxy.requests[before:] if "/blobs/" in r.path)
        result["again"]["bytes"] = sum(image.size for image in again)
    # Docker leaves a connection open on which nothing comes, until it ends itself.
    wait_until(lambda: all(r.ended is not None for r in lab.proxy.requests))
    result["open"] = [r.path for r in lab.proxy.requests if r.ended is None]
    lab.module.strip(state)
    result["partial"] = partial(state)
    return result


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def met(worker: Workplace, engine: str) -> Result:
    result: Result = isolated(meet_faults, worker, engine)
    return result


@pytest.mark.parametrize("name", transient("docker"))
def test_transient_fault_is_overcome(met: Result, engine: str, name: str) -> None:
    case = met["cases"][name]
    assert not case["bug"], case["bug"]
    assert not case["error"] and case["has"], case
    assert case["seconds"] < 60
    attempts = case["records"][0]["attempts"]
    wire = case["wire"] / case["bytes"]
    assert wire >= 1, "all of it came from there"
    if name == "wrong_once":
        assert wire <= 2.01 and len(attempts) == 2  # what is wrong is no beginning of what is right
    elif (engine, name) == ("containerd", "reset"):
        # ctr's lease ends with its failure, and what came before the connection was reset goes with it.
        assert wire <= 1.01 + AFTER / case["bytes"]
    else:
        assert wire <= 1.2
    if name == "short" or (engine, name) == ("docker", "reset"):
        assert case["ranges"] == [f"bytes={AFTER}-"] and len(attempts) == 1
    if name in ("limited", "limited_for"):
        said = "toomanyrequests" if engine == "docker" else "429 Too Many Requests"
        assert [said in a["outcome"] for a in attempts] == [True, True, False]
    if name == "limited_for":
        assert len([1 for a, b in pairwise(case["manifests"]) if b - a >= 3]) == 2, "each wait was as asked"
    if name == "stall":
        assert "no progress for 0:04 min" in attempts[0]["outcome"] and len(attempts) == 2
    if name == "drip":
        assert len(attempts) == 1, attempts


@pytest.mark.parametrize("name", permanent("docker"))
def test_permanent_fault_is_reported(met: Result, engine: str, name: str) -> None:
    case, planned = met["cases"][name], permanent(engine)[name]
    layer, attempts = case["layer"], case["records"][0]["attempts"]
    assert not case["bug"], case["bug"]
    assert not case["has"]
    assert case["error"].startswith(f"{case['ref']}: ")
    assert planned.words.replace("{layer}", layer) in case["error"], case["error"]
    assert case["records"][0]["outcome"] == "failed"
    assert len(attempts) == planned.attempts, attempts
    # Every attempt ends by its deadline, with a moment more for a busy machine; then there are the pauses.
    assert case["seconds"] < planned.attempts * (planned.limits.progress_seconds + 5) + 5
    if name == "stall_always":
        # Docker tells of what came in a burst only in part.
        assert re.search(r"downloading, [\d.]+ [kM]B of 6 MB", case["error"]), case["error"]
    if name == "slow":
        assert case["error"].split(": ")[1].startswith("too slow for 0:0")
        assert case["error"].endswith("B/s (attempt 3)")
    if name in ("unknown", "refused", "expired", "redirect", "limited_always", "limited_for_long"):
        assert case["wire"] == 0


def test_a_tag_that_moved_after_the_lock_changes_nothing(met: Result) -> None:
    assert not met["moved"]["error"] and met["moved"]["has"] == [True, False]


def test_what_failed_comes_without_faults_and_nothing_else_is_left(met: Result) -> None:
    again = met["again"]
    assert not again["error"] and all(again["has"]), again
    assert again["wire"] <= again["bytes"] + 100_000
    assert met["open"] == [] and met["partial"] == []


def lock_what_fails(lab: Lab) -> Result:
    """Lock what is not there, is not reachable, or has the wrong bytes."""
    good = lab.push("good", MB)
    lab.endpoints[REFUSED] = Endpoint(REFUSED, new_address(), PORT, lab.endpoints[HOST].ca)
    lab.serve_proxy(EXPIRED, not_after=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1))
    lab.proxy.faults = [Fault("wrong", path="/blobs/")]
    refs = {
        "unknown": f"{HOST}/good:none",
        "no_repository": f"{HOST}/none:1",
        "refused": f"{REFUSED}/good:1",
        "expired": f"{EXPIRED}/good:1",
        "wrong": good.ref,
    }

    def message(ref: str) -> str:
        return told(lambda: locate(ref, PLATFORM, lab.endpoints))[0]

    # What is not reached is tried for some 15 s.
    with ThreadPoolExecutor(len(refs)) as threads:
        return dict(zip(refs, threads.map(message, refs.values()), strict=True))


def told(work: Callable[[], object]) -> list[str]:
    """Return the message and the hint of what ``work`` raises."""
    try:
        work()
    except PullError as error:
        return [error.message, error.hint or ""]
    return ["nothing was raised", ""]


def test_what_can_not_be_locked_is_named(worker: Workplace) -> None:
    found = isolated(lock_what_fails, worker, "docker")
    assert found["unknown"].startswith(f"{HOST}/good:none: {HOST} says 404 manifest unknown")
    assert found["no_repository"].startswith(f"{HOST}/none:1: {HOST} says 404")
    assert found["refused"].startswith(f"{REFUSED}/good:1: ") and "refused" in found["refused"]
    assert found["expired"].startswith(f"{EXPIRED}/good:1: ") and "expired" in found["expired"]
    assert found["wrong"].startswith(f"{HOST}/good:1: the registry gave other bytes than those of sha256:")


# -- an end from outside ---------------------------------------------------------------------------------------


def end_early(lab: Lab) -> Result:
    """End pulls from outside, and the engine itself; then pull with a new one on the same data root."""
    names = ("optional", "required", "cancelled", "killed")
    stuck = {name: lab.push(name, SIZE) for name in names}
    good = {name: lab.push(f"good{name}", MB) for name in names}
    lab.proxy.faults = [_placed(_layer("stall"), name, image) for name, image in stuck.items()]
    state = lab.folder("state")
    result: Result = {}

    def during(
        engine: Any, name: str, act: Callable[[], None], stop: threading.Event | None = None
    ) -> Result:
        def wait_and_act() -> None:
            large = _large(stuck[name])
            wait_until(lambda: any(large in r.path and r.sent >= AFTER for r in lab.proxy.requests))
            time.sleep(1)
            acted.append(time.monotonic())
            act()

        acted: list[float] = []
        thread = threading.Thread(target=wait_and_act)
        thread.start()
        found = lab.pull(engine, [stuck[name]], stop=stop, limits=PATIENT)
        ended = time.monotonic()
        thread.join()
        return {**found, "after": ended - acted[0]}

    with lab.running(state) as engine:
        optional = [Wanted(stuck["optional"], required=False), Wanted(good["optional"])]
        result["optional"] = lab.pull(engine, optional, limits=HASTY, attempts=1)
        result["optional"]["has"] = [engine.has(w.image) for w in optional]
        required = [_unknown(good["required"]), stuck["required"]]
        result["required"] = lab.pull(engine, required, limits=PATIENT)
        stop = threading.Event()
        result["cancelled"] = during(engine, "cancelled", stop.set, stop)
        daemon = "dockerd" if lab.engine == "docker" else "containerd"
        result["killed"] = during(engine, "killed", lambda: kill(daemon))
    lab.proxy.faults = ()
    with lab.running(state) as engine:
        everything = [*stuck.values(), *good.values()]
        result["kept"] = engine.has(good["optional"])
        missing = [image for image in everything if not engine.has(image)]
        result["again"] = lab.pull(engine, missing, limits=PATIENT, attempts=1)
        result["again"]["has"] = [engine.has(image) for image in everything]
    lab.module.strip(state)
    result["partial"] = partial(state)
    return result


@pytest.fixture(scope="module")
def ended(worker: Workplace, engine: str) -> Result:
    result: Result = isolated(end_early, worker, engine)
    return result


def test_an_image_that_is_not_required_may_fail(ended: Result) -> None:
    found = ended["optional"]
    assert not found["bug"] and not found["error"]
    assert found["has"] == [False, True]
    assert list(found["failed"]) == [f"{HOST}/optional:1"]
    assert "no progress" in found["failed"][f"{HOST}/optional:1"]


def test_the_first_required_image_that_fails_ends_the_others(ended: Result) -> None:
    found = ended["required"]
    assert not found["bug"] and found["seconds"] < 15
    assert found["error"].startswith(f"{HOST}/goodrequired:1: ") and "not found" in found["error"]
    assert "\n" not in found["error"], "the other one did not fail, it was ended"
    assert sorted(r["outcome"] for r in found["records"]) == ["failed", "stopped"]


def test_stop_ends_a_pull_within_seconds(ended: Result) -> None:
    found = ended["cancelled"]
    assert not found["bug"] and found["after"] < 5
    assert found["error"].startswith(f"{HOST}/cancelled:1: the build ends")
    assert len(found["records"][0]["attempts"]) == 1


def test_an_engine_that_is_killed_is_told_at_once(ended: Result, engine: str) -> None:
    found = ended["killed"]
    assert not found["bug"] and found["after"] < 5
    assert found["error"].startswith(f"{HOST}/killed:1: {engine} is gone"), found["error"]


def test_a_new_engine_goes_on_where_all_of_this_ended(ended: Result) -> None:
    assert ended["kept"]
    again = ended["again"]
    assert not again["bug"] and not again["error"] and all(again["has"]), again
    assert ended["partial"] == []


# -- a full disk -----------------------------------------------------------------------------------------------


@contextmanager
def small_disk(lab: Lab, mib: int) -> Iterator[Path]:
    """Mount a filesystem of its own, as small as that."""
    file, place = lab.base / "disk.img", lab.folder("disk")
    with file.open("wb") as stream:
        stream.truncate(mib << 20)
    process.run(["mkfs.ext4", "-q", file])
    # The namespace's /dev has no devices of the host.
    if not os.path.exists("/dev/loop-control"):
        os.mknod("/dev/loop-control", 0o20600, os.makedev(10, 237))
    loop = process.run(["losetup", "--find"]).stdout.strip()
    if not os.path.exists(loop):
        os.mknod(loop, 0o60600, os.makedev(7, int(loop.removeprefix("/dev/loop"))))
    process.run(["mount", "-o", f"loop={loop}", file, place])
    try:
        yield place
    finally:
        process.run(["umount", place])
        file.unlink()


def fill_disk(lab: Lab) -> Result:
    """Pull what has no room when it is unpacked, then what has."""
    large = lab.push("large", zeros=300 << 20)
    small = lab.push("small", MB)
    mib = 128
    with small_disk(lab, mib) as disk:
        state = disk / "state"
        state.mkdir()
        with lab.running(state) as engine:
            result = lab.pull(engine, [large], limits=PATIENT, attempts=5)
            result["blobs"] = len([r for r in lab.proxy.requests if r.path.startswith("/v2/large/blobs/")])
            result["layers"] = len(large.layers)
            # containerd gives room back a moment after it has said that there is none.
            result["freed"] = wait_until(lambda: shutil.disk_usage(disk).free > (mib << 20) / 2)
            result["small"] = lab.pull(engine, [small], limits=PATIENT, attempts=1)
            result["has"] = [engine.has(large), engine.has(small)]
    return result


def test_a_full_disk_is_told_and_not_tried_again(worker: Workplace, engine: str) -> None:
    found = isolated(fill_disk, worker, engine)
    assert not found["bug"]
    assert found["error"].startswith(f"{HOST}/large:1: ") and "no space left on device" in found["error"]
    assert len(found["records"][0]["attempts"]) == 1
    assert found["blobs"] == found["layers"] + 1, "each layer and the configuration once"
    # What did not fit is gone, so that something smaller does.
    assert found["freed"]
    assert not found["small"]["error"] and found["has"] == [False, True], found["small"]


# -- a password ------------------------------------------------------------------------------------------------


@contextmanager
def private_registry(lab: Lab, username: str, password: str) -> Iterator[Endpoint]:
    """Run a second registry on the same storage, one that lets nobody in without a password."""
    storage = next(lab.base.glob("storage-*"))
    address = new_address()
    with open_root(
        [lab.tools], lab.folder("private"), binds={registry._STORAGE: storage}, network=True
    ) as root:
        home = root.path / registry._HOME.lstrip("/")
        made = certificate.make(PRIVATE, home)
        hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()
        (home / "htpasswd").write_text(f"{username}:{hashed}\n")
        config = {
            **registry.configuration(address, writable=False),
            "auth": {"htpasswd": {"realm": "lab", "path": f"{registry._HOME}/htpasswd"}},
        }
        (home / "config.json").write_text(json.dumps(config))
        ca = lab.folder("private-ca") / "ca.pem"
        ca.write_bytes(made.ca.read_bytes())
        argv = root.argv([f"/{registry._PROGRAM}", "serve", f"{registry._HOME}/config.json"])
        with process.background(argv, log=lab.base / "private.log"):
            yield Endpoint(PRIVATE, address, PORT, ca)


def use_password(lab: Lab) -> Result:
    """Pull from a registry that wants a password: with it, with a wrong one, without; look where it is found."""
    username, password = "robot", f"canary-{secrets.token_hex(12)}"
    pushed = [lab.push(name, 20 * MB) for name in ("locked", "denied", "anonymous")]
    locked, denied, anonymous = (i.model_copy(update={"ref": i.ref.replace(HOST, PRIVATE)}) for i in pushed)
    state = lab.folder("state")
    header = json.dumps({"username": username, "password": password}).encode()
    words = {
        password,
        base64.b64encode(f"{username}:{password}".encode()).decode(),
        base64.b64encode(header).decode(),
        base64.urlsafe_b64encode(header).decode(),
    }
    found: set[str] = set()
    programs: set[str] = set()
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.005):
            for one in processes():
                programs.add(Path(one.words[0]).name)
                text = " ".join((*one.words, *one.environment))
                found.update(f"{one.pid} {one.words[0]}" for word in words if word in text)

    def login(secret: str) -> str:
        return json.dumps({PRIVATE: {"username": username, "password": secret}})

    result: Result = {}
    with private_registry(lab, username, password) as endpoint:
        lab.endpoints[PRIVATE] = endpoint
        with lab.running(state) as engine:
            result["locate_without"] = told(lambda: locate(locked.ref, PLATFORM, lab.endpoints))
            os.environ[VARIABLE] = login(password)
            result["located"] = locate(locked.ref, PLATFORM, lab.endpoints) == locked
            sampler = threading.Thread(target=sample)
            sampler.start()
            result["with"] = lab.pull(engine, [locked])
            over.set()
            sampler.join()
            result["has"] = engine.has(locked)
            os.environ[VARIABLE] = login("wrong")
            result["wrong"] = lab.pull(engine, [denied])
            del os.environ[VARIABLE]
            result["without"] = lab.pull(engine, [anonymous])
            assert lab.root
            files = files_with(lab.root.path / "run", words)
    (lab.base / "canary").write_text(password)
    result["files"] = [*files, *files_with(lab.base, words)]
    result["processes"], result["programs"] = sorted(found), sorted(programs)
    result["records"] = any(word in json.dumps(result) for word in words)
    return result


def files_with(folder: Path, words: set[str]) -> list[str]:
    """Return the files below ``folder`` that hold one of the words; what is mounted there is not looked into."""
    found = []
    device = folder.stat().st_dev
    for place, names, files in os.walk(folder):
        names[:] = [name for name in names if Path(place, name).lstat().st_dev == device]
        for path in (Path(place, name) for name in files):
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                found += [os.fspath(path) for word in words if word.encode() in data]
    return found


def test_a_password_opens_a_registry_and_is_found_nowhere(worker: Workplace, engine: str) -> None:
    found = isolated(use_password, worker, engine)
    message, hint = found["locate_without"]
    assert message.startswith(f"{PRIVATE}/locked:1: {PRIVATE} says 401") and VARIABLE in hint
    assert found["located"]
    assert not found["with"]["bug"] and not found["with"]["error"] and found["has"], found["with"]
    for name, image in (("wrong", "denied"), ("without", "anonymous")):
        case = found[name]
        assert not case["bug"]
        assert case["error"].startswith(f"{PRIVATE}/{image}:1: ")
        assert any(w in case["error"].lower() for w in ("unauthorized", "authorization", "basic auth")), case
        assert len(case["records"][0]["attempts"]) == 1, case
    assert {"dockerd" if engine == "docker" else "ctr"} <= set(found["programs"]), "nobody was looked at"
    assert found["processes"] == []
    (canary,) = found["files"]
    assert canary.endswith("/canary"), "it is found where it was put for this purpose, and nowhere else"
    assert not found["records"]
