"""The meaning of the API server's answer to an eviction."""

from __future__ import annotations

import pytest

from image_builder.drain.evict import RETRY_SECONDS, Answer, Reply, evict
from image_builder.drain.pods import pod_from
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from tests.unit.drain.manifests import pod_object


class Server(Client):
    """An API server that answers each eviction with one error, or none."""

    def __init__(self, error: KubeError | None) -> None:
        super().__init__(Access("https://lab", Pem(text="")))
        self.error = error

    def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        assert (namespace, name, uid) == ("work", "a", "uid-a")
        if self.error and not dry_run:
            raise self.error


def reply(error: KubeError | None) -> Reply:
    return evict(Server(error), pod_from(pod_object()))


def test_accepted() -> None:
    assert reply(None).answer is Answer.ACCEPTED


@pytest.mark.parametrize("status", [404, 409])
def test_it_is_gone_or_another_has_its_name(status: int) -> None:
    assert reply(KubeError("x", status)).answer is Answer.GONE


def test_a_budget_is_named_and_waited_for_as_long_as_the_server_says() -> None:
    causes = {"DisruptionBudget": "The disruption budget keep needs 2 healthy pods and has 2 currently"}
    assert reply(KubeError("x", 429, 7.0, causes)) == Reply(Answer.LATER, causes["DisruptionBudget"], 7.0)
    throttled = reply(KubeError("POST /x: 429 too many requests", 429))
    assert throttled == Reply(Answer.LATER, "too many requests", RETRY_SECONDS)


def test_two_budgets_are_refused() -> None:
    message = (
        "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
    )
    assert reply(KubeError(message, 500)).answer is Answer.REFUSED


def test_a_namespace_that_is_deleted_is_waited_for() -> None:
    assert reply(KubeError("x", 403, None, {"NamespaceTerminating": "x"})).answer is Answer.LATER


@pytest.mark.parametrize(
    ("status", "message"),
    [
        *((status, 'admission webhook "a.example.com" denied the request') for status in (400, 403, 422)),
        (500, "failed calling webhook"),
    ],
)
def test_a_webhook_that_refuses_or_fails_holds_up_its_pod_alone(status: int, message: str) -> None:
    refused = reply(KubeError(f"POST /x: {status} {message}", status))
    assert refused == Reply(Answer.LATER, message, RETRY_SECONDS)


@pytest.mark.parametrize("status", [0, 401, 403, 503])
def test_what_says_nothing_of_the_pod_is_raised(status: int) -> None:
    with pytest.raises(KubeError):
        reply(KubeError('User "x" cannot create resource "pods/eviction" in API group ""', status))
