"""The node configuration: what the schema and the node's own reader refuse, every problem at once."""

from __future__ import annotations

import copy
import json
import ssl
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from image_builder.node.errors import NodeError
from image_builder.node.join import credentials, schema
from image_builder.node.join.codes import JoinError
from image_builder.node.join.config import MOST_BYTES, Taint, json_schema, parse, problems
from image_builder.node.join.credentials import Token as BootstrapToken
from image_builder.node.join.credentials import check_clock, check_life, from_custom_data, parse_broker
from image_builder.node.join.settings import Settings
from image_builder.node.join.settings import parse as parse_settings
from image_builder.node.net.fetch import Response
from image_builder.node.net.retry import Deadline
from tests.support.nodes import joins

CA = joins.authority().certificate
Change = Callable[[dict[str, Any]], object]


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _refused(text: bytes, number: int = 13) -> str:
    with pytest.raises(JoinError) as refused:
        parse(text)
    assert refused.value.number == number
    return refused.value.message


def test_a_configuration_and_its_defaults() -> None:
    made = parse(_text(joins.document(CA)))
    assert (made.generation, made.endpoint, made.dns) == (7, ("127.0.0.1", 6443), ("10.0.0.10",))
    assert made.taints == (Taint("node.example/team", "NoSchedule", "research"),)
    assert str(made.taints[0]) == "node.example/team=research:NoSchedule"
    least = parse(
        _text({key: joins.document(CA)[key] for key in ("format", "generation", "cluster", "credentials")})
    )
    assert (least.hosts, least.rate, least.ip, least.provider_id) == (1, 5, "platform", "platform")
    assert least.deadlines["ready"] == 300 and least.budget_seconds == 900


def test_the_time_for_the_slots_follows_from_how_many_there_are() -> None:
    made = parse(_text(joins.document(CA, join={"hosts": 600, "rate": 5})))
    assert made.window == 120 and made.deadlines["join"] == 130


def test_everything_that_is_wrong_is_told_at_once() -> None:
    wrong = joins.document(CA, join={"rate": 0, "speed": 3})
    wrong["node"]["max_pods"] = "30"
    wrong["cluster"]["dns"] = ["dns.example"]
    del wrong["generation"]
    said = _refused(_text(wrong))
    assert sorted(said.split("; ")) == [
        "cluster.dns[0]: must match ^[0-9a-fA-F.:]+$",
        "generation: is missing",
        "join.rate: must be more than 0",
        "join.speed: unknown key",
        "node.max_pods: must be an integer, not a string",
    ]


WRONG: dict[str, Change] = {
    "format": lambda d: d.update(format=2),
    "format of another type": lambda d: d.update(format=True),
    "generation": lambda d: d.update(generation=0),
    "unknown key": lambda d: d.update(tokens=1),
    "http": lambda d: d["cluster"].update(server="http://10.0.0.1:6443"),
    "path": lambda d: d["cluster"].update(server="https://10.0.0.1:6443/x"),
    "line's end": lambda d: d["cluster"].update(server="https://10.0.0.1:6443\n"),
    "ca": lambda d: d["cluster"].update(ca="MIIB"),
    "four servers": lambda d: d["cluster"].update(dns=["10.0.0.1"] * 4),
    "kind": lambda d: d["credentials"].update(kind="magic"),
    "broker without url": lambda d: d.update(credentials={"kind": "broker", "resource": "api://x"}),
    "broker by http": lambda d: d["credentials"].update(joins.BROKER, url="http://broker/x"),
    "label": lambda d: d["node"]["labels"].update({"a b": "c"}),
    "label's value": lambda d: d["node"]["labels"].update(a="c c"),
    "label of another type": lambda d: d["node"]["labels"].update(a=1),
    "platform's fact": lambda d: d["node"]["platform_labels"].update(a="colour"),
    "effect": lambda d: d["node"]["taints"][0].update(effect="Never"),
    "taint's key": lambda d: d["node"]["taints"][0].update(key="a,b=c"),
    "name": lambda d: d["node"].update(name="Node_1"),
    "provider": lambda d: d["node"].update(provider_id="17 --evil"),
    "pods": lambda d: d["node"].update(max_pods=0),
    "budget": lambda d: d.update(join={"budget_seconds": 1}),
    "phase": lambda d: d.update(join={"deadlines": {"coffee": 3}}),
    "a list": lambda d: d.update(node=[]),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_schema_and_the_node_refuse_the_same(name: str) -> None:
    document = joins.document(CA)
    WRONG[name](document)
    _refused(_text(document))
    # Python's `$` also matches before a trailing newline; JSON Schema's doesn't, and the node's reader refuses it.
    if name != "line's end":
        assert list(jsonschema.Draft202012Validator(json_schema()).iter_errors(document))


def test_the_schema_and_the_node_take_the_same() -> None:
    document = joins.document(CA, credentials=joins.BROKER)
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert problems(document) == []


def test_no_rule_of_the_schema_is_left_unapplied() -> None:
    def keywords(rules: dict[str, Any]) -> set[str]:
        found = set(rules)
        for key in ("properties", "$defs"):
            found |= {word for rule in rules.get(key, {}).values() for word in keywords(rule)}
        for key in ("items", "propertyNames", "if", "then", "additionalProperties"):
            found |= keywords(rules[key]) if isinstance(rules.get(key), dict) else set()
        return found

    known = schema._NOTES | set(schema._APPLIED) | set(schema._SIMPLE) | {"type", "then", "$ref"}
    assert keywords(json_schema()) <= known
    with pytest.raises(KeyError):
        schema.problems({}, {"minProperties": 1})


RULES: dict[str, tuple[Change, str]] = {
    "a CA that is none": (
        lambda d: d["cluster"].update(ca="-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"),
        "cluster.ca: must be a certificate (PEM)",
    ),
    "a port": (
        lambda d: d["cluster"].update(server="https://10.0.0.1:99999"),
        "cluster.server: must have a valid port",
    ),
    "an address": (lambda d: d["node"].update(ip="10.0.0.256"), "node.ip: must be an IP address"),
    "one address of two": (
        lambda d: d["node"].update(ip="10.0.0.4,fd00:::4"),
        "node.ip: must be an IP address",
    ),
    "two addresses of one family": (
        lambda d: d["node"].update(ip="10.0.0.4,10.0.0.5"),
        "node.ip: must have addresses of different families",
    ),
    "a label of the scheduler's": (
        lambda d: d["node"]["labels"].update({"node-role.kubernetes.io/x": "y"}),
        "node.labels.node-role.kubernetes.io/x: a kubelet must not set this label: it is reserved",
    ),
    "a label that admission keeps": (
        lambda d: d["node"]["labels"].update({"node-restriction.kubernetes.io/x": "y"}),
        "node.labels.node-restriction.kubernetes.io/x: a kubelet must not set this label: it is reserved",
    ),
    "a label twice": (
        lambda d: d["node"]["platform_labels"].update({"node.example/pool": "zone"}),
        "node.platform_labels.node.example/pool: is also in labels",
    ),
    "a taint twice": (
        lambda d: d["node"]["taints"].append({"key": "node.example/team", "effect": "NoSchedule"}),
        "node.taints[1]: repeats a key with the same effect",
    ),
    "slots without time": (
        lambda d: d.update(join={"hosts": 600, "rate": 1, "budget_seconds": 300}),
        "join.budget_seconds: must be at least the deadline of the phase join",
    ),
    "slots behind the deadline": (
        lambda d: d.update(join={"hosts": 600, "deadlines": {"join": 60}}),
        "join.deadlines.join: must be at least hosts / rate, or the last hosts could never join",
    ),
    "more than a token": (
        lambda d: d.update(credentials={"kind": "custom-data", "resource": "api://x"}),
        "credentials: kind custom-data takes no other fields",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_what_a_schema_cannot_say(name: str) -> None:
    document = joins.document(CA)
    change, said = RULES[name]
    change(document)
    assert _refused(_text(document)) == said


@pytest.mark.parametrize(
    "label", ["node.kubernetes.io/pool", "topology.kubernetes.io/region", "kubernetes.example/x"]
)
def test_labels_that_a_kubelet_may_set(label: str) -> None:
    document = joins.document(CA)
    document["node"]["labels"][label] = "x"
    assert problems(document) == []


SECRETS = {
    "a bootstrap token": joins.TOKEN,
    "a private key": joins.authority().key,
    "a signed token": "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlIn0.c2lnbmF0dXJl",
    "credentials of HTTP": "Bearer c29tZXRoaW5nIHNlY3JldA==",
    "a shared access signature": "https://x.example/y?sv=2022&sig=abcdef0123456789%3D",
    "a password in an address": "https://user:secret@registry.example/",
}


@pytest.mark.parametrize("what", SECRETS)
def test_a_secret_is_refused_wherever_it_is_and_never_told(what: str) -> None:
    document = joins.document(CA)
    document["node"]["labels"]["x"] = SECRETS[what]
    document["cluster"]["ca"] = CA + SECRETS[what]
    said = _refused(_text(document), 14)
    assert (
        f"node.labels.x: must not contain {what}" in said and f"cluster.ca: must not contain {what}" in said
    )
    assert SECRETS[what][:12] not in said


def test_the_secret_of_an_unknown_key_is_never_told() -> None:
    said = _refused(_text({**joins.document(CA), "token": joins.TOKEN}), 14)
    assert joins.TOKEN not in said and said == "token: must not contain a bootstrap token"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON: JSONDecodeError"),
        (b'{"format": 1', "not JSON: JSONDecodeError"),
        (b'{"format": 1, "format": 1}', "not JSON: `format` occurs twice"),
        (b'{"format": NaN}', "not JSON: ValueError"),
        (b"\xff\xfe{", "not JSON"),
        (b"[]", "(all): must be an object, not an array"),
        (b"null", "(all): must be an object, not null"),
        (b" " * (MOST_BYTES + 1), "but user data may have at most 49152"),
    ],
)
def test_what_is_no_configuration(text: bytes, said: str) -> None:
    assert said in _refused(text)


def test_a_damaged_configuration_never_ends_in_anything_but_a_refusal() -> None:
    document = joins.document(CA, credentials=joins.BROKER)
    for path in ("format", "generation", "cluster", "credentials", "node"):
        values: tuple[Any, ...] = (None, [], {}, "x", -1, True, 1.5)
        for value in values:
            damaged = copy.deepcopy(document)
            damaged[path] = value
            if not (path == "node" and value == {}):
                _refused(_text(damaged))


def test_settings_tell_everything_that_is_wrong() -> None:
    assert parse_settings({}) == Settings()
    assert parse_settings({"clock_seconds": 30}).clock_seconds == 30.0
    with pytest.raises(NodeError) as refused:
        parse_settings({"imds": "ftp://x", "speed": 1, "file": "relative", "clock_seconds": True})
    assert refused.value.code == "settings"
    for part in (
        "speed is not a known key",
        "clock_seconds",
        "imds",
        'file must be an absolute path, not "relative"',
    ):
        assert part in refused.value.message


def test_tokens() -> None:
    assert from_custom_data({"bootstrap_token": joins.TOKEN}).text == joins.TOKEN
    for found in ({}, {"bootstrap_token": "abc"}, {"bootstrap_token": 7}):
        with pytest.raises(JoinError) as missing:
            from_custom_data(found)
        assert missing.value.number == 68
    answer = {"token": joins.TOKEN, "expires": "2026-01-01T00:00:00Z"}
    assert parse_broker(_text(answer)).expires == 1767225600
    answers: tuple[Any, ...] = (
        {**answer, "token": "x"},
        {**answer, "expires": "2026-01-01T00:00:00"},
        {**answer, "expires": 1},
        [],
        {},
    )
    for wrong in answers:
        with pytest.raises(JoinError) as unusable:
            parse_broker(_text(wrong))
        assert unusable.value.number == 63 and joins.TOKEN not in unusable.value.message


def test_an_expired_token_and_one_that_expires_too_soon() -> None:
    for left in (-5, 30):
        with pytest.raises(JoinError) as soon:
            check_life(BootstrapToken(joins.TOKEN, expires=1000 + left), 60, now=1000)
        assert soon.value.number == 69
    check_life(BootstrapToken(joins.TOKEN, expires=1061), 60, now=1000)
    check_life(BootstrapToken(joins.TOKEN), 60, now=1000)


# OpenSSL's code, and how far the server's clock is ahead of ours (None: it isn't known).
CERTIFICATES: dict[str, tuple[int, float | None, int, str]] = {
    "has expired": (10, 10.0, 67, "is not valid now: refused"),
    "will be valid": (9, -10.0, 67, "is not valid now: refused"),
    "has expired, by nobody knows whose clock": (10, None, 67, "is not valid now: refused"),
    "has expired by our clock": (10, -86400.0, 66, "ahead of the API server's"),
    "is of another CA": (20, 10.0, 65, "is not signed by this CA: refused"),
}


@pytest.mark.parametrize(("verify_code", "ahead", "number", "words"), CERTIFICATES.values(), ids=CERTIFICATES)
def test_a_certificate_that_can_not_be_verified(
    monkeypatch: pytest.MonkeyPatch, verify_code: int, ahead: float | None, number: int, words: str
) -> None:
    def ask(_url: str, authority: str | None, *_: object, **__: object) -> Response:
        if authority is None and ahead is not None:
            return Response(200, b"", date=time.time() + ahead)
        error = ssl.SSLCertVerificationError("refused")
        error.verify_code, error.verify_message = verify_code, "refused"
        raise error

    monkeypatch.setattr(credentials, "ask", ask)
    with pytest.raises(JoinError, match=words) as refused:
        credentials.prove(parse(_text(joins.document(CA))), joins.TOKEN, 60, Deadline.after(60))
    assert refused.value.number == number


def test_a_clock_that_is_off_by_a_day() -> None:
    for off, words in ((86400, "86400 s ahead of"), (-86400, "86400 s behind")):
        with pytest.raises(JoinError) as wrong:
            check_clock(1_700_000_000, 1_700_000_000 + off, 60)
        assert wrong.value.number == 66 and words in wrong.value.message
    check_clock(1_700_000_000, 1_700_000_050, 60)
    check_clock(0, 1_700_000_000, 60)


@pytest.mark.parametrize("ip", ["10.0.0.4", "fd00::4", "10.0.0.4,fd00::4", "fd00::4,10.0.0.4"])
def test_a_node_may_have_an_address_of_each_family(ip: str) -> None:
    document = joins.document(CA)
    document["node"]["ip"] = ip
    assert parse(_text(document)).ip == ip
