"""Azure's limits as token buckets: for a subscription, for all its scale sets together, and for each scale set.

The numbers come from the reference (Azure Resource Manager's throttling limits; Compute's throttling limits); the
names of Compute's policies are our own. Answers report the remaining tokens in ``x-ms-ratelimit-remaining-…``; an
empty bucket answers 429 with Retry-After.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tests.support.arm.model import Answer, Request, error

_KINDS = {"GET": "reads", "DELETE": "deletes"}
_SCALE_SET = "/virtualmachinescalesets/"
_MINUTE = 60.0


@dataclass(frozen=True)
class Policy:
    """The limit of a bucket: it holds ``size`` requests and gains ``refill`` per minute."""

    size: float
    refill: float


def _documented() -> dict[str, Policy]:
    return {
        "reads": Policy(250, 1500),
        "writes": Policy(200, 600),
        "deletes": Policy(200, 600),
        "ScaleSet": Policy(36, 12),
        "ScaleSets": Policy(6000, 2000),
        "Instances": Policy(30, 10),
        "AllInstances": Policy(1080, 360),
    }


@dataclass
class Bucket:
    """A bucket: ``taken`` has the times of granted requests; ``early`` counts requests before Retry-After ended."""

    policy: Policy
    tokens: float
    at: float
    taken: list[float] = field(default_factory=list)
    refused: int = 0
    early: int = 0
    _not_before: float = 0.0

    def take(self, now: float) -> int:
        """Take a token and return 0, or return the seconds until one is available."""
        speed = self.policy.refill / _MINUTE
        self.tokens, self.at = min(self.policy.size, self.tokens + (now - self.at) * speed), now
        self.early += now < self._not_before
        if self.tokens >= 1:
            self.tokens -= 1
            self.taken.append(now)
            return 0
        self.refused += 1
        seconds = math.ceil((1 - self.tokens) / speed)
        self._not_before = now + seconds
        return seconds

    @property
    def share(self) -> float:
        """Return the largest number of requests within one minute, as a fraction of the refill per minute."""
        most = max((sum(t <= u < t + _MINUTE for u in self.taken) for t in self.taken), default=0)
        return most / self.policy.refill


@dataclass
class Limits:
    """All buckets, by policy and scope. Tests can tighten ``policies`` and hide the remaining tokens (``tells``)."""

    policies: dict[str, Policy] = field(default_factory=_documented)
    buckets: dict[tuple[str, str], Bucket] = field(default_factory=dict)
    tells: bool = True
    clock: Callable[[], float] = time.monotonic

    @property
    def refused(self) -> int:
        return sum(bucket.refused for bucket in self.buckets.values())

    @property
    def early(self) -> int:
        return sum(bucket.early for bucket in self.buckets.values())

    def shares(self) -> dict[tuple[str, str], float]:
        """Return each bucket's busiest minute, as a fraction of its refill."""
        return {key: bucket.share for key, bucket in self.buckets.items()}

    def take(self, request: Request) -> Answer | None:
        """Take a token from each of a request's buckets; return the refusal if one is empty."""
        for (policy, _), bucket in self._of(request):
            if seconds := bucket.take(self.clock()):
                code = "SubscriptionRequestsThrottled" if policy in ("reads", "writes", "deletes") else ""
                return error(
                    429,
                    code or "OperationNotAllowed",
                    f"The request is being throttled: {policy}.",
                    Retry_After=str(seconds),
                )
        return None

    def marked(self, request: Request, answer: Answer) -> Answer:
        """Return an answer whose headers report the tokens left in the request's buckets."""
        if not self.tells:
            return answer
        headers, left = {}, []
        for (policy, _), bucket in self._of(request):
            if policy in ("reads", "writes", "deletes"):
                headers[f"x-ms-ratelimit-remaining-subscription-{policy}"] = str(int(bucket.tokens))
            else:
                left.append(f"Microsoft.Compute/{policy};{int(bucket.tokens)}")
        if left:
            headers["x-ms-ratelimit-remaining-resource"] = ",".join(left)
        return replace(answer, headers=answer.headers | headers)

    @staticmethod
    def boundless() -> Limits:
        """Return buckets that never run empty, for tests in which a minute takes a second."""
        return Limits(dict.fromkeys(_documented(), Policy(1e9, 1e9)), tells=False)

    @staticmethod
    def keys_of(method: str, path: str) -> list[tuple[str, str]]:
        """Return a request's buckets as pairs of policy and scope."""
        before, _, name = path.lower().partition(_SCALE_SET)
        keys = [(_KINDS.get(method, "writes"), "")]
        if name.endswith("/virtualmachines"):
            keys += [("Instances", before + name), ("AllInstances", "")]
        elif name:
            keys += [("ScaleSet", before + name.partition("/")[0]), ("ScaleSets", "")]
        return keys

    def _of(self, request: Request) -> Iterator[tuple[tuple[str, str], Bucket]]:
        for key in self.keys_of(request.method, request.path):
            if key not in self.buckets:
                policy = self.policies[key[0]]
                self.buckets[key] = Bucket(policy, policy.size, self.clock())
            yield key, self.buckets[key]
