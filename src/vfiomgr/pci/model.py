"""PCI functions, as the kernel describes them in sysfs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec.structs import replace

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.paths import PCI_DEVICES, VFIO_NODES, HostPath, vfio_group_node
from vfiomgr.pci.names import short_name
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable


class DeviceSecurity(Value):
    """The connection of a function with the platform's TEE security manager (TSM).

    Only a function with PCIe device authentication has it, once a driver of a TSM is loaded
    (drivers/pci/tsm.c, sysfs-bus-pci in Documentation/ABI/testing; Linux 6.19).
    """

    connect: str | None = None
    """The TSM with a secure session, e.g. `tsm0`; None without a session."""
    bound: str | None = None
    """The TSM while a confidential guest has the function (TDISP)."""
    manager: str | None = None
    """The address of the function whose device security manager is responsible for it (`dsm`)."""

    def __str__(self) -> str:
        """`connected to tsm0, bound to a confidential guest`."""
        session = f"connected to {self.connect}" if self.connect else "not connected"
        return f"{session}, bound to a confidential guest" if self.bound else session


_FULL = expression(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")
_LIBVIRT = expression(r"pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])")
_ROOT_COMPLEX = expression(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_IDENTIFIERS = expression(r"([0-9a-f]{4}):([0-9a-f]{4})")
_SHORT = expression(r"([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")
_ALMOST = expression(r"(?:([0-9a-f]{4,8})[:.])?([0-9a-f]{1,2})[:.]([0-9a-f]{1,2})(?:[:.]([0-7]))?")
"""An address without its function, or with other separators."""
_PLATFORM = expression(r"[0-9a-f]{4,16}\.[a-z][a-z0-9_-]+|[a-z]{3,4}[0-9a-f]{4}:[0-9a-f]{2}")
"""`31d0000.serial` (of_device_make_bus_id in drivers/of/platform.c), `ARMH0011:00` (of ACPI)."""
_ASSIGNING_PLATFORM = (
    "vfiomgr assigns functions of PCI; a platform device needs the driver vfio-platform, an IOMMU "
    "group (in the device tree: the property iommus of its node), and a monitor that supports it"
)
_BEYOND = expression(r"(?:[0-9a-f]{1,8}:)?[0-9a-f]{1,2}:[0-9a-f]{1,2}\.[89a-f]")
"""An address whose function there cannot be."""
_MAX_DEVICE = 0x1F
_WRITTEN = r"^\s*([0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:(0?[0-9a-fA-F]|1[0-9a-fA-F])\.[0-7]\s*$"
"""The same as a regular expression of JSON Schema."""

CLASS_NETWORK = "02"
CLASS_DISPLAY = "03"
CLASS_AUDIO = "0403"
CLASS_BRIDGE = "06"
CLASS_ACCELERATOR = "12"
CLASS_VGA = "0300"
CLASS_OTHER_BRIDGE = "0680"
"""The class of NVSwitches, which have an endpoint's header and are not bridges."""
IN_ITS_MEMORY = " is in its memory (/proc/iomem)"
"""What follows the name of a firmware's framebuffer in a sign of a display."""
IS_MASTER = " is its DRM master, with a screen switched on"
"""What follows the name of a program in such a sign."""

HEADER_ENDPOINT = 0
UNKNOWN_CALL = "a call on it"
"""The placeholder for an operation of another program, which may be short."""

_CLASS_3D = "0302"
_AMD = "1022"
_AMD_NPUS = frozenset({"1502", "17f0", "17f2", "17f3", "1b0b", "1b0c"})
"""The NPUs of the driver amdxdna, of the class of signal processors (amdxdna_pci_drv.c)."""
_INTEL = "8086"
_DENIED = frozenset(
    {"0435", "0443", "19e2", "19e3", "37c8", "37c9"}  # QuickAssist, functions and VFs
    | {"0b25", "0cfe"}  # DSA and IAX of Sapphire Rapids
)


class PciAddress(tuple[int, int, int, int]):
    """domain:bus:device.function; compared numerically; the domain has up to 32 bits."""

    __slots__ = ()
    __match_args__ = ("domain", "bus", "device", "function")
    is_text_in_documents: ClassVar[bool] = True

    def __new__(cls, domain: int, bus: int, device: int, function: int) -> Self:
        """Create an address from numbers."""
        return super().__new__(cls, (domain, bus, device, function))

    def __getnewargs__(self) -> tuple[int, int, int, int]:
        """For copies."""
        return (self[0], self[1], self[2], self[3])

    @property
    def domain(self) -> int:
        """The PCI domain, 0 on most hosts."""
        return self[0]

    @property
    def bus(self) -> int:
        """The number of the bus, 0 to 255."""
        return self[1]

    @property
    def device(self) -> int:
        """The number of the device on its bus, 0 to 31."""
        return self[2]

    @property
    def function(self) -> int:
        """The number of the function, 0 to 7."""
        return self[3]

    @classmethod
    def parse(cls, text: str, known: Iterable[PciAddress] = ()) -> Self:
        """Read `0000:04:00.0` (any width of domain), or `04:00.0` if it is unambiguous in `known`.

        libvirt's `pci_0000_04_00_0` is read too, and a path such as
        `/sys/bus/pci/devices/0000:04:00.0`.

        Raises:
            UsageError: the text is not an address, or a short one matches several domains.
        """
        lowered = _bare(text.strip().lower())
        if match := _FULL.fullmatch(lowered):
            return cls._checked(text, *(int(part, 16) for part in match.groups()))
        if match := _SHORT.fullmatch(lowered):
            bus, device, function = (int(part, 16) for part in match.groups())
            domains = sorted(
                a.domain for a in known if (a.bus, a.device, a.function) == (bus, device, function)
            )
            if len(domains) > 1:
                choices = ", ".join(str(cls(d, bus, device, function)) for d in domains)
                message = f"{text!r} is ambiguous: it matches {choices}"
                raise UsageError(message, "write the address with its domain")
            return cls._checked(text, domains[0] if domains else 0, bus, device, function)
        if _PLATFORM.fullmatch(lowered):
            message = f"{text!r} is the name of a platform device, which is not on PCI"
            raise UsageError(message, _ASSIGNING_PLATFORM)
        message = f"{text!r} is not a PCI address"
        if _BEYOND.fullmatch(lowered):
            message += ": a function number is at most 7"
        raise UsageError(
            message,
            _correction(lowered, known)
            or "use domain:bus:device.function in hexadecimal, e.g. 0000:04:00.0; "
            "list the addresses of this host: vfiomgr list --all",
        )

    @classmethod
    def _checked(cls, text: str, domain: int, bus: int, device: int, function: int) -> Self:
        if device > _MAX_DEVICE:
            message = f"{text!r} is not a PCI address: a device number is at most 1f"
            raise UsageError(message, "list the addresses of this host: vfiomgr list --all")
        return cls(domain, bus, device, function)

    def __str__(self) -> str:
        """The form of the kernel: at least four digits of domain."""
        return "{:04x}:{:02x}:{:02x}.{:x}".format(*self)

    def __repr__(self) -> str:
        """For developers."""
        return f"PciAddress({self})"

    @property
    def slot(self) -> tuple[int, int, int]:
        """The part that all functions of a slot share."""
        return (self.domain, self.bus, self.device)

    @property
    def routing_id(self) -> int:
        """Bus, device and function as one number, which identifies the function in its domain."""
        return self.bus << 8 | self.device << 3 | self.function

    @classmethod
    def from_document(cls, value: object) -> Self:
        """Read an address from a document.

        Raises:
            ValueError: the text is not an address.
        """
        try:
            return cls.parse(str(value))
        except UsageError as error:
            raise ValueError(error.message) from None

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> Any:  # noqa: ANN401 - pydantic's own hook
        """Addresses are strings in documents."""
        from pydantic_core import core_schema  # noqa: PLC0415 - documents only

        def validate(value: object) -> PciAddress:
            return value if isinstance(value, PciAddress) else cls.from_document(value)

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: object, _handler: object) -> dict[str, Any]:
        """The pattern that `parse` accepts."""
        return {"type": "string", "pattern": _WRITTEN}


def _correction(text: str, known: Iterable[PciAddress]) -> str:
    """What is probably meant by a text that is almost an address; empty if unknown."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and all(_FULL.fullmatch(part) or _SHORT.fullmatch(part) for part in parts):
        return "separate addresses with spaces"
    match = _ALMOST.fullmatch(text)
    if match is None:
        return ""
    wanted = [None if part is None else int(part, 16) for part in match.groups()]
    for address in sorted(known):
        if all(one in (None, other) for one, other in zip(wanted, address, strict=True)):
            return f"did you mean {address}?"
    return ""


def _bare(text: str) -> str:
    """The kernel's form of an address, from libvirt's form or a path in sysfs."""
    if text.startswith("pci_") and (match := _LIBVIRT.fullmatch(text)):
        return "{}:{}:{}.{}".format(*match.groups())
    return text.rstrip("/").rsplit("/", 1)[-1] if text.startswith("/sys/") else text


def identifiers_in(text: str) -> tuple[str, str] | None:
    """The vendor and device ID in a text such as `10de:2235`; None for other texts."""
    match = _IDENTIFIERS.fullmatch(text.strip().lower())
    return None if match is None else (match[1], match[2])


def is_address(name: str) -> bool:
    """Whether a name in sysfs is the address of a PCI function."""
    return _FULL.fullmatch(name) is not None


def device_text(device: str | PciAddress) -> str:
    """A device as programs name it: the text of an address, of PCI IDs or of a UUID.

    Raises:
        TypeError: it is something else, e.g. a list, or a device.
    """
    if isinstance(device, str | PciAddress):
        return str(device)
    pass_its = ": pass its address" if hasattr(device, "address") else ""
    message = f"expected an address such as '04:00.0', not {device!s:.60}{pass_its}"
    raise TypeError(message)


def is_vfio_driver(name: str | None) -> bool:
    """Whether a driver is vfio-pci or a variant of it; all have `vfio` in their names."""
    return name is not None and "vfio" in name


class DeviceIdentity(Value):
    """Identifies a function across reboots and hot-plug."""

    address: PciAddress
    vendor_id: str
    device_id: str
    subsystem_id: str
    class_code: str
    bridge_path: str
    serial: str | None = None
    """From the vital product data; None if there is none or it is not readable."""

    def is_same_as(self, other: DeviceIdentity) -> bool:
        """Whether both are the same device; an unknown serial number matches any."""
        if self.serial is None or other.serial is None:
            return replace(self, serial=None) == replace(other, serial=None)
        return self == other

    def __str__(self) -> str:
        """Address and PCI IDs."""
        serial = f" serial {self.serial}" if self.serial else ""
        return f"{self.address} [{self.vendor_id}:{self.device_id} {self.subsystem_id}]{serial}"


class Bar(Value):
    """A base address register that decodes memory or ports; `size` in bytes."""

    index: int
    start: int
    size: int
    is_memory: bool
    is_64bit: bool
    is_prefetchable: bool
    sizes: tuple[int, ...] | None = ()
    """The sizes that it can have, if it is resizable; None if they are unknown, because its
    function is suspended."""
    is_unassigned: bool = False
    """Whether the kernel found no address for it (IORESOURCE_UNSET)."""

    @property
    def largest(self) -> int | None:
        """The largest size that it can be resized to; None if it cannot, or if this is unknown."""
        return max(self.sizes or (), default=None)


class PciDevice(Value):
    """One PCI function; IDs are hexadecimal without prefix, as in pci.ids."""

    address: PciAddress
    name: str
    vendor_id: str
    device_id: str
    subsystem_id: str
    class_code: str
    class_name: str
    revision: str
    header_type: int | None
    bridge_path: str
    """The directory above it in /sys/devices: its bridges, e.g. `pci0000:00/0000:00:03.0`."""
    driver: str | None
    driver_override: str | None
    driver_module: str | None
    modalias: str | None
    iommu_group: int | None
    numa_node: int | None
    physical_function: PciAddress | None
    virtual_functions: tuple[PciAddress, ...]
    sriov_totalvfs: int | None
    sriov_numvfs: int | None
    sriov_drivers_autoprobe: bool | None
    is_boot_display: bool
    is_responsive: bool
    """Whether the configuration space is readable; a dead device reads as all ones."""
    vfio_device: str | None
    """The name below `vfio-dev/`, e.g. `vfio0`, while a VFIO driver is bound."""
    vfio_cdev: bool
    """Whether `/dev/vfio/devices/<vfio_device>` exists."""
    reset_method: tuple[str, ...]
    power_state: str | None
    power_control: str | None
    runtime_status: str | None
    d3cold_allowed: bool | None
    nodes: tuple[str, ...]
    """The nodes of its host driver below /dev, e.g. `/dev/dri/card0`, `/dev/nvidia0`."""
    bars: tuple[Bar, ...]
    stuck: str | None = None
    """The operation that the kernel is stuck in, e.g. an unbind; attributes are then unknown."""
    serial: str | None = None
    """From the vital product data, if requested."""
    display_signs: tuple[str, ...] = ()
    """What shows that the console is on it."""
    vram: int | None = None
    """Bytes of memory of its own, where its driver reports them (amdgpu)."""
    compute_partition: str | None = None
    """How amdgpu divides the compute units of the GPU, e.g. `CPX`; None if it cannot."""
    memory_partition: str | None = None
    """How its memory is divided, e.g. `NPS4`."""
    sriov_offset: int | None = None
    """The distance from its routing ID to that of its first virtual function."""
    sriov_stride: int | None = None
    """The distance between the routing IDs of its virtual functions."""
    sriov_vf_total_msix: int | None = None
    """The MSI-X vectors for all its virtual functions; 0 if its driver cannot set their number."""
    ari_enabled: bool | None = None
    """Whether the bridge above it forwards the addresses of many virtual functions (ARI)."""
    unassigned_vf_bars: tuple[int, ...] = ()
    """The BARs of its virtual functions for which the kernel found no addresses."""
    tsm: DeviceSecurity | None = None
    """Its state for confidential guests; None if the kernel has none."""

    @property
    def short_name(self) -> str:
        """Maker and marketing name, e.g. `NVIDIA A40`."""
        kinds = (CLASS_DISPLAY, CLASS_ACCELERATOR, CLASS_NETWORK)
        has_marketing_name = self.class_code.startswith(kinds) or self.is_nvswitch
        return short_name(self.name, has_marketing_name=has_marketing_name)

    @property
    def identity(self) -> DeviceIdentity:
        """The identity that must still match when a plan about this function is carried out."""
        return DeviceIdentity(
            self.address,
            self.vendor_id,
            self.device_id,
            self.subsystem_id,
            self.class_code,
            self.bridge_path,
            self.serial,
        )

    @property
    def has_lost_power(self) -> bool:
        """Whether it is in D3cold although it is awake or failed to wake up."""
        return self.power_state == "D3cold" and self.runtime_status in ("active", "error")

    @property
    def bridges(self) -> tuple[str, ...]:
        """The root complex and the bridges above it, `pci0000:00` and `0000:00:03.0`.

        The device of a host bridge may be below another one, of a device tree or of Hyper-V
        (devm_pci_alloc_host_bridge in drivers/pci/probe.c).
        """
        parts = tuple(self.bridge_path.split("/"))
        roots = (number for number, part in enumerate(parts) if _ROOT_COMPLEX.fullmatch(part))
        return parts[next(roots, 0) :]

    @property
    def is_on_root_bus(self) -> bool:
        """Whether no bridge is above it: the last part is a root complex, e.g. one of VMD."""
        *above, last = self.bridges
        return not above or _ROOT_COMPLEX.fullmatch(last) is not None

    @property
    def is_bridge(self) -> bool:
        """By header type, or by class for an endpoint's header (host and ISA bridges)."""
        if self.header_type not in (None, HEADER_ENDPOINT):
            return True
        return self.class_code.startswith(CLASS_BRIDGE) and not self.class_code.startswith(
            CLASS_OTHER_BRIDGE
        )

    @property
    def is_denied(self) -> bool:
        """Whether vfio-pci denies it by default (vfio_pci_dev_in_denylist)."""
        return self.vendor_id == _INTEL and self.device_id in _DENIED

    @property
    def is_on_vfio(self) -> bool:
        """Whether it is bound to vfio-pci or one of its variants."""
        return is_vfio_driver(self.driver)

    @property
    def is_for_guests(self) -> bool:
        """Whether its driver, VFIO's or a vendor's, offers it to guests."""
        return self.is_on_vfio or self.vfio_device is not None

    @property
    def is_stuck_without_driver(self) -> bool:
        """Whether the kernel is stuck in a call that may be the removal of a driver of VFIO.

        The link to the driver is gone by then (__device_release_driver in drivers/base/dd.c), and
        so is vfio-dev in Linux 6.12, not in 6.1 (vfio_unregister_group_dev in
        drivers/vfio/vfio_main.c); the node of the group remains.
        """
        return self.stuck is not None and self.driver is None

    @property
    def is_graphics_or_accelerator(self) -> bool:
        """Display controllers, processing accelerators, NPUs and NVSwitches."""
        is_gpu = self.class_code.startswith((CLASS_DISPLAY, CLASS_ACCELERATOR)) or self.is_npu
        return (is_gpu and not self.is_bridge) or self.is_nvswitch

    @property
    def is_muxless(self) -> bool:
        """Whether it is a GeForce without outputs, as in laptops whose display another GPU has."""
        is_3d = self.class_code.startswith(_CLASS_3D)
        return is_3d and self.vendor_id == "10de" and "GeForce" in self.name

    @property
    def is_npu(self) -> bool:
        """Whether it is an accelerator of another class: of AMD's NPUs, or with a node of accel."""
        is_known = self.vendor_id == _AMD and self.device_id in _AMD_NPUS
        return is_known or any(node.startswith("/dev/accel/") for node in self.nodes)

    @property
    def framebuffers(self) -> tuple[str, ...]:
        """The firmware's framebuffers in its memory, e.g. `BOOTFB` and `simpledrm`."""
        signs = (sign.partition(IN_ITS_MEMORY) for sign in self.display_signs)
        return tuple(name for name, is_one, _ in signs if is_one)

    @property
    def is_primary_display(self) -> bool:
        """Whether it shows the console by more than the screen of a program, as second cards do."""
        of_programs = (sign.endswith(IS_MASTER) for sign in self.display_signs)
        return self.is_boot_display and not (self.display_signs and all(of_programs))

    @property
    def is_nvswitch(self) -> bool:
        """Whether it is an NVSwitch, which connects GPUs and is not a GPU."""
        is_other = self.class_code.startswith(CLASS_OTHER_BRIDGE)
        return is_other and self.vendor_id == "10de" and not self.is_bridge

    def index_of_function(self, address: PciAddress) -> int | None:
        """The index of its virtual function with an address, existing or not; None if none has it.

        See pci_iov_virtfn_bus and pci_iov_virtfn_devfn (drivers/pci/iov.c).
        """
        offset, stride = self.sriov_offset, self.sriov_stride
        if self.sriov_totalvfs == 1:
            stride = 1  # which then has no meaning
        if not offset or not stride or address.domain != self.address.domain:
            return None
        index, rest = divmod(address.routing_id - self.address.routing_id - offset, stride)
        return index if not rest and 0 <= index < (self.sriov_totalvfs or 0) else None

    def __str__(self) -> str:
        """Address and name."""
        return f"{self.address} ({self.name})"


@lru_cache(maxsize=1 << 13)
def pci_device(address: PciAddress) -> HostPath:
    """The directory of a PCI function."""
    return PCI_DEVICES / str(address)


def vfio_group_node_text(group: int | None, address: PciAddress) -> str:
    """The node of a function's IOMMU group in a shell command, also if its number is unknown."""
    if group is not None:
        return vfio_group_node(group)
    return f"{VFIO_NODES}/$(basename $(readlink {pci_device(address)}/iommu_group))"
