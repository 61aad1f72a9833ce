"""The phases of joining, and what each can fail with: a number, and what kind of failure it is.

The tens of a number are the phase. docs/reference/node-config.md lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from image_builder.node.errors import NodeError

# transient: trying again may do. configuration: whoever wrote it must change it. image: another image is needed.
# node: this machine, or what is on it; a reimage may do. hardware: another machine.
Kind = Literal["transient", "configuration", "image", "node", "hardware"]

PHASES = ("identity", "network", "disk", "runtime", "gpu", "credentials", "join", "kubelet", "ready")


@dataclass(frozen=True)
class Code:
    """``meaning`` is for people: what is wrong, in a few words."""

    phase: str
    kind: Kind
    meaning: str


CODES: Mapping[int, Code] = {
    1: Code("", "node", "something that nobody expected: the reason has the system's own words"),
    2: Code("", "transient", "the time for all phases together was over before this phase began"),
    11: Code(
        "identity", "transient", "the metadata service does not answer, and nothing else says how to join"
    ),
    12: Code("identity", "configuration", "no configuration: nobody has told this node how to join"),
    13: Code("identity", "configuration", "the configuration does not fit its schema"),
    14: Code("identity", "configuration", "a secret is in the configuration, which every process can read"),
    15: Code("identity", "node", "the configuration asks the platform for something that it does not say"),
    16: Code("identity", "image", "the settings of the image can't be used"),
    21: Code("network", "transient", "this machine does not have the address that the node is to have"),
    22: Code("network", "transient", "the API server's name does not resolve"),
    23: Code("network", "transient", "the API server does not take a connection"),
    24: Code(
        "network", "node", "pods are not kept away from the metadata service: the pod guard is not in force"
    ),
    31: Code("disk", "node", "the local disk failed"),
    32: Code("disk", "node", "nothing is known of the local disk in this boot"),
    41: Code("runtime", "node", "preloaded images are missing"),
    42: Code("runtime", "node", "nothing is known of the preloaded images in this boot"),
    43: Code("runtime", "node", "the container engine does not answer"),
    51: Code("gpu", "hardware", "the preflight of this boot failed"),
    52: Code("gpu", "node", "the preflight of this boot could not be settled"),
    53: Code("gpu", "node", "there is no preflight of this boot"),
    60: Code("credentials", "transient", "no attested document of this machine"),
    61: Code("credentials", "transient", "no token of the managed identity"),
    62: Code("credentials", "transient", "the broker does not answer, or refuses"),
    63: Code("credentials", "configuration", "the broker's answer is not understood"),
    64: Code("credentials", "transient", "the API server does not take the token: it is expired, or unknown"),
    65: Code("credentials", "configuration", "the API server is not proven by this CA"),
    66: Code("credentials", "node", "this machine's clock is off"),
    67: Code("credentials", "transient", "the API server does not answer, or with an error of its own"),
    68: Code("credentials", "configuration", "there is no bootstrap token in the custom data"),
    69: Code("credentials", "transient", "the token expires before the node could join"),
    71: Code("join", "configuration", "this node's slot is later than the time it has"),
    81: Code("kubelet", "node", "the kubelet's files can't be written"),
    82: Code("kubelet", "node", "the kubelet can't be started again with its new files"),
    91: Code("ready", "transient", "the kubelet has got no certificate"),
    92: Code("ready", "node", "the kubelet does not answer"),
    93: Code("ready", "transient", "the API server does not call the node Ready"),
    94: Code("ready", "hardware", "it is a Ready node with a taint: the preflight of this boot did not pass"),
}
UNEXPECTED, OVER = 1, 2


class JoinError(NodeError):
    """A phase failed. ``number`` is one of CODES."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"join.{number}", reason)
        self.number = number
