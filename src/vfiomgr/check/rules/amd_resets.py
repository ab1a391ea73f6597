"""AMD GPUs with known reset problems, by device ID, each with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.check.model import Readiness
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_AMD = "1002"
_OWN_RESET = "device_specific"
_VENDOR_RESET = "vendor_reset"
_PAGE = "https://github.com/gnif/vendor-reset"
_FAMILIES = {
    "Polaris 10": "67c0 67c1 67c2 67c4 67c7 67c8 67c9 67ca 67cc 67cf 67d0 67df 6fdf",
    "Polaris 11": "67e0 67e1 67e3 67e7 67e8 67e9 67eb 67ef 67ff",
    "Polaris 12": "6980 6981 6985 6986 6987 6995 6997 699f",
    "Vega 10": "6860 6861 6862 6863 6864 6867 6868 6869 686a 686b 686c 686d 686e 686f 687f",
    "Vega 20": "66a0 66a1 66a2 66a3 66a4 66a7 66af",
    "Arcturus (MI100)": "738c",
    "Navi 10": "7310 7312 7318 7319 731a 731b 731e 731f",
    "Navi 12": "7360 7362",
    "Navi 14": "7340 7341 7347 734f",
}
"""GPUs that vendor-reset supports (its src/device-db.h, as of 2024)."""
_FAMILY = {number: name for name, ids in _FAMILIES.items() for number in ids.split()}
_LOST_BY_RESET = frozenset({"740f", "74a1", "75a3"})
"""Instinct MI300X (also reported with the ID of an MI210) and MI355X."""
_LOST_SOURCE = "https://github.com/amd/MxGPU-Virtualization/issues/25"
_OOPS_AT_UNBIND = frozenset({"7550"})
"""Navi 48: Radeon RX 9070 and 9070 XT."""
_OOPS_SOURCE = "https://github.com/CachyOS/linux-cachyos/issues/1023"
_DEVICES = "/sys/bus/pci/devices"


def is_known(device: PciDevice) -> bool:
    """Whether a function's model has known reset problems."""
    known = _FAMILY.keys() | _LOST_BY_RESET | _OOPS_AT_UNBIND
    return _is_amd(device) and device.device_id in known


def _is_amd(device: PciDevice) -> bool:
    is_gpu = device.vendor_id == _AMD and device.is_graphics_or_accelerator
    return is_gpu and device.physical_function is None


def _of(host: HostSnapshot, ids: frozenset[str]) -> list[PciDevice]:
    """GPUs that could be assigned; the console's display is excluded."""
    return [d for d in host.devices if _is_amd(d) and d.device_id in ids and not d.is_boot_display]


def reset_trouble(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs that may not start again after the kernel's resets."""
    found = _of(host, frozenset(_FAMILY))
    devices = [d for d in found if _OWN_RESET not in d.reset_method]
    if devices:
        is_loaded = facts.module(_VENDOR_RESET).is_present
        yield finding(
            "amd-reset",
            "warning",
            "an AMD GPU may not start in a guest a second time",
            (*map(_family, devices), f"{_PAGE} lists these device IDs"),
            "after the kernel's resets these GPUs may not initialize again until a power cycle",
            _own_reset(devices, is_loaded=is_loaded),
        )


def _family(device: PciDevice) -> str:
    methods = f"; {_place(device)}: {' '.join(device.reset_method)}" if device.reset_method else ""
    return f"{device} is {_FAMILY[device.device_id]}, {_ids(device)}{methods}"


def _place(device: PciDevice) -> str:
    return f"{_DEVICES}/{device.address}/reset_method"


def _own_reset(devices: Sequence[PciDevice], *, is_loaded: bool) -> str:
    """Return the remedy; since Linux 5.15 reset_method must be set, too."""
    places = " ".join(_place(d) for d in devices if d.reset_method)
    tell = f"echo {_OWN_RESET} | tee {places}" if places else ""
    if is_loaded:
        return f"use the loaded module vendor_reset before the first guest: {tell or 'check dmesg'}"
    commands = f"modprobe vendor-reset{' && ' if tell else ''}{tell}"
    return f"install the module vendor-reset ({_PAGE}); at boot before the first guest: {commands}"


def lost_by_reset(host: HostSnapshot, _facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs whose configuration space reads as all ones after a reset by VFIO."""
    devices = _of(host, _LOST_BY_RESET)
    if devices:
        yield finding(
            "amd-lost-by-reset",
            "warning",
            "an AMD Instinct GPU may be lost after its guest ends, until the host reboots",
            (*(f"{d}, {_ids(d)}" for d in devices), f"{_LOST_SOURCE} reports it"),
            "after a reset by VFIO the configuration space of MI300X and MI355X reads as all ones, "
            "and neither removing the function nor a rescan restores it",
            "assign virtual functions of AMD's driver gim, which are not affected; for an entire "
            "GPU, plan a reboot of the host after each guest",
        )


def oops_at_unbind(host: HostSnapshot, _facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs for which a kernel failure on unbind from vfio-pci was reported."""
    devices = _of(host, _OOPS_AT_UNBIND)
    if devices:
        names = " ".join(str(d.address) for d in devices)
        yield finding(
            "amd-unbind",
            "warning",
            "the kernel may fail when this AMD GPU is unbound from vfio-pci",
            (
                *(f"{d}, {_ids(d)}" for d in devices),
                f"{_OOPS_SOURCE} reports it for Linux 7.2.2",
                *((f"this host runs Linux {host.kernel_release}",) if host.kernel_release else ()),
            ),
            "a fault in vfio_pci_core_sriov_configure leaves the function unusable until a reboot; "
            "libvirt unbinds it when a guest with managed='yes' stops",
            f"use managed='no' in the guest, and: vfiomgr bind --persist {names}",
        )


def _ids(device: PciDevice) -> str:
    return f"{device.vendor_id}:{device.device_id}"
