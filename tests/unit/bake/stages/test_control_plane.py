"""The inputs of the control plane's build: the kubelet's own source, and packages that carry the mark."""

from __future__ import annotations

from pathlib import Path

from image_builder.bake.stages.go.openapi import described_packages


def test_packages_are_found_below_links_by_their_mark(tmp_path: Path) -> None:
    staging = tmp_path / "staging/src/k8s.io/api/core/v1"
    staging.mkdir(parents=True)
    (staging / "doc.go").write_text("// +k8s:openapi-gen=true\npackage v1\n")
    vendor = tmp_path / "vendor/k8s.io"
    vendor.mkdir(parents=True)
    (vendor / "api").symlink_to("../../staging/src/k8s.io/api")
    for name, text in {
        "vendor/k8s.io/kube-openapi/cmd/openapi-gen/main.go": "// +k8s:openapi-gen=x",
        "pkg/plain/a.go": "package plain",
        "pkg/tested/a_test.go": "// +k8s:openapi-gen=true",
        "pkg/apis/abac/v0/types.go": "// +k8s:openapi-gen=true",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert described_packages(tmp_path) == [
        "k8s.io/kubernetes/pkg/apis/abac/v0",
        "k8s.io/kubernetes/vendor/k8s.io/api/core/v1",
    ]
