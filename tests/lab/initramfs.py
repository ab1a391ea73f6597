"""The guest's initial file system: busybox, the modules that mount its root, and /init."""

from __future__ import annotations

import hashlib
import lzma
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.lab.errors import BuildError
from tests.lab.kernel import Kernel, locked, run

_BUSYBOX = Path("/bin/busybox")
_GUEST = Path(__file__).with_name("guest")
_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
_DIRECTORIES = ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper")


def provide(kernel: Kernel) -> Path:
    """Return a kernel's initial file system, built first where its sources changed."""
    path = kernel.home / f"initramfs-{_stamp(_busybox(kernel))}.cpio"
    if not path.exists():
        with locked(kernel.home):
            if not path.exists():
                _build(kernel, path)
    return path


def _busybox(kernel: Kernel) -> Path:
    """Return the program of a root, which may be for another processor, or of the machine."""
    return kernel.directory / "usr/bin/busybox" if kernel.is_root else _BUSYBOX


def _stamp(busybox: Path) -> str:
    """Return a hash of all that the initial file system is made from."""
    digest = hashlib.sha256()
    for source in (Path(__file__), busybox, *sorted(_GUEST.iterdir())):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(kernel: Kernel, path: Path) -> None:
    """Write the archive under another name, then rename it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as name:
        root = Path(name, "root")
        for directory in _DIRECTORIES:
            (root / directory).mkdir(parents=True)
        shutil.copy(_busybox(kernel), root / "bin")
        for script in _GUEST.iterdir():
            shutil.copy(script, root)
            (root / script.name).chmod(0o755)
        _copy_modules(kernel, root / "modules")
        archive = Path(name, path.name)
        archive.write_bytes(_pack(root))
        archive.rename(path)


def _copy_modules(kernel: Kernel, destination: Path) -> None:
    """Copy modules and their dependencies, numbered in the order of their loading."""
    for number, source in enumerate(_load_order(kernel)):
        name, compressed, _ = source.name.partition(".xz")
        content = source.read_bytes()
        target = destination / f"{number:02}-{name}"
        target.write_bytes(lzma.decompress(content) if compressed else content)


def _load_order(kernel: Kernel) -> list[Path]:
    """Return the files to load, each after those that it depends on."""
    show = ["modprobe", "--dirname", str(kernel.directory), "--set-version", kernel.release]
    text = run([*show, "--config", "/dev/null", "--show-depends", "--all", *_MODULES])
    lines = (line.split() for line in text.splitlines())
    return list(dict.fromkeys(Path(words[1]) for words in lines if words[:1] == ["insmod"]))


def _pack(root: Path) -> bytes:
    """Return a directory as the archive that the kernel unpacks."""
    names = sorted(path.relative_to(root) for path in root.rglob("*"))
    listing = b"".join(bytes(name) + b"\0" for name in names)
    command = ["cpio", "--create", "--null", "--format=newc", "--owner=0:0", "--quiet"]
    done = subprocess.run(command, cwd=root, input=listing, capture_output=True, check=False)
    if done.returncode:
        reason = f"cpio failed: {done.stderr.decode(errors='replace')}"
        raise BuildError(reason)
    return done.stdout
