"""The GPU driver: modules for this kernel, one version of everything, and no traces of the build.

None of these checks needs a GPU. What only a GPU can show is left to the smoke test.
"""

from __future__ import annotations

import re
from typing import Any

from questions import merged, packages
from suite import booted, differences, gpus, load, needs, nothing, offline, output, read, starts_at_boot
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]

with_gpu = needs("gpu")
built = needs("gpu", __nvidia_precompiled=False)

MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset")
LICENSES = {"open": "Dual MIT/GPL", "proprietary": "NVIDIA"}
# NVIDIA's libraries that CUDA programs and the smoke test load by these names.
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4")
# A GPU as its bus announces it: an NVIDIA A100 with 80 GB.
A_GPU = "pci:v000010DEd000020B5sv000010DEsd00001533bc03sc02i00"
COMPILERS = r"/usr/bin/((x86_64-linux-gnu-)?(gcc|g\+\+|cc|ld)(-\d+)?|make|dkms)|/usr/sbin/dkms"
KEYS = r"/var/lib/(dkms/mok\.(key|pub)|shim-signed/mok/.+)|.*/(MOK|signing_key)\.(priv|pem|key)"


def _kernel(tree: Tree) -> str:
    """Return the version of the image's only kernel."""
    actual = [path.partition("-")[2] for path in tree.matching(r"/boot/vmlinuz-.*")]
    assert len(actual) == 1, f"kernels: {actual}"
    return actual[0]


def _modinfo(host: Host, kernel: str, module: str) -> dict[str, str]:
    """Return modinfo's fields of the module that would be loaded, the first of each name."""
    fields: dict[str, str] = {}
    for field in output(host, "modinfo --null -k %s %s | tr '\\0' '\\n'", kernel, module).splitlines():
        # NAME=VALUE; only the file's name is in the human-readable form.
        name, separator, value = field.partition(":" if field.startswith("filename:") else "=")
        if separator:
            fields.setdefault(name, value.strip())
    # A module that the index names but that doesn't exist has a file name and no other fields.
    assert {"filename", "vermagic"} <= fields.keys(), f"the kernel {kernel} has no module {module}"
    return fields


@offline
@booted
@with_gpu
def test_gpu_modules_are_for_the_kernel(host: Host, tree: Tree, v: V) -> None:
    """Every driver module is there for exactly the image's kernel, in exactly the declared version."""
    kernel = _kernel(tree)
    wrong = []
    for name in MODULES:
        fields = _modinfo(host, kernel, name)
        expected = {"vermagic": kernel, "version": v["nvidia_driver_version"]}
        actual = {"vermagic": fields["vermagic"].split()[0], "version": fields.get("version", "none")}
        wrong += [f"{name}: {difference}" for difference in differences(expected, actual)]
    nothing(wrong)


@offline
@booted
@with_gpu
def test_gpu_modules_are_of_the_declared_flavour(host: Host, tree: Tree, v: V) -> None:
    """The driver modules are the open or the proprietary ones, whichever the pool's GPUs need."""
    actual = {name: _modinfo(host, _kernel(tree), name).get("license", "none") for name in MODULES}
    nothing(differences(dict.fromkeys(MODULES, LICENSES[v["__nvidia_flavour"].strip()]), actual))


@offline
@booted
@with_gpu
def test_gpu_modules_fit_the_kernels_interface(host: Host, tree: Tree) -> None:
    """The driver modules were built against the same kernel symbol checksums as the kernel's own modules."""
    kernel = _kernel(tree)
    own = tree.matching(
        rf"/usr/lib/modules/{re.escape(kernel)}/kernel/(fs/overlayfs|drivers/net)/[^/]+\.ko(\.\w+)?"
    )
    believed: dict[str, str] = {}
    for path in own:
        believed |= _checksums(host, path)
    assert "module_layout" in believed, f"{len(own)} modules of the kernel have no checksums"
    wrong = []
    for name in MODULES:
        needed = _checksums(host, _modinfo(host, kernel, name)["filename"])
        assert "module_layout" in needed, f"{name} has no checksums"
        shared = {symbol: believed[symbol] for symbol in needed if symbol in believed}
        wrong += [f"{name}: {difference}" for difference in differences(shared, needed)]
    nothing(wrong)


def _checksums(host: Host, module: str) -> dict[str, str]:
    """Return the checksum of each kernel symbol that a module file uses."""
    lines = output(host, "modprobe --dump-modversions %s", module).splitlines()
    return {symbol: checksum for checksum, symbol in (line.split() for line in lines)}


@offline
@booted
@with_gpu
def test_gpu_modules_would_be_loaded(host: Host, tree: Tree) -> None:
    """A GPU's alias resolves to the driver, no configuration denies it, and all its dependencies are there."""
    kernel = _kernel(tree)
    assert "nvidia" in output(host, "modprobe --set-version %s --resolve-alias %s", kernel, A_GPU).split()
    wrong = []
    for name in MODULES:
        steps = output(
            host, "modprobe --set-version %s --dry-run --show-depends %s", kernel, name
        ).splitlines()
        wrong += [f"{name}: {step}" for step in steps if not step.startswith(("insmod ", "builtin "))]
        if not any("/updates/" in step or "nvidia" in step for step in steps):
            wrong.append(f"{name}: {steps}")
    configured = output(host, "modprobe --set-version %s --showconfig", kernel).splitlines()
    wrong += [
        line for line in configured if re.fullmatch(r"(blacklist|install) nvidia([-_]uvm)?( .*)?", line)
    ]
    nothing(wrong)


@offline
@with_gpu
def test_gpu_modules_are_there_once(tree: Tree) -> None:
    """Each driver module exists only once, so an older one can't be loaded in its place."""
    actual = tree.matching(r"/(usr/)?lib/modules/.+/nvidia([-_]\w+)*\.ko(\.\w+)?")
    names = [re.sub(r"\.ko.*", "", path.rpartition("/")[2]).replace("-", "_") for path in actual]
    nothing(sorted({path for path, name in zip(actual, names, strict=True) if names.count(name) > 1}))
    assert set(MODULES) <= set(names), f"only {names}"


@offline
@booted
@needs("gpu", image_secure_boot=True)
def test_gpu_modules_are_signed(host: Host, tree: Tree, v: V) -> None:
    """Where Secure Boot is declared, each driver module is signed, by an allowed signer if the definition lists any."""
    actual = {name: _modinfo(host, _kernel(tree), name).get("signer", "") for name in MODULES}
    nothing(f"{name} is signed by nobody" for name, signer in actual.items() if not signer)
    if v["nvidia_signers"]:
        nothing(f"{name}: {signer}" for name, signer in actual.items() if signer not in v["nvidia_signers"])


@offline
@booted
@with_gpu
def test_gpu_firmware_is_there(host: Host, tree: Tree, v: V) -> None:
    """The GSP firmware that the module names is on the disk, in the driver's version."""
    kernel = _kernel(tree)
    expected = output(host, "modinfo -k %s --field firmware nvidia", kernel).split()
    assert expected, "the module names no firmware"
    nothing(f for f in expected if f"/{v['nvidia_driver_version']}/" not in f)
    nothing(f for f in expected if not any(f"{top}/firmware/{f}" in tree for top in ("/lib", "/usr/lib")))


@offline
@booted
@with_gpu
def test_gpu_libraries_are_the_drivers(host: Host, v: V) -> None:
    """Each library that programs load by its short name is the one of the declared version."""
    libraries = dict(
        re.findall(r"^\s*(\S+) \(.*x86-64.*\) => (\S+)$", output(host, "ldconfig -p"), re.MULTILINE)
    )
    wrong = []
    for name in LIBRARIES:
        target = (
            output(host, "readlink --canonicalize-existing %s", libraries[name])
            if name in libraries
            else "nothing"
        )
        if not target.endswith(f".so.{v['nvidia_driver_version']}"):
            wrong.append(f"{name} is {target}")
    nothing(wrong)


@offline
@booted
@with_gpu
def test_gpu_packages_are_of_one_version(host: Host, v: V) -> None:
    """The packages of firmware, libraries, programs and fabric manager are of the driver's version."""
    libraries, actual = packages(host), {}
    for name in v["__nvidia_pinned"]:
        assert name in libraries and libraries[name].installed, f"{name} is not installed"
        actual[name] = re.sub(r"^\d+:|-[^-]*$", "", libraries[name].version)
    nothing(differences(dict.fromkeys(actual, v["nvidia_driver_version"]), actual))
    branch = v["nvidia_driver_version"].split(".")[0]
    for name in v["__nvidia_unpinned"]:
        assert name in libraries, f"{name} is not there"
        version = libraries[name].version
        assert version.startswith(f"{branch}."), f"{name} {version} is of another branch than {branch}"


@offline
@booted
@with_gpu
def test_gpu_packages_are_held(host: Host, v: V) -> None:
    """The driver's packages are held, so no upgrade installs a library that doesn't match the modules."""
    held = {name for name, package in packages(host).items() if package.held}
    nothing(sorted(set(v["__nvidia_held"]) - held))


@offline
@booted
@built
def test_gpu_build_left_nothing(host: Host, tree: Tree, v: V) -> None:
    """The image has no compiler, kernel headers, driver source or DKMS tree."""
    nothing(tree.matching(COMPILERS))
    nothing(tree.matching(r"/var/lib/dkms/nvidia[^/]*/.+|/usr/src/(nvidia|linux-headers)-.+"))
    unwanted = re.compile(r"dkms|make|gcc(-\d+)?|linux-headers-.*|.*-dkms")
    nothing(
        name for name, package in packages(host).items() if package.installed and unwanted.fullmatch(name)
    )


@offline
@booted
@with_gpu
def test_gpu_signing_key_is_not_there(host: Host, tree: Tree) -> None:
    """The image has no key that signs modules, which every node would share."""
    nothing(tree.matching(KEYS))


@offline
@booted
@with_gpu
def test_gpu_nouveau_is_denied(host: Host, tree: Tree) -> None:
    """The system's configuration denies nouveau, the other driver."""
    lines = output(host, "modprobe --set-version %s --showconfig", _kernel(tree)).splitlines()
    assert "blacklist nouveau" in lines
    assert "install nouveau /bin/false" in lines


@offline
@with_gpu
def test_gpu_nouveau_is_denied_in_the_initramfs(host: Host, tree: Tree, v: V) -> None:
    """The initramfs has the configuration that denies nouveau, and doesn't have nouveau itself."""
    listing = output(host, "lsinitramfs %s", f"/boot/initrd.img-{_kernel(tree)}").splitlines()
    assert v["__nvidia_modprobe_file"].lstrip("/") in listing
    nothing(path for path in listing if re.search(r"/nouveau\.ko", path))


@offline
@with_gpu
def test_gpu_nothing_of_a_machine_is_baked(tree: Tree) -> None:
    """The image has nothing that describes a machine's GPUs: no CDI, no device files, no daemon state."""
    nothing(tree.matching(r"/(etc|var/run|run)/cdi/.+|/dev/nvidia.*|/var/(run|lib)/nvidia-persistenced/.+"))


@offline
@booted
@with_gpu
def test_gpu_starts_its_units(host: Host, tree: Tree, v: V) -> None:
    """A GPU starts the units that it needs when it appears; none of them starts on a node without one."""
    rules = read(host, "/etc/udev/rules.d/71-nvidia.rules")
    units = v["__nvidia_services"]
    started = re.findall(r'ENV\{SYSTEMD_WANTS\}\+="([^"]*)"', rules)
    assert [name for line in started for name in line.split()] == units, f"a GPU starts {started}"
    nothing(unit for unit in units if starts_at_boot(tree, unit))
    for unit in units:
        lines = merged(host, f"systemd/system/{unit}").splitlines()
        assert "ExecStartPre=/sbin/modprobe nvidia" in lines, f"{unit} comes before the driver"


@offline
@booted
@with_gpu
def test_gpu_fabric_manager_is_where_it_belongs(host: Host, v: V) -> None:
    """Images for sizes with NVSwitch have the fabric manager; others, where it would fail to start, don't."""
    actual = any(
        name.startswith("nvidia-fabric") and package.installed for name, package in packages(host).items()
    )
    assert actual == v["__nvidia_fabric"], f"the fabric manager is {'' if actual else 'not '}installed"


@offline
@booted
@with_gpu
def test_gpu_record_is_true(host: Host, tree: Tree, v: V) -> None:
    """The record that a node is compared with at boot matches the image."""
    kernel = _kernel(tree)
    record = load(host, v["__nvidia_record"])
    expected = {
        "driver": v["nvidia_driver_version"],
        "flavour": v["__nvidia_flavour"].strip(),
        "kernel": kernel,
    }
    nothing(differences(expected, record))
    assert sorted(record["modules"]) == sorted(MODULES)
    for name, module in record["modules"].items():
        path = _modinfo(host, kernel, name)["filename"]
        actual = output(host, "sha256sum %s", path).split()[0]
        assert actual == module["sha256"], f"{name} has the SHA-256 {actual}, recorded is {module['sha256']}"


@offline
@booted
@needs("gpu", nvidia_rdma=lambda kind: kind != "none")
def test_gpu_rdma_is_there(host: Host, v: V) -> None:
    """RDMA's libraries are installed, and sessions may lock all the memory that they need."""
    libraries = output(host, "ldconfig -p")
    nothing(name for name in ("libibverbs.so.1", "librdmacm.so.1") if name not in libraries)
    limits = read(host, "/etc/security/limits.d/91-nvidia-rdma.conf").splitlines()
    nothing(line for line in ("* - memlock unlimited", "root - memlock unlimited") if line not in limits)


@offline
@booted
@needs("gpu", nvidia_rdma=lambda kind: kind != "none", nvidia_rdma_kernel_options=bool)
def test_gpu_rdma_has_its_kernel_options(host: Host, tree: Tree, v: V) -> None:
    """The image's kernel has the options that RDMA with GPUs needs, built in or as modules."""
    config = read(host, f"/boot/config-{_kernel(tree)}").splitlines()
    nothing(
        name
        for name in v["nvidia_rdma_kernel_options"]
        if not {f"CONFIG_{name}=y", f"CONFIG_{name}=m"} & set(config)
    )


@booted
@with_gpu
def test_gpu_driver_wants_nothing_but_a_gpu(host: Host) -> None:
    """The kernel accepts the module; without a GPU, the driver's only complaint is that there is none."""
    done = host.run("modprobe nvidia")
    output(host, "journalctl --sync")
    log = output(host, "journalctl --dmesg --boot --no-pager --output=cat")
    nothing(
        line
        for line in log.splitlines()
        if re.search(r"nvidia: .*(disagrees|Unknown symbol|version magic)", line)
    )
    if gpus(host):
        assert done.rc == 0, done.stderr
    else:
        assert "No such device" in done.stderr, f"{done.rc}: {done.stderr}"
        assert re.search(r"NVRM: No NVIDIA (GPU|graphics adapter) found", log), "the driver didn't say why"


@booted
@with_gpu
def test_gpu_units_follow_the_gpu(host: Host, v: V) -> None:
    """The driver's services are active on a machine with a GPU, and inactive, not failed, on one without."""
    expected = "active" if gpus(host) else "inactive"
    states = {
        unit: host.run("systemctl is-active %s", unit).stdout.strip() for unit in v["__nvidia_services"]
    }
    nothing(f"{unit} is {state}, not {expected}" for unit, state in states.items() if state != expected)


@booted
@with_gpu
def test_gpu_tools_say_that_there_is_none(host: Host) -> None:
    """NVIDIA's own tool exits promptly, with a list of the GPUs or an error that no driver is loaded."""
    done = host.run("timeout 60 nvidia-smi -L")
    number = gpus(host)
    if number:
        assert done.rc == 0 and len(done.stdout.splitlines()) >= number, done.stdout + done.stderr
    else:
        assert done.rc in (6, 9), f"{done.rc}: {done.stdout}{done.stderr}"
