"""One image booted, given the pods, and watched: ``pending_pods`` does this with both images."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from image_builder.errors import BootError
from image_builder.lab.registry import HOST
from image_builder.machine.ssh import SshTarget
from image_builder.machine.vm import Vm, VmOptions
from image_builder.verify.boot import GROWTH_BYTES, LOCAL_DISK, find_disk, virtual_size, wait_for_system
from tests.e2e.pods import BIG, PODS, QUOTA, SMALL, STALLED, Event, Pod, manifest, read_events, tell
from tests.e2e.registry import MB, Registry
from tests.support.registries.plan import Fault

# The address under which QEMU's user network exposes the host's 127.0.0.1.
_HOST_ADDRESS = "10.0.2.2"
# The registry refuses the pause image until the pod runs, or for this long.
REFUSED_SECONDS = 180.0
# The link stalls once this many bytes of the image were sent: for longer than a minute, but less than thirty.
STALL_AFTER, STALL_SECONDS = 24 * MB, 100.0
# An emulated machine on a busy host unpacks a gigabyte in half an hour.
_POD_SECONDS = 3600.0
_STEP = 3.0
_REFUSALS = tuple(
    Fault("status", path=r"^/v2/pause/", status=429, method=method) for method in ("GET", "HEAD")
)
_JOURNAL = "journalctl -u kubelet -o json --output-fields=MESSAGE --no-pager"
# The kubelet's health port, with handwritten HTTP: the image has no curl.
_HEALTHY = r"exec 3<>/dev/tcp/127.0.0.1/10248; printf 'GET /healthz HTTP/1.0\r\n\r\n' >&3; grep -q ^ok <&3"
_TROUBLE_LINES = 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Booted:
    """A machine that is up: its SSH access, and the seconds to add to its monotonic clock to get ours."""

    ssh: SshTarget
    offset: float


def observe(artefact: Path, registry: Registry, work: Path, *, serial: bool, say: Say) -> dict[str, Any]:
    """Boot the image of ``artefact`` (the directory of one build), give it all pods, return the observations as JSON.

    ``serial`` sets the kubelet's ``serializeImagePulls``. Raises BootError and CommandError.
    """
    facts = json.loads((artefact / "facts.json").read_bytes())
    variables = facts["variables"]
    disk = find_disk(artefact)
    options = VmOptions(
        name=str(facts["image"]),
        disk=disk,
        extra_disks=(LOCAL_DISK,) if "node" in variables["image_layers"] else (),
        secure_boot=bool(variables["image_secure_boot"]),
        user=str(variables["azure_guest_default_user"]),
        disk_size=virtual_size(disk) + GROWTH_BYTES,
    )
    with Vm(options, work) as vm:
        say("booting")
        ssh = vm.wait_for_ssh()
        state = wait_for_system(ssh)
        say(f"{state} after {vm.seconds:.0f} s")
        booted_seconds = round(vm.seconds, 1)
        machine = _prepare(ssh, registry, serial)
        seen = _Acts(machine, registry, variables, say).play()
        return {
            "image": options.name,
            "build": artefact.name,
            "accelerator": vm.accelerator,
            "state": state,
            "booted_seconds": booted_seconds,
            "settings": _settings(ssh),
            **seen,
        }


def _prepare(ssh: SshTarget, registry: Registry, serial: bool) -> Booted:
    """Point the machine at the registry, and make its kubelet log its events. None of this is part of an image."""
    ssh.put(registry.ca, f"/etc/docker/certs.d/{HOST}/ca.crt")
    ssh.run(["sh", "-c", f"echo '{_HOST_ADDRESS} {HOST}' >> /etc/hosts"])
    # Without an API server events only go to the log, from this verbosity on.
    ssh.run(["sh", "-c", "echo 'KUBELET_EXTRA_ARGS=--v=3' >> /etc/kubernetes/node.env"])
    if serial:
        change = "s/^serializeImagePulls: false$/serializeImagePulls: true/"
        ssh.run(["sed", "-i", change, "/etc/kubernetes/kubelet.yaml"])
    ssh.run(["systemctl", "restart", "kubelet"])
    # The kubelet's startup takes half a minute on an emulated machine, and must not count as a pod's waiting time.
    ssh.run(["bash", "-c", f"until ({_HEALTHY}) 2>/dev/null; do sleep 2; done"], timeout=600)
    before = time.monotonic()
    uptime = float(ssh.run(["cut", "-d ", "-f1", "/proc/uptime"]).stdout)
    return Booted(ssh, (before + time.monotonic()) / 2 - uptime)


def _settings(ssh: SshTarget) -> dict[str, Any]:
    """Return the running machine's settings that matter here."""
    kubelet = ssh.run(["grep", "^serializeImagePulls:", "/etc/kubernetes/kubelet.yaml"]).stdout.split()[1]
    words = ssh.run(["sh", "-c", "tr '\\0' '\\n' < /proc/$(pidof kubelet)/cmdline"]).stdout.split()
    name = "--image-pull-progress-deadline="
    docker = json.loads(ssh.run(["cat", "/etc/docker/daemon.json"]).stdout)
    return {
        "serializeImagePulls": kubelet == "true",
        "image-pull-progress-deadline": next(w.removeprefix(name) for w in words if w.startswith(name)),
        "data-root": docker["data-root"],
        "max-concurrent-downloads": docker["max-concurrent-downloads"],
    }


class _Acts:
    """The acts of one machine, in order."""

    def __init__(self, machine: Booted, registry: Registry, variables: dict[str, Any], say: Say) -> None:
        self.ssh, self.offset = machine.ssh, machine.offset
        self.registry, self.say = registry, say
        self.manifests = str(variables.get("kubelet_static_pod_path", "/etc/kubernetes/manifests"))
        self.given: dict[str, float] = {}
        self.events: list[Event] = []
        self._cursor = ""
        self.requests_before = len(registry.proxy.requests)

    def play(self) -> dict[str, Any]:
        registry, link = self.registry, self.registry.link
        registry.proxy.faults = _REFUSALS
        self.give(QUOTA)
        self.wait(lambda: self.started(QUOTA), REFUSED_SECONDS)
        refused = round(time.monotonic() - self.given[QUOTA.name], 1)
        running = self.ssh.run(["docker", "ps", "--quiet"]).stdout.split()
        registry.proxy.faults = ()
        self.must_start(QUOTA)

        self.give(BIG)
        self.wait(lambda: self.started(BIG) or self.sent(BIG) > 0, _POD_SECONDS)
        self.give(SMALL)
        self.must_start(SMALL)
        self.must_start(BIG)

        self.give(STALLED)
        self.wait(lambda: self.sent(STALLED) >= STALL_AFTER, _POD_SECONDS, step=0.2)
        link.freeze()
        self.say(f"the link stands still for {STALL_SECONDS:g} s")
        time.sleep(STALL_SECONDS)
        link.thaw()
        self.must_start(STALLED)
        return {
            "refused_seconds": refused,
            "containers_while_refused": len(running),
            "stall_seconds": STALL_SECONDS,
            "requests": {
                name: len(self.asked(name)) for name in ("pause", *(pod.repository for pod in PODS))
            },
            "bytes": {
                name: sum(r.sent for r in self._requests(f"/v2/{name}/blobs/"))
                for name in ("pause", *(pod.repository for pod in PODS))
            },
            "pods": {
                pod.name: asdict(tell(pod, self.given[pod.name], self.events, self.asked(pod.repository)))
                for pod in PODS
            },
        }

    def _requests(self, path: str) -> list[Any]:
        found = self.registry.proxy.requests[self.requests_before :]
        return [request for request in found if request.path.startswith(path)]

    def asked(self, repository: str) -> list[float]:
        return [request.started for request in self._requests(f"/v2/{repository}/")]

    def sent(self, pod: Pod) -> int:
        return sum(request.sent for request in self._requests(f"/v2/{pod.repository}/blobs/"))

    def give(self, pod: Pod) -> None:
        """Put a pod's manifest into the directory that the kubelet watches."""
        self.say(f"pod {pod.name}")
        ready = f"/var/tmp/{pod.name}.json"
        self.ssh.put(manifest(pod).encode(), ready, mode=0o600)
        script = f"mv {ready} {self.manifests}/{pod.name}.json && cut -d' ' -f1 /proc/uptime"
        self.given[pod.name] = float(self.ssh.run(["sh", "-c", script]).stdout) + self.offset

    def started(self, pod: Pod) -> bool:
        """Read new entries of the kubelet's journal; return whether the pod's container was started."""
        after = f" --after-cursor='{self._cursor}'" if self._cursor else " --boot"
        journal = self.ssh.run(["sh", "-c", f"{_JOURNAL}{after} --show-cursor"], timeout=300).stdout
        lines = [line for line in journal.splitlines() if line.startswith("{")]
        if lines:
            self._cursor = json.loads(lines[-1])["__CURSOR"]
        new = list(read_events("\n".join(lines), self.offset))
        for event in new:
            self.say(f"  {event.pod}: {event.reason}: {event.message[:150]}")
        self.events += new
        return any(event.pod == pod.name and event.reason == "Started" for event in self.events)

    def wait(self, done: Callable[[], bool], seconds: float, *, step: float = _STEP) -> bool:
        deadline = time.monotonic() + seconds
        while not (holds := done()) and time.monotonic() < deadline:
            time.sleep(step)
        return holds

    def must_start(self, pod: Pod) -> None:
        if not self.wait(lambda: self.started(pod), _POD_SECONDS):
            tail = "\n".join(
                self.ssh.run(
                    ["journalctl", "-u", "kubelet", "-n", f"{_TROUBLE_LINES}", "--no-pager", "-o", "cat"]
                ).stdout.splitlines()
            )
            raise BootError(
                f"the pod {pod.name} did not run within {_POD_SECONDS:g} s; kubelet says:\n{tail}"
            )
