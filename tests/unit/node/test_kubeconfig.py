"""A kubelet's kubeconfig: as client-go writes it, as kubeadm writes it, and what is refused."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from image_builder.node.errors import NodeError
from image_builder.node.net.kubeconfig import Pem, has_expired, load, parse, read_yaml
from tests.support.control_plane.pki import Authority
from tests.support.nodes import joins

AUTHORITY = Authority()

# As the kubelet's bootstrap writes it.
KUBELET = """\
apiVersion: v1
clusters:
- cluster:
    certificate-authority: /etc/kubernetes/pki/ca.crt
    server: https://cluster.example.com:6443
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
preferences: {}
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem
"""


def test_what_the_kubelet_writes() -> None:
    found = parse(KUBELET, Path("/etc/kubernetes"))
    assert found.server == "https://cluster.example.com:6443"
    assert found.authority == Pem(path=Path("/etc/kubernetes/pki/ca.crt"))
    assert found.certificate == found.key == Pem(path=Path("/var/lib/kubelet/pki/kubelet-client-current.pem"))


def test_indented_lists_quotes_comments_and_data() -> None:
    data = base64.b64encode(AUTHORITY.certificate).decode()
    text = KUBELET.replace("- cluster:", "  - cluster:  # ours").replace(
        "    certificate-authority: /etc/kubernetes/pki/ca.crt", f"      certificate-authority-data: {data}"
    )
    text = text.replace(
        "    server: https://cluster.example.com:6443", '      server: "https://[::1]:6443"'
    ).replace("  name: default-cluster", "    name: 'default-cluster'")
    found = parse(f"---\n# by hand\n{text}", Path("/"))
    assert found.server == "https://[::1]:6443"
    assert found.authority.read().encode() == AUTHORITY.certificate


def test_relative_paths_and_tokens(tmp_path: Path) -> None:
    text = KUBELET.replace(
        "    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem\n", ""
    ).replace("    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem", "    tokenFile: token")
    (tmp_path / "kubelet.conf").write_text(text)
    found = load(tmp_path / "kubelet.conf")
    assert found.token == Pem(path=tmp_path / "token") and found.node == ""
    with pytest.raises(NodeError, match="can't be read"):
        found.token.read()


def test_json_and_whose_certificate_it_is() -> None:
    made = AUTHORITY.kubeconfig(
        "https://127.0.0.1:6443", "system:node:gpu-17.example", groups=["system:nodes"]
    )
    assert parse(made, Path("/")).node == "gpu-17.example"
    other = AUTHORITY.kubeconfig("https://127.0.0.1:6443", "somebody")
    assert parse(other, Path("/")).node == ""
    assert read_yaml(yaml.safe_dump(json.loads(made))) == json.loads(made)


@pytest.mark.parametrize("days", [30, 100 * 365])  # its end is a UTCTime or a GeneralizedTime
def test_when_a_certificate_has_expired(days: int) -> None:
    certificate = joins.issued(joins.authority(), "system:node:n", (-1, days)).certificate
    now = datetime.now(UTC)
    assert not has_expired(certificate, now + timedelta(days=days, minutes=-1))
    assert has_expired(certificate, now + timedelta(days=days, minutes=1))
    assert not has_expired("damaged", now)


def test_a_damaged_certificate_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    text = KUBELET.replace("/var/lib/kubelet/pki/kubelet-client-current.pem", str(tmp_path / "pem"))
    assert parse(text, tmp_path).node == ""


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("    server: https:", "    server: http:", "must be an https address"),
        ("    server:", "    insecure-skip-tls-verify: true\n    server:", "insecure-skip-tls-verify"),
        ("current-context: default-context", "current-context: other", "nothing is called 'other'"),
        ("    client-key: /var", "    other-key: /var", "neither a client certificate"),
        ("    server: https", "    server: &a https", "not understood"),
        ("  name: default-cluster", "\tname: default-cluster", "a tab"),
        ("preferences: {}", "preferences", "no `key: value`"),
        ("clusters:", "clusters: {a: b}", "not understood"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in KUBELET
    (tmp_path / "conf").write_text(KUBELET.replace(old, new, 1))
    with pytest.raises(NodeError, match=what) as error:
        load(tmp_path / "conf")
    assert error.value.code == "kube.config"


def _is_word(text: str) -> bool:
    """Return whether a text is a word to YAML, which takes ``1_0`` for a number and ``0b`` for a faulty one."""
    try:
        return (
            not text.startswith("-")
            and not text.endswith(":")
            and yaml.safe_load(f"k: {text}") == {"k": text}
        )
    except ValueError:
        return False


_WORDS = st.text("abcdefgh-_./:0123456789", min_size=1, max_size=12).filter(_is_word)
_TREES = st.recursive(
    _WORDS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3) | st.dictionaries(_WORDS, inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(_WORDS, _TREES, min_size=1, max_size=4))
def test_blocks_are_read_as_a_yaml_library_reads_them(tree: object) -> None:
    assert read_yaml(yaml.safe_dump(tree, default_flow_style=False, width=1000)) == tree
