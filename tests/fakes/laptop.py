"""Laptops of ASUS: the graphics switches of the firmware, as the kernel's drivers have them.

dgpu_disable_store and gpu_mux_mode_store in drivers/platform/x86/asus-wmi.c, and the same of
asus-armoury.c: the MUX is read by the firmware at boot, and the discrete GPU loses its power.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tests.fakes.kernel import FakeKernel
from tests.fakes.sysfs import READ_ONLY, reject
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.drivers import Driver
    from tests.fakes.reactions import Reactions

INTEGRATED, DISCRETE, AUDIO = "0000:00:02.0", "0000:01:00.0", "0000:01:00.1"
_PLATFORM = "/sys/devices/platform/asus-nb-wmi"
_ARMOURY = "/sys/class/firmware-attributes/asus-armoury/attributes"


class AsusFirmware:
    """The switches, and what the firmware keeps of them without power."""

    def __init__(self, kernel: FakeKernel, *, armoury: bool, has_mux: bool) -> None:
        self.kernel = kernel
        self._armoury = armoury
        self.has_mux = has_mux
        self.egpu_enabled = False
        self.mux = True
        self.kept_disabled = self.disabled = False
        self._is_wired_to_discrete = False
        kernel.drivers.when_bound.append(self._show_panel)

    def path(self, name: str) -> HostPath:
        """The attribute of a switch."""
        if self._armoury:
            return HostPath(f"{_ARMOURY}/{name}/current_value")
        return HostPath(f"{_PLATFORM}/{name}")

    def join(self, reactions: Reactions) -> None:
        """Act on writes."""
        reactions.buses[self.path("gpu_mux_mode")] = self._set_mux
        reactions.buses[self.path("dgpu_disable")] = self._set_disabled

    def boot(self) -> None:
        """The firmware sets the MUX, and powers the GPU, as it was stored."""
        self._is_wired_to_discrete = not self.mux
        self.disabled = self.kept_disabled
        sysfs = self.kernel.sysfs
        sysfs.put(self.path("dgpu_disable"), str(int(self.disabled)))
        if self.has_mux:
            sysfs.put(self.path("gpu_mux_mode"), str(int(self.mux)))
        if self._armoury:
            sysfs.put(f"{_ARMOURY}/pending_reboot", "0", READ_ONLY)
        self._power()
        for address in (INTEGRATED, DISCRETE):
            if self.kernel.functions.directory(address):
                self._show_panel(None, address)

    def _show_panel(self, _driver: Driver | None, address: str) -> None:
        has_panel = address == (DISCRETE if self._is_wired_to_discrete else INTEGRATED)
        number = int(address == DISCRETE)
        connector = f"drm/card{number}/card{number}-eDP-1"
        directory = self.kernel.functions.directory(address)
        if directory is not None and self.kernel.sysfs.exists(directory / connector):
            status = "connected" if has_panel else "disconnected"
            self.kernel.sysfs.put(directory / connector / "status", status, READ_ONLY)

    def _power(self) -> None:
        if not self.disabled:
            self.kernel.unpowered.clear()
            return
        self.kernel.unpowered.update((DISCRETE, AUDIO))
        for address in (AUDIO, DISCRETE):
            self.kernel.unplug(address)

    def _set_disabled(self, text: str) -> None:
        if text.strip() not in ("0", "1"):
            reject(errno.EINVAL)
        value = text.strip() == "1"
        if value and self.has_mux and not self.mux:
            reject(errno.EBUSY if self._armoury else errno.ENODEV)
        is_powered = self.kernel.functions.directory(DISCRETE) is not None
        self.disabled = value
        if value or is_powered:
            self.kept_disabled = value
        self.kernel.sysfs.put(self.path("dgpu_disable"), text.strip())
        self._power()

    def _set_mux(self, text: str) -> None:
        if text.strip() not in ("0", "1"):
            reject(errno.EINVAL)
        if self.disabled and text.strip() == "0":
            reject(errno.ENODEV)
        if self.egpu_enabled and text.strip() == "0":
            reject(errno.EBUSY if self._armoury else errno.ENODEV)
        self.mux = text.strip() == "1"
        self.kernel.sysfs.put(self.path("gpu_mux_mode"), text.strip())
        if self._armoury:
            self.kernel.sysfs.put(f"{_ARMOURY}/pending_reboot", "1", READ_ONLY)


def laptop(root: Path, *, armoury: bool = False, has_mux: bool = True) -> AsusFirmware:
    """A laptop with an integrated GPU, a discrete one with audio, and the panel on the first."""
    kernel = FakeKernel(root)
    kernel.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    kernel.add_driver("i915", ids=[("8086", "*", "03")])
    kernel.add_driver("amdgpu", ids=[("1002", "*", "03")])
    kernel.add_driver("snd_hda_intel", ids=[("*", "*", "0403")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True, loaded=True)
    kernel.add_pci(
        INTEGRATED,
        vendor="8086",
        device="46a6",
        class_code="030000",
        group=0,
        driver="i915",
        boot_vga=True,
        gives=[("drm", "drm/card0"), ("drm", "drm/card0/card0-eDP-1")],
    )
    kernel.add_pci(
        "0000:00:01.0",
        vendor="8086",
        device="460d",
        class_code="060400",
        header_type=0x81,
        group=1,
        driver="pcieport",
        reset_methods="",
    )
    kernel.add_pci(
        DISCRETE,
        vendor="1002",
        device="73ef",
        class_code="030000",
        header_type=0x80,
        group=10,
        bridge="0000:00:01.0",
        driver="amdgpu",
        boot_vga=False,
        gives=[("drm", "drm/card1"), ("drm", "drm/card1/card1-eDP-1")],
    )
    kernel.add_pci(
        AUDIO,
        vendor="1002",
        device="ab28",
        class_code="040300",
        header_type=0x80,
        group=11,
        bridge="0000:00:01.0",
        driver="snd_hda_intel",
        gives=[("sound", "sound/card1/controlC1")],
    )
    kernel.sysfs.put("/proc/net/tcp", "  sl  local_address rem_address   st")
    firmware = AsusFirmware(kernel, armoury=armoury, has_mux=has_mux)
    kernel.add_firmware(firmware)
    return firmware
