"""Pull the locked images with an image's own engine: in parallel, watched, retried where that can help."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Protocol

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull import retry
from image_builder.bake.pull.attempt import Attempt, now
from image_builder.bake.pull.model import Event, Limits
from image_builder.bake.pull.network import Endpoints, Network
from image_builder.bake.pull.reference import parse
from image_builder.bake.pull.refusals import mirror_failures, retry_after
from image_builder.canonical import JSON
from image_builder.errors import PullError
from image_builder.events import Monitor, Part

_WATCH_SECONDS = 0.25
_IN_WORDS = {
    "waiting": "queued",
    "downloading": "downloading",
    "downloaded": "downloaded",
    "extracting": "extracting",
    "done": "done",
    "retrying": "the runtime tries again",
}


class Engine(Protocol):
    """A running container runtime that pulls."""

    name: str
    alive: Callable[[], bool]

    def pull(self, image: LockedImage, attempt: Attempt) -> None:
        """Pull ``image``, reporting events to ``attempt``. Raises PullError with the runtime's own message."""


@dataclass(frozen=True)
class Request:
    """An image to pull; one that is not ``required`` may fail, except because the disk is full."""

    image: LockedImage
    required: bool = True


@dataclass
class _Job:
    """An image being pulled. ``started`` and ``ended`` are seconds of the monotonic clock."""

    request: Request
    started: float = 0.0
    ended: float = 0.0
    attempt: Attempt | None = None
    attempts: list[dict[str, JSON]] = field(default_factory=list)
    state: str = "waiting"
    error: str = ""

    @property
    def is_lost(self) -> bool:
        """Return whether it failed and nothing can be made without it."""
        return self.state == "failed" and (self.request.required or retry.classify(self.error) == "full")


@dataclass(frozen=True)
class Pulled:
    """The result of pulling. ``failed`` maps the references of missing images that aren't required to the reason."""

    failed: Mapping[str, str]
    records: Sequence[Mapping[str, JSON]]


class Puller:
    """A parallel puller. ``limits`` are for each image, ``parallel`` is how many are pulled at once."""

    def __init__(
        self,
        engine: Engine,
        *,
        limits: Limits,
        policy: retry.Policy,
        parallel: int,
        endpoints: Endpoints,
        network: Network,
        stage: str,
        monitor: Monitor,
        stop: threading.Event | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.engine, self.limits, self.policy, self.parallel = engine, limits, policy, parallel
        self.endpoints, self.network = endpoints, network
        self.stage, self.monitor, self.chance = stage, monitor, chance
        self._stop = stop or threading.Event()
        self._over = threading.Event()

    def pull(self, requests: Sequence[Request]) -> Pulled:
        """Pull all images. A required image that fails ends the others, as does a full disk.

        Raises PullError naming every such image, its layer, its last known state, and for how long nothing arrived.
        """
        began = now()
        # Large ones first, so that the last to finish isn't one that began last.
        jobs = [_Job(w) for w in sorted(requests, key=lambda w: -w.image.size)]
        with ThreadPoolExecutor(max(1, self.parallel)) as workers:
            running = {workers.submit(self._work, job): job for job in jobs}
            try:
                self._watch(running)
            except BaseException:
                self._end_all(jobs, "the build ends")
                raise
        records: list[Mapping[str, JSON]] = [_record(job, began) for job in jobs]
        lost = [j for j in jobs if j.is_lost]
        if not lost and (self._stop.is_set() or not self.engine.alive()):
            lost = [j for j in jobs if j.state != "done"]
        if lost:
            lines = [f"{j.request.image.ref}: {j.error or 'the build ends'}" for j in lost]
            raise PullError("\n  ".join(lines), records=records)
        return Pulled({j.request.image.ref: j.error for j in jobs if j.error}, records)

    def _watch(self, running: Mapping[Future[None], _Job]) -> None:
        """Judge and display the running pulls until all have ended."""
        waiting = set(running)
        while waiting:
            done, waiting = wait(waiting, timeout=_WATCH_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                job = running[future]
                if job.is_lost:
                    self._end_all(list(running.values()), f"given up, since {job.request.image.ref} failed")
            # A runtime doesn't say when a layer leaves its queue. While it downloads nothing, there is no queue.
            busy = any(j.attempt and j.attempt.downloads for j in running.values())
            for job in running.values():
                self._judge(job, busy)
            if self._stop.is_set() and not self._over.is_set():
                self._end_all(list(running.values()), "the build ends")
            if not self.engine.alive() and waiting:
                self._end_all(list(running.values()), f"{self.engine.name} is gone")
            self.monitor.stage_parts(self.stage, [_part(job) for job in running.values()])

    def _judge(self, job: _Job, busy: bool) -> None:
        attempt = job.attempt
        if attempt is None or attempt.given_up:
            return
        attempt.queued(behind_others=busy)
        remaining = self.limits.overall_seconds - sum(_seconds(a) for a in job.attempts)
        verdict = attempt.judge(now(), replace(self.limits, overall_seconds=max(remaining, 0.0)))
        if verdict:
            attempt.give_up(str(verdict))

    def _end_all(self, jobs: Sequence[_Job], why: str) -> None:
        self._over.set()
        for job in jobs:
            if job.attempt:
                job.attempt.give_up(why)

    def _work(self, job: _Job) -> None:
        """Try to pull one image until it is there or there is no hope left."""
        job.started = now()
        while not self._over.is_set():
            job.state, job.attempt = "pulling", Attempt(now())
            if self._over.is_set():  # set just now: the thread that ended the others may have missed it
                job.attempt.give_up("the build ends")
            try:
                self.engine.pull(job.request.image, job.attempt)
            except PullError as error:
                if self._failed(job, job.attempt, error):
                    break
                continue
            job.attempts.append(_attempt(job.attempt, "pulled"))
            job.state, job.error, job.attempt = "done", "", None
            break
        else:
            job.state = "stopped"
        # An engine that dies aborts the pull a moment before it can be seen to be dead.
        gone = f"{self.engine.name} is gone"
        if job.state != "done" and not self.engine.alive() and not job.error.startswith(gone):
            job.error = f"{gone}: {job.error}" if job.error else gone
        job.ended = now()

    def _failed(self, job: _Job, attempt: Attempt, error: PullError) -> bool:
        """Record a failed attempt and wait for the next one. Returns True if there is none."""
        why = attempt.given_up or error.message
        job.error = _with_last_seen(why, attempt)
        job.attempts.append(_attempt(attempt, job.error))
        job.attempt = None
        if self._over.is_set() or not self.engine.alive():
            job.state = "stopped" if self._over.is_set() else "failed"
            return True
        # A deadline has expired: what stalls once may arrive at the second try, but the time is gone for good.
        kind: retry.Class = "transient" if attempt.given_up else retry.classify(why)
        image, mirrors, requested_seconds = job.request.image, self.network.mirrors, 0.0
        # Docker passes on only the answer of the registry, which it asks after the mirrors.
        by_mirror = kind == "transient" and not attempt.given_up and parse(image.ref).registry in mirrors
        if kind == "limited" or by_mirror:
            requested_seconds = retry_after(image.ref, image.digest, self.endpoints, self.network)
        pause = retry.pause_before_next(
            self.policy, kind, len(job.attempts), self.chance(), requested_seconds
        )
        spent = sum(_seconds(a) for a in job.attempts)
        if pause is None or spent >= self.limits.overall_seconds:
            count = f" (attempt {len(job.attempts)})" if len(job.attempts) > 1 else ""
            wish = (
                f"; the registry asks for a pause of {requested_seconds:.0f} s" if requested_seconds else ""
            )
            job.state, job.error = "failed", f"{job.error}{wish}{self._by_mirrors(image, why)}{count}"
            return True
        job.state = f"retrying in {pause:.0f} s: {why}"
        self._over.wait(pause)
        return False

    def _by_mirrors(self, image: LockedImage, why: str) -> str:
        """Return the failures of the mirrors of an image's registry that the runtime's message doesn't name."""
        failures = mirror_failures(image.ref, image.digest, self.endpoints, self.network)
        return "".join(f"{retry.MIRROR}{url}: {said}" for url, said in failures.items() if url not in why)


def _with_last_seen(why: str, attempt: Attempt) -> str:
    """Add the last event of the layer that reported last, unless the message already names a layer."""
    events = [s for s in attempt.latest().values() if s.layer and s.phase not in ("done", "waiting")]
    if not events or "layer" in why:
        return why
    last = max(events, key=lambda s: s.at)
    ago = now() - last.at
    return f"{why}; layer {last.layer}: {last.text or _IN_WORDS[last.phase]}, {ago:.0f} s ago"


def _attempt(attempt: Attempt, outcome: str) -> dict[str, JSON]:
    """Return the record of an attempt for pulls.json; times are seconds since its start."""
    layers: dict[str, JSON] = {
        layer: {
            "downloaded_bytes": record.bytes,
            "phases": {
                phase: [round(at - attempt.started, 2) for at in times]
                for phase, times in record.phases.items()
            },
        }
        for layer, record in attempt.layers.items()
    }
    return {"seconds": round(now() - attempt.started, 2), "outcome": outcome, "layers": layers}


def _seconds(attempt: Mapping[str, JSON]) -> float:
    seconds = attempt["seconds"]
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def _record(job: _Job, began: float) -> dict[str, JSON]:
    image = job.request.image
    return {
        "ref": image.ref,
        "digest": image.digest,
        "bytes": image.size,
        "outcome": job.state if job.state in ("done", "failed", "stopped") else "stopped",
        "error": job.error or None,
        "started": round(max(job.started - began, 0.0), 2),
        "seconds": round(max(job.ended - job.started, 0.0), 2),
        "attempts": job.attempts,
    }


def _part(job: _Job) -> Part:
    """Return one image's progress line."""
    image = job.request.image
    if job.state == "done":
        return Part(image.ref, image.size, image.size, "done")
    if job.attempt is None:
        return Part(image.ref, 0, image.size, job.state)
    latest = job.attempt.latest()
    sizes = {name: layer.size for layer in image.layers for name in _names(layer.digest)}
    got = {name: _downloaded(event, sizes) for name, event in latest.items() if name in sizes}
    unpacked = sum(s.phase == "done" for name, s in latest.items() if name in sizes)
    unpacking = [s for s in latest.values() if s.phase == "extracting"]
    progress = f"{unpacked}/{len(image.layers)} layers"
    if unpacking:
        progress += f", extracting {unpacking[0].layer.removeprefix('sha256:')[:12]}"
    elif latest and all(s.phase in ("waiting", "done") for s in latest.values()):
        progress += ", queued"
    return Part(image.ref, sum(got.values()), image.size, progress)


def _names(digest: str) -> tuple[str, str]:
    """Return the names that runtimes give a layer: its digest, and Docker's short id."""
    return digest, digest.removeprefix("sha256:")[:12]


def _downloaded(event: Event, sizes: Mapping[str, int]) -> int:
    if event.phase in ("downloaded", "extracting", "done"):
        return sizes[event.layer]
    return min(event.current, sizes[event.layer]) if event.phase == "downloading" else 0
