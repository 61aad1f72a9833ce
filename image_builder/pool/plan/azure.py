"""Scale sets as Azure Resource Manager reports them, through Azure's own SDK: each whole, or none at all.

Three questions for a scale set, whatever its size, each answered in pages: its model, its instances with their
instance view, its network interfaces. The collection's ``azure_rm`` inventory asks one for each machine and one more
for each of its interfaces instead, and where one of those is throttled it leaves the machine out without a word.

What is returned is the service's JSON: only this module uses the SDK.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from image_builder.errors import FetchError
from image_builder.pool.plan.snapshot import Listing, ScaleSetId, is_flexible
from image_builder.system import host

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.core.paging import ItemPaged

# Seconds: to connect, for a byte of an answer, and for one question with all its repetitions.
_CONNECT_SECONDS, _READ_SECONDS, _ASK_SECONDS = 10, 60, 600
_REPETITIONS = 8
_THROTTLED = 429
_LONGEST = 300
# Microsoft.Compute/HighCostGetVMScaleSet30Min;107,Microsoft.Compute/...;...
_REMAINING = re.compile(r"([\w./]+);(\d+)")
_HINT = (
    "nothing was written; reading scale sets and interfaces needs the role Reader on their resource groups"
)

Say = Callable[[str], None]


@dataclass
class Traffic:
    """The cost of the queries. ``remaining``: the fewest that the service would still answer, by its own names."""

    requests: int = 0
    throttled: int = 0
    remaining: dict[str, int] = field(default_factory=dict)

    def note(self, status: int, headers: Mapping[str, str]) -> str:
        """Count an answer; return the notice for people, or nothing."""
        self.requests += 1
        limits = dict(_remaining(headers))
        for name, count in limits.items():
            self.remaining[name] = min(count, self.remaining.get(name, count))
        if status != _THROTTLED:
            return ""
        self.throttled += 1
        return f"Azure asks to wait {headers.get('Retry-After', 'some')} seconds: too many requests"


def _remaining(headers: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for name, value in headers.items():
        if name.lower() == "x-ms-ratelimit-remaining-resource":
            yield from ((resource, int(count)) for resource, count in _REMAINING.findall(value))
        elif name.lower().startswith("x-ms-ratelimit-remaining-") and value.isdigit():
            yield name.lower().removeprefix("x-ms-ratelimit-remaining-"), int(value)


class Reader:
    """Asks for scale sets; a context manager. ``traffic`` says what that took.

    ``endpoint`` is the address of Resource Manager; without it that of the cloud that AZURE_SDK_CLOUD_CONF names, the
    public one by default. ``say`` is called with what people should know while they wait.
    """

    def __init__(
        self,
        *,
        credential: TokenCredential | None = None,
        endpoint: str | None = None,
        repetitions: int = _REPETITIONS,
        say: Say = lambda _: None,
    ) -> None:
        """Raises HostError where the SDK isn't installed."""
        host.check_azure()
        from azure.identity import DefaultAzureCredential

        self._credential: Any = credential or DefaultAzureCredential()
        self._is_own = credential is None
        self._endpoint, self._say = endpoint, say
        self._options: dict[str, Any] = {
            "retry_total": repetitions,
            "timeout": _ASK_SECONDS,
            "connection_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "raw_response_hook": self._note,
        }
        self._clients: dict[tuple[str, str], Any] = {}
        self._open = ExitStack()
        self.traffic = Traffic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self._is_own:
            self._credential.close()

    def read(self, scale_set_id: ScaleSetId) -> Listing:
        """Return all that is known of a scale set; raises FetchError where any part of it can't be had."""
        with _blamed(scale_set_id):
            compute, network = (
                self._client(kind, scale_set_id.subscription) for kind in ("compute", "network")
            )
            scale_set = compute.virtual_machine_scale_sets.get(
                scale_set_id.group, scale_set_id.name
            ).as_dict()
            if is_flexible(scale_set):
                # Its machines are ordinary ones, and so are their interfaces: of the whole resource group.
                chosen = f"'virtualMachineScaleSet/id' eq '{scale_set_id.id}'"
                instances = compute.virtual_machines.list(
                    scale_set_id.group, filter=chosen, expand="instanceView"
                )
                interfaces = network.network_interfaces.list(scale_set_id.group)
            else:
                machines, name = (
                    compute.virtual_machine_scale_set_vms,
                    (scale_set_id.group, scale_set_id.name),
                )
                instances = machines.list(*name, expand="instanceView")
                interfaces = network.network_interfaces.list_virtual_machine_scale_set_network_interfaces(
                    *name
                )
            return Listing(scale_set, tuple(_all(instances)), tuple(_all(interfaces)))

    def _client(self, kind: str, subscription: str) -> Any:
        from azure.mgmt.compute import ComputeManagementClient
        from azure.mgmt.network import NetworkManagementClient

        key = (kind, subscription)
        if key not in self._clients:
            make: Any = ComputeManagementClient if kind == "compute" else NetworkManagementClient
            client = make(self._credential, subscription, base_url=self._endpoint, **self._options)
            self._clients[key] = self._open.enter_context(client)
        return self._clients[key]

    def _note(self, answer: Any) -> None:
        notice = self.traffic.note(answer.http_response.status_code, answer.http_response.headers)
        if notice:
            self._say(notice)


def _all(pages: ItemPaged[Any]) -> Iterator[dict[str, Any]]:
    """Return the items of every page; raises FetchError for pages that go round in circles."""
    numbered: Any = pages.by_page()
    tokens = set()
    for page in numbered:
        for item in page:
            if not hasattr(item, "as_dict"):
                raise ValueError(f"not an object: {item!r}")
            yield item.as_dict()
        following = numbered.continuation_token
        if following and following in tokens:
            raise FetchError("Azure's result pages loop", hint="nothing was written; try again")
        tokens.add(following)


@contextmanager
def _blamed(scale_set_id: ScaleSetId) -> Iterator[None]:
    """Say of what the SDK complains which scale set it was about."""
    from azure.core.exceptions import AzureError

    try:
        yield
    except AzureError as error:
        message = " ".join(str(error).split())[:_LONGEST]
        raise FetchError(f"{scale_set_id.id}: {message}", hint=_HINT) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # What the SDK's models raise for an answer that is none of the service's, such as a proxy's.
        message = " ".join(str(error).split())[:_LONGEST]
        raise FetchError(
            f"{scale_set_id.id}: the answer is invalid: {message}", hint="nothing was written"
        ) from error
