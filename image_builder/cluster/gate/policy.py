"""The operator's policy for nodes that go bad in service: what counts, what is done, and to how many at once."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from image_builder.drain.policy import Policy as DrainPolicy
from image_builder.strict_yaml import Strict

Seconds = Annotated[float, Field(ge=0)]
Status = Literal["True", "False"]

# The ailment of a node whose physical host is known to be bad: not a condition of the Node object.
HOST_CONDITION, HOST_REASON = "PhysicalHost", "HostKnownBad"
# Our agent's conditions.
OURS = ("NodeHealthy", "image-builder/NodeHealthy")
NVSENTINEL = (
    *("Gpu*Watch", "SysLogs*", "InfiniBand*Check", "Ethernet*Check", "NVSwitchFatalError", "NVSwitchDown"),
)
# Conditions that mark a node as bad, as patterns, and the status that does. Ours; node-problem-detector's (its
# config/, August 2026; not NTPProblem) and what AKS adds to it (https://learn.microsoft.com/azure/aks/node-problem-detector);
# and those of NVSentinel's monitors (its docs/INTEGRATIONS.md and docs/configuration/nic-health-monitor.md).
CONDITIONS: Mapping[str, Status] = {
    **dict.fromkeys(OURS, "False"),
    **dict.fromkeys(NVSENTINEL, "True"),
    **dict.fromkeys(
        (
            *(
                "KernelDeadlock",
                "ReadonlyFilesystem",
                "XfsShutdown",
                "DiskBadBlock",
                "CperHardwareErrorFatal",
            ),
            *("CorruptDockerOverlay2", "FrequentUnregisterNetDevice", "FrequentKubeletRestart"),
            *("FrequentDockerRestart", "FrequentContainerdRestart"),
            *("KubeletUnhealthy", "ContainerRuntimeUnhealthy", "KubeProxyUnhealthy"),
            *("FilesystemCorruptionProblem", "KubeletProblem", "ContainerRuntimeProblem", "VMEventScheduled"),
            *("GPUMissing", "NVLinkStatusInactive", "XIDErrors", "IBLinkFlapping"),
        ),
        "True",
    ),
}


class Rule(Strict):
    """What is done about a class of findings. The first rule that matches counts."""

    reason: str = Field(
        default="*", description="The condition's reason, or a pattern of it, such as `Gpu*`."
    )
    condition: str = Field(default="*", description="The condition's type, or a pattern of it.")
    remedy: Literal["ignore", "taint", "drain", "reboot", "reimage", "hand-over"] = Field(
        description="`ignore`: nothing. `taint`: the node gets no new work. `drain`: also drain it."
        " `reboot`, `reimage`, `hand-over`: also request that once it is empty."
    )
    lasting_seconds: Seconds | None = Field(
        default=None, description="How long it must last; by default the policy's `lasting_seconds`."
    )

    def matches(self, condition: str, reason: str) -> bool:
        return fnmatchcase(reason, self.reason) and fnmatchcase(condition, self.condition)


# Azure's notice is only minutes.
_MAINTENANCE = Rule(reason="MaintenanceScheduled", remedy="taint", lasting_seconds=0.0)
# A machine that passes its preflight on a host known to be bad is only reported.
_KNOWN_HOST = Rule(condition=HOST_CONDITION, reason=HOST_REASON, remedy="ignore")
_ANY = Rule(remedy="taint")


class Policy(Strict):
    """The whole policy. Without a file, these defaults: nodes that stay bad get no new work."""

    model_config = ConfigDict(allow_inf_nan=False)

    lasting_seconds: Seconds = Field(
        default=300.0, description="How long a condition must be bad before the gate acts on it."
    )
    share: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Largest share of the fleet out at once for its health, at least one node. 0: none is taken out.",
    )
    unavailable: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="No node is taken out while this share of the fleet, at least one node, is out for its health or"
        " emptied by a roll. Hosts that a roll only cordoned, and that still work, don't count. At least `share`.",
    )
    stale_seconds: Seconds = Field(
        default=1800.0,
        description="A condition without a heartbeat for this long, or since the boot, is no longer maintained by"
        " anybody, and doesn't count. Ours and NVSentinel's have no heartbeat, and always count. 0: all do.",
    )
    rules: tuple[Rule, ...] = Field(
        default=(), description="The remedy for each class of findings; without a rule, the taint."
    )
    conditions: Mapping[str, Status] = Field(
        default_factory=dict,
        description="Additional conditions, by type or pattern, and the status that is bad.",
    )
    nvsentinel: tuple[str, ...] = Field(
        default=(), description="Pools whose bad nodes are left to NVSentinel: the gate does nothing to them."
    )
    remember_days: Annotated[float, Field(ge=0)] = Field(
        default=90.0, description="How long a bad physical host is remembered. 0: not at all."
    )
    drain: DrainPolicy = Field(
        default=DrainPolicy(),
        description="How nodes are drained, by the policy of [drains](drain.md#the-policy).",
    )

    @field_validator("drain")
    @classmethod
    def _bad_nodes_alone(cls, drain: DrainPolicy) -> DrainPolicy:
        if drain.whole_gangs:
            raise ValueError(
                "whole_gangs would empty healthy nodes for a bad one: it is for drains and rolls"
            )
        if drain.max_fenced is not None:
            raise ValueError("max_fenced is for drains and rolls: the gate's share limits bad nodes")
        return drain

    def bad_status(self, condition: str) -> Status | None:
        """Return the status that means that a condition is bad; None if it says nothing about health."""
        for patterns in (self.conditions, CONDITIONS):
            for pattern, status in patterns.items():
                if fnmatchcase(condition, pattern):
                    return status
        return None

    def is_stale(self, condition: str, beat: float, newest: float, tested: float) -> bool:
        """Return whether nobody maintains a condition any more, by the times of its last heartbeat, of the node's
        newest one, and of the report on this boot's preflight (Unix times of the node's clock, 0: unknown).
        """
        has_none = any(fnmatchcase(condition, pattern) for pattern in (*OURS, *NVSENTINEL))
        if has_none or not beat or not self.stale_seconds:
            return False
        return beat < max(newest - self.stale_seconds, tested)

    def rule(self, condition: str, reason: str) -> Rule:
        """Return what is to be done about a finding."""
        return next(
            rule for rule in (*self.rules, _MAINTENANCE, _KNOWN_HOST, _ANY) if rule.matches(condition, reason)
        )

    def lasts(self, rule: Rule) -> float:
        """Return how many seconds a finding that matches a rule must last."""
        return self.lasting_seconds if rule.lasting_seconds is None else rule.lasting_seconds
