"""Hosts of situations: a fake kernel with the functions of a listing, in a typical machine."""

from __future__ import annotations

import os
import posixpath
import re
import string
from typing import TYPE_CHECKING, NamedTuple

from tests.fakes.containerd import Containerd
from tests.fakes.kernel import FakeKernel
from tests.fakes.programs import Said
from tests.field.machine import FIRST_WITH_CDEVS, lay_out, version_of
from vfiomgr.libvirt.model import Hypervisor
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.field.situation import Function, Listed, Situation

_INTERFACES = {"0108": "02", "0c03": "30", "0106": "01"}
"""The programming interface of a class: NVMe, xHCI, AHCI."""
_BRIDGE, _DISPLAY, _NETWORK = "0604", "03", "02"
_PORT_IDS = {"i": ("8086", "7a38"), "a": ("1022", "1483"), "p": ("1014", "04c1")}
"""Vendor and device of root ports, by the first letter of the kind of machine."""
_ARM_PORT = ("10de", "22b1")
_VENDOR_NAMES = {
    "10de": "NVIDIA Corporation",
    "1002": "Advanced Micro Devices, Inc. [AMD/ATI]",
    "1022": "Advanced Micro Devices, Inc. [AMD]",
    "8086": "Intel Corporation",
    "15b3": "Mellanox Technologies",
    "14e4": "Broadcom Inc. and subsidiaries",
    "1000": "Broadcom / LSI",
    "144d": "Samsung Electronics Co Ltd",
    "15b7": "Sandisk Corp",
}
_MODULES = {"xhci_hcd": "xhci_pci", "ehci-pci": "ehci_pci", "pcieport": None}
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PREFETCHABLE_FROM = 64 << 20
_MEMORY, _MEMORY_64_PREFETCHABLE = 0x40200, 0x14220C
_BARS = {
    "0302": ("16M", "64G", "32M"),
    "10de03": ("16M", "256M", "32M"),
    "100203": ("256M", "2M", "512K"),
    "808603": ("16M", "256M"),
    "0108": ("16K",),
    "02": ("1M", "16K"),
    "0604": (),
    "06": (),
    "05": (),
}
_RESETS = {
    "0604": "",
    "06": "",
    "05": "",
    "0302": "flr bus",
    "10de03": "bus",
    "100203": "bus",
    "808603": "flr",
    "0403": "pm bus",
    "0c03": "flr bus",
    "0108": "flr bus",
    "02": "flr bus",
    "0106": "flr",
}
"""By class, or by vendor and class; the first key that fits counts."""
_VERSION = re.compile(r"\bv(\d+\.\d+\.\d+)")
_NAMED_BY_LETTERS = "abcdefghij"
_FIRST_LARGE_BUS = 0x10
_FIRST_WITH_VFIO_DEV = (6, 1)
_FREE_PORTS = ("1c", "1d", "1b", "06", "07", "08", "09")


class FieldKernel(FakeKernel):
    """A fake kernel whose programs print fixed texts; other programs are not installed.

    containerd reads its configuration as its release does.
    """

    def answer(self, outputs: dict[str, str]) -> None:
        """Install the programs of some command lines; others of them print nothing and fail."""
        for name in {line.split()[0] for line in outputs}:
            version = _VERSION.search(outputs.get("containerd --version", ""))
            if name == "containerd" and version is not None:
                Containerd(version[1]).install(self)
                continue
            path = name if name.startswith("/") else f"/usr/bin/{name}"
            self.programs.install(path)
            self.programs.known[path] = _Printing(name, outputs)
        self._outputs = outputs

    def hypervisor(self, uri: str) -> Hypervisor:
        """What the libvirt of this host reports if a command connects to it."""
        libvirt, qemu = (self._release_of(each) for each in ("libvirtd ", "qemu-system-"))
        return Hypervisor(uri, libvirt, qemu, offers_vfio=True, has_kvm=True)

    def _release_of(self, program: str) -> Version:
        text = next(text for line, text in self._outputs.items() if line.startswith(program))
        return Version.parse(text.lstrip(string.ascii_letters + "() "))


class _Printing(NamedTuple):
    """A program that only prints."""

    name: str
    outputs: dict[str, str]

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it changes the host: never."""
        return False

    def run(self, arguments: Sequence[str]) -> Said:
        """Print what the situation says of the longest beginning of the command line."""
        line = " ".join((self.name, *arguments))
        known = [each for each in self.outputs if f"{line} ".startswith(f"{each} ")]
        return Said(0, self.outputs[max(known, key=len)]) if known else Said(1)


def build(situation: Situation, directory: Path) -> FieldKernel:
    """Make the host of a situation below a directory."""
    return _Builder(situation, directory).build()


class _Builder:
    def __init__(self, situation: Situation, directory: Path) -> None:
        self._situation = situation
        self._machine = situation.machine
        self._listed = situation.listed()
        self._kernel = FieldKernel(
            directory / "host",
            has_iommu=self._machine.iommu,
            has_cdev=version_of(self._machine.kernel) >= FIRST_WITH_CDEVS,
        )
        self._ports: dict[str, str] = {}
        """The root port of a bus, by the bus."""
        self._port_names = self._free_ports()
        groups = [each.group for each in self._listed if each.group is not None]
        self._next_group = max([90, *groups]) + 1
        self._counts: dict[str, int] = {}

    def build(self) -> FieldKernel:
        """Lay out the machine, its functions, and the files of the situation over them."""
        kernel, situation = self._kernel, self._situation
        self._add_drivers()
        bridges = [each for each in self._listed if each.class_code.startswith(_BRIDGE)]
        others = [each for each in self._listed if each not in bridges]
        for each in (*bridges, *sorted(others, key=self._is_virtual)):
            self._add(each)
        lay_out(kernel.sysfs, self._machine, self._listed)
        kernel.sysfs.put("/usr/share/misc/pci.ids", "\n".join(_pci_ids(self._listed)))
        if version_of(self._machine.kernel) < _FIRST_WITH_VFIO_DEV:
            kernel.sysfs.drop("/sys/class/vfio-dev")
            for each in self._listed:
                kernel.sysfs.drop(f"{kernel.sysfs.target(PCI_DEVICES / each.address)}/vfio-dev")
        for path, text in situation.files.items():
            _put(kernel, path, text)
        for path, mode in situation.modes.items():
            os.chmod(kernel.sysfs.real(path), mode)
        kernel.answer(situation.programs)
        for index, process in enumerate(situation.processes):
            place = f"/proc/{4000 + index}"
            kernel.sysfs.put(f"{place}/comm", process.name)
            kernel.sysfs.put(f"{place}/cmdline", process.name)
            for number, node in enumerate(process.open):
                kernel.sysfs.link_absolute(f"{place}/fd/{number + 3}", node)
        return kernel

    def _add_drivers(self) -> None:
        vfio = self._machine.vfio
        names = ("pcieport", *self._machine.drivers)
        wanted: dict[str, set[tuple[str, ...]]] = {name: set() for name in names}
        for each in self._listed:
            if each.driver is not None:
                wanted.setdefault(each.driver, set()).add((each.vendor, each.device))
        if vfio != "missing":
            wanted.setdefault("vfio-pci", set())
        uses_vfio = any("vfio" in (each.driver or "") for each in self._listed)
        for name, ids in wanted.items():
            is_vfio = "vfio" in name
            self._kernel.add_driver(
                name,
                module=None if is_vfio and vfio == "built-in" else _MODULES.get(name, name),
                ids=[("*", "*", _BRIDGE)] if name == "pcieport" else sorted(ids),
                loaded=not is_vfio or uses_vfio or vfio in ("loaded", "built-in"),
                is_vfio=is_vfio,
                manages_dma=is_vfio or name == "pcieport",
            )

    def _is_virtual(self, each: Listed) -> bool:
        return bool(self._function(each).physfn)

    def _function(self, each: Listed) -> Function:
        from tests.field.situation import Function  # noqa: PLC0415 - only typed above

        return self._situation.functions.get(each.address, Function())

    def _add(self, each: Listed) -> None:
        function, sysfs = self._function(each), self._kernel.sysfs
        slot = [other for other in self._listed if other.address[:-2] == each.address[:-2]]
        is_bridge = each.class_code.startswith(_BRIDGE)
        code = each.class_code
        nodes = self._machine.nodes
        numa = function.numa if function.numa is not None else (0 if nodes > 1 else -1)
        reset = function.reset if function.reset is not None else _of(_RESETS, each, "flr bus")
        self._kernel.add_pci(
            each.address,
            vendor=each.vendor,
            device=each.device,
            class_code=code if len(code) > 4 else code + _INTERFACES.get(code, "00"),
            group=each.group,
            driver=each.driver,
            driver_override=function.override,
            bridge=self._bridge(each, function),
            subsystem=function.subsystem,
            header_type=is_bridge | (0x80 if len(slot) > 1 else 0),
            boot_vga=function.boot_vga if code.startswith("0300") else None,
            numa_node=numa,
            reset_methods=reset,
            gives=tuple(self._given(each)),
            total_vfs=function.total_vfs,
        )
        place = PCI_DEVICES / each.address
        sysfs.put(place / "revision", f"0x{each.revision}")
        sysfs.put(place / "resource", "\n".join(_resources(each, function)))
        if function.physfn:
            sysfs.link(f"{place}/physfn", sysfs.target(f"{PCI_DEVICES}/{function.physfn}") or "")
            physical = PCI_DEVICES / function.physfn
            number = sum(n.startswith("virtfn") for n in sysfs.names(physical))
            sysfs.link(f"{physical}/virtfn{number}", sysfs.target(place) or "")
            sysfs.put(physical / "sriov_numvfs", str(number + 1))
        self._use(each, function)

    def _bridge(self, each: Listed, function: Function) -> str | None:
        """The bridge above a function: given, listed in its group, or a port that is added."""
        address = PciAddress.parse(each.address)
        if function.below:
            return None if function.below == "root" else function.below
        if function.physfn:
            parent = self._kernel.functions.known[function.physfn]
            return parent.bridge
        is_arm_root = self._machine.kind in ("arm-server", "arm-board", "power")
        if address.bus == 0 or (is_arm_root and each.class_code.startswith(_BRIDGE)):
            return None
        bus = each.address[:-5]
        if bus not in self._ports:
            self._ports[bus] = self._listed_port(each) or self._added_port(address)
        return self._ports[bus]

    def _listed_port(self, each: Listed) -> str | None:
        """A bridge of the listing in the same group, whose bus no other function has taken."""
        return next(
            (
                other.address
                for other in self._listed
                if other.class_code.startswith(_BRIDGE)
                and other.group == each.group
                and other.address[:-5] != each.address[:-5]
                and other.address not in self._ports.values()
                and other.address in self._kernel.functions.known
            ),
            None,
        )

    def _added_port(self, address: PciAddress) -> str:
        domain = f"{address.domain:04x}"
        if address.bus >= _FIRST_LARGE_BUS:
            taken = {int(each.address.split(":")[1], 16) for each in self._listed}
            bus = next(n for n in range(address.bus - 1, 0, -1) if n not in taken)
            name = f"{domain}:{bus:02x}:{address.bus % 0x20:02x}.0"
        elif domain != "0000":
            name = f"{domain}:00:00.0"
        else:
            name = next(self._port_names)
        vendor, device = _PORT_IDS.get(self._machine.kind[0], _PORT_IDS["i"])
        if self._machine.kind.startswith("arm"):
            vendor, device = _ARM_PORT
        if name not in self._kernel.functions.known:
            self._kernel.add_pci(
                name,
                vendor=vendor,
                device=device,
                class_code=f"{_BRIDGE}00",
                header_type=1,
                group=self._next_group,
                driver="pcieport",
                reset_methods="",
            )
            self._next_group += 1
        return name

    def _free_ports(self) -> Iterator[str]:
        taken = {each.address for each in self._listed}
        names = (f"0000:00:{device}.{n}" for device in _FREE_PORTS for n in range(8))
        return (name for name in names if name not in taken)

    def _given(self, each: Listed) -> Iterator[tuple[str, str]]:
        """What a native driver makes of a function."""
        code = each.class_code
        if "vfio" in (each.driver or "") or each.driver is None:
            return
        if code.startswith(_DISPLAY):
            number = self._count("drm")
            yield "drm", f"drm/card{number}"
            yield "drm", f"drm/renderD{128 + number}"
        elif code.startswith(_NETWORK):
            yield "net", f"net/{_interface(each)}"
        elif code == "0403":
            yield "sound", f"sound/card{self._count('sound')}"
        elif each.driver == "nvme":
            number = self._count("nvme")
            yield "nvme", f"nvme/nvme{number}"
            yield "block", f"nvme/nvme{number}/nvme{number}n1"
            yield "block", f"nvme/nvme{number}/nvme{number}n1/nvme{number}n1p1"
        elif code in ("0106", "0107", "0104") and each.driver != "vmd":
            disk = f"sd{_NAMED_BY_LETTERS[self._count('disk')]}"
            above = f"host0/target0:0:0/0:0:0:0/block/{disk}"
            yield "block", above
            yield "block", f"{above}/{disk}1"

    def _count(self, kind: str) -> int:
        self._counts[kind] = self._counts.get(kind, -1) + 1
        return self._counts[kind]

    def _use(self, each: Listed, function: Function) -> None:
        gives = self._kernel.functions.known[each.address].gives
        names = [below.rpartition("/")[2] for kind, below in gives if kind in ("block", "net")]
        for name in (below.rpartition("/")[2] for kind, below in gives if kind == "net"):
            _put(self._kernel, f"/sys/class/net/{name}/device", f"-> ../../../{each.address}")
        if function.mounted and names:
            self._kernel.mount(f"/dev/{names[-1]}", function.mounted)
        if function.default_route and names:
            self._kernel.default_route(names[-1])


def _of(table: dict[str, str], each: Listed, default: str) -> str:
    """The entry of a function's class, or of its vendor and class."""
    names = (each.vendor + each.class_code, each.class_code)
    found = (v for key, v in table.items() if any(name.startswith(key) for name in names))
    return next(found, default)


def _interface(each: Listed) -> str:
    address = PciAddress.parse(each.address)
    domain = f"P{address.domain}" if address.domain else ""
    function = f"f{address.function}" if address.function else ""
    return f"en{domain}p{address.bus}s{address.device}{function}"


def _resources(each: Listed, function: Function) -> Iterator[str]:
    """The lines of `resource`: memory BARs one after the other, then empty ones."""
    names = (each.vendor + each.class_code, each.class_code)
    usual = (v for key, v in _BARS.items() if any(name.startswith(key) for name in names))
    address = PciAddress.parse(each.address)
    start = (address.domain + 1 << 40) + ((address.bus << 8 | address.function) << 37)
    count = 0
    for text in function.bars or next(usual, ("64K",)):
        size = int(text[:-1]) * _SIZES[text[-1]]
        is_wide = size >= _PREFETCHABLE_FROM or (count and names[0].startswith("10de03"))
        flags = _MEMORY_64_PREFETCHABLE if is_wide else _MEMORY
        start = -(-start // size) * size
        yield f"0x{start:016x} 0x{start + size - 1:016x} 0x{flags:016x}"
        start, count = start + size, count + 1
        if flags != _MEMORY:
            yield _EMPTY
            count += 1
    yield from [_EMPTY] * (13 - count)


_EMPTY = " ".join(["0x" + "0" * 16] * 3)


def _pci_ids(listed: Iterable[Listed]) -> Iterator[str]:
    """The names of the listing as pci.ids has them."""
    yield "# pci.ids"
    for vendor in dict.fromkeys(each.vendor for each in listed):
        name = _VENDOR_NAMES.get(vendor, f"Vendor {vendor}")
        yield f"{vendor}  {name}"
        short = (name, name.partition(",")[0], name.partition(" [")[0])
        for each in listed:
            if each.vendor == vendor:
                shown = each.name
                for prefix in short:
                    shown = shown.removeprefix(prefix).strip()
                yield f"\t{each.device}  {shown or each.name}"
    for code, kind in sorted({each.class_code[:4]: each.kind for each in listed}.items()):
        yield from (f"C {code[:2]}  {kind}", f"\t{code[2:]}  {kind}")


def _put(kernel: FakeKernel, path: str, text: str | None) -> None:
    """Lay a file over the host; attributes of functions lie where the link leads."""
    above, name = posixpath.split(path)
    place = f"{kernel.sysfs.target(above) or above}/{name}"
    kernel.sysfs.drop(place)
    if text is None:
        return
    target = text.removeprefix("-> ")
    if target != text:
        kernel.sysfs.link_absolute(place, target.strip())
    elif name == "resource":
        lines = text.splitlines()
        kernel.sysfs.put(place, "\n".join([*lines, *[_EMPTY] * (13 - len(lines))]))
    elif text.startswith("hex "):
        kernel.sysfs.put_bytes(place, bytes.fromhex(text.removeprefix("hex ")))
    elif path.endswith("/"):
        kernel.sysfs.make(path)
    elif "/bin/" in path or "/sbin/" in path:
        kernel.sysfs.put(place, text or "#!/bin/sh", 0o755)
    else:
        kernel.sysfs.put(place, text.rstrip("\n"))
