"""apt, with a configuration of its own, as the resolver of package names.

Of the host's apt configuration, only the address of its Debian mirror and its credentials are used. apt itself checks
signatures, Valid-Until and hashes, and every error is fatal (``Error-Mode=any``).
"""

from __future__ import annotations

import email.utils
import os
import re
import urllib.parse
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.lock import apt_auth
from image_builder.bake.lock.fetch import located
from image_builder.bake.lock.model import DEBIAN, SECURITY, LockedFile, LockedPackage
from image_builder.bake.lock.repository import known_control
from image_builder.bake.pull import retry
from image_builder.errors import CommandError, FetchError, HostError, LockError, SpaceError
from image_builder.system import process
from image_builder.system.trees import sha256

_URI = re.compile(r"^'(?P<uri>[^']+)' (?P<name>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})")
_IDENTITY = ("Package", "Version", "Architecture")
_STANZA_FIELD = re.compile(rf"^({'|'.join(_IDENTITY)}):[ \t]*(\S+)", re.MULTILINE)
_RELEASE_FIELD = re.compile(r"^(Origin|Label|Suite|Codename|Date):[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
# Where mmdebstrap sets its own defaults, for hosts without a Debian source of their own, such as Ubuntu.
_MMDEBSTRAP = Path("/usr/bin/mmdebstrap")
_DEFAULTS = {
    DEBIAN: re.compile(r"^ *my \$mirror += '([^']+)';", re.MULTILINE),
    SECURITY: re.compile(r"^ *my \$secmirror += '([^']+)';", re.MULTILINE),
}


@dataclass(frozen=True)
class Source:
    """A repository: ``id`` names it in the lock, ``signed_by`` is its keyring's path or its armored key.

    A flat repository has the suite ``/`` and no components. ``place`` is where the inventory names it.
    """

    id: str
    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: Path | str
    with_sources: bool = False
    place: str = ""

    def deb822(self) -> str:
        """Return the stanza for apt's sources."""
        types = "deb deb-src" if self.with_sources else "deb"
        components = f"Components: {' '.join(self.components)}\n" if self.components else ""
        key = str(self.signed_by)
        if not key.startswith("/"):
            key = "".join(f"\n {line.rstrip() or '.'}" for line in key.strip().splitlines())
        return (
            f"Types: {types}\nURIs: {located(self.uri)}\nSuites: {' '.join(self.suites)}\n"
            f"{components}Signed-By: {key}\n"
        )


class Apt:
    """A private apt, whose state, lists and simulated dpkg status are in ``path``."""

    def __init__(self, path: Path, sources: Sequence[Source], architecture: str) -> None:
        self.path = path
        self.sources = sources
        for name in ("lists/partial", "cache/archives/partial", "etc/sources.list.d", "etc/preferences.d"):
            (path / name).mkdir(parents=True, exist_ok=True)
        (path / "status").touch()
        stanzas = "\n".join(s.deb822() for s in sources)
        (path / "etc/sources.list.d/all.sources").write_text(stanzas, encoding="utf-8")
        (path / "apt.conf").write_text(_configuration(path, architecture), encoding="utf-8")

    def _run(self, argv: Sequence[str]) -> str:
        env = {"APT_CONFIG": os.fspath(self.path / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}
        try:
            return process.run(argv, env=env, cwd=self.path).stdout
        except CommandError as error:
            if retry.classify(error.tail) != "full":
                raise
            raise SpaceError(
                f"no space left for the package indices in {self.path}",
                hint="free some: image-builder store gc --keep 1; or another disk: --store DIR",
            ) from error

    def update(self) -> None:
        """Fetch the indices. Raises FetchError when any is missing, expired, or not properly signed, SpaceError."""
        try:
            self._run(["apt-get", "update", "--error-on=any", "-q"])
        except CommandError as error:
            wrong = [line for line in error.tail.splitlines() if line.startswith(("E:", "W:", "Err:"))]
            reason = "\n  ".join(wrong or error.tail.splitlines()[-5:])
            places = [
                f"{s.uri} ({s.place})" for s in self.sources if s.place and located(s.uri) in error.tail
            ]
            reason += "".join(f"\n  of the inventory: {place}" for place in places)
            raise FetchError(
                f"the package indices could not be read:\n  {reason}",
                hint="check the mirror (image_base.mirror, or the host's own Debian source), the repositories of the "
                "inventory and this host's clock",
            ) from error

    def release_dates(self, ids: Container[str] | None = None) -> dict[str, int]:
        """Return the Date of each Release file, in seconds since 1970, for the repositories with these ids or for all.

        Keys are the names of the repository and its suite, which all mirrors share, or else the file's name.
        """
        dates: dict[str, int] = {}
        chosen = [source for source in self.sources if ids is not None and source.id in ids]
        beginnings = tuple(_list_name(source.uri) for source in chosen)
        for path in sorted((self.path / "lists").glob("*Release")):
            if ids is not None and not path.name.startswith(beginnings):
                continue
            fields = dict(_RELEASE_FIELD.findall(path.read_text(encoding="utf-8", errors="replace")))
            if "Date" in fields:
                repository = fields.get("Label") or fields.get("Origin")
                suite = fields.get("Codename") or fields.get("Suite")
                name = f"{repository} {suite}" if repository and suite else path.name
                date = int(email.utils.parsedate_to_datetime(fields["Date"]).timestamp())
                dates[name] = min(date, dates.get(name, date))
        return dates

    def install(self, names: Iterable[str]) -> list[LockedPackage]:
        """Return the packages that installing ``names`` would add to those installed so far, and mark them installed.

        Raises LockError when apt can't satisfy them.
        """
        # Any quieter, and apt doesn't report which package lacks what.
        argv = ["apt-get", "install", "--print-uris", "--yes", "-q", "--no-install-recommends", *names]
        try:
            output = self._run(argv)
        except CommandError as error:
            raise LockError(f"apt finds no way to install the packages:\n  {_explanation(error)}") from error
        packages = [self._package(m) for line in output.splitlines() if (m := _URI.match(line))]
        self._write_status(self._indexed(packages).values())
        return sorted(packages, key=lambda p: (p.name, p.architecture))

    def prefer(self, packages: Iterable[LockedPackage]) -> None:
        """Prefer these versions if the indices still have them."""
        pins = (f"Package: {p.name}\nPin: version {p.version}\nPin-Priority: 1000\n" for p in packages)
        (self.path / "etc/preferences.d/known").write_text("\n".join(pins), encoding="utf-8")

    def mark_installed(self, packages: Sequence[LockedPackage], debs: Path) -> list[LockedPackage]:
        """Mark the packages of an earlier lock as installed; return those that nothing is known about.

        ``debs`` holds fetched packages and their control files, by SHA-256; the indices may know the others. If any
        package is unknown, none is marked.
        """
        fetched = {p.sha256: _control(debs, p.sha256).strip() for p in packages}
        others = [p for p in packages if not fetched[p.sha256]]
        indexed = self._indexed(others)
        unknown = [p for p in others if _identity(p) not in indexed]
        if not unknown:
            self._write_status([*filter(None, fetched.values()), *indexed.values()])
        return unknown

    def files(self, names: Iterable[str]) -> list[LockedPackage]:
        """Return the packages ``names`` themselves, without their dependencies. Raises LockError."""
        try:
            output = self._run(["apt-get", "download", "--print-uris", "-qq", *names])
        except CommandError as error:
            reason = "\n  ".join(line for line in error.tail.splitlines() if line.strip())
            raise LockError(f"apt doesn't have the packages:\n  {reason}") from error
        packages = [self._package(m) for line in output.splitlines() if (m := _URI.match(line))]
        return sorted(packages, key=lambda p: (p.name, p.architecture))

    def source(self, name: str) -> tuple[str, list[LockedFile]]:
        """Return the version and the files of the newest source package ``name``. Raises LockError."""
        try:
            output = self._run(["apt-get", "source", "--print-uris", "--only-source", "-qq", name])
        except CommandError as error:
            raise LockError(f"no source package {name}:\n  {error.tail}") from error
        files = [self._file(m) for line in output.splitlines() if (m := _URI.match(line))]
        descriptions = [f.name for f in files if f.name.endswith(".dsc")]
        if not descriptions:
            raise LockError(f"no source package {name} in the configured repositories")
        version = descriptions[0].removesuffix(".dsc").split("_", 1)[1]
        return version, sorted(files, key=lambda f: f.name)

    def _file(self, match: re.Match[str]) -> LockedFile:
        source, path = self._locate(match["uri"])
        return LockedFile(
            name=urllib.parse.unquote(match["name"]),
            sha256=match["sha256"],
            size=int(match["size"]),
            path=path,
            repository=source,
        )

    def _package(self, match: re.Match[str]) -> LockedPackage:
        name, version, rest = urllib.parse.unquote(match["name"]).split("_", 2)
        file = self._file(match)
        return LockedPackage(
            **{**file.model_dump(), "name": name},
            version=version,
            architecture=rest.removesuffix(".deb"),
        )

    def _locate(self, uri: str) -> tuple[str, str]:
        """Split an address into (repository id, path below the repository)."""
        for source in sorted(self.sources, key=lambda s: -len(s.uri)):
            base = located(source.uri).rstrip("/") + "/"
            if uri.startswith(base):
                return source.id, uri.removeprefix(base)
        raise LockError(f"apt names a file of an unknown repository: {uri}")

    def _indexed(self, packages: Sequence[LockedPackage]) -> dict[tuple[str, ...], str]:
        """Return the packages' index entries, by ``_identity``, without versions that are gone."""
        if not packages:
            return {}
        names = [f"{p.name}:{p.architecture}={p.version}" for p in packages]
        names = [n.replace(":all=", "=") for n in names]
        try:
            answer = self._run(["apt-cache", "show", "--no-all-versions", *names])
        except CommandError as error:
            if "No packages found" not in error.tail:
                raise
            return {}
        stanzas = [stanza for stanza in answer.strip().split("\n\n") if stanza]
        return {tuple(dict(_STANZA_FIELD.findall(s)).get(f, "") for f in _IDENTITY): s for s in stanzas}

    def _write_status(self, stanzas: Iterable[str]) -> None:
        with (self.path / "status").open("a", encoding="utf-8") as status:
            for stanza in stanzas:
                status.write(f"{stanza}\nStatus: install ok installed\n\n")


def _list_name(uri: str) -> str:
    """Return the prefix of the names that apt gives to a repository's lists (``URItoFileName``)."""
    rest = re.sub(r"^[a-z+]+:(//)?([^/@]*@)?", "", located(uri).rstrip("/"))
    quoted = re.sub(r'[\\|{}\[\]<>"^~_=!@#$%&*]', lambda match: f"%{ord(match[0]):02x}", rest)
    return quoted.replace("/", "_") + "_"


def _control(debs: Path, name: str) -> str:
    """Return a fetched package's control stanza; empty if there is none, or only a damaged package to read it from."""
    control, package = debs / f"{name}.control", debs / name
    recorded = control.exists() and control.stat().st_size
    return known_control(debs, name) if recorded or (package.exists() and sha256(package) == name) else ""


def _identity(package: LockedPackage) -> tuple[str, ...]:
    return package.name, package.version, package.architecture


def _explanation(error: CommandError) -> str:
    """Return apt's explanation of packages that it can't install: each with what it lacks, then the errors."""
    lines = [line for line in error.tail.splitlines() if line.strip()]
    unmet = next((n for n, line in enumerate(lines) if "unmet dependencies" in line), 0)
    return "\n  ".join(lines[unmet:])


def _configuration(path: Path, architecture: str) -> str:
    return (
        f'Dir "{path}";\nDir::Etc "{path}/etc";\nDir::Etc::SourceList "/dev/null";\n'
        f'Dir::Etc::SourceParts "{path}/etc/sources.list.d";\nDir::Etc::Trusted "/dev/null";\n'
        f'Dir::Etc::TrustedParts "/dev/null";\nDir::Etc::Parts "/dev/null";\n'
        f'Dir::State "{path}";\nDir::State::Lists "{path}/lists";\nDir::State::Status "{path}/status";\n'
        f'Dir::Cache "{path}/cache";\nDir::Log "{path}/log";\nDir::Bin::Methods "/usr/lib/apt/methods";\n'
        f'APT::Architecture "{architecture}";\nAPT::Architectures {{ "{architecture}"; }};\n'
        'APT::Install-Recommends "false";\nAPT::Sandbox::User "root";\nAcquire::Languages "none";\n'
        'Acquire::ForceHash "SHA256";\nAcquire::Retries "3";\nAcquire::http::Timeout "30";\n'
        'Acquire::Check-Valid-Until "true";\nAPT::Get::AllowUnauthenticated "false";\n'
        f"{apt_auth.configuration()}"
    )


def default_mirrors(program: Path = _MMDEBSTRAP) -> dict[str, str]:
    """Return mmdebstrap's default mirrors, read from its program text, or {} if there are none."""
    text = _text(program)
    return {name: match[1] for name, pattern in _DEFAULTS.items() if (match := pattern.search(text))}


def _text(path: Path) -> str:
    """Return the text of a host file, which may be in any encoding; empty if there is no such file."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def host_mirrors(etc: Path = Path("/etc")) -> dict[str, str]:
    """Return the host's own Debian mirrors: {"debian": address, "debian-security": address}.

    Empty on a host that isn't Debian. They are read from the deb822 and one-line sources in /etc/apt; of a mirror list
    (``mirror+file:``, as in Debian's cloud images), the first mirror is taken.
    """
    release = dict(line.split("=", 1) for line in _text(etc / "os-release").splitlines() if "=" in line)
    if release.get("ID", "").strip('"') != "debian":
        return {}
    codename = release.get("VERSION_CODENAME", "").strip('"')
    mirrors: dict[str, str] = {}
    listings = _host_sources(etc / "apt")
    # Vendors name their suites after Debian's. Debian's own archive is the one that has the updates as well.
    archives = {listed for listed, suites in listings if f"{codename}-updates" in suites}
    for listed, suites in sorted(listings, key=lambda listing: listing[0] not in archives):
        uri = _fetchable(listed)
        if uri is None:
            continue
        if codename in suites:
            mirrors.setdefault(DEBIAN, uri)
        if f"{codename}-security" in suites:
            mirrors.setdefault(SECURITY, uri)
    return mirrors


def _fetchable(uri: str) -> str | None:
    """Return an address that programs other than apt can fetch from, or None for a CD-ROM and the like."""
    if uri.startswith("mirror+file:"):
        path = Path("/" + uri.removeprefix("mirror+file:").lstrip("/"))
        lines = _text(path).splitlines()
        uri = next((fields[0] for line in lines if (fields := line.split()) and fields[0][0] != "#"), "")
    return uri if uri.startswith(("http:", "https:", "file:", "copy:")) else None


# Values that apt reads as no (StringToBool).
_OFF = ("no", "false", "without", "off", "disable", "0")


def _host_sources(apt: Path) -> list[tuple[str, list[str]]]:
    sources = []
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", _text(path)):
            fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.+)$", stanza, flags=re.MULTILINE))
            if "URIs" in fields and fields.get("Enabled", "").strip().lower() not in _OFF:
                sources.append((fields["URIs"].split()[0], fields.get("Suites", "").split()))
    lists = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))]
    for path in lists:
        for line in _text(path).splitlines():
            if match := re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s", f"{line} "):
                sources.append((match[1], [match[2]]))
    return sources


def debian_sources(
    suite: str, components: tuple[str, ...], keyring: Path, mirror: str | None, *, with_sources: bool = False
) -> list[Source]:
    """Return the Debian repositories of a suite: the archive with its updates, and security.

    ``mirror`` is the archive's address; the security archive is expected at the same address with ``-security``
    appended. Without ``mirror``, the host's own mirrors are used or, if it has none, mmdebstrap's defaults. Raises
    HostError if the keyring is missing or no mirror is known.
    """
    if mirror:
        base = mirror.rstrip("/")
        mirrors = {DEBIAN: base, SECURITY: f"{base}-security"}
    else:
        mirrors = host_mirrors()
    if DEBIAN not in mirrors:
        mirrors = default_mirrors()
    if DEBIAN not in mirrors:
        raise HostError(
            "no Debian mirror is known", hint="set image_base.mirror or the variable IMAGE_BUILDER_MIRROR"
        )
    if not keyring.exists():
        raise HostError(f"the keyring {keyring} is missing", hint="apt-get install debian-archive-keyring")
    suites = {DEBIAN: (suite, f"{suite}-updates"), SECURITY: (f"{suite}-security",)}
    return [
        Source(name, mirrors[name].rstrip("/"), of_name, components, keyring, with_sources)
        for name, of_name in suites.items()
        if name in mirrors
    ]
