"""Ready-made hosts with vGPUs of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes import samples
from tests.fakes.gvtg import gvtg
from tests.fakes.kernel import FakeKernel

if TYPE_CHECKING:
    from pathlib import Path

INTEGRATED = "0000:00:02.0"


def samples_host(tmp_path: Path) -> FakeKernel:
    """The kernel's sample drivers mtty, mdpy and mbochs, and no PCI function."""
    kernel = FakeKernel(tmp_path / "host")
    for parent in (samples.mtty(), samples.mdpy(), samples.mbochs()):
        kernel.add_parent(parent)
    return kernel


def gvtg_host(tmp_path: Path, *, aperture: int = 256, has_names: bool = False) -> FakeKernel:
    """0000:00:02.0 on i915 with GVT-g, and `aperture` MB."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("i915", ids=[("8086", "*", "03")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    kernel.add_pci(
        INTEGRATED,
        vendor="8086",
        device="591b",
        class_code="030000",
        group=1,
        driver="i915",
        boot_vga=True,
        gives=[("drm", "drm/card0"), ("drm", "drm/renderD128")],
    )
    return kernel.add_parent(gvtg(INTEGRATED, aperture=aperture, has_names=has_names))
