"""Hosts of any size as directories: the same mixture of functions in each block of 64.

A block is a PCI domain of its own: a root port, a GPU with its audio function, and a network
adapter with 60 virtual functions. Nothing in it is random.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 64
_VIRTUAL = BLOCK - 4
_ZERO_LINE = " ".join(["0x" + "0" * 16] * 3)
_READ_BY_NOBODY = {
    "ari_enabled": "1",
    "broken_parity_status": "0",
    "consistent_dma_mask_bits": "64",
    "dma_mask_bits": "64",
    "enable": "1",
    "irq": "16",
    "local_cpulist": "0-63",
    "local_cpus": "ffffffff,ffffffff",
    "msi_bus": "1",
    "power/autosuspend_delay_ms": "",
    "power/runtime_active_time": "0",
    "power/runtime_suspended_time": "0",
    "power/wakeup": "disabled",
}
"""Attributes that make a directory as long as a real one is."""


@dataclass(frozen=True)
class _Function:
    """What sets a function apart; `place` is its directory below /sys/devices."""

    address: str
    place: str
    identifiers: str
    class_code: str
    driver: str
    header_type: int = 0
    attributes: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()


class _Files:
    """Writes below a root; files of the same text are one file with many names."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[bytes, str] = {}
        self._made: set[str] = set()

    def put(self, path: str, data: bytes) -> None:
        """A file."""
        target = self._target(path)
        known = self._known.get(data)
        if known is not None:
            try:
                os.link(known, target)
            except OSError:  # it has as many names as this file system allows
                pass
            else:
                return
        with open(target, "xb") as file:
            file.write(data)
        self._known[data] = target

    def link(self, path: str, to: str) -> None:
        """A relative link, as all links of sysfs are."""
        os.symlink(os.path.relpath(to, os.path.dirname(path)), self._target(path))

    def _target(self, path: str) -> str:
        target = f"{self._root}/{path}"
        directory = os.path.dirname(target)
        if directory not in self._made:
            os.makedirs(directory, exist_ok=True)
            self._made.add(directory)
        return target


def make_tree(root: str, functions: int, virtual_driver: str = "iavf") -> None:
    """Make a host with that many functions, a multiple of 64, each in an IOMMU group of its own.

    Of 64, 60 are virtual functions; `virtual_driver` has them.
    """
    if functions % BLOCK:
        message = f"{functions} is no multiple of {BLOCK}"
        raise ValueError(message)
    files = _Files(root)
    files.put("proc/sys/kernel/osrelease", b"6.12.0\n")
    files.put("sys/class/iommu/dmar0/type", b"0\n")
    for driver in ("pcieport", "nvidia", "snd_hda_intel", "ice", virtual_driver):
        files.put(f"sys/module/{driver}/refcnt", b"0\n")
        files.link(f"sys/bus/pci/drivers/{driver}/module", f"sys/module/{driver}")
    for block in range(functions // BLOCK):
        for index, function in enumerate(_block(block, virtual_driver)):
            _add(files, function, block * BLOCK + index)


def _block(domain: int, virtual_driver: str) -> Iterator[_Function]:
    port = f"pci{domain:04x}:00/{domain:04x}:00:01.0"
    gpu, audio, adapter = (f"{domain:04x}:{rest}" for rest in ("01:00.0", "01:00.1", "02:00.0"))
    virtual = [f"{domain:04x}:02:{n >> 3:02x}.{n & 7}" for n in range(8, 8 + _VIRTUAL)]
    yield _Function(port.rpartition("/")[2], port, "8086:347A", "060400", "pcieport", 1)
    display = (("boot_vga", "0"), ("reset_method", "flr bus"))
    yield _Function(gpu, f"{port}/{gpu}", "10DE:2684", "030000", "nvidia", 0x80, display)
    yield _Function(audio, f"{port}/{audio}", "10DE:22BA", "040300", "snd_hda_intel", 0x80)
    yield _Function(
        adapter,
        f"{port}/{adapter}",
        "8086:1592",
        "020000",
        "ice",
        attributes=(
            ("reset_method", "flr bus"),
            ("sriov_totalvfs", str(_VIRTUAL)),
            ("sriov_numvfs", str(_VIRTUAL)),
            ("sriov_drivers_autoprobe", "1"),
        ),
        links=tuple((f"virtfn{n}", f"{port}/{name}") for n, name in enumerate(virtual)),
    )
    for name in virtual:
        links = (("physfn", f"{port}/{adapter}"),)
        flr = (("reset_method", "flr"),)
        yield _Function(
            name, f"{port}/{name}", "8086:1889", "020000", virtual_driver, 0, flr, links
        )


def _add(files: _Files, function: _Function, group: int) -> None:
    directory = f"sys/devices/{function.place}"
    for name, text in _attributes(function, group).items():
        files.put(f"{directory}/{name}", f"{text}\n".encode())
    files.put(f"{directory}/config", _config(function))
    iommu = f"sys/kernel/iommu_groups/{group}"
    driver = f"sys/bus/pci/drivers/{function.driver}"
    files.put(f"{iommu}/type", b"DMA-FQ\n")
    for link, target in (
        (f"{directory}/driver", driver),
        (f"{directory}/iommu_group", iommu),
        (f"{directory}/subsystem", "sys/bus/pci"),
        (f"{iommu}/devices/{function.address}", directory),
        (f"{driver}/{function.address}", directory),
        (f"sys/bus/pci/devices/{function.address}", directory),
        *((f"{directory}/{name}", f"sys/devices/{place}") for name, place in function.links),
    ):
        files.link(link, target)


def _attributes(function: _Function, group: int) -> dict[str, str]:
    vendor, device = function.identifiers.split(":")
    code = function.class_code
    alias = (
        f"pci:v0000{vendor}d0000{device}sv0000{vendor}sd00000001"
        f"bc{code[:2]}sc{code[2:4]}i{code[4:]}"
    )
    return {
        **_READ_BY_NOBODY,
        "vendor": f"0x{vendor.lower()}",
        "device": f"0x{device.lower()}",
        "subsystem_vendor": f"0x{vendor.lower()}",
        "subsystem_device": "0x0001",
        "class": f"0x{code}",
        "revision": "0x01",
        "modalias": alias,
        "uevent": (
            f"DRIVER={function.driver}\nPCI_CLASS={code.lstrip('0')}\n"
            f"PCI_ID={function.identifiers}\nPCI_SUBSYS_ID={vendor}:0001\n"
            f"PCI_SLOT_NAME={function.address}\nMODALIAS={alias}"
        ),
        "resource": "\n".join(_resource(group)),
        "driver_override": "(null)",
        "numa_node": "0",
        "d3cold_allowed": "1",
        "power_state": "D0",
        "power/control": "on",
        "power/runtime_status": "active",
        **dict(function.attributes),
    }


def _resource(number: int) -> Iterator[str]:
    """Two memory BARs at a place of the function's own, then empty lines."""
    start = 0x200000000000 + (number << 24)
    yield f"0x{start:016x} 0x{start + 0xFFFFFF:016x} 0x000000000014220c"
    yield _ZERO_LINE
    yield f"0x{start + (1 << 50):016x} 0x{start + (1 << 50) + 0xFFFF:016x} 0x000000000014220c"
    yield from [_ZERO_LINE] * 10


def _config(function: _Function) -> bytes:
    vendor, device = (int(part, 16) for part in function.identifiers.split(":"))
    head = vendor.to_bytes(2, "little") + device.to_bytes(2, "little")
    return head.ljust(0x0E, b"\0") + bytes([function.header_type]) + bytes(0xF1)
