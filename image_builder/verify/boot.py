"""Boot an artifact in its own machine, to look at it or to verify it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.bake.store import Store
from image_builder.canonical import JSON
from image_builder.errors import BootError, UsageError, VerifyError
from image_builder.events import Monitor, shown_stage
from image_builder.machine.ssh import SshTarget
from image_builder.machine.vm import ExtraDisk, Vm, VmOptions
from image_builder.settings import Settings
from image_builder.verify.result import SuiteResult, require_passed
from image_builder.verify.runner import clear_records, observe_suite, read_facts, require_red

# An emulated machine unpacks preloaded images at a tenth of a real one's speed.
SYSTEM_SECONDS = 1200.0
_SYSTEM_STEP = 5.0
# On such a machine with shared processors, a pod took 288 s.
POD_SECONDS = 900.0
# A whole run of the suite, on such a machine, too.
SUITE_SECONDS = 3600.0
# A cloud's disk is larger than the image, and the root must grow into it. Loading an archive takes three times its
# size: the archive, what Docker first unpacks it to, and the layers.
GROWTH_BYTES = 8 << 30
# A blank disk for an image that wants one, as a cloud provides it: every image of the lab fits.
LOCAL_DISK = ExtraDisk("local0", size=16 << 30)
POD_NAME = "lab-probe"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
PauseArchive = Callable[[str], bytes]
"""Returns an archive of a pause image under a reference, as `docker load` takes it."""
DISK_SUFFIXES = (".qcow2", ".raw", ".vhd")
_RECORD, _FACTS = "boot.json", "facts.json"


@dataclass(frozen=True)
class BootResult:
    """The result of a boot. Seconds count from power-on; ``pod_seconds`` is None if the image runs no pods.

    ``build_id`` is that of the facts that the machine was checked against, empty without any.
    """

    image: str
    build_id: str
    accelerator: str
    secure_boot: bool
    ssh_seconds: float
    system_seconds: float
    system_state: str
    pod_seconds: float | None
    suite: SuiteResult | None
    console_problems: tuple[str, ...]

    def as_json(self) -> dict[str, JSON]:
        """Return the result as stored in boot.json."""
        return {
            "image": self.image,
            "build_id": self.build_id,
            "accelerator": self.accelerator,
            "secure_boot": self.secure_boot,
            "seconds": {"ssh": self.ssh_seconds, "system": self.system_seconds, "pod": self.pod_seconds},
            "system_state": self.system_state,
            "suite": self.suite.as_json() if self.suite else None,
            "console_problems": list(self.console_problems),
        }

    def write(self, out_dir: Path) -> None:
        """Write boot.json."""
        record = json.dumps(self.as_json(), indent=1) + "\n"
        (out_dir / _RECORD).write_text(record, encoding="utf-8")

    def require_passed(self) -> None:
        """Raise VerifyError unless every check passed and the console was clean."""
        if self.suite is None:
            raise VerifyError(f"{self.image} was booted but not verified")
        require_passed(self.suite)
        if self.console_problems:
            lines = "\n".join(f"  {problem}" for problem in self.console_problems)
            raise VerifyError(
                f"{len(self.console_problems)} problems on the console of {self.image}\n{lines}"
            )


def find_disk(artefact: Path) -> Path:
    """Return the disk in a directory of artifacts, or the file itself. Raises BootError if there is none."""
    if artefact.is_file():
        return artefact
    for suffix in DISK_SUFFIXES:
        if disks := sorted(artefact.glob(f"*{suffix}")):
            return disks[0]
    raise BootError(
        f"{artefact} holds no disk ({', '.join(DISK_SUFFIXES)})",
        hint="build one: image_formats must name raw, qcow2 or vhd",
    )


def local_disks(sizes: Sequence[str]) -> tuple[ExtraDisk, ...]:
    """Return blank NVMe disks ``local0``, ``local1``, … with sizes such as ``16G``. Raises UsageError."""
    return tuple(ExtraDisk(f"local{number}", size=parse_size(size)) for number, size in enumerate(sizes))


def parse_size(text: str) -> int:
    """Return the bytes that a number with K, M, G or T (powers of 1024) stands for. Raises UsageError."""
    size = re.fullmatch(r"([1-9]\d{0,14})([KMGT]?)", text.upper())
    if size is None:
        raise UsageError(f"not a disk size: {text}", hint="write 16G, 512M or a number of bytes")
    return int(size[1]) * _UNITS[size[2]]


def boot(
    artefact: Path,
    *,
    verify: bool,
    out_dir: Path,
    settings: Settings,
    monitor: Monitor,
    pause_archive: PauseArchive,
    facts: Path | None = None,
    keep: bool = False,
    secure_boot: bool | None = None,
    extra_disks: tuple[ExtraDisk, ...] | None = None,
    then: Callable[[SshTarget], None] | None = None,
) -> BootResult:
    """Boot ``artefact`` (a disk, or the directory of one build), then end the machine.

    With ``verify``, the suite's booted checks run, and ``out_dir`` gets ``verify.json``, ``junit.xml``, ``boot.json``
    and ``console.log``; failed checks are part of the result. If all passed, the machine is then broken to show that
    the user's own checks can fail, unless ``keep``. Without ``verify``, or with ``keep``, it stays up until it powers
    itself off or KeyboardInterrupt is raised. ``facts`` is by default the disk's facts.json; ``then`` gets
    the machine; ``pause_archive`` provides the pod's image if it has none. By default Secure Boot is as it declares,
    with a blank local disk for the layer ``node``. Raises UsageError, BootError, CommandError, HostError, VerifyError.
    """
    disk = find_disk(artefact)
    specification = _specification(facts, disk, needed=verify)
    facts = facts or disk.parent / _FACTS
    variables = specification.get("variables", {})
    out_dir.mkdir(parents=True, exist_ok=True)
    clear_records(out_dir)
    (out_dir / _RECORD).unlink(missing_ok=True)
    store = Store(settings.store)
    store.prepare()
    monitor.stages_planned([(name, "", False) for name in ("boot", "verify")[: 1 + verify]])
    options = _options(disk, specification, secure_boot, extra_disks)
    console = (out_dir / "console.log").resolve()
    with store.staging() as work, Vm(options, work, console) as vm:
        try:
            with shown_stage(monitor, "boot"):
                ssh = vm.wait_for_ssh(on_line=lambda line: monitor.stage_doing("boot", line))
                _require_secure_boot(ssh, options.secure_boot)
                state = wait_for_system(ssh, on_wait=lambda: monitor.stage_doing("boot", vm.last_line()))
                system_seconds = round(vm.seconds, 1)
            pod_seconds = suite = None
            with shown_stage(monitor, "verify") if verify else nullcontext():
                if verify:
                    pod_seconds = start_pod(vm, ssh, variables, monitor, pause_archive)
                    suite = _run_suite(ssh, facts, out_dir, settings, monitor)
                result = _result(vm, specification, state, system_seconds, pod_seconds, suite)
                if suite and not keep:
                    _prove(ssh, suite, facts, out_dir, settings, monitor)
                # Last: `publish` accepts a machine's verification only with this record.
                result.write(out_dir)
            if then:
                then(ssh)
            if keep or not verify:
                _stay(vm, ssh, monitor)
        finally:
            if vm.console_log.exists():
                shutil.copyfile(vm.console_log, console)
    return result


def _specification(facts: Path | None, disk: Path, *, needed: bool) -> dict[str, Any]:
    """Return the content of ``facts``, by default of the facts.json next to a disk, empty if there is none.

    Raises BootError if there is none but it is ``needed``, UsageError if it isn't that of a build.
    """
    default = disk.parent / _FACTS
    if facts or default.is_file():
        return read_facts(facts or default)
    if needed:
        raise BootError(f"{default} is missing: it says what {disk.name} must be")
    return {}


def _options(
    disk: Path,
    specification: Mapping[str, Any],
    secure_boot: bool | None,
    extra_disks: tuple[ExtraDisk, ...] | None,
) -> VmOptions:
    """Return the machine for an image; if a choice is None, the image's own variables make it."""
    variables = specification.get("variables", {})
    if extra_disks is None:
        extra_disks = (LOCAL_DISK,) if "node" in variables.get("image_layers", []) else ()
    return VmOptions(
        name=str(specification.get("image", disk.stem)),
        disk=disk,
        extra_disks=extra_disks,
        secure_boot=bool(variables.get("image_secure_boot")) if secure_boot is None else secure_boot,
        user=str(variables.get("azure_guest_default_user", "debian")),
        disk_size=virtual_size(disk) + GROWTH_BYTES,
    )


def _result(
    vm: Vm,
    specification: Mapping[str, Any],
    state: str,
    system_seconds: float,
    pod_seconds: float | None,
    suite: SuiteResult | None,
) -> BootResult:
    return BootResult(
        image=vm.options.name,
        build_id=str(specification.get("build_id", "")),
        accelerator=vm.accelerator,
        secure_boot=vm.options.secure_boot,
        ssh_seconds=round(vm.seconds_to_ssh or 0.0, 1),
        system_seconds=system_seconds,
        system_state=state,
        pod_seconds=pod_seconds,
        suite=suite,
        console_problems=tuple(vm.problems()),
    )


def virtual_size(disk: Path) -> int:
    """Return the size of a disk in bytes: a raw file's own, or the one in a qcow2 header (offset 24)."""
    with disk.open("rb") as file:
        header = file.read(32)
    return int.from_bytes(header[24:32], "big") if header[:4] == b"QFI\xfb" else disk.stat().st_size


def _require_secure_boot(ssh: SshTarget, expected: bool) -> None:
    """Raise BootError unless the firmware reports Secure Boot as expected.

    The variable's file has four bytes of attributes and one byte of value (UEFI specification 2.10, 3.3).
    """
    variable = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    value = ssh.run(["od", "-An", "-t", "u1", variable], ok=(0, 1)).stdout.split()
    enabled = value[-1:] == ["1"]
    if enabled != expected:
        raise BootError(
            f"Secure Boot is {'on' if enabled else 'off'}, but {'on' if expected else 'off'} was asked for"
        )


def wait_for_system(ssh: SshTarget, on_wait: Callable[[], None] | None = None) -> str:
    """Wait until systemd has started everything, and return its state (``running``, ``degraded``, …).

    ``on_wait`` is called every few seconds.
    """
    # If timeout(1) ends the command, it prints nothing: systemd is still starting units.
    argv = ["timeout", f"{_SYSTEM_STEP:g}", "systemctl", "is-system-running", "--wait"]
    deadline = time.monotonic() + SYSTEM_SECONDS
    while not (state := ssh.run(argv, ok=range(256)).stdout.strip()):
        if time.monotonic() > deadline:
            return "starting"
        if on_wait:
            on_wait()
    return state


def start_pod(
    vm: Vm, ssh: SshTarget, variables: Mapping[str, Any], monitor: Monitor, pause_archive: PauseArchive
) -> float | None:
    """Give the node a static pod with its pause image; return the seconds until the pod runs.

    Nothing is pulled: if the image doesn't preload its pause image, it is given the ``pause_archive`` of that
    reference. Returns None if the image has no kubelet. Raises BootError if the pod doesn't run in time.
    """
    layers = variables.get("image_layers", [])
    if "container_runtime" not in layers:
        return None
    reference = str(variables["container_runtime_pause_image"])
    if reference not in [image["ref"] for image in variables.get("image_preload", [])]:
        monitor.stage_doing("verify", f"loading {reference}")
        ssh.put(pause_archive(reference), "/var/tmp/pause.tar")
        ssh.run(
            import_command(str(variables.get("container_runtime_engine", "docker")), "/var/tmp/pause.tar"),
            timeout=POD_SECONDS,
        )
        ssh.run(["rm", "/var/tmp/pause.tar"])
    if "kubernetes" not in layers:
        return None
    manifests = str(variables.get("kubelet_static_pod_path", "/etc/kubernetes/manifests"))
    ssh.put(static_pod(reference).encode(), f"{manifests}/{POD_NAME}.json", mode=0o600)
    monitor.stage_doing("verify", "waiting for the static pod")
    deadline = time.monotonic() + POD_SECONDS
    # Two processes: the sandbox's and the container's. Counting them works the same with every engine.
    while len(ssh.run(["pgrep", "-x", "pause"], ok=(0, 1)).stdout.split()) < 2:
        if time.monotonic() > deadline:
            tail = ssh.run(
                ["journalctl", "-u", "kubelet", "-n", "15", "--no-pager", "-o", "cat"], ok=range(256)
            ).stdout
            raise BootError(f"the static pod did not run within {POD_SECONDS:g} s; kubelet says:\n{tail}")
        time.sleep(1)
    return round(vm.seconds, 1)


def import_command(engine: str, archive: str) -> list[str]:
    """Return the command that loads an image archive into a node's engine, without any registry."""
    if engine == "docker":
        return ["docker", "image", "load", "--quiet", "--input", archive]
    return ["ctr", "--namespace", "k8s.io", "images", "import", archive]


def static_pod(reference: str) -> str:
    """Return the manifest of a pod that does nothing, as JSON."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD_NAME, "namespace": "default"},
        "spec": {
            # An image has no pod network: a CNI comes with the cluster.
            "hostNetwork": True,
            "containers": [{"name": "pause", "image": reference, "imagePullPolicy": "Never"}],
        },
    }
    return json.dumps(pod, indent=1) + "\n"


def _run_suite(
    ssh: SshTarget, facts: Path, out_dir: Path, settings: Settings, monitor: Monitor
) -> SuiteResult:
    monitor.stage_doing("verify", "running the checks")
    return observe_suite(
        ssh.url,
        facts,
        out_dir,
        marker="booted",
        python=settings.python,
        log=out_dir / "suite.log",
        checks=settings.checks,
        timeout=SUITE_SECONDS,
        on_progress=lambda _name, done, total: monitor.stage_progress("verify", done, total, "checks"),
    )


def _prove(
    ssh: SshTarget, suite: SuiteResult, facts: Path, out_dir: Path, settings: Settings, monitor: Monitor
) -> None:
    """Break the machine, which is no longer needed, in each way that must turn one of the user's own checks red.

    For the other checks, the build has broken the sealed tree. Raises VerifyError if one stays green.
    """
    if settings.checks is None or suite.not_passed or not any(c.only_booted for c in suite.own):
        return
    monitor.stage_doing("verify", "proving that your own checks can fail")
    records = out_dir / "mutants"
    records.mkdir(exist_ok=True)
    require_red(
        f"broken:{ssh.url}",
        facts,
        records,
        settings.checks,
        marker="booted",
        python=settings.python,
        log=records / "suite.log",
        timeout=SUITE_SECONDS,
    )


def _stay(vm: Vm, ssh: SshTarget, monitor: Monitor) -> None:
    monitor.note(f"it runs until it powers off or until Ctrl-C: {' '.join(ssh.address.command)}")
    try:
        while vm.running:
            time.sleep(0.5)
    except KeyboardInterrupt:
        monitor.note("switched off")
