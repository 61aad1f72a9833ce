"""The policy of a drain: how far it may go, how long it waits, and the user's own rules for pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from image_builder.strict_yaml import Strict

Mode = Literal["idle-only", "fence", "ask", "evict"]
Seconds = Annotated[float, Field(ge=0)]


class Rule(Strict):
    """A rule for pods that match all of ``namespace``, ``owner`` and ``labels``. The first that matches counts."""

    action: Literal["ignore", "wait", "evict"] = Field(
        description="`ignore`: the pod doesn't count. `wait`: wait until it ends by itself. `evict`: it may be evicted."
    )
    namespace: str = Field(default="", description="The pod's namespace; empty: any.")
    owner: str = Field(
        default="", description="The kind of its controller, such as `StatefulSet`; empty: any."
    )
    labels: Mapping[str, str] = Field(
        default_factory=dict, description="Labels that it must have, all of them."
    )
    gpus: bool = Field(
        default=False,
        description="The rule also applies to pods with GPUs, RDMA devices or resource claims. Without it, only rules"
        " that wait apply to those.",
    )


class Policy(Strict):
    """The whole policy. Each mode does what the previous ones do, and one thing more."""

    model_config = ConfigDict(allow_inf_nan=False)

    mode: Mode = Field(
        default="fence",
        description="`idle-only`: take idle hosts, never cordon a busy one. `fence`: cordon, and wait until running"
        " work ends. `ask`: ask the owners to save their work and end. `evict`: evict the pods that may be evicted.",
    )
    max_wait_seconds: Seconds = Field(
        default=3600.0,
        description="Timeout: a host still busy this long after its cordon is uncordoned and skipped.",
    )
    checkpoint_seconds: Seconds = Field(
        default=0.0,
        description="In mode `evict`, pods are asked first and evicted this long after the cordon; 0: evicted at once.",
    )
    settle_seconds: Seconds = Field(
        default=30.0,
        description="How long a host must be cordoned and without pods before it counts as empty, since the scheduler"
        " may have been about to bind one. In `idle-only`, also how long it must be idle before its cordon.",
    )
    poll_seconds: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="Polling interval; longer for large fleets."
    )
    looks_per_second: Annotated[float, Field(gt=0)] = Field(
        default=100.0,
        description="Maximum hosts checked per second, on average; two requests each, the one for pods answered from"
        " the API server's memory.",
    )
    max_fenced: int | None = Field(
        default=None, ge=1, description="Maximum hosts that are cordoned and still busy at once."
    )
    whole_gangs: bool = Field(
        default=False,
        description="If a gang also runs on other hosts, drain those as well. Otherwise its hosts are skipped.",
    )
    take_cordoned: bool = Field(
        default=False,
        description="Drain hosts that somebody else has cordoned. Their cordon stays afterwards.",
    )
    insist: bool = Field(
        default=False, description="Cordon a host again if somebody else uncordons it meanwhile."
    )
    rules: tuple[Rule, ...] = Field(default=(), description="Rules for pods, checked before all others.")
