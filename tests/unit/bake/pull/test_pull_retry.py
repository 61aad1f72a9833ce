"""Retries of failures: which are retried, and when, judged by messages that runtimes really write."""

from __future__ import annotations

import pytest

from image_builder.bake.lock.model import LockedImage, LockedLayer
from image_builder.bake.pull.attempt import Attempt
from image_builder.bake.pull.model import Limits
from image_builder.bake.pull.network import Network
from image_builder.bake.pull.puller import Puller, Request
from image_builder.bake.pull.retry import Class, Policy, classify, pause_before_next
from image_builder.errors import PullError
from image_builder.events import Monitor

# Each message as Docker or containerd writes it.
SAID: list[tuple[str, Class]] = [
    ("write /var/lib/docker/tmp/GetImageBlob123: no space left on device", "full"),
    ("failed to register layer: Error processing tar file(exit status 1): no space left on device", "full"),
    ("toomanyrequests: You have reached your (unauthenticated) pull rate limit.", "limited"),
    ("unexpected status from HEAD request to https://r/v2/a/manifests/1: 429 Too Many Requests", "limited"),
    ("filesystem layer verification failed for digest sha256:0123", "corrupt"),
    (
        'failed commit on ref "layer-sha256:1": unexpected commit digest sha256:2, expected sha256:1',
        "corrupt",
    ),
    ("manifest for r/a@sha256:1 not found: manifest unknown: manifest unknown", "permanent"),
    ('failed to resolve reference "r/a@sha256:1": r/a@sha256:1: not found', "permanent"),
    ("pull access denied for r/a, repository does not exist or may require 'docker login'", "permanent"),
    ('Get "https://r/v2/": unauthorized: authentication required', "permanent"),
    ("r/a:1: https://r/token answered 400: login refused", "permanent"),
    ("r/a:1: https://r/token answered 503 Service Unavailable", "transient"),
    # Docker and containerd: too many layers, a hard link to a lower layer's file.
    ("failed to register layer: max depth exceeded", "permanent"),
    ("has 126 layers, and docker takes at most 125 layers", "permanent"),
    ("failed to register layer: link /etc/below /etc/above: no such file or directory", "permanent"),
    ("failed to extract layer sha256:1: failed to create hard link: no such file or directory", "permanent"),
    ("failed to register layer: Error processing tar file(exit status 1): unexpected EOF", "transient"),
    ("failed to register layer: write /usr/lib/x: no space left on device", "full"),
    ("no matching manifest for linux/arm64 in the manifest list entries", "permanent"),
    ("tls: failed to verify certificate: x509: certificate has expired or is not yet valid", "permanent"),
    ('Get "https://r/v2/a/blobs/sha256:1": stopped after 10 redirects', "permanent"),
    ("received unexpected HTTP status: 503 Service Unavailable", "transient"),
    ("read tcp 127.0.0.1:1->127.0.0.1:443: read: connection reset by peer", "transient"),
    ("unexpected EOF", "transient"),
    ("something that nobody has said before", "transient"),
    ('failed to do request: Head "https://r/v2/team/model-403/manifests/sha256:1": i/o timeout', "transient"),
    ('failed to resolve reference "r/team/429@sha256:1": read: connection reset by peer', "transient"),
    ('Get "https://r/v2/x509:1/unauthorized/blobs/sha256:1": dial tcp [::1]:403: i/o timeout', "transient"),
    ("model-429@sha256:1: short read: expected 401 bytes but got 403: unexpected EOF", "transient"),
    ("r/team/model-403:1: r answered 503 Service Unavailable", "transient"),
    ("unexpected status from GET request to https://r/v2/a/blobs/sha256:1: 403 Forbidden", "permanent"),
    ("unexpected status from HEAD request to https://r/v2/a/manifests/1: 429 Slow Down", "limited"),
    ("error parsing HTTP 403 response body: invalid character '<'", "permanent"),
    ("failed with status code [manifests 1]: 401 Custom", "permanent"),
    ("received unexpected HTTP status: 403 Forbidden", "permanent"),
    ("r/a:1: registry.example:5000 answered 429", "limited"),
    ("read: connection reset by peer; mirror https://m: m answered 403 Forbidden", "transient"),
    ("r/a:1: unexpected EOF; mirror https://m: m answered 401\n  r/b:1: no space left on device", "full"),
]


@pytest.mark.parametrize(("message", "kind"), SAID)
def test_class_of_a_failure(message: str, kind: Class) -> None:
    assert classify(message) == kind


def test_waits_grow_and_are_spread() -> None:
    waits = [pause_before_next(Policy(attempts=9), "transient", n, 0.0) for n in range(1, 9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pause_before_next(Policy(), "transient", 1, 0.999) == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize(
    ("kind", "attempt", "ends"),
    [
        ("permanent", 1, True),
        ("full", 1, True),
        ("corrupt", 1, False),
        ("corrupt", 2, True),
        ("transient", 4, False),
        ("transient", 5, True),
        ("limited", 5, True),
    ],
)
def test_last_attempt(kind: Class, attempt: int, ends: bool) -> None:
    assert (pause_before_next(Policy(attempts=5), kind, attempt, 0.5) is None) == ends


def test_what_the_registry_asks_for_is_never_cut_short() -> None:
    wait = pause_before_next(Policy(), "limited", 1, 0.0, wanted_by_registry=42)
    assert wait == 42
    later = pause_before_next(Policy(), "limited", 1, 0.9, wanted_by_registry=42)
    assert later is not None and 42 < later < 47
    assert pause_before_next(Policy(longest_wait=60), "limited", 1, 0.0, wanted_by_registry=61) is None


class _Refusing:
    """An engine whose pulls fail with an engine's own message."""

    name = "docker"

    def __init__(self, message: str) -> None:
        self.message, self.alive = message, lambda: True

    def pull(self, _image: LockedImage, _attempt: Attempt) -> None:
        raise PullError(self.message)


def _puller(message: str) -> Puller:
    return Puller(
        _Refusing(message),
        limits=Limits(60, 1, 60),
        policy=Policy(1),
        parallel=1,
        endpoints={},
        network=Network(),
        stage="preload",
        monitor=Monitor(),
    )


def test_a_full_disk_is_no_reason_to_leave_an_image_out() -> None:
    """What is left out stays out of later builds, which have the space."""
    layer = LockedLayer(digest=f"sha256:{'1' * 64}", size=1, diff_id=f"sha256:{'1' * 64}")
    digests = dict.fromkeys(("digest", "manifest", "config"), layer.digest)
    image = LockedImage(ref="registry.example/a:1", platform="linux/amd64", layers=[layer], **digests)
    optional = [Request(image, required=False)]
    refused = _puller("unauthorized: authentication required").pull(optional)
    assert refused.failed == {image.ref: "unauthorized: authentication required"}
    with pytest.raises(PullError, match="registry.example/a:1: write /a: no space left on device") as full:
        _puller("write /a: no space left on device").pull(optional)
    assert classify(full.value.message) == "full"  # as the stage's error will be
