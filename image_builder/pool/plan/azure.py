"""Scale sets as Azure Resource Manager reports them, read through Azure's own SDK: completely or not at all.

A scale set takes three queries, whatever its size, each with paged results: its model, its instances with their
instance views, and its network interfaces. The collection's ``azure_rm`` inventory instead sends a query for each
machine and another for each of its interfaces, and silently omits a machine if one of those is throttled.

Results are the service's JSON: only this module uses the SDK.
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

# Seconds to connect, to wait for the next byte of a response, and for one query with all its retries.
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
    """The cost of the queries. ``remaining``: the fewest that the service would still accept, by its limits' names."""

    requests: int = 0
    throttled: int = 0
    remaining: dict[str, int] = field(default_factory=dict)

    def note(self, status: int, headers: Mapping[str, str]) -> str:
        """Count a response; return a notice for the user, or an empty string."""
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
    """Reads scale sets; a context manager. ``traffic`` is the cost so far.

    ``endpoint`` is the address of Resource Manager; the default is that of the cloud that AZURE_SDK_CLOUD_CONF names,
    or else of the public one. ``say`` is called with notices for users while they wait.
    """

    def __init__(
        self,
        *,
        credential: TokenCredential | None = None,
        endpoint: str | None = None,
        repetitions: int = _REPETITIONS,
        say: Say = lambda _: None,
    ) -> None:
        """Raises HostError if the SDK isn't installed."""
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
        """Return everything known about a scale set; raises FetchError if any part of it can't be read."""
        with _blamed(scale_set_id):
            compute, network = (
                self._client(kind, scale_set_id.subscription) for kind in ("compute", "network")
            )
            scale_set = compute.virtual_machine_scale_sets.get(
                scale_set_id.group, scale_set_id.name
            ).as_dict()
            if is_flexible(scale_set):
                # Its machines are ordinary VMs with ordinary interfaces: list those of the whole resource group.
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
    """Yield the items of every page; raises FetchError if the pages loop."""
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
    """Turn the SDK's errors into FetchErrors that name the scale set."""
    from azure.core.exceptions import AzureError

    try:
        yield
    except AzureError as error:
        message = " ".join(str(error).split())[:_LONGEST]
        raise FetchError(f"{scale_set_id.id}: {message}", hint=_HINT) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # What the SDK's models raise for a response that isn't the service's, such as a proxy's.
        message = " ".join(str(error).split())[:_LONGEST]
        raise FetchError(
            f"{scale_set_id.id}: the answer is invalid: {message}", hint="nothing was written"
        ) from error
