"""The kernel of a host and its processors: the facet `host.kernel`."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Literal

from vfiomgr.expressions import expression
from vfiomgr.paths import ACPI_TABLES, BOOT_ID, MODULE_DIRECTORIES, HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_WORD = expression(r'(?:[^\s"]|"[^"]*"?)+')
_PARTS = expression(r"(?m)^processor\s*: (\d+)\n(?:.+\n)*?CPU part\s*: (\w+)")
_DEVICE_TREE = HostPath("/proc/device-tree")
_VENDOR = HostPath("/sys/class/dmi/id/sys_vendor")
_RELEASE = HostPath("/proc/sys/kernel/osrelease")
_ARCHITECTURES = (
    ("flags", "x86_64"),
    ("CPU implementer", "aarch64"),
    ("isa", "riscv64"),
    ("cpu", "ppc64le"),
)
"""Keys of /proc/cpuinfo that identify a kind of CPU (arch/*/kernel: show_cpuinfo, c_show)."""
_BY_TABLE = {"DMAR": "x86_64", "IVRS": "x86_64", "IORT": "aarch64", "GTDT": "aarch64"}
"""ACPI tables of one architecture: Arm's are for its IOMMUs and its timers (drivers/acpi/arm64)."""
_BY_RELEASE = {
    "amd64": "x86_64",
    "x86_64": "x86_64",
    "arm64": "aarch64",
    "aarch64": "aarch64",
    "riscv64": "riscv64",
    "ppc64le": "ppc64le",
    "powerpc64le": "ppc64le",
}
"""Words in the releases of distributions' kernels, as in `6.1.0-13-arm64`."""


class KernelFacts(
    Value, rename={"release": "kernel_release", "command_line": "kernel_command_line"}
):
    """The running kernel and its processors."""

    release: str | None
    command_line: str | None
    boot_id: str | None
    cpu_vendor: str | None
    cpu_address_bits: int | None = None
    """The physical address width of an x86 CPU; None for other CPUs."""
    architecture: str | None = None
    """The CPU architecture in libvirt's terms: `x86_64`, `aarch64`; None if unknown."""
    runs_on: Literal["xen", "guest"] | None = None
    """`xen`: it controls a Xen host, as dom0; `guest`: in a virtual machine; None: neither seen."""
    cpu_virtualizes: bool | None = None
    """Whether an x86 CPU shows vmx or svm; None for other CPUs."""
    compatible: tuple[str, ...] = ()
    """What the device tree calls the machine: the board first, then its SoC."""
    machine_vendor: str | None = None
    """The vendor of the machine as its firmware reports it (DMI)."""
    cpu_parts: dict[str, tuple[int, ...]] = {}  # noqa: RUF012 - msgspec copies it
    """CPUs of an ARM host by the part number of their cores, e.g. `0xd0b`."""
    has_device_tree: bool = False
    """Whether a device tree describes the machine, and no ACPI tables of a firmware."""

    @property
    def version(self) -> Version | None:
        """The version of the kernel, if it is known."""
        release = self.release or ""
        return Version.parse(release) if release[:1].isdecimal() else None

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command line."""
        return tuple(_WORD.findall(self.command_line or ""))


class Parameter(Value):
    """A parameter of the kernel or of a module, as in `vfio-pci.ids=10de:2684`."""

    word: str
    value: str
    """Without quotes; empty if there is none."""


def parameters(text: str | None, name: str) -> tuple[Parameter, ...]:
    """The parameters of this name on a kernel command line or in the arguments of a module.

    Dashes and underscores in names are the same, and quotes may be around a value or all
    (parameq in kernel/params.c, next_arg in lib/cmdline.c).
    """
    words = _WORD.findall(text or "")
    pairs = ((word, *word.replace('"', "").partition("=")) for word in words)
    wanted = name.replace("-", "_")
    return tuple(
        Parameter(word, value) for word, key, _, value in pairs if key.replace("-", "_") == wanted
    )


def read_kernel(tree: HostTree) -> KernelFacts:
    """Read the facet."""
    text, vendor = tree.read(HostPath("/proc/cpuinfo")) or "", tree.read(_VENDOR)
    first = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    cpu = {key.strip(): value.strip() for key, _, value in pairs}
    return KernelFacts(
        release=tree.read(_RELEASE),
        command_line=tree.read(HostPath("/proc/cmdline")),
        boot_id=tree.read(BOOT_ID),
        cpu_vendor=cpu.get("vendor_id"),
        cpu_address_bits=_address_bits(cpu),
        architecture=_architecture(tree, cpu),
        runs_on=_runs_on(tree, cpu, vendor),
        cpu_virtualizes=not {"vmx", "svm"}.isdisjoint(cpu["flags"].split())
        if "flags" in cpu
        else None,
        compatible=tuple((tree.read(_DEVICE_TREE / "compatible") or "").strip("\0").split("\0"))
        if tree.exists(_DEVICE_TREE / "compatible")
        else (),
        machine_vendor=vendor,
        cpu_parts=_cpu_parts(text),
        has_device_tree=tree.exists(_DEVICE_TREE) and not tree.exists(ACPI_TABLES),
    )


_XEN = HostPath("/sys/hypervisor")
_DOM0 = 1 << 11
"""XENFEAT_dom0 in include/xen/interface/features.h."""


def _runs_on(
    tree: HostTree, cpu: dict[str, str], vendor: str | None
) -> Literal["xen", "guest"] | None:
    """What the kernel runs on, by Xen's files, the CPU, and the vendor of the virtual machine.

    A Xen kernel of which neither file is readable is taken for dom0, as guests have few functions.
    """
    if tree.read(_XEN / "type") == "xen":
        capabilities = tree.read(HostPath("/proc/xen/capabilities"))
        features = tree.read(_XEN / "properties/features")
        has_bit = features is not None and bool(_number(features) & _DOM0)
        is_unknown = capabilities is None and features is None
        return "xen" if is_unknown or has_bit or "control_d" in (capabilities or "") else "guest"
    is_guest = "hypervisor" in cpu.get("flags", "").split()
    return "guest" if is_guest or vendor == "QEMU" else None


def _number(hexadecimal: str) -> int:
    try:
        return int(hexadecimal, 16)
    except ValueError:
        return 0


def _cpu_parts(text: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for number, part in _PARTS.findall(text):
        found[part] = (*found.get(part, ()), int(number))
    return found


def _architecture(tree: HostTree, cpu: dict[str, str]) -> str | None:
    """The CPU architecture; of a recording without CPUs, by its firmware or its kernels.

    Installed kernels only count if the running one is unknown; None if they differ.
    """
    known = next((name for key, name in _ARCHITECTURES if key in cpu), None)
    if known is not None or tree.is_live:
        return known
    running = tree.read(_RELEASE)
    releases = [running] if running else chain.from_iterable(map(tree.children, MODULE_DIRECTORIES))
    by_table = {a for table, a in _BY_TABLE.items() if tree.exists(ACPI_TABLES / table)}
    found = by_table or {a for text in releases for word, a in _BY_RELEASE.items() if word in text}
    return found.pop() if len(found) == 1 else None


def _address_bits(cpu: dict[str, str]) -> int | None:
    """From `48 bits physical, 48 bits virtual` (show_cpuinfo in arch/x86/kernel/cpu/proc.c)."""
    bits = cpu.get("address sizes", "").partition(" ")[0]
    return int(bits) if bits.isdecimal() else None
