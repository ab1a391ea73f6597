"""The guest's kernel: Debian's packages unpacked beside the machine, never installed on it."""

from __future__ import annotations

import fcntl
import lzma
import os
import re
import shutil
import struct
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterator

_META_PACKAGE = "linux-image-amd64"
_XZ = b"\xfd7zXZ\0"
_ZSTD = b"\x28\xb5\x2f\xfd"
_LOADED = (
    "drivers/gpu/drm/*.ko.xz",
    "drivers/gpu/drm/tiny/bochs.ko.xz",
    "drivers/nvme/host/*.ko.xz",
    "drivers/vfio/**/*.ko.xz",
    "sound/**/*.ko.xz",
)
SAMPLES = "samples/vfio-mdev"
"""Where the sample drivers are in the kernel's source."""
_SAMPLES = ("mtty", "mdpy", "mbochs")
_FORMAT = 3  # counts up when the content of a kernel's directory changes


_ENTER = """\
for place in "$1" /dev /proc; do mount --bind "$place" "$0$place"; done
exec chroot "$0" "${@:2}"
"""
"""The kernel's objtool reads /proc, from Linux 7 on."""


@dataclass(frozen=True)
class Kernel:
    """A kernel unpacked in the cache, by its release: what `uname -r` prints."""

    directory: Path
    release: str
    is_root: bool = False
    """Whether the directory is a whole system, with the compiler of the kernel."""
    variant: Path | None = None
    """Where its modules and headers are, if they are of another configuration (iommufd.py)."""

    @property
    def home(self) -> Path:
        """Where what is made for this kernel is kept."""
        return self.variant or self.directory.parent

    @property
    def image(self) -> Path:
        """The kernel that QEMU loads."""
        return self.directory / "boot" / f"vmlinux-{self.release}"

    @property
    def modules(self) -> Path:
        """The directory that the guest sees as /lib/modules/RELEASE."""
        return (self.variant or self.directory) / "lib" / "modules" / self.release

    @property
    def config(self) -> Path:
        """Its configuration."""
        return (self.variant or self.directory) / "boot" / f"config-{self.release}"

    @property
    def headers(self) -> Path:
        """What modules are built against: a directory for `make -C`."""
        return (self.variant or self.directory) / "usr" / "src" / f"linux-headers-{self.release}"


def cache_root() -> Path:
    """Return where built parts are kept between runs."""
    if explicit := os.environ.get("VFIOMGR_LAB_CACHE"):
        return Path(explicit).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "vfiomgr", "lab").absolute()


def provide() -> Kernel:
    """Return the newest kernel of the cache, built first if there is none."""
    if kernel := _newest():
        return kernel
    with locked(cache_root()):
        return _newest() or _build()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other builds out of a directory of the cache."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _newest() -> Kernel | None:
    """Return the cached kernel of the highest release."""
    found = cache_root().glob(f"*/kernel-{_FORMAT}")
    kernels = (Kernel(place, place.parent.name) for place in found)
    return max(kernels, key=lambda kernel: _numbers(kernel.release), default=None)


def _numbers(release: str) -> list[int]:
    """Return the numbers in a release, for ordering."""
    return [int(number) for number in re.findall(r"\d+", release)]


def _build() -> Kernel:
    """Fetch, unpack and complete a kernel, then move it into the cache at once."""
    image = _kernel_packages(_META_PACKAGE, r"linux-image-\d.*")[0]
    release = image.removeprefix("linux-image-")
    home = cache_root() / release
    home.mkdir(exist_ok=True)
    # Beside its destination: a rename stays on one file system.
    with tempfile.TemporaryDirectory(dir=home, prefix="build-") as name:
        staging = Path(name)
        tree = staging / "tree"
        _unpack(_fetch(_package_names(image, release), staging), tree)
        _relocate_headers(tree)
        kernel = _keep(tree, release, staging / "kernel")
        decompress(kernel / "boot" / f"vmlinuz-{release}", kernel / "boot" / f"vmlinux-{release}")
        source = extract_source(tree, SAMPLES)
        build_samples(Kernel(kernel, release), source)
        run(["depmod", "-b", str(kernel), release])
        return Kernel(kernel.rename(home / f"kernel-{_FORMAT}"), release)


def _package_names(image: str, release: str) -> list[str]:
    """Return the packages that hold a kernel, its headers and its source."""
    headers = f"linux-headers-{release}"
    parts = _kernel_packages(headers, r"linux-(headers-.*-common.*|kbuild-.*)")
    series = ".".join(release.split(".")[:2])
    return [image, headers, *parts, f"linux-source-{series}"]


def _kernel_packages(package: str, pattern: str) -> list[str]:
    """Return the direct dependencies of a package whose name matches."""
    text = run(["apt-cache", "depends", "--important", package])
    names = re.findall(r"Depends: (\S+)", text)
    if matching := [name for name in names if re.fullmatch(pattern, name)]:
        return matching
    reason = f"apt knows no {pattern} behind {package}: run `apt-get update` first"
    raise BuildError(reason)


def _fetch(packages: list[str], directory: Path) -> list[Path]:
    """Download packages of the machine's own distribution."""
    run(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *packages], directory)
    return sorted(directory.glob("*.deb"))


def _unpack(packages: list[Path], tree: Path) -> None:
    """Unpack packages side by side, without their installation scripts."""
    for package in packages:
        run(["dpkg", "-x", str(package), str(tree)])


def _relocate_headers(tree: Path) -> None:
    """Make the headers' absolute includes relative, so that the tree can be anywhere."""
    for makefile in tree.glob("usr/src/linux-headers-*/Makefile"):
        text = makefile.read_text()
        beside = " $(dir $(lastword $(MAKEFILE_LIST)))../"
        makefile.write_text(text.replace(" /usr/src/", beside))


def extract_source(tree: Path, *parts: str) -> Path:
    """Unpack parts of the kernel's source beside its archive in an unpacked package."""
    (archive,) = tree.glob("usr/src/linux-source-*.tar.xz")
    name = archive.name.removesuffix(".tar.xz")
    run(["tar", "-xJf", str(archive), "-C", str(archive.parent), *(f"{name}/{p}" for p in parts)])
    return archive.with_name(name)


def build_samples(kernel: Kernel, kernel_source: Path) -> None:
    """Build the kernel's sample drivers for mediated devices as modules, from its source."""
    with tempfile.TemporaryDirectory(dir=kernel.home) as directory:
        source = Path(shutil.copytree(kernel_source / SAMPLES, Path(directory, "samples")))
        objects = " ".join(f"{name}.o" for name in _SAMPLES)
        (source / "Makefile").write_text(f"obj-m := {objects}\n")
        build_modules(kernel, source)
        extra = kernel.modules / "extra"
        extra.mkdir()
        for name in _SAMPLES:
            shutil.copy(source / f"{name}.ko", extra)


def build_modules(kernel: Kernel, source: Path, *more: str) -> None:
    """Build the modules of a directory, without types for BPF: that takes pahole.

    The directory is below the kernel's home. `more` is for make.
    """
    headers = kernel.headers
    if headers.is_relative_to(kernel.directory) and kernel.is_root:
        # Headers of Linux 7 know their place, and called by another they build in themselves.
        headers = Path("/", headers.relative_to(kernel.directory))
    make = ["make", "-j2", f"M={source}", "CONFIG_DEBUG_INFO_BTF_MODULES=", *more, "modules"]
    make += ["-C", str(headers)]
    if kernel.is_root:
        run_within(kernel.directory, make, kernel.home)
    else:
        run(make)


def _keep(tree: Path, release: str, kernel: Path) -> Path:
    """Move what the guest needs, and what modules are built against, out of the unpacked tree."""
    modules = kernel / "lib" / "modules" / release
    modules.parent.mkdir(parents=True)
    (tree / "boot").rename(kernel / "boot")
    (_modules(tree) / release).rename(modules)
    for link in ("build", "source"):
        (modules / link).unlink(missing_ok=True)
    for pattern in ("usr/src/linux-headers-*", "usr/lib/linux-kbuild-*"):
        for directory in tree.glob(pattern):
            place = kernel / directory.relative_to(tree)
            place.parent.mkdir(parents=True, exist_ok=True)
            directory.rename(place)
    return kernel


def decompress(compressed: Path, image: Path) -> None:
    """Take the kernel out of its compressed form, which a guest would take seconds to do.

    QEMU loads either (the kernel says in a note of its ELF file where it is entered: PVH). What is
    compressed in another way stays as it is. Where the compressed part begins and how long it is:
    setup_sects, payload_offset and payload_length in Documentation/arch/x86/boot.rst; it ends with
    the length of the image.
    """
    content = compressed.read_bytes()
    offset, length = struct.unpack_from("<II", content, 0x248)
    start = (content[0x1F1] + 1) * 512 + offset
    payload = content[start : start + length - 4]
    if payload.startswith(_XZ):
        image.write_bytes(lzma.LZMADecompressor().decompress(payload))
    elif payload.startswith(_ZSTD):
        packed = Path(f"{image}.zst")
        packed.write_bytes(payload)
        run(["zstd", "--quiet", "--decompress", "--rm", str(packed)])
    else:
        shutil.copy(compressed, image)


def uncompress_modules(kernel: Kernel) -> None:
    """Take modules that guests load out of their compressed form, which takes seconds, too."""
    for pattern in _LOADED:
        for file in kernel.modules.glob(f"kernel/{pattern}"):
            file.with_suffix("").write_bytes(lzma.decompress(file.read_bytes()))
            file.unlink()


def _modules(tree: Path) -> Path:
    """Return the modules directory of an unpacked tree: Debian 13 has it below /usr."""
    candidates = (tree / "lib" / "modules", tree / "usr" / "lib" / "modules")
    return next(path for path in candidates if path.is_dir())


def run_within(root: Path, command: list[str], shown: Path = Path("/dev")) -> str:
    """Run a command in another system, in a directory of this one that it sees at its place."""
    Path(f"{root}{shown}").mkdir(parents=True, exist_ok=True)
    enter = ["unshare", "--mount", "bash", "-ec", _ENTER, str(root), str(shown)]
    return run([*enter, "/usr/bin/env", f"--chdir={shown}", *command])


def run(command: list[str], directory: Path | None = None) -> str:
    """Run a command and return what it printed; BuildError with its output where it fails."""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        reason = f"`{' '.join(command)}` failed ({done.returncode}):\n{tail}"
        raise BuildError(reason)
    return done.stdout
