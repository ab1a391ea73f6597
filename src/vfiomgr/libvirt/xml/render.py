"""Render libvirt's XML with the templates of templates/libvirt, one per element."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

from vfiomgr.documents.text import resource_directory
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.libvirt.desktop import KVMFR, LOOKING_GLASS
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import format_cpulist

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from vfiomgr.guests.model import GuestAddress
    from vfiomgr.libvirt.build.model import DomainPlan, DomainRequest
    from vfiomgr.libvirt.model import DomainHostdev, GuestHostdev

_LETTERS = 26
_CONTROL = expression(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_PREFIXES = {"virtio": "vd", "sata": "sd", "scsi": "sd"}


def hostdev(planned: GuestHostdev) -> str:
    """The element of one function or mediated device."""
    return _render(f"hostdev-{planned.device.kind}", device=planned.device, title=planned.title)


def hostdev_source(device: DomainHostdev) -> str:
    """The element that identifies a device in a domain for libvirt."""
    return _render("hostdev-source", hostdev=device)


def node_mdev(uuid: str, parent: str, type_id: str) -> str:
    """A mediated device for nodeDeviceDefineXML; `parent` is libvirt's name for it."""
    return _render("nodedev-mdev", uuid=uuid, parent=parent, type=type_id)


def domain(plan: DomainPlan, *, with_reasons: bool = False) -> str:
    """A complete domain; `with_reasons` adds each part's reason as a comment before it."""
    return _render(
        "domain",
        plan=plan,
        request=plan.request,
        elements=_explained(plan, _elements(plan), with_reasons=with_reasons),
        devices=_explained(plan, _devices(plan), with_reasons=with_reasons),
        last=_explained(plan, _last(plan), with_reasons=with_reasons),
    )


def _elements(plan: DomainPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The parts before the devices, each with its name in the plan."""
    request = plan.request

    def part(name: str) -> str:
        return _render(name, plan=plan, request=request, cells_with_memory=_cells_with_memory(plan))

    yield part("memory"), ("memory",)
    if request.hugepage_bytes or request.is_locked:
        yield part("memory-backing"), ()
    if plan.hard_limit_bytes is not None:
        yield part("memtune"), ("memtune",)
    yield part("vcpu"), ()
    if plan.has_iommufd:
        yield part("iommufd"), ("iommufd",)
    if plan.has_io_thread:
        yield part("iothreads"), ()
    if plan.cpus.pins:
        yield part("cputune"), ("pins",)
    if plan.memory.host_nodes:
        yield part("numatune"), ("nodes",)
    yield part("os"), ("firmware",)
    yield part("features"), ("features",)
    cells = tuple(f"cell {entry.cell.number}" for entry in plan.memory.cells)
    yield part("cpu"), ("cpu", "maxphysaddr", *cells)
    if request.is_windows:
        yield part("clock"), ()
    if request.launch_security:
        yield part("launch-security"), ("launch",)


def _cells_with_memory(plan: DomainPlan) -> tuple[int, ...]:
    return tuple(entry.cell.number for entry in plan.memory.cells if entry.cell.memory_bytes)


def _devices(plan: DomainPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    request = plan.request
    for controller in plan.controllers:
        parts = (f"bus {controller.index}",) if controller.index else ("hole",)
        yield _render("controller", device=controller), parts
    yield _render("usb"), ()
    if request.cdroms and plan.is_arm:
        yield _render("scsi"), ()
    targets = _targets(request)
    for number, disk in enumerate(request.disks):
        order = plan.boot_order(f"disk {number}")
        bus, target = request.bus_of(disk), targets[number]
        has_thread = plan.has_io_thread and bus == "virtio"
        element = _render("disk", disk=disk, target=target, bus=bus, order=order, own=has_thread)
        yield element, ()
    for number, path in enumerate(request.cdroms):
        order, target = plan.boot_order(f"cdrom {number}"), _target(plan.cdrom_bus, number)
        yield _render("cdrom", path=path, target=target, bus=plan.cdrom_bus, order=order), ()
    for number, network in enumerate(request.networks):
        order = plan.boot_order(f"network {number}")
        model = request.model_of(network)
        is_teamed = network.alias is not None and network.alias in plan.partners
        element = _render("network", network=network, model=model, order=order, is_teamed=is_teamed)
        yield element, ()
    yield _render("serial"), ()
    yield from _screen(plan)
    for planned in plan.hostdevs:
        yield hostdev(planned), (f"device {planned.device.name}",)
    for device in request.usb:
        yield _render("usb-device", device=device), ()
    if request.has_tpm:
        yield _render("tpm", plan=plan), ()
    yield _render("balloon"), ()
    yield from _iommus(plan)


def _screen(plan: DomainPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What shows the guest, and its input and sound.

    A tablet is left out beside Looking Glass, which moves the pointer by distances.
    """
    request, glass = plan.request, plan.request.looking_glass
    for given in request.evdev:
        yield _render("evdev", given=given), ()
    if request.graphics != "none":
        if glass is None and not request.evdev:
            yield _render("pointer"), ()
        yield _render("graphics", kind=request.graphics), ()
    if request.has_sound:
        yield _render("sound", audio=request.audio), ()
    options = [wanted.options for wanted in request.devices]
    shows_device = any(one.display or one.has_vga for one in options)
    usual = "virtio" if plan.is_arm else "vga"
    is_without = request.graphics == "none" or shows_device or request.video == "none"
    yield _render("video", model="none" if is_without else usual), ()
    if glass is not None and not glass.is_kvmfr:
        yield _render("shmem", glass=glass, label=LOOKING_GLASS), ("looking-glass",)


def _iommus(plan: DomainPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    if plan.iommu is not None:
        yield _render("iommu", plan=plan), ("iommu",)
    for smmu in plan.smmus:
        yield _render("smmuv3", smmu=smmu, request=plan.request), ("iommu",)


def _last(plan: DomainPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The parts for QEMU, in their own namespace."""
    changed = [planned for planned in plan.hostdevs if planned.properties]
    if changed:
        yield _render("override", changed=changed), ()
    glass = plan.request.looking_glass
    kvmfr = glass if glass is not None and glass.is_kvmfr else None
    if plan.cpus.aperture_mib is not None or kvmfr is not None:
        element = _render("commandline", plan=plan, kvmfr=kvmfr, node=KVMFR, label=LOOKING_GLASS)
        yield element, ("fw_cfg", "looking-glass")


def _explained(
    plan: DomainPlan, elements: Iterator[tuple[str, tuple[str, ...]]], *, with_reasons: bool
) -> list[object]:
    """The rendered elements, each after its reasons."""
    from markupsafe import Markup  # noqa: PLC0415 - as jinja2

    texts: list[object] = []
    for element, parts in elements:
        reasons = [plan.why(part) for part in parts] if with_reasons else []
        texts += [Markup(f"<!-- {_comment(reason)} -->") for reason in reasons if reason]  # noqa: S704 - a comment has no markup
        texts.append(Markup(element.rstrip("\n")))  # noqa: S704 - rendered above, and escaped there
    return texts


def _targets(request: DomainRequest) -> list[str]:
    """The names of the disks, counted on each bus; CD-ROMs come first on SATA."""
    free = {"virtio": count(), "sata": count(len(request.cdroms))}
    return [_target(bus, next(free[bus])) for bus in map(request.bus_of, request.disks)]


def _target(bus: str, number: int) -> str:
    """`vda`, …, `vdz`, `vdaa`, …; of SATA `sda`, …."""
    name = ""
    while number >= 0:
        number, letter = divmod(number, _LETTERS)
        name = chr(ord("a") + letter) + name
        number -= 1
    return f"{_PREFIXES[bus]}{name}"


def _render(name: str, **values: object) -> str:
    return _environment().get_template(f"{name}.xml.j2").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - slow

    environment = Environment(
        loader=FileSystemLoader(f"{resource_directory('templates')}/libvirt"),
        undefined=StrictUndefined,
        autoescape=True,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_without_controls,
    )
    environment.filters["comment"] = _comment
    environment.filters["numbers"] = format_cpulist
    environment.filters["place"] = _place
    return environment


def _without_controls(value: object) -> object:
    """Check a value for a template: reject characters that are not allowed in XML or in a line.

    Raises:
        UsageError: it has one (https://www.w3.org/TR/xml/#charsets); elements, which are Markup,
            may have line breaks.
    """
    if type(value) is str and (found := _CONTROL.search(value)) is not None:
        message = (
            f"cannot write {value!r}: the character {found[0]!r} is not allowed in a domain's XML"
        )
        raise UsageError(message, "remove it, or rename the file")
    return value


def _place(address: PciAddress | GuestAddress) -> Markup:
    """The attributes of an address of PCI, of the host or in the guest."""
    from markupsafe import Markup  # noqa: PLC0415 - as jinja2

    if isinstance(address, PciAddress):
        slot, last = address.device, ""
    else:
        slot = address.slot
        last = " multifunction='on'" if address.multifunction else ""
    return Markup(  # noqa: S704 - numbers
        f"domain='0x{address.domain:04x}' bus='0x{address.bus:02x}'"
        f" slot='0x{slot:02x}' function='0x{address.function:x}'{last}"
    )


def _comment(text: str) -> str:
    """The text for a comment: no two hyphens in a row, only printable characters."""
    return "".join(c for c in re.sub(r"-(?=-)", "- ", text) if c.isprintable()).rstrip("-")
