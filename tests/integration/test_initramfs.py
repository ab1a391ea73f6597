"""The initramfs of Debian 13, built for real by each of its tools, holds the rules of vfiomgr."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.debian import root_archive
from tests.fakes.kernel import FakeKernel
from tests.integration.installed import Built, Root

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root directory")
NIC = "0000:01:00.0"
HOST = "/host"
RULE = f"etc/udev/rules.d/05-vfiomgr-{NIC}.rules"
BIND = ("vfiomgr", "bind", NIC, "--persist", "--update-initramfs")
FORGET = ("vfiomgr", "unbind", NIC, "--forget-only", "--update-initramfs")
TOOLS = {
    "initramfs-tools": ("initramfs-tools",),
    "dracut": ("dracut", "initramfs-tools-core", "systemd-sysv"),
}
"""The packages of each; mkinitramfs stays where dracut has replaced initramfs-tools."""
LISTS = {"initramfs-tools": "lsinitramfs", "dracut": "lsinitrd"}
HOOKS = {
    "initramfs-tools": "/etc/initramfs-tools/hooks/vfiomgr",
    "dracut": "/etc/dracut.conf.d/90-vfiomgr.conf",
}


@dataclass(frozen=True)
class System:
    """A Debian 13 with a kernel, whose initramfs one of the tools builds."""

    root: Root
    tool: str

    def images(self) -> list[str]:
        """The images of all kernels."""
        return sorted(f"/boot/{path.name}" for path in self.root.place.glob("boot/initr*"))

    def holds_rule(self, image: str) -> bool:
        """Whether the image, as the tool lists it, holds the rule."""
        return RULE in self.root.run_on(HOST, LISTS[self.tool], image)


@pytest.fixture(scope="module", params=TOOLS)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, built: Built
) -> Iterator[System]:
    """A network card is on vfio-pci there: its kind is one whose drivers an initramfs contains."""
    place = tmp_path_factory.mktemp(request.param)
    packages = ("linux-image-amd64", "python3", "udev", *TOOLS[request.param])
    archive = root_archive("trixie", *packages)
    subprocess.run(["tar", "-C", place, "--exclude=./dev/*", "-xf", archive], check=True)
    for modules in place.glob("usr/lib/modules/*/kernel/*"):  # an image without them is built fast
        shutil.rmtree(modules)
    kernel = FakeKernel(tmp_path_factory.mktemp("host") / "host")
    kernel.add_driver("ixgbe", ids=[("8086", "10fb")])
    kernel.add_driver("vfio-pci", ids=[("8086", "10fb")], is_vfio=True, manages_dma=True)
    kernel.add_pci(
        NIC, vendor="8086", device="10fb", class_code="020000", group=11, driver="vfio-pci"
    )
    shutil.copytree(kernel.root, f"{place}{HOST}", symlinks=True)
    shutil.copy(built.deb, place / "vfiomgr.deb")
    root = Root(place)
    root.run("dpkg", "-i", "/vfiomgr.deb")
    yield System(root, request.param)
    shutil.rmtree(place)


def test_the_image_holds_the_rule_until_it_is_forgotten(system: System) -> None:
    (image,) = system.images()
    assert not system.holds_rule(image)
    said = system.root.run_on(HOST, *BIND)
    assert f"wrote {HOOKS[system.tool]}\n" in said
    assert "rebuilt the initramfs\n" in said
    assert system.holds_rule(image)
    assert f"removed {HOOKS[system.tool]}\n" in system.root.run_on(HOST, *FORGET)
    assert not system.holds_rule(image)


@pytest.mark.parametrize("system", ["initramfs-tools"], indirect=True)
def test_an_image_of_the_running_kernel_without_the_rule_is_told(system: System) -> None:
    """No tool rebuilds this image, whose kernel is not installed here."""
    (image,) = system.images()
    release = os.uname().release
    stale = system.root.place / f"boot/initrd.img-{release}"
    shutil.copy(f"{system.root.place}{image}", stale)
    try:
        said = " ".join(system.root.run_on(HOST, *BIND).split())
        assert f"warning: the new initramfs does not contain /{RULE}: at boot" in said
        system.root.run_on(HOST, *FORGET[:-1])
        shutil.copy(f"{system.root.place}{image}", stale)
        assert system.holds_rule(f"/boot/{stale.name}")
        assert "warning" not in system.root.run_on(HOST, *BIND)
    finally:
        stale.unlink()
        system.root.run_on(HOST, *FORGET)
