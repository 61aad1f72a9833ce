"""CI's time limits, for 2 processors and an empty store; a run that exceeds one by a fifth fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

# Minutes of all lanes together, by part. `fast` is lint, types and unit tests; `bake` is everything up to an artefact,
# `preload` the pulls of container images, `disk` the local disk with the preload store, and the booted machine, `gpu`
# the drivers' build and the gate, `pools` hundreds of hosts with sshd. The part that needs an image first waits until
# it is baked. Measured with no stage in the store, 2026-11-24: fast 2.2 (the goal is 2), bake 19.7, preload 15.0 with
# nine for baking `worker`, disk 20.6, gpu 15.3. `pools` with publishing, drains and rolls, 2026-11-27: 11.4.
CEILINGS = {"fast": 2.2, "bake": 20.0, "preload": 15.0, "disk": 22.0, "gpu": 16.0, "pools": 13.0}
# Minutes of the whole, which is less than the sum, since lanes run side by side. The goal for a store that has all
# stages is 18; a store from another state of the code counts as filled although it has none of them. Measured
# 2026-11-26 and -27, converted to this machine: 24.9 and 15.6.
WHOLE = {"empty": 25.0, "filled": 18.0}
CEILING_GB = 25.0
_MARGIN = 1.2
# Seconds that a fixed computation takes on the machine of these figures. It wasn't timed there: this is its time on a
# slower machine, divided by the ratio of the unit tests' times on both.
# Hosts that share their memory bandwidth with others are two to four times as slow, depending on the hour: on one of
# them, without any load of its own, it took 2.5 times as long in one evening hour of 2026-11-27, and 3.6 to
# 3.9 times in another, when the unit tests took 3.5 times as long.
_KEYS, _SECONDS, _SLOWEST = 200_000, 0.17, 4.0


def slowness() -> float:
    """Return how many times slower this machine is than that of the ceilings, between 1 and 4."""

    def seconds() -> float:
        started = time.process_time()
        sorted({str(number): (number, [number]) for number in range(_KEYS)}.items())
        return time.process_time() - started

    return min(_SLOWEST, max(1.0, min(seconds() for _ in range(5)) / _SECONDS))


def lines(
    minutes: Mapping[str, float], whole: float, gigabytes: float, store: str, slowness: float = 1.0
) -> Iterator[tuple[str, bool]]:
    """Return a line about each ceiling, and whether it is exceeded by more than the margin.

    ``minutes`` has the parts that ran; ``store`` is `empty` or `filled`, as it was at the start. The ceilings are
    multiplied by the machine's ``slowness``.
    """
    if slowness > _MARGIN:
        yield (
            f"this machine is {slowness:.1f} times as slow as that of the ceilings: they are as much higher",
            False,
        )
    for name, taken in minutes.items():
        yield _line(name, taken, CEILINGS[name] * slowness, "min")
    if set(minutes) == set(CEILINGS):
        yield _line(f"all, {store} store", whole, WHOLE[store] * slowness, "min")
        yield _line("disk", gigabytes, CEILING_GB, "GB")


def _line(name: str, taken: float, ceiling: float, unit: str) -> tuple[str, bool]:
    is_red = taken > ceiling * _MARGIN
    over = " (over by more than a fifth)" if is_red else " (over)" if taken > ceiling else ""
    return f"{name}: {taken:.1f} of {ceiling:.3g} {unit}{over}", is_red
