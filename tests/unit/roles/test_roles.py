"""The rules for every role and layer: its variables, its modules, what it may refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment, meta

REPO = Path(__file__).resolve().parents[3]
ROLES = sorted(path for path in (REPO / "roles").iterdir() if path.is_dir())
LAYERS = [REPO / "playbooks/seal.yml", *sorted((REPO / "playbooks/layers").glob("*.yml"))]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Everything else in a task is the module: ansible-core's reference of keywords.
KEYWORDS = words(
    "action any_errors_fatal args async become become_user block always rescue changed_when check_mode "
    "collections connection delay delegate_to diff environment failed_when ignore_errors listen local_action "
    "loop loop_control module_defaults name no_log notify poll register retries run_once tags throttle "
    "timeout until vars when"
)
# Keywords whose values are expressions without braces.
EXPRESSIONS = frozenset({"when", "changed_when", "failed_when", "until", "that"})
# Names that ansible-core itself offers to templates, and those that a template defines itself.
OFFERED = words(
    "ansible_managed ansible_check_mode ansible_collection_name ansible_loop item omit role_path role_name "
    "lookup query now undef"
)
# A task's name starts with one of these imperatives.
_VERBS = words(
    "Add Apply Ask Check Compile Configure Copy Create Disable Download Empty Enable Find Gather Hold Install Let "
    "List Load Mark Mask Read Reload Remove Restart Save Set Trust Turn Unpack Update Write"
)
TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "path": str,
    "bool": bool,
    "int": int,
    "float": (int, float),
    "list": list,
    "dict": dict,
}

by_role = pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)


@cache
def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def options(role: Path) -> dict[str, Any]:
    specs: dict[str, Any] = load(role / "meta/argument_specs.yml")["argument_specs"]
    found: dict[str, Any] = specs["main"].get("options") or {}
    return found


def defaults(role: Path) -> dict[str, Any]:
    return load(role / "defaults/main.yml") or {}


def tasks_in(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield every task, including those inside blocks."""
    for entry in entries:
        yield entry
        for part in ("block", "rescue", "always"):
            yield from tasks_in(entry.get(part, []))


def tasks(role: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted([*role.glob("tasks/**/*.yml"), *role.glob("handlers/*.yml")]):
        for task in tasks_in(load(path) or []):
            yield path, task


def modules(task: dict[str, Any]) -> set[str]:
    return set(task) - KEYWORDS


@by_role
def test_argument_specs_agree_with_defaults(role: Path) -> None:
    specs = options(role)
    required = {name for name, spec in specs.items() if spec.get("required")}
    # Variables that this role asks the host for are undefined until then.
    asked = {name for name in specs if role.name == "target" and "default" not in specs[name]}
    assert set(specs) - required - asked == set(defaults(role))
    for name, value in defaults(role).items():
        assert specs[name].get("default") == value, f"{name}: the default in the specs is another"
        template = isinstance(value, str) and "{{" in value
        if not template and specs[name]["type"] in TYPES:
            assert isinstance(value, TYPES[specs[name]["type"]]), f"{name} is no {specs[name]['type']}"


@by_role
def test_every_option_is_described(role: Path) -> None:
    def undescribed(specs: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, spec in specs.items():
            if not spec.get("description") or not spec.get("type"):
                yield prefix + name
            yield from undescribed(spec.get("options") or {}, f"{prefix}{name}.")

    assert not list(undescribed(options(role)))
    assert load(role / "meta/argument_specs.yml")["argument_specs"]["main"]["short_description"]


@by_role
def test_variables_bear_the_roles_name(role: Path) -> None:
    assert [name for name in defaults(role) if not name.startswith(f"{role.name}_")] == []
    constants = {name for path in role.glob("vars/*.yml") for name in load(path) or {}}
    registered = {task["register"] for _, task in tasks(role) if "register" in task}
    assert [n for n in sorted(constants | registered) if not n.startswith(f"__{role.name}_")] == []


@by_role
def test_role_is_complete(role: Path) -> None:
    for name in ("README.md", "meta/main.yml", "tasks/main.yml", "molecule/default/molecule.yml"):
        assert (role / name).is_file(), name
    assert list((role / "molecule/default/tests").glob("test_*.py"))
    # A role depends at most on target, to know what it changes.
    assert load(role / "meta/main.yml")["dependencies"] in ([], [{"role": "target"}])


@by_role
def test_modules_are_ansible_cores_or_the_roles_own(role: Path) -> None:
    own = {path.stem for path in role.glob("library/*.py")}
    assert all(name.startswith(f"{role.name}_") for name in own)
    for path, task in tasks(role):
        used = modules(task)
        assert len(used) == (0 if "block" in task else 1), f"{path}: {task}"
        assert all(name.startswith("ansible.builtin.") for name in used - own), f"{path}: {used}"


@by_role
def test_tasks_are_named_and_honest(role: Path) -> None:
    for path, task in tasks(role):
        name = task.get("name", "")
        assert name.partition(" ")[0] in _VERBS and not name.endswith("."), f"{path}: {task}"
        assert not {"ignore_errors", "local_action", "action", "delegate_to"} & set(task), (
            f"{path}: {task['name']}"
        )
        if {"ansible.builtin.command", "ansible.builtin.shell"} & set(task):
            command = task.get("ansible.builtin.command") or task["ansible.builtin.shell"]
            creates = isinstance(command, dict) and {"creates", "removes"} & set(command)
            assert creates or "changed_when" in task, f"{path}: {task['name']} says nothing of changes"


@by_role
def test_modes_are_quoted(role: Path) -> None:
    for path, task in tasks(role):
        for arguments in task.values():
            if isinstance(arguments, dict) and "mode" in arguments:
                assert isinstance(arguments["mode"], str), f"{path}: {task['name']}"


@by_role
def test_handlers_run_on_booted_machines_alone(role: Path) -> None:
    for path, task in tasks(role):
        if path.parent.name == "handlers":
            assert "target_booted" in str(task.get("when")), f"{path}: {task['name']}"


@by_role
def test_nothing_is_started_in_a_bake(role: Path) -> None:
    for path, task in tasks(role):
        for arguments in task.values():
            state = arguments.get("state") if isinstance(arguments, dict) else None
            if isinstance(state, str) and re.search(r"\b(started|restarted|reloaded|stopped)\b", state):
                guard = f"{state} {task.get('when')}"
                assert "target_booted" in guard, f"{path}: {task['name']}"


class AnyName(dict[str, Any]):
    """A mapping with every filter and test: Ansible's own aren't the subject here."""

    def get(self, _key: str, _default: Any = None) -> Any:
        return str


ENGINE = Environment(autoescape=True)
ENGINE.filters, ENGINE.tests = AnyName(), AnyName()


def free_names(text: str) -> set[str]:
    """Return the variables that a template doesn't define itself."""
    return meta.find_undeclared_variables(ENGINE.parse(text))


def texts(value: Any, key: str = "") -> Iterator[str]:
    """Yield the templates in a value of a YAML file, with bare expressions put in braces."""
    if isinstance(value, dict):
        for inner, part in value.items():
            if isinstance(inner, str):
                yield from texts(inner)
            yield from texts(part, str(inner))
    elif isinstance(value, list):
        for part in value:
            yield from texts(part, key)
    elif isinstance(value, str):
        yield "{{ (" + value + ") }}" if key in EXPRESSIONS and "{{" not in value else value


def loop_variables(task: dict[str, Any]) -> set[str]:
    control = task.get("loop_control") or {}
    return {control[name] for name in ("loop_var", "index_var") if name in control}


@by_role
def test_role_speaks_of_its_own_variables_only(role: Path) -> None:
    """Another role's variables come in through the layer's playbook, which the plan's ids cover."""
    used: dict[str, Path] = {}
    for path in sorted((role / "templates").rglob("*.j2")):
        used |= dict.fromkeys(free_names(path.read_text(encoding="utf-8")), path)
    for path in sorted([*role.glob("defaults/*.yml"), *role.glob("vars/*.yml")]):
        for text in texts(load(path)):
            used |= dict.fromkeys(free_names(text), path)
    made: set[str] = set()
    for path, task in tasks(role):
        made |= set(task.get("vars") or {}) | loop_variables(task)
        for text in texts(task):
            used |= dict.fromkeys(free_names(text), path)
    own = re.compile(rf"(__)?{role.name}_\w+")
    for dependency in load(role / "meta/main.yml")["dependencies"]:
        made |= options(REPO / "roles" / dependency["role"]).keys()
    made |= {"ansible_facts"} if role.name == "target" else set()
    foreign = {n: p for n, p in used.items() if not own.fullmatch(n) and n not in OFFERED | made}
    assert not foreign


@by_role
def test_no_name_is_put_together_at_run_time(role: Path) -> None:
    """Such a name would escape the plan, which looks for the words of variables in a role's files."""
    for path in (p for p in role.rglob("*") if p.suffix in (".yml", ".j2") and "molecule" not in p.parts):
        found = re.findall(r"lookup\(\s*['\"]vars|hostvars\[|\bvarnames\b|\bvars\[", path.read_text("utf-8"))
        assert not found, f"{path}: {found}"


@by_role
def test_facts_of_the_baking_machine_are_not_used(role: Path) -> None:
    """The exception is the file that asks the host, which no bake allows."""
    for path in (p for p in role.rglob("*") if p.suffix in (".yml", ".j2") and "molecule" not in p.parts):
        if path == REPO / "roles/target/tasks/ask.yml":
            continue
        found = re.findall(
            r"\bansible_(?:facts|kernel|hostname|distribution\w*|env)\b", path.read_text("utf-8")
        )
        assert not found, f"{path}: {found}"


def test_repositories_are_written_alike() -> None:
    """A role is complete without the others, so each has the template: they differ in the variable alone."""
    templates = sorted((REPO / "roles").glob("*/templates/repository.sources.j2"))
    texts = {
        re.sub(r"\b[a-z_]+_repository\b", "item", path.read_text(encoding="utf-8")) for path in templates
    }
    assert len(templates) == 3 and len(texts) == 1, texts


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_playbook_is_one_play_of_known_roles(path: Path) -> None:
    plays = load(path)
    assert len(plays) == 1 and plays[0]["gather_facts"] is False
    assert plays[0]["hosts"] == (
        "images" if path.stem == "seal" else "{{ target_hosts | default('images') }}"
    )
    names = {entry["role"]: entry for entry in plays[0]["roles"]}
    assert set(names) <= {role.name for role in ROLES}
    for name, entry in names.items():
        assert all(variable.startswith(f"{name}_") for variable in entry.get("vars", {})), name


def test_initramfs_is_configured_before_the_kernel_comes() -> None:
    """Files written after the kernel's package would need a second initramfs."""
    names = [entry["role"] for entry in load(REPO / "playbooks/layers/system.yml")[0]["roles"]]
    assert names.index("azure_guest") < names.index("system")
    imports = [t["ansible.builtin.import_tasks"] for t in load(REPO / "roles/system/tasks/main.yml")]
    assert imports == ["preflight.yml", "quiet.yml", "install.yml", "configure.yml", "service.yml"]


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_neighbour_tables_are_those_of_a_large_cluster(family: str) -> None:
    sysctl = defaults(REPO / "roles/system")["system_sysctl"]
    names = [f"net.{family}.neigh.default.gc_thresh{n}" for n in (1, 2, 3)]
    assert [sysctl[name] for name in names] == [80000, 90000, 100000]


def test_no_kernel_setting_has_two_owners() -> None:
    system = defaults(REPO / "roles/system")["system_sysctl"]
    assert not set(system) & set(defaults(REPO / "roles/hardening")["hardening_sysctl"])


def test_hardening_denies_nothing_that_is_loaded() -> None:
    denied = set(defaults(REPO / "roles/hardening")["hardening_denied_modules"])
    needed = set(load(REPO / "roles/hardening/vars/main.yml")["__hardening_needed_modules"])
    needed |= set(defaults(REPO / "roles/system")["system_modules"])
    needed |= set(defaults(REPO / "roles/azure_guest")["azure_guest_initramfs_modules"])
    assert not denied & needed and {"udf", "vfat"} <= needed


# Started by a timer, or of no use once cloud-init is running.
STARTED_ONCE = {"node-health.service.j2", "preflight-again.service.j2", "first-boot-again.service.j2"}
BOOT_UNITS = [
    path
    for path in sorted((REPO / "roles").glob("*/templates/*.service.j2"))
    if "Type=oneshot" in path.read_text() and path.name not in STARTED_ONCE
]


@pytest.mark.parametrize("path", BOOT_UNITS, ids=lambda path: path.name)
def test_each_unit_of_a_boot_is_started_again_after_a_failure(path: Path) -> None:
    unit, _, service = path.read_text().partition("[Service]\n")
    assert "StartLimitIntervalSec=0" in unit.splitlines(), "after five failures it would be given up"
    settings = dict(line.split("=", 1) for line in service.splitlines() if line.startswith("Restart"))
    assert settings["Restart"] == "on-failure" and 5 <= int(settings["RestartSec"]) <= 300


def test_host_keys_are_of_the_same_types_whoever_makes_them() -> None:
    system = defaults(REPO / "roles/system")["system_ssh_host_key_types"]
    assert defaults(REPO / "roles/azure_guest")["azure_guest_ssh_host_key_types"] == system


SEALED = (
    "/etc/ssh/ssh_host_ed25519_key",
    "/etc/ssh/ssh_host_rsa_key.pub",
    "/etc/passwd-",
    "/etc/hostname",
    "/root/.bash_history",
    "/root/.ssh/authorized_keys",
    "/home/someone/.docker/config.json",
    "/var/lib/cloud/instance/user-data.txt",
    "/var/lib/systemd/random-seed",
    "/var/lib/apt/lists/some_dists_suite_InRelease",
    "/var/cache/apt/archives/foo.deb",
    "/var/log/journal/0123/system.journal",
    "/etc/machine.conf.dpkg-old",
    "/var/lib/waagent/Certificates.p12",
    "/etc/kubernetes/kubelet.conf",
    "/etc/kubernetes/bootstrap-kubelet.conf",
    "/etc/kubernetes/node.env",
    "/etc/kubernetes/pki/ca.crt",
    "/var/lib/kubelet/pki/kubelet-client-2026-11-22-01-00-00.pem",
    "/var/lib/kubelet/pki/kubelet-client-current.pem",
    "/var/lib/kubelet/image_manager/pulled/sha256-0123",
    "/var/lib/kubelet/cpu_manager_state",
    "/etc/node-agent/join-taints.json",
    "/var/lib/node-agent/preflight.json",
    "/var/lib/kubelet/dra_manager_state",
    "/etc/nvme/hostnqn",
    "/etc/nvme/hostid",
    "/etc/ssl/private/ssl-cert-snakeoil.key",
    "/etc/docker/key.json",
    "/var/lib/docker/engine-id",
    "/var/lib/libuuid/clock.txt",
    "/etc/multipath/wwids",
    "/etc/multipath/bindings",
    "/etc/dropbear/dropbear_ed25519_host_key",
    "/etc/openvswitch/system-id.conf",
    "/etc/udev/rules.d/70-persistent-net.rules",
)
KEPT = (
    "/etc/nvme/discovery.conf",
    "/etc/iscsi/initiatorname.iscsi",
    "/etc/iscsi/iscsid.conf",
    "/etc/multipath.conf",
    "/etc/docker/daemon.json",
    "/etc/ssl/private",
    "/etc/udev/rules.d/80-net.rules",
    "/etc/kubernetes/kubelet.yaml",
    "/etc/kubernetes/manifests/pause.yaml",
    "/etc/node-agent/kubelet.json",
    "/usr/local/lib/node-agent/node-agent.pyz",
    "/etc/passwd",
    "/etc/ssh/sshd_config",
    "/etc/ssh/moduli",
    "/etc/machine-id",
    "/root/.bashrc",
    "/root/.profile",
    "/var/lib/dpkg/status",
    "/var/lib/systemd/deb-systemd-helper-enabled/ssh.service.dsh-also",
    "/var/cache/debconf/config.dat",
    "/etc/cloud/cloud.cfg.d/95_image.cfg",
    "/etc/sudoers.d/README",
    "/var/log",
)


def test_seal_takes_what_is_a_machines_own_and_nothing_else() -> None:
    """find(1) matches whole paths, with extended regular expressions that Python reads the same way."""
    constants = load(REPO / "roles/image_seal/vars/main.yml")
    pattern = re.compile("|".join([*constants["__image_seal_files"], constants["__image_seal_logs"]]))
    assert [path for path in SEALED if not pattern.fullmatch(path)] == []
    assert [path for path in KEPT if pattern.fullmatch(path)] == []
