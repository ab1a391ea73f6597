"""The systems that the laboratory boots: Debian releases, each with its own kernel and programs."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.lab import iommufd, kernel, roots
from tests.lab.architectures import AMD64, ARM64, Architecture
from tests.lab.kernel import Kernel, run_within
from tests.lab.topology import CURRENT_VARIABLE

PLATFORM_VARIABLE = "VFIOMGR_LAB_PLATFORM"  # set in a guest
_CHECKOUT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = Path("/opt/vfiomgr")
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Platform:
    """A system; without a release, that of the machine itself."""

    name: str
    release: str | None = None
    """A name in Debian's archive."""
    has_cdevs: bool = False
    """Whether its VFIO is built with IOMMUFD: /dev/iommu, and a node of its own for each device."""
    has_groups: bool = True
    """Whether VFIO has a node for each IOMMU group; only a VFIO with cdevs can be without."""
    architecture: Architecture = AMD64
    kernel_from: str | None = None
    """The release of its kernel, where that is another one."""

    def kernel(self) -> Kernel:
        """Return its kernel, built first if there is none."""
        if self.release is None:
            return kernel.provide()
        own = roots.provide(self.kernel_from or self.release, self.architecture)
        return iommufd.provide(own, has_groups=self.has_groups) if self.has_cdevs else own

    @property
    def root(self) -> Path:
        """What its guests see as their own file system."""
        if self.release is None:
            return Path("/")
        return roots.provide(self.release, self.architecture).directory

    @property
    def python(self) -> str:
        """The interpreter that runs vfiomgr in its guests."""
        return sys.executable if self.release is None else str(_ENVIRONMENT / "bin/python")

    @property
    def path(self) -> str:
        """Where its guests look for programs."""
        own = str(Path(self.python).parent)
        return os.pathsep.join([own, os.environ["PATH"] if self.release is None else _SYSTEM])

    def write_files(self, top: Path) -> None:
        """Write what is copied to the root of its guests: an environment with the checkout.

        It is as `pip install -e` would leave it. A root in the cache serves all checkouts, and all
        variants of its kernel, each with a configuration of its own.
        """
        if self.release is None:
            return
        config = self.kernel().config
        (top / "boot").mkdir(parents=True)
        shutil.copy(config, top / "boot")
        environment = top / _ENVIRONMENT.relative_to("/")
        packages = environment / "lib" / roots.python(self.root) / "site-packages"
        for directory in (environment / "bin", packages):
            directory.mkdir(parents=True)
        (environment / "pyvenv.cfg").write_text(
            "home = /usr/bin\ninclude-system-site-packages = true\n"
        )
        (environment / "bin/python").symlink_to("/usr/bin/python3")
        (packages / "checkout.pth").write_text(f"{_CHECKOUT / 'src'}\n")
        command = environment / "bin/vfiomgr"
        command.write_text(f"#!{self.python}\nfrom vfiomgr.__main__ import start\nstart()\n")
        command.chmod(0o755)


DEFAULT = Platform("debian12")
PLATFORMS = {
    platform.name: platform
    for platform in (
        DEFAULT,
        Platform("debian13", "trixie"),
        Platform("sid", "sid"),
        Platform("debian13-iommufd", "trixie", has_cdevs=True),
        Platform("debian13-no-groups", "trixie", has_cdevs=True, has_groups=False),
        Platform("debian13-arm64", "trixie", architecture=ARM64),
        Platform("sid-iommufd", "sid", has_cdevs=True, kernel_from="trixie"),
    )
}


def current() -> Platform:
    """Return the platform of the guest that this process runs in; on the machine, the default."""
    return PLATFORMS[os.environ.get(PLATFORM_VARIABLE, DEFAULT.name)]


@cache
def compile_checkout(platform: Platform) -> None:
    """Compile the checkout for a platform's Python, tests as pytest does: a guest is slow at it.

    For the machine's own, tools/setup and pytest did so. What Python compiles to is the same on all
    processors, so that a release of another one needs that of the machine's.
    """
    if platform.release is None:
        return
    root = roots.provide(platform.release).directory
    name = roots.python(root)
    path = f"PYTHONPATH={_CHECKOUT / 'src'}"
    compiling = [name, "-m", "compileall", "-q", "src", "tests", "benchmarks"]
    run_within(root, ["env", path, *compiling], _CHECKOUT)
    collecting = [name, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    known = [path, f"{CURRENT_VARIABLE}=workstation", f"{PLATFORM_VARIABLE}={platform.name}"]
    run_within(root, ["env", *known, *collecting, "tests/lab"], _CHECKOUT)
