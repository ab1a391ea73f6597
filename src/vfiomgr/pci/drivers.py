"""Drivers of a function: variant drivers of VFIO, and the original one, which `unbind` restores."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec

from vfiomgr.documents.jsonable import API_VERSION, from_jsonable, to_jsonable, wrong_version
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import VfiomgrError
from vfiomgr.expressions import expression
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.paths import MODULE_DIRECTORIES, STATE, HostPath
from vfiomgr.pci.bars import BarSize
from vfiomgr.pci.model import DeviceIdentity, PciAddress, PciDevice, is_address
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

PLAIN = "vfio-pci"
"""The driver for any function."""
_ALIAS = "vfio_pci:"
_MODALIAS = "pci:"
PLAIN_MODULE = "vfio_pci"
"""Its module, whose own alias matches everything."""
_NAMES = {"xe_vfio_pci": "xe-vfio-pci"}
"""Drivers with other names than their modules (KBUILD_MODNAME in drivers/vfio/pci/*/main.c)."""


class VfioVariant(Value):
    """A module with a `vfio_pci:` alias (MODULE_DEVICE_TABLE of drivers/vfio/pci/*)."""

    alias: str
    """A pattern, e.g. `vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*`."""
    module: str
    driver: str | None
    """The driver of the module; None until it is loaded, unless it is known."""

    @property
    def driver_name(self) -> str:
        """The driver's name: as the kernel shows it, or as expected."""
        return self.driver or _NAMES.get(self.module, self.module)


def best_variant(variants: Iterable[VfioVariant], modalias: str | None) -> VfioVariant | None:
    """The variant whose alias matches a function with the fewest wildcards."""
    if modalias is None or not modalias.startswith(_MODALIAS):
        return None
    wanted = _ALIAS + modalias.removeprefix(_MODALIAS)
    fitting = [variant for variant in variants if fnmatchcase(wanted, variant.alias)]
    return min(fitting, key=lambda variant: variant.alias.count("*"), default=None)


def is_variant_module(name: str) -> bool:
    """Whether a module has the name of a variant driver of VFIO, e.g. `mlx5_vfio_pci`."""
    return name.endswith(f"_{PLAIN_MODULE}")


_ANY = 0xFFFFFFFF
"""PCI_ANY_ID (include/linux/mod_devicetable.h)."""
_HEXADECIMAL = expression(r"(?:0x)?[0-9a-f]{1,8}")
_SCANNED = expression(r"\s*(?:0x([0-9a-f]*)|([0-9a-f]+))(:?)", re.IGNORECASE)
"""What `%x:` of sscanf reads (vsscanf in lib/vsprintf.c)."""
_LEAST_PARTS, _MOST_PARTS = 2, 6


class PciIdEntry(Value):
    """An entry of `ids=` of vfio-pci (vfio_pci_fill_ids in drivers/vfio/pci/vfio_pci.c).

    vendor:device[:subvendor[:subdevice[:class[:class_mask]]]], in hexadecimal.
    """

    text: str
    vendor: int
    device: int
    subvendor: int = _ANY
    subdevice: int = _ANY
    class_code: int = 0
    class_mask: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it names nothing but a vendor and a device."""
        return self.subvendor == self.subdevice == _ANY and not self.class_mask

    @property
    def is_of_any_vendor(self) -> bool:
        """Whether it matches devices of every vendor."""
        return self.vendor == _ANY

    @property
    def identifier(self) -> str:
        """vendor:device in the form of layouts."""
        return f"{self.vendor:04x}:{'*' if self.device == _ANY else f'{self.device:04x}'}"

    def matches(self, device: PciDevice) -> bool:
        """Whether vfio-pci would match a function (pci_match_one_device in drivers/pci/pci.h)."""
        wanted = (self.vendor, self.device, self.subvendor, self.subdevice)
        found = (device.vendor_id, device.device_id, *device.subsystem_id.split(":"))
        pairs = zip(wanted, found, strict=False)
        is_same = all(number == _ANY or f"{number:04x}" == text for number, text in pairs)
        return is_same and (not self.class_mask or self._is_of_class(device.class_code))

    def _is_of_class(self, code: str) -> bool:
        if not _HEXADECIMAL.fullmatch(code):
            return False
        return not (int(code, 16) ^ self.class_code) & self.class_mask


def parse_pci_ids(text: str) -> Iterator[tuple[str, PciIdEntry | None]]:
    """The entries of a list for `ids=`, each with its text; None for one that vfio-pci ignores."""
    for entry in filter(None, text.split(",")):
        numbers = _scan(entry)
        yield entry, PciIdEntry(entry, *numbers) if len(numbers) >= _LEAST_PARTS else None


def _scan(entry: str) -> list[int]:
    """The numbers that sscanf("%x:%x:%x:%x:%x:%x") reads: as many as there are, up to a misfit."""
    numbers: list[int] = []
    end = 0
    while len(numbers) < _MOST_PARTS and (found := _SCANNED.match(entry, end)):
        numbers.append(int(found[1] or found[2] or "0", 16) & _ANY)
        if not found[3]:
            break
        end = found.end()
    return numbers


_MODULES = HostPath("/sys/module")
_DRIVER = "pci:"
_MODULE_ALIAS = expression(r"\nalias (vfio_pci:\S+) (\S+)")
_BUILT_IN_ALIAS = expression(r"(?:^|\0)([^.\0]+)\.alias=(vfio_pci:[^\0]+)")
_VFIO = "vfio"


def read_variants(tree: HostTree) -> tuple[VfioVariant, ...]:
    """The variant drivers of this kernel, loadable or built in (depmod(8), modules.alias)."""
    loadable = "\n" + (_list(tree, "modules.alias") or "")
    built_in = _list(tree, "modules.builtin.modinfo") or ""
    found = _MODULE_ALIAS.findall(loadable)
    found += [(alias, module) for module, alias in _BUILT_IN_ALIAS.findall(built_in)]
    return tuple(
        VfioVariant(alias, module, driver_of_module(tree, module))
        for alias, module in found
        if module != PLAIN_MODULE
    )


def read_vfio_modules(tree: HostTree) -> tuple[str, ...] | None:
    """The loadable modules with `vfio` in their names; None without depmod's list."""
    text = _list(tree, "modules.dep")
    if text is None:
        return None
    paths = (path for line in text.splitlines() if _VFIO in line for path in line.split())
    names = {path.rpartition("/")[2].partition(".ko")[0].replace("-", "_") for path in paths}
    return tuple(sorted(name for name in names if _VFIO in name))


def _list(tree: HostTree, name: str) -> str | None:
    """A list that depmod(8) made for the running kernel."""
    release = tree.read(HostPath("/proc/sys/kernel/osrelease"))
    if not release:
        return None
    texts = (tree.read_text(library / release / name) for library in MODULE_DIRECTORIES)
    return next((text for text in texts if text is not None), None)


def driver_of_module(tree: HostTree, module: str) -> str | None:
    """The PCI driver of a loaded or built-in module; their names may differ."""
    names = tree.children(_MODULES / module.replace("-", "_") / "drivers")
    drivers = [name.removeprefix(_DRIVER) for name in names if name.startswith(_DRIVER)]
    return drivers[0] if drivers else None


class DriverState(Value):
    """The driver of a function and the reason; None for an attribute means: the default."""

    driver: str | None
    driver_override: str | None
    power_control: str | None = None
    reset_method: str | None = None
    """Methods in the order in which the kernel tries them, e.g. `flr bus`."""
    d3cold_allowed: bool | None = None
    bars: tuple[BarSize, ...] = ()
    """Sizes of resizable BARs; one that is not listed may have any size."""

    def is_met_by(self, other: DriverState) -> bool:
        """Whether `other` matches this state in everything that this one specifies."""
        pairs = (
            (self.power_control, other.power_control),
            (self.reset_method, other.reset_method),
            (self.d3cold_allowed, other.d3cold_allowed),
        )
        same = (self.driver, self.driver_override) == (other.driver, other.driver_override)
        same = same and set(self.bars) <= set(other.bars)
        return same and all(mine is None or mine == theirs for mine, theirs in pairs)

    def __str__(self) -> str:
        """`nvidia`, or `vfio-pci (driver_override vfio-pci)`."""
        name = self.driver or "no driver"
        return f"{name} (driver_override {self.driver_override})" if self.driver_override else name


class OriginalState(Value):
    """The original state of a function; valid for the boot and the device it was recorded of."""

    device: DeviceIdentity
    state: DriverState
    driver_module: str | None
    boot_id: str


ORIGINS = STATE / "origins"
"""The directory of the records."""
_LIMIT = 1 << 16


class _UnreadableError(ValueError):
    """A record that is unreadable but may contain a state."""


def origin_file(address: PciAddress | str) -> HostPath:
    """The path of a function's record."""
    return ORIGINS / f"{address}.json"


def read_origins(tree: HostTree) -> tuple[OriginalState, ...]:
    """All records; one unreadable record does not hide the others."""
    found: list[OriginalState] = []
    for name in tree.children(ORIGINS):
        try:
            origin = _read(tree, name)
        except ValueError as error:
            message = f"ignoring {ORIGINS / name}: {error}"
            warnings.warn(message, stacklevel=2)
        else:
            found += [] if origin is None else [origin]
    return tuple(sorted(found, key=lambda origin: origin.device.address))


def unreadable_origins(tree: HostTree) -> dict[str, str]:
    """The functions with unreadable records, and why; an incomplete first write does not count."""
    found: dict[str, str] = {}
    for name in tree.children(ORIGINS):
        try:
            _read(tree, name)
        except _UnreadableError as error:
            found[name.removesuffix(".json")] = str(error)
        except ValueError:
            continue  # it has no state
    return found


def _read(tree: HostTree, name: str) -> OriginalState | None:
    """One record; None if it is gone, not readable for this user, or a temporary file.

    Raises:
        _UnreadableError: it may contain the state of a function.
        ValueError: it is something else.
    """
    if name.startswith("."):
        return None
    if not name.endswith(".json") or not is_address(name.removesuffix(".json")):
        message = "not a record of vfiomgr"
        raise ValueError(message)
    try:
        data = read_own(tree, ORIGINS / name, _LIMIT)
    except OSError:
        return None
    except NotARecord as error:
        raise _UnreadableError(error) from None
    if not data.strip(b"\0"):
        # A power cut leaves a file like this, and ends the boot that the record was good for.
        message = "it is empty"
        raise ValueError(message)
    try:
        origin = _parse(data.decode())
    except (ValueError, KeyError, TypeError, AttributeError, VfiomgrError, RecursionError) as error:
        message = f"not a record of vfiomgr ({type(error).__name__}: {error})"
        raise _UnreadableError(message) from None
    if origin_file(origin.device.address).name != name:
        message = f"it belongs to {origin.device.address}"
        raise _UnreadableError(message)
    return origin


def write_origin(tree: HostTree, origin: OriginalState) -> None:
    """Record an original state; it is only valid for this boot, so a power cut cannot lose it."""
    document = {"api_version": API_VERSION, **to_jsonable(origin)}
    data = msgspec.json.format(msgspec.json.encode(document)) + b"\n"
    tree.make_directory(ORIGINS)
    tree.replace(origin_file(origin.device.address), data, durable=False)


def remove_origin(tree: HostTree, origin: OriginalState) -> None:
    """Remove a record."""
    tree.remove(origin_file(origin.device.address))


def _parse(text: str) -> OriginalState:

    document = parse_json(text)
    if document["api_version"] != API_VERSION:
        raise ValueError(wrong_version(document["api_version"]))
    device = document["device"]
    texts = (*device.values(), document["driver_module"], document["boot_id"])
    if not all(isinstance(text, str | None) for text in texts):
        message = "a value has another type"
        raise TypeError(message)
    return OriginalState(
        device=DeviceIdentity(**{**device, "address": PciAddress.parse(device["address"])}),
        state=from_jsonable(DriverState, document["state"]),
        driver_module=document["driver_module"],
        boot_id=document["boot_id"],
    )


# Host drivers that stop a function before a reset, and set it up again afterwards. The kernel calls
# `reset_prepare` and `reset_done` of a driver (pci_dev_save_and_disable and pci_dev_restore in
# drivers/pci/pci.c) if its pci_error_handlers have them. A driver without them continues to use a
# function that has lost its state. sysfs does not show the handlers. They were read from the
# modules of Linux 6.1, 6.12 and 7.2; for fm10k, hns3, pds_core and 4xxx, from sources. virtio-pci
# is left out: most virtio drivers do not support its handlers (virtio_pci_common.c).
_QAT = "drivers/crypto/intel/qat/qat_common/adf_aer.c"
HANDLERS: Mapping[Version, Mapping[str, str]] = {
    Version(6, 1): {
        "cxgb4": "drivers/net/ethernet/chelsio/cxgb4/cxgb4_main.c",
        "fm10k": "drivers/net/ethernet/intel/fm10k/fm10k_pci.c",
        "hns3": "drivers/net/ethernet/hisilicon/hns3/hns3_enet.c",
        "i40e": "drivers/net/ethernet/intel/i40e/i40e_main.c",
        "ice": "drivers/net/ethernet/intel/ice/ice_main.c",
        "mhi-pci-generic": "drivers/bus/mhi/host/pci_generic.c",
        "mwifiex_pcie": "drivers/net/wireless/marvell/mwifiex/pcie.c",
        "nvme": "drivers/nvme/host/pci.c",
        "qla2xxx": "drivers/scsi/qla2xxx/qla_os.c",
    },
    Version(6, 12): {
        "habanalabs": "drivers/accel/habanalabs/common/habanalabs_drv.c",
        "igbvf": "drivers/net/ethernet/intel/igbvf/netdev.c",
        "intel-ipu6": "drivers/media/pci/intel/ipu6/ipu6.c",
        "intel_vpu": "drivers/accel/ivpu/ivpu_drv.c",
        "ionic": "drivers/net/ethernet/pensando/ionic/ionic_bus_pci.c",
        "pds_core": "drivers/net/ethernet/amd/pds_core/main.c",
    },
    Version(7, 2): {
        "4xxx": _QAT,
        "c3xxx": _QAT,
        "c6xx": _QAT,
        "dh895xcc": _QAT,
        "idxd": "drivers/dma/idxd/init.c",
        "intel-ipu7": "drivers/staging/media/ipu7/ipu7.c",
    },
}
"""The file of the handlers by driver, under the oldest kernel for which they were verified."""


def handles_resets(driver: str, kernel: Version | None) -> bool:
    """Whether a host driver is known to have both handlers in this kernel."""
    return kernel is not None and any(
        since <= kernel and driver in drivers for since, drivers in HANDLERS.items()
    )
