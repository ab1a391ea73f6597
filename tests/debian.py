"""Programs of other Debian releases: packages unpacked in the cache, never installed.

Roots of other releases, too: the least that a release can be.

Each package is unpacked with all packages that it depends on, and its programs run with the
libraries of their own release: those of the machine may be too old. apt has sources, lists and
packages of its own in the cache, the mirror and proxy of the machine, and Debian's keys.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.errors import BuildError
from tests.lab.kernel import cache_root, locked, run

if TYPE_CHECKING:
    from collections.abc import Iterable

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""The keys of the Debian archive, from the package debian-archive-keyring."""
_ARCHIVE = "http://deb.debian.org/debian"
_ROOT_FORMAT = 1  # counts up when the content of a root changes
_FORMAT = 2  # counts up when the content of an unpacked package changes
_VERSIONS = ".versions.json"
_UNUSED_IN_ROOTS = ("usr/share/doc", "usr/share/locale", "usr/share/man/??")
_UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale")


@dataclass(frozen=True)
class Program:
    """A program of a release, unpacked."""

    release: str
    name: str
    version: str
    """Of its package, e.g. 2.1.9+ds1-5."""
    command: tuple[str, ...]
    """Runs it with the libraries of its release."""
    directories: tuple[str, ...] = ()
    """Where other programs of its package and dependencies are, to be put before PATH."""

    def __str__(self) -> str:
        """`containerd 2.1.9+ds1-5 (Debian sid)`."""
        return f"{self.name} {self.version} (Debian {self.release})"


def program(release: str, package: str, path: str, *, within: str | None = None) -> Program:
    """Return a program of a package, fetched and unpacked first if it is not in the cache.

    `release` is a name in Debian's archive: trixie, sid. `within` names a package that depends on
    this one, where both are needed: they are fetched together.

    Raises:
        BuildError: it cannot be fetched, or the package has no such file.

    """
    tree = unpacked(release, within or package)
    place = tree / path.lstrip("/")
    loader = next(tree.glob("usr/lib/*/ld-linux*.so.*"), None)
    if not place.is_file() or loader is None:
        reason = f"{package} of Debian {release} has no {path}"
        raise BuildError(reason)
    libraries = ":".join(map(str, (loader.parent, tree / "usr/lib")))
    command = (str(loader), "--library-path", libraries, "--argv0", place.name, str(place))
    version = json.loads((tree / _VERSIONS).read_text())[package]
    directories = tuple(str(tree / name) for name in ("usr/sbin", "usr/bin"))
    return Program(release, place.name, version, command, directories)


def unpacked(release: str, package: str) -> Path:
    """Return the directory of a package with its dependencies, built first if there is none."""
    home = cache_root() / "debian" / release
    place = home / f"{package}-{_FORMAT}"
    if not place.is_dir():
        with locked(home):
            if not place.is_dir():
                _build(release, package, place)
    return place


def _build(release: str, package: str, place: Path) -> None:
    """Fetch and unpack a package, then move it into the cache at once."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="build-") as name:
        staging = Path(name)
        tree = staging / "tree"
        tree.mkdir()
        versions = {}
        for archive in _fetched(release, package, staging):
            run(["dpkg-deb", "--extract", str(archive), str(tree)])
            show = ["dpkg-deb", "--show", "--showformat", "${Package} ${Version}", str(archive)]
            found, _, version = run(show).partition(" ")
            versions[found] = version
            archive.unlink()
        (tree / _VERSIONS).write_text(json.dumps(versions))
        for unused in _UNUSED:
            shutil.rmtree(tree / unused, ignore_errors=True)
        tree.rename(place)


def root_archive(release: str, *packages: str) -> Path:
    """Return a tar of an empty system of a release with some packages, built first if needed.

    Raises:
        BuildError: no mirror has the release, or mmdebstrap is not installed.

    """
    home = cache_root() / "debian" / release
    place = home / f"root-{'-'.join(packages)}-{_ROOT_FORMAT}.tar"
    if not place.is_file():
        with locked(home):
            if not place.is_file():
                _build_root(release, packages, place)
    return place


def root_directory(release: str, name: str, packages: Iterable[str]) -> Path:
    """Return the directory of a system of a release with these packages, built first if needed.

    Unlike an archive it is changed by what runs in it. `name` is its name in the cache.

    Raises:
        BuildError: no mirror has the release, or mmdebstrap is not installed.

    """
    wanted = tuple(sorted(packages))
    content = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:12]
    home = cache_root() / "debian" / release
    place = home / f"{name}-{content}-{_ROOT_FORMAT}"
    with locked(home):
        if not place.is_dir():
            _build_root(release, wanted, place)
    return place


def _build_root(release: str, packages: tuple[str, ...], place: Path) -> None:
    """Build a root from the first mirror that has the release, then move it into the cache.

    mmdebstrap makes an archive or a directory, as the name of its target says.
    """
    reasons: list[str] = []
    for mirror in mirrors():
        with tempfile.TemporaryDirectory(dir=place.parent, prefix="build-") as name:
            built = Path(name, f"root{place.suffix}")
            try:
                mmdebstrap(release, packages, built, mirror)
            except BuildError as error:
                reasons.append(str(error))
                continue
            built.rename(place)
            return
    raise BuildError("\n".join(reasons))


def mmdebstrap(
    release: str,
    packages: Iterable[str],
    target: Path,
    mirror: str,
    *,
    variables: Iterable[str] = (),
) -> None:
    """Build a root: an archive or a directory, as the name of the target says.

    `variables` are for the installation scripts of packages.

    Raises:
        BuildError: the mirror has no such release, or mmdebstrap is not installed.

    """
    options = [_include(packages), "--variant=minbase", release, str(target), mirror]
    run(["env", *variables, *_mmdebstrap(), *options])


def extract_foreign(
    release: str, packages: Iterable[str], target: Path, mirror: str, architecture: str
) -> None:
    """Unpack the essential packages and these, for a processor whose programs do not run here.

    None is configured.

    Raises:
        BuildError: as above.

    """
    options = ["--variant=extract", f"--architectures={architecture}"]
    options += ["--include=?essential", _include(packages)]
    run([*_mmdebstrap(), *options, release, str(target), mirror])


def _include(packages: Iterable[str]) -> str:
    """Return the option that names packages."""
    return f"--include={','.join(packages)}"


def _mmdebstrap() -> list[str]:
    """Return the program with the options of all roots."""
    command = ["mmdebstrap", "--quiet", f"--keyring={KEYRING}"]
    command += [f"--dpkgopt=path-exclude=/{path}/*" for path in _UNUSED_IN_ROOTS]
    return [*command, *(f"--aptopt={setting}" for setting in _settings_of_indices())]


def _settings_of_indices() -> list[str]:
    """Return what apt is told here of the age of a mirror's indices: a mirror may be frozen.

    mmdebstrap's apt does not read the machine's settings.
    """
    lines = run(["apt-config", "dump", "Acquire::Check-Valid-Until"]).splitlines()
    return [line for line in lines if line]


def _fetched(release: str, package: str, directory: Path) -> list[Path]:
    """Download a package with its dependencies from the first mirror that has the release."""
    reasons: list[str] = []
    for mirror in mirrors():
        apt = Apt(directory / str(len(reasons)), release, mirror)
        try:
            return apt.download(package)
        except BuildError as error:
            reasons.append(str(error))
    raise BuildError("\n".join(reasons))


def mirrors() -> list[str]:
    """Return the mirrors of Debian that this machine's apt uses, and Debian's own."""
    template = "$(ORIGIN) $(REPO_URI)"
    try:
        told = run(["apt-get", "indextargets", "--format", template, "Created-By: Packages"])
    except BuildError:
        told = ""  # a source of the machine that cannot be read is not ours to mend
    pairs = (line.partition(" ") for line in told.splitlines())
    own = (uri.rstrip("/") for origin, _, uri in pairs if origin == "Debian")
    return list(dict.fromkeys((*(uri for uri in own if "security" not in uri), _ARCHIVE)))


@dataclass(frozen=True)
class Apt:
    """apt with sources, lists and packages of its own; proxies are those of the machine."""

    directory: Path
    release: str
    mirror: str

    def download(self, package: str) -> list[Path]:
        """Download a package with all that it depends on, recommended packages left out.

        Raises:
            BuildError: a source or a package cannot be fetched, or its signature is not Debian's.

        """
        self._set_up()
        wanted = ["--download-only", "--no-install-recommends", "-q", "-y", "install", package]
        run(["apt-get", *self._options(), *wanted])
        return sorted(self.directory.glob("archives/*.deb"))

    def download_alone(self, package: str) -> Path:
        """Download a package without what it depends on.

        Raises:
            BuildError: as above.

        """
        self._set_up()
        run(["apt-get", *self._options(), "-q", "download", package], self.directory)
        (archive,) = self.directory.glob("*.deb")
        return archive

    def _set_up(self) -> None:
        for name in ("lists/partial", "archives/partial", "etc"):
            (self.directory / name).mkdir(parents=True)
        (self.directory / "status").touch()
        source = f"deb [signed-by={KEYRING}] {self.mirror} {self.release} main\n"
        (self.directory / "sources.list").write_text(source)
        run(["apt-get", *self._options(), "-q", "update"])

    def _options(self) -> list[str]:
        places = {
            "Dir::Etc::SourceList": "sources.list",
            "Dir::Etc::SourceParts": "etc",
            "Dir::Etc::Preferences": "etc/none",
            "Dir::Etc::PreferencesParts": "etc",
            "Dir::State": ".",
            "Dir::State::Lists": "lists",
            "Dir::State::Status": "status",
            "Dir::Cache": ".",
            "Dir::Cache::Archives": "archives",
        }
        settings = {name: str(self.directory / place) for name, place in places.items()}
        settings |= {
            "APT::Sandbox::User": "",
            "APT::Update::Error-Mode": "any",
            "APT::Default-Release": "",
            "APT::Get::List-Cleanup": "false",
            "Acquire::Retries": "3",
        }
        return [part for item in settings.items() for part in ("-o", "=".join(item))]
