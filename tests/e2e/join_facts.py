"""The facts that a record of ``join`` must show. There are no time limits here: an emulated machine is slow."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from image_builder.lab import software
from image_builder.node.join.codes import PHASES
from image_builder.node.preflight.model import CONDITION
from tests.e2e.command import Facts, machine
from tests.e2e.join_lab import MACHINE, POOL
from tests.support.control_plane import gates
from tests.support.nodes import joins

# The addresses that the image's own network configuration gives its pods (inventories/lab, kubelet_cni_conf).
PODS = ipaddress.ip_network("10.88.0.0/24")
SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
# The answer of deploy/token-broker.yml to requests for anything else.
POLICY = "the broker makes bootstrap tokens, and nothing else"


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Return where it ran and how long it took, in words."""
    first, again, away = record["first"], record["again"], record["away"]
    moments, after = (
        ", ".join(f"{boot['seconds'][name]:.0f}" for name in ("registered", "ready", "admitted", "pod"))
        for boot in (first, again)
    )
    second = " and ".join(f"{boot['second_run']['seconds']:.1f}" for boot in (first, again))
    return {
        "where": machine(record, first["node"]["info"]),
        "seconds from power-on until the node is registered, Ready, admitted, and its pod runs": (
            f"{moments}; after the deallocation {after}"
        ),
        "seconds of a second run of `node-agent join`, each boot": second,
        "the API server's absence, and until the node reported again": (
            f"{away['away_seconds']:.0f} s, {away['heard_after_seconds']:.0f} s"
        ),
    }


def facts(record: Mapping[str, Any]) -> Facts:
    """Return each fact in words, and whether it holds."""
    first, again = record["first"], record["again"]
    boots = [_boot(record, boot) for boot in (first, again)]
    return {
        **_bootstrap(record),
        **{f"each boot: {text}": all(boot[text] for boot in boots) for text in boots[0]},
        **_again(first, again),
        **_away(record["away"]),
    }


def _bootstrap(record: Mapping[str, Any]) -> Facts:
    first = record["first"]
    requests = first["requests"]
    asked = requests[0] if requests else {}
    return {
        "the broker got one request, from this machine": [one["vm_id"] for one in record["wanted"]]
        == [joins.VM_ID],
        "the node requested one certificate": len(requests) == 1,
        "it authenticated that request with a bootstrap token": str(asked.get("username")).startswith(
            "system:bootstrap:"
        )
        and "system:bootstrappers" in asked.get("groups", []),
        "the request was for a kubelet's client certificate": asked.get("signer") == SIGNER,
        "the gate approved the request, and the controller manager signed it": bool(asked.get("issued"))
        and asked.get("conditions") == [["Approved", "BoundToken"]],
        **_policy(record["refusal"]),
        "the node registered with the pool's taint and the gate's taint": {
            "node.example/team",
            gates.TAINT["key"],
        }
        <= set(first["registered_taints"]),
    }


def _policy(refusal: str | None) -> Facts:
    """Return the fact about what the broker's account may not do; empty if the API server has no admission policies."""
    if refusal is None:
        return {}
    return {"the broker's account can create bootstrap tokens and no other Secrets": POLICY in refusal}


def _boot(record: Mapping[str, Any], seen: Mapping[str, Any]) -> Facts:
    node, pod, told = seen["node"], seen["pod"], seen["provision"]
    labels, taints = node["labels"], [taint["key"] for taint in node["taints"]]
    wanted = record["told"]["node"]
    compute = joins.INSTANCE["compute"]
    return {
        "the local disk was blank": seen["disk"] == "format",
        "the node is Ready": node["conditions"].get("Ready") == "True",
        "it passed its preflight": node["conditions"].get(CONDITION) == "True",
        "the gate removed its taint, and the pool's taint is still there": taints == ["node.example/team"],
        "its labels name its pool": labels.get("node.example/pool") == POOL,
        "its labels name its zone": labels.get("topology.kubernetes.io/zone")
        == f"{compute['location']}-{compute['zone']}",
        "its labels name its image and build": labels.get("node-image/name") == record["image"]
        and bool(labels.get("node.example/build"))
        and labels.get("node.example/build") == labels.get("node-image/build"),
        "its provider ID is the one of the platform's machine": node["provider_id"].startswith(
            "azure:///subscriptions/"
        )
        and node["provider_id"].endswith("/virtualMachines/17"),
        "its address is the one that the platform gave it": node["addresses"].get("InternalIP") == MACHINE,
        "it accepts as many pods as its user data says": node["max_pods"] == str(wanted["max_pods"]),
        "the pod has an address in the pod network": ipaddress.ip_address(pod["ip"]) in PODS,
        "the pod's image was present, and nothing was pulled": pod["pulling"] == 0
        and any("already present" in words and software.LARGE_REFERENCE in words for words in pod["pulled"]),
        "all phases of the join succeeded or were skipped": [phase["name"] for phase in told["phases"]]
        == list(PHASES)
        and {phase["state"] for phase in told["phases"]} <= {"ok", "skipped"}
        and told["state"] == "ok",
        "no systemd unit failed": seen["failed_units"] == [],
        "no token is left on the node": seen["token_is_in"] == [],
        "a second run of the agent changes none of its files and doesn't restart the kubelet": seen[
            "second_run"
        ]["status"]
        == 0
        and seen["second_run"]["changed"] == []
        and not seen["second_run"]["kubelet_restarted"],
    }


def _again(first: Mapping[str, Any], again: Mapping[str, Any]) -> Facts:
    skipped = {phase["name"] for phase in again["provision"]["phases"] if phase["state"] == "skipped"}
    return {
        "second boot: it has a new boot ID": first["node"]["info"]["bootID"]
        != again["node"]["info"]["bootID"],
        "second boot: it is the same Node object": first["node"]["uid"] == again["node"]["uid"],
        "second boot: it is still a member, and requested neither a token nor a certificate": "join"
        in skipped
        and again["tokens"] == first["tokens"]
        and again["requests"] == first["requests"],
        "second boot: the pod runs in a new container": first["pod"]["container"]
        != again["pod"]["container"],
    }


def _away(seen: Mapping[str, Any]) -> Facts:
    return {
        "without the API server: the pod kept running": seen["container_ran_on"],
        "after the outage: the node reports again and is Ready, with only its pool's taint": seen["taints"]
        == ["node.example/team"],
        "after the outage: the pod has the same container, never restarted": seen["same_container"]
        and seen["restarts"] == 0,
        "after the outage: the kubelet was not restarted": not seen["kubelet_restarted"],
    }
