"""The variable that a program's sentence is about: it is named with its file and line where the sentence shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.definition import load_inventory, problem_in

pytestmark = pytest.mark.usefixtures("unread_layers")

INVENTORY = """\
all:
  children:
    images:
      hosts:
        worker:
      vars:
        image_base: {suite: bookworm}
        image_layers: [container_runtime, kubernetes]
        container_runtime_engine: containerd
        container_runtime_containerd_version: "2.2"
        container_runtime_image_pull_progress_deadline: "1800"
        age: 14d
        kubelet_version: "1.36"
        kubelet_source: {type: none}
        kubelet_image_maximum_gc_age: "{{ age }}"
        kubelet_node_labels:
          pool: gpu pool
          node-role.kubernetes.io/gpu: ""
        kubelet_max_pods: 250
        kubelet_image_gc_high_threshold_percent: 95
        kubelet_config: {oomScoreAdj: 5000}
        kubelet_kube_reserved: {cpu: 250m, memory: lots}
        kubelet_register_with_taints:
          - {key: gpu node, value: a100, effect: NoSchedule}
        kubelet_extra_args: [--v=2, --no-such-flag=1]
"""
FILE = "/etc/kubernetes/kubelet.yaml"


@pytest.mark.parametrize(
    ("sentence", "path", "text"),
    [
        ('time: unknown unit "d" in duration "14d"', "kubelet_image_maximum_gc_age", "gc_age"),
        ('missing unit in duration "1800"', "container_runtime_image_pull_progress_deadline", "1800"),
        ("invalid node labels: 'gpu pool' - a valid label", "kubelet_node_labels.pool", "gpu pool"),
        (
            "unknown 'kubernetes.io' labels specified with --node-labels: [node-role.kubernetes.io/gpu]",
            "kubelet_node_labels.node-role.kubernetes.io/gpu",
            "node-role",
        ),
        ("maxPods (--max-pods) -1 must not be negative", "kubelet_max_pods", "max_pods"),
        (
            "imageGCHighThresholdPercent (--image-gc-high-threshold) 101",
            "kubelet_image_gc_high_threshold_percent",
            "high",
        ),
        ("oomScoreAdj (--oom-score-adj) 5000 must be", "kubelet_config.oomScoreAdj", "5000"),
        (
            '--kube-reserved value failed to parse: "lots" for "memory"',
            "kubelet_kube_reserved.memory",
            "lots",
        ),
        (
            "invalid taint: {gpu node a100 NoSchedule <nil>}",
            "kubelet_register_with_taints[0].key",
            "gpu node",
        ),
        ("unknown flag: --no-such-flag", "kubelet_extra_args[1]", "no-such"),
        ("failed to create kubelet", FILE, ""),
    ],
)
def test_the_variable_is_named_where_the_sentence_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str, path: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    problem = problem_in(load_inventory([tmp_path / "hosts.yml"]).define("worker"), sentence, FILE)
    assert problem.path == path and problem.reason == sentence
    lines = [f"hosts.yml:{n}" for n, line in enumerate(INVENTORY.splitlines(), 1) if text and text in line]
    assert problem.where in lines if text else problem.where == ""
