"""The kernel with IOMMUFD: what is linked from its root, and what is its own; nothing is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab import iommufd
from tests.lab.kernel import SAMPLES, Kernel

if TYPE_CHECKING:
    from pathlib import Path

_RELEASE = "6.12.1-amd64"
_CONFIG = "CONFIG_VFIO=m\nCONFIG_VFIO_GROUP=y\n# CONFIG_IOMMUFD is not set\n"
_AUTO = "CONFIG_VFIO=m\nCONFIG_VFIO_GROUP=y\nCONFIG_VFIO_GROUPS_OF_ANOTHER=y\n"
_HEADER = "#define CONFIG_VFIO_MODULE 1\n#define CONFIG_VFIO_GROUP 1\n"
_SYMBOLS = "0x1\tprintk\tvmlinux\tEXPORT_SYMBOL\n0x2\tvfio_open\tdrivers/vfio/vfio\tEXPORT_SYMBOL\n"
_NEW = "0x3\tvfio_open\tdrivers/vfio/vfio\tEXPORT_SYMBOL\n"


def _fill(top: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A root with a kernel of two modules, and a compiler that builds one."""
    kernel = Kernel(tmp_path / "home/root", _RELEASE, is_root=True)
    files = {
        "include/config/auto.conf": _AUTO,
        "include/generated/autoconf.h": _HEADER,
        "Module.symvers": _SYMBOLS,
    }
    _fill(kernel.headers, files)
    (kernel.headers / "scripts").symlink_to("../../lib/linux-kbuild/scripts")
    _fill(kernel.modules, {"kernel/drivers/vfio/vfio.ko": "", "kernel/net/tun.ko": "tun"})
    _fill(kernel.config.parent, {kernel.config.name: _CONFIG})
    source = {"drivers/iommu/iommufd/Makefile": "", f"{SAMPLES}/mtty.c": ""}
    _fill(kernel.directory / "usr/src/linux-source", source)

    def build(_: Kernel, source: Path) -> None:
        _fill(source, {"drivers/vfio/vfio.ko": "new", "Module.symvers": _NEW})

    monkeypatch.setattr(iommufd, "build_modules", build)
    monkeypatch.setattr(iommufd, "build_samples", lambda *_: None)
    monkeypatch.setattr(iommufd, "run", lambda _: "")
    return kernel


def test_a_variant_has_settings_modules_and_symbols_of_its_own(base: Kernel) -> None:
    made = iommufd.provide(base, has_groups=False)
    assert made.config.read_text() == (
        "CONFIG_VFIO=m\nCONFIG_IOMMUFD=m\nCONFIG_VFIO_DEVICE_CDEV=y\n"
        "CONFIG_INTERVAL_TREE_SPAN_ITER=y\n"
    )
    assert (
        "CONFIG_VFIO_GROUPS_OF_ANOTHER=y\n"
        in (made.headers / "include/config/auto.conf").read_text()
    )
    assert (made.headers / "include/generated/autoconf.h").read_text() == (
        "#define CONFIG_VFIO_MODULE 1\n#define CONFIG_IOMMUFD_MODULE 1\n"
        "#define CONFIG_VFIO_DEVICE_CDEV 1\n#define CONFIG_INTERVAL_TREE_SPAN_ITER 1\n"
    )
    assert (made.headers / "Module.symvers").read_text() == _SYMBOLS.splitlines(keepends=True)[
        0
    ] + _NEW
    assert (made.modules / "kernel/drivers/vfio/vfio.ko").read_text() == "new"
    assert (made.modules / "kernel/net/tun.ko").read_text() == "tun"
    assert str((made.headers / "scripts").readlink()) == f"/usr/src/{made.headers.name}/scripts"


def test_a_variant_leaves_its_root_as_it_was(base: Kernel) -> None:
    made = iommufd.provide(base, has_groups=True)
    assert "CONFIG_VFIO_GROUP=y\n" in made.config.read_text()
    assert made.home != iommufd.provide(base, has_groups=False).home
    assert base.config.read_text() == _CONFIG
    assert (base.headers / "include/config/auto.conf").read_text() == _AUTO
    assert (base.headers / "include/generated/autoconf.h").read_text() == _HEADER
    assert (base.headers / "Module.symvers").read_text() == _SYMBOLS
    assert (base.modules / "kernel/drivers/vfio/vfio.ko").read_text() == ""
