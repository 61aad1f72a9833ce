"""After a failed pull, the registry and its mirrors are queried once more: how long to wait, and why they refused."""

from __future__ import annotations

import pytest
import urllib3

from image_builder.bake.pull.network import Mirror, Network
from image_builder.bake.pull.refusals import mirror_failures, retry_after
from image_builder.bake.pull.registry import RegistryClient
from image_builder.errors import PullError
from tests.unit.bake.pull.test_pull_registry import REF, response


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ({"registry.example": (429, "7"), "one.example": (429, "120"), "two.example": (429, "30")}, 120),
        ({"one.example": (429, "120")}, 120),
        ({"registry.example": (429, "7"), "one.example": (200, "")}, 7),
        ({"registry.example": (404, ""), "two.example": (429, "30")}, 30),
        ({"registry.example": (200, ""), "one.example": (429, "100000")}, 0),
        ({"registry.example": (429, "soon"), "one.example": (503, "9")}, 0),
        ({}, 0),
    ],
)
def test_the_longest_pause_that_a_registry_or_a_mirror_asks_for(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, tuple[int, str]], seconds: float
) -> None:
    """On a network whose only way out is a mirror, the registry itself never answers."""

    def stream(client: RegistryClient, *_: object, **__: object) -> urllib3.BaseHTTPResponse:
        if client.registry not in answers:
            raise urllib3.exceptions.HTTPError("no route to host")
        status, pause = answers[client.registry]
        return response(status, Retry_After=pause) if pause else response(status)

    monkeypatch.setattr(RegistryClient, "stream", stream)
    mirrors = [Mirror("https://one.example"), Mirror("https://two.example")]
    network = Network({"registry.example": mirrors})
    assert retry_after(REF, "sha256:1", {}, network) == seconds


def test_mirrors_that_do_not_give_an_image_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror that has it and the registry itself are left out."""

    def stream(client: RegistryClient, *_: object, **__: object) -> urllib3.BaseHTTPResponse:
        if client.registry == "silent.example":
            raise urllib3.exceptions.HTTPError("Read timed out")
        if client.registry == "locked.example":
            raise PullError(f"{client.image}: login refused")
        return response({"good.example": 200, "busy.example": 429}.get(client.registry, 404), Retry_After="9")

    monkeypatch.setattr(RegistryClient, "stream", stream)
    mirrors = [Mirror(f"https://{name}.example") for name in ("good", "silent", "locked", "busy")]
    assert mirror_failures(REF, "sha256:1", {}, Network({"registry.example": mirrors})) == {
        "https://silent.example": "silent.example can't be reached: Read timed out",
        "https://locked.example": "login refused",
        "https://busy.example": "busy.example answered 429 Too Many; it asks for a pause of 9 s",
    }
    assert mirror_failures(REF, "sha256:1", {}, Network({"other.example": mirrors})) == {}
