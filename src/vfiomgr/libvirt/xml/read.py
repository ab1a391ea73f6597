"""Read domains from XML (https://libvirt.org/formatdomain.html).

Unknown and newer elements and attributes are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vfiomgr.documents.text import bytes_of
from vfiomgr.documents.xml_text import QEMU_NAMESPACE, Element, parse
from vfiomgr.errors import UsageError
from vfiomgr.guests.model import NumaCell
from vfiomgr.libvirt.model import (
    KVM_IOAPIC,
    NAMESPACE,
    VENDOR_ID,
    Domain,
    DomainCpu,
    DomainIommu,
    DomainLaunch,
    DomainMemory,
    HookSettings,
)
from vfiomgr.libvirt.xml.desktop import read_screen, read_shared
from vfiomgr.libvirt.xml.elements import (
    attribute_of,
    count_own_mappings,
    count_unplaced,
    is_on,
    number_of,
    read_controllers,
    read_hostdevs,
    read_nvme_disks,
    read_taken,
    read_teamed,
    set_of,
    sets_of,
    size_of,
    uuid_of,
    whole_number,
)

MOST_BYTES = 10 << 20
"""The size limit of virsh for files, too (VSH_MAX_XML_FILE of tools/vsh.h)."""
_REMEDY = "name an existing file, or - for a pipe; virsh dumpxml creates one"


def read_xml(path: str, remedy: str = _REMEDY) -> bytes:
    """Read a file as bytes, up to the size limit of a domain.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: it is larger, or never ends.
    """
    try:
        return bytes_of(path, "domain", MOST_BYTES)
    except OSError as error:
        message = f"cannot read domain {path}: {error.strerror}"
        raise UsageError(message, remedy) from None


_UNLIMITED = 9_007_199_254_740_991 * 1024
"""VIR_DOMAIN_MEMORY_PARAM_UNLIMITED, in KiB: allowed in XML, although virsh never prints it."""
_BINDING_MODES = frozenset({"", "strict", "interleave", "restrictive"})
"""Modes of numatune: `preferred` is only a preference."""
_LOCATED = (
    "metadata",
    "memory",
    "vcpu",
    "os/type",
    "currentMemory",
    "memtune/hard_limit",
    "maxMemory",
    "memoryBacking",
    "memoryBacking/hugepages",
    "numatune/memory",
    "cpu",
    "cpu/maxphysaddr",
    "cputune",
    "os/boot",
    "iommufd",
    "devices",
    "devices/iommu",
)
"""Elements whose lines appear in messages."""
_MOST_CPUS = 16_384
_MOST_BITS = 128
_MOST_CELLS = 1024


def read_domain(text: bytes, source: str) -> Domain:
    """Read a domain's XML; `source` is the file or the domain's name, for messages.

    Raises:
        InvalidDocument: it is not XML, not a domain, or a part that devices depend on is invalid.
    """
    return domain_of(parse(text, source))


def domain_of(root: Element) -> Domain:
    """Read a domain's element.

    Raises:
        InvalidDocument: as `read_domain`.
    """
    name = _name(root)
    return Domain(
        source=root.source,
        name=name,
        uuid=_uuid(root),
        kind=root.get("type"),
        machine=attribute_of(root, "os/type", "machine"),
        architecture=attribute_of(root, "os/type", "arch"),
        memory=_memory(root),
        cpu=_cpu(root),
        firmware=_firmware(root),
        hostdevs=(*read_hostdevs(root), *read_nvme_disks(root)),
        controllers=read_controllers(root),
        taken=read_taken(root),
        unplaced=count_unplaced(root),
        own_mappings=count_own_mappings(root),
        iommus=tuple(map(_iommu, root.each("devices/iommu"))),
        launch=_launch(root),
        teamed=read_teamed(root),
        has_graphics=bool(root.each("devices/graphics")),
        has_os_boot=bool(root.each("os/boot")),
        boot_orders=tuple(_boot_orders(root)),
        qemu_arguments=(*_command_line(root), *_overrides(root)),
        command_line=tuple(_command_line(root)),
        has_json_devices=not any(map(_deletes_json, root.all("capabilities", QEMU_NAMESPACE))),
        shared_memory=tuple(map(read_shared, root.each("devices/shmem"))),
        screen=read_screen(root),
        is_confined=not any(one.get("type") == "none" for one in root.each("seclabel")),
        has_iommufd=is_on(root.find("iommufd"), "enabled"),
        iommufd_group=attribute_of(root, "iommufd", "fdgroup"),
        hook=hook_settings(root),
        lines=tuple(_lines(root)),
    )


def hook_settings(root: Element) -> HookSettings | None:
    """What a domain's element enables vfiomgr's hook for; None if it does not."""
    metadata = root.find("metadata")
    marks = () if metadata is None else metadata.all("devices", NAMESPACE)
    return next(filter(None, map(settings_of, marks)), None)


def settings_of(mark: Element) -> HookSettings | None:
    """What vfiomgr's own element enables its hook for; None if it does not."""
    if mark.name != "devices" or mark.get("bind") != "yes":
        return None
    names = HookSettings.__struct_fields__
    return HookSettings(**{n: mark.get(n.replace("_", "-")) == "yes" for n in names})


def _lines(root: Element) -> Iterator[tuple[str, int]]:
    yield root.name, root.line
    for path in _LOCATED:
        found = root.find(path)
        if found is not None:
            yield path, found.line
    for found in root.all("commandline", QEMU_NAMESPACE):
        yield "qemu:commandline", found.line


def _boot_orders(root: Element) -> Iterator[int]:
    devices = root.find("devices")
    for device in () if devices is None else devices.children:
        order = next((boot.get("order") for boot in device.all("boot")), "")
        if order.isdecimal():
            yield int(order)


def _name(root: Element) -> str:
    if (root.name, root.namespace) != ("domain", None):
        message = f"<{root.tag}> is not a domain"
        root.fail(message, "start with <domain type='kvm'>; virsh dumpxml prints a domain")
    name = root.find("name")
    if name is None or not name.text.strip():
        root.fail("the domain has no name", "add <name>…</name>")
    return name.text.strip()


def _uuid(root: Element) -> str | None:
    found = root.find("uuid")
    return None if found is None else uuid_of(found, found.text)


def _memory(root: Element) -> DomainMemory:
    limit = root.find("memtune/hard_limit")
    hard_limit = None if limit is None else size_of(limit)
    current = root.find("currentMemory")
    return DomainMemory(
        total_bytes=_total_memory(root),
        hard_limit_bytes=hard_limit if hard_limit and hard_limit < _UNLIMITED else None,
        is_locked=root.find("memoryBacking/locked") is not None,
        has_hugepages=root.find("memoryBacking/hugepages") is not None,
        hugepage_bytes=tuple(
            size_of(page, attribute="size") for page in root.each("memoryBacking/hugepages/page")
        ),
        host_nodes=frozenset().union(*_bound_nodes(root)),
        cell_nodes=tuple(_sets_by(root.each("numatune/memnode"), "cellid", _MOST_CELLS, "nodeset")),
        current_bytes=None if current is None else size_of(current),
    )


def _sets_by(
    elements: Sequence[Element], number: str, most: int, attribute: str
) -> Iterator[tuple[int, frozenset[int]]]:
    """The number and the set of each element."""
    for element, found in zip(elements, sets_of(elements, attribute), strict=True):
        yield number_of(element, number, most), found


def _total_memory(root: Element) -> int:
    """`<memory>`; if it is missing, libvirt uses the sum of the cells."""
    memory = root.find("memory")
    if memory is not None:
        return size_of(memory)
    return sum(cell.memory_bytes for cell in _cells(root))


def _bound_nodes(root: Element) -> Iterator[frozenset[int]]:
    for element in (*root.each("numatune/memory"), *root.each("numatune/memnode")):
        if element.get("mode") in _BINDING_MODES:
            yield set_of(element, element.get("nodeset"))


def _cpu(root: Element) -> DomainCpu:
    count, width = root.find("vcpu"), root.find("cpu/maxphysaddr")
    is_emulated = (
        width is not None and width.get("mode") == "emulate" and "bits" in width.attributes
    )
    return DomainCpu(
        count=1 if count is None else _count(count),
        mode=attribute_of(root, "cpu", "mode"),
        physical_bits=number_of(width, "bits", _MOST_BITS) if width and is_emulated else None,
        passes_physical_bits=width is not None and width.get("mode") == "passthrough",
        physical_bits_limit=(
            number_of(width, "limit", _MOST_BITS) if width and "limit" in width.attributes else None
        ),
        pins=_pins(root, count),
        cells=tuple(_cells(root)),
        hides_kvm=is_on(root.find("features/kvm/hidden"), "state"),
        hiding=tuple(_hiding(root)),
    )


def _pins(root: Element, count: Element | None) -> tuple[tuple[int, frozenset[int]], ...]:
    """The CPUs of the host for each one of the guest; cpuset is for those without vcpupin."""
    single = tuple(_sets_by(root.each("cputune/vcpupin"), "vcpu", _MOST_CPUS, "cpuset"))
    if count is None or not count.get("cpuset"):
        return single
    alike = set_of(count, count.get("cpuset"))
    return tuple({**dict.fromkeys(range(_count(count)), alike), **dict(single)}.items())


def _hiding(root: Element) -> Iterator[str]:
    if attribute_of(root, "features/ioapic", "driver") == "kvm":
        yield KVM_IOAPIC
    if is_on(root.find("features/hyperv/vendor_id"), "state"):
        yield VENDOR_ID


def _count(element: Element) -> int:
    digits = element.text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MOST_CPUS))):
        element.fail(f"invalid number of CPUs: {digits!r}", "write e.g. <vcpu>4</vcpu>")
    return int(digits)


def _cells(root: Element) -> Iterator[NumaCell]:
    """NUMA nodes of the guest; those without a number are numbered in order."""
    cells = root.each("cpu/numa/cell")
    for position, (cell, cpus) in enumerate(zip(cells, sets_of(cells, "cpus"), strict=True)):
        yield NumaCell(
            number=number_of(cell, "id", _MOST_CPUS, position),
            memory_bytes=size_of(cell, attribute="memory") if "memory" in cell.attributes else 0,
            cpus=cpus,
        )


def _command_line(root: Element) -> Iterator[str]:
    for line in root.all("commandline", QEMU_NAMESPACE):
        yield from (argument.get("value") for argument in line.all("arg", QEMU_NAMESPACE))


def _deletes_json(capabilities: Element) -> bool:
    deleted = capabilities.all("del", QEMU_NAMESPACE)
    return any(one.get("capability") == "device.json" for one in deleted)


def _overrides(root: Element) -> Iterator[str]:
    for override in root.all("override", QEMU_NAMESPACE):
        for device in override.all("device", QEMU_NAMESPACE):
            for frontend in device.all("frontend", QEMU_NAMESPACE):
                for changed in frontend.all("property", QEMU_NAMESPACE):
                    name = f"device.{device.get('alias')}.{changed.get('name')}"
                    yield from ("-set", f"{name}={changed.get('value')}")


def _firmware(root: Element) -> str | None:
    is_flash = attribute_of(root, "os/loader", "type") == "pflash"
    return attribute_of(root, "os", "firmware") or ("efi" if is_flash else None)


def _launch(root: Element) -> DomainLaunch | None:
    found, pmu = root.find("launchSecurity"), root.find("features/pmu")
    if found is None:
        return None
    return DomainLaunch(
        line=found.line,
        kind=found.get("type"),
        has_smm=is_on(root.find("features/smm"), "state"),
        has_pmu=None if pmu is None else pmu.get("state") != "off",
        interrupts=attribute_of(root, "features/ioapic", "driver"),
        loader=attribute_of(root, "os/loader", "type"),
        has_kernel=root.find("os/kernel") is not None,
        memory_devices=tuple((d.line, d.get("model")) for d in root.each("devices/memory")),
        memory_slots=whole_number(attribute_of(root, "maxMemory", "slots") or "") or 0,
        shares_memory=attribute_of(root, "memoryBacking/access", "mode") == "shared"
        or any(cell.get("memAccess") == "shared" for cell in root.each("cpu/numa/cell")),
        is_preallocated=attribute_of(root, "memoryBacking/allocation", "mode") == "immediate",
    )


def _iommu(element: Element) -> DomainIommu:
    driver, alias = element.find("driver"), element.find("alias")
    bits = None if driver is None else number_of(driver, "aw_bits", _MOST_BITS, 0)
    return DomainIommu(
        model=element.get("model"),
        has_caching_mode=is_on(driver, "caching_mode"),
        is_accelerated=is_on(driver, "accel"),
        address_bits=bits or None,
        has_eim=is_on(driver, "eim"),
        translates_dma=driver is None or driver.get("dma_translation") != "off",
        is_eim_off=driver is not None and driver.get("eim") == "off",
        alias="" if alias is None else alias.get("name"),
        bus=None if driver is None else whole_number(driver.get("pciBus")),
        line=element.line,
    )
