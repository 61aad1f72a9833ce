"""The phases of joining, and the codes of their failures, each with its kind and its meaning.

The tens of a code are the phase. docs/reference/node-config.md lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from image_builder.node.errors import NodeError

# transient: a retry may help. configuration: its author must change it. image: another image is needed.
# node: this machine, or something on it; a reimage may help. hardware: another machine is needed.
Kind = Literal["transient", "configuration", "image", "node", "hardware"]

PHASES = ("identity", "network", "disk", "runtime", "gpu", "credentials", "join", "kubelet", "ready")


@dataclass(frozen=True)
class Code:
    """A failure code. ``meaning`` is for people: what is wrong, in a few words."""

    phase: str
    kind: Kind
    meaning: str


CODES: Mapping[int, Code] = {
    1: Code("", "node", "unexpected error; the reason has the system's own message"),
    2: Code("", "transient", "timed out: the budget for all phases was used up before this phase began"),
    11: Code(
        "identity", "transient", "the metadata service does not answer, and there is no other configuration"
    ),
    12: Code("identity", "configuration", "no configuration: this node has not been configured to join"),
    13: Code("identity", "configuration", "the configuration does not match its schema"),
    14: Code(
        "identity", "configuration", "the configuration contains a secret, and every process can read it"
    ),
    15: Code(
        "identity", "node", "the configuration leaves to the platform what the platform does not provide"
    ),
    16: Code("identity", "image", "the settings of the image are invalid"),
    21: Code("network", "transient", "this machine does not have the node's configured address"),
    22: Code("network", "transient", "the API server's name does not resolve"),
    23: Code("network", "transient", "the API server does not accept connections"),
    24: Code("network", "node", "the pod guard is not in force: pods can reach the metadata service"),
    31: Code("disk", "node", "the local disk failed"),
    32: Code("disk", "node", "no report on the local disk in this boot"),
    41: Code("runtime", "node", "preloaded images are missing"),
    42: Code("runtime", "node", "no report on the preloaded images in this boot"),
    43: Code("runtime", "node", "the container engine does not answer"),
    51: Code("gpu", "hardware", "the preflight of this boot failed"),
    52: Code("gpu", "node", "the preflight of this boot was inconclusive"),
    53: Code("gpu", "node", "no preflight result of this boot"),
    60: Code("credentials", "transient", "the metadata service gives no attested document"),
    61: Code("credentials", "transient", "the metadata service gives no token of the managed identity"),
    62: Code("credentials", "transient", "the broker does not answer or refuses"),
    63: Code("credentials", "configuration", "the broker's answer can't be parsed"),
    64: Code("credentials", "transient", "the API server rejects the token: it is expired or unknown"),
    65: Code(
        "credentials",
        "configuration",
        "the API server's certificate is not signed by this CA, or this node has joined elsewhere or by another name",
    ),
    66: Code("credentials", "node", "this machine's clock is off"),
    67: Code(
        "credentials",
        "transient",
        "the API server does not answer, answers with an error, or its certificate is not valid now",
    ),
    68: Code("credentials", "configuration", "no bootstrap token in the custom data"),
    69: Code("credentials", "transient", "the token expires before the node can join"),
    71: Code("join", "configuration", "this node's slot is later than its deadline"),
    81: Code("kubelet", "node", "the kubelet's files can't be written"),
    82: Code("kubelet", "node", "the kubelet can't be restarted with its new files"),
    91: Code("ready", "transient", "the kubelet has not received a certificate"),
    92: Code("ready", "node", "the kubelet does not answer"),
    93: Code("ready", "transient", "the API server does not report the node as Ready"),
    94: Code("ready", "hardware", "the node is Ready but tainted: the preflight of this boot did not pass"),
    95: Code("ready", "transient", "the cluster's network add-on has not come to this node"),
}
UNEXPECTED, OVER = 1, 2


class JoinError(NodeError):
    """A phase failed. ``number`` is one of CODES."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"join.{number}", reason)
        self.number = number
