"""`vfiomgr list` and `vfiomgr show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.model.path import vfio_group_node
from vfiomgr.model.reset import COMMON_RESETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.reset import ResetMethod
    from vfiomgr.model.snapshot import HostSnapshot

_HEADINGS = ("ADDRESS", "NAME", "DRIVER", "GROUP", "NUMA", "NOTES")
_GIB = 1 << 30
_MIB = 1 << 20
_KIB = 1 << 10


@click.command("list")
@click.option(
    "--all", "every", is_flag=True, help="All PCI devices, not GPUs and accelerators alone."
)
@session_options()
@click.pass_obj
def list_devices(session: Session, *, every: bool) -> None:
    """List devices: GPUs and accelerators, or all with --all.

    \b
    Examples:
      vfiomgr list
      vfiomgr list --all --format json
    """
    host = session.host()
    devices = [d for d in host.devices if every or d.is_graphics_or_accelerator]
    if session.format != "table":
        print_document("DeviceList", {"items": devices}, session.format)
        return
    if devices:
        print_table(_HEADINGS, [_row(host, device) for device in devices])
    elif host.devices:
        note(f"no GPUs or accelerators; --all lists all {len(host.devices)} PCI devices")
    else:
        note("this host has no PCI devices")


def _row(host: HostSnapshot, device: PciDevice) -> tuple[str, ...]:
    return (
        str(device.address),
        device.name,
        or_dash(device.driver),
        or_dash(device.iommu_group),
        or_dash(device.numa_node),
        ", ".join(_notes(host, device)),
    )


def _notes(host: HostSnapshot, device: PciDevice) -> Iterator[str]:
    if device.is_boot_display:
        yield "console's display"
    if device.virtual_functions:
        yield f"{len(device.virtual_functions)} VFs"
    if device.physical_function:
        yield f"VF of {device.physical_function}"
    count = sum(vgpu.parent == str(device.address) for vgpu in host.vgpus)
    if count:
        yield f"{count} vGPU{'s' if count > 1 else ''}"
    if device.driver_override:
        yield f"driver_override {device.driver_override}"
    origin = host.origin(device)
    if origin:
        yield f"taken from {origin.state.driver or 'no driver'}"
    if not device.is_responsive:
        yield "does not answer"
    if device.stuck:
        yield "stuck in the kernel"


@click.command("show")
@click.argument("address", shell_complete=complete_address)
@session_options()
@click.pass_obj
def show(session: Session, address: str) -> None:
    """Show one device: its group and peers, driver, users, reset, power, NUMA, BARs, vGPUs.

    \b
    Examples:
      vfiomgr show 0000:04:00.0
      vfiomgr show 04:00.0 --format yaml
    """
    host = session.host(with_users=True, with_resets=True)
    device = host.device(host.parse_address(address))
    facts = _facts(host, device)
    if session.format != "table":
        print_document("Device", {**_own_facts(device), **facts}, session.format)
        return
    click.echo(str(device))
    lines = _lines(host, device, facts)
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        click.echo(f"  {label.ljust(width)}  {text}")


def _own_facts(device: PciDevice) -> dict[str, object]:
    return {name: getattr(device, name) for name in type(device).__dataclass_fields__}


def _facts(host: HostSnapshot, device: PciDevice) -> dict[str, object]:
    origin = host.origin(device)
    return {
        "group_members": [d.address for d in host.group_members(device.iommu_group)],
        "slot": [d.address for d in host.slot(device)],
        "vgpus": [v.uuid for v in host.vgpus if v.parent == str(device.address)],
        "vgpu_types": [
            t.id for p in host.vgpu_parents if p.name == str(device.address) for t in p.types
        ],
        "users": _users(host, device),
        "host_uses": [u.what for u in host.host_uses or () if u.address == device.address],
        "origin": origin.state if origin else None,
        "reset_unavailable": _resets(host, device),
        "refusal": _refusal(host, device),
    }


def _users(host: HostSnapshot, device: PciDevice) -> list[str] | None:
    """Processes that hold the device's nodes; None where they cannot be seen."""
    if host.users is None:
        return None
    nodes = frozenset(device.nodes) | host.guest_nodes(device)
    return list(dict.fromkeys(str(user) for user in host.users_of(nodes)))


def _resets(host: HostSnapshot, device: PciDevice) -> dict[ResetMethod, str]:
    """Why the function is not reset in the other ways."""
    from vfiomgr.planner.reset import unavailable  # noqa: PLC0415 - `list` needs no planner

    return unavailable(host, device)


def _refusal(host: HostSnapshot, device: PciDevice) -> str | None:
    """Why `vfiomgr bind` would refuse the device, if it would."""
    from vfiomgr.errors import Refusal  # noqa: PLC0415
    from vfiomgr.model.intent import Bind  # noqa: PLC0415
    from vfiomgr.planner import plan  # noqa: PLC0415 - `list` needs no planner

    try:
        plan(host, Bind((device.address,)))
    except Refusal as refusal:
        return refusal.message
    return None


def _lines(
    host: HostSnapshot, device: PciDevice, facts: dict[str, object]
) -> list[tuple[str, str]]:
    users = facts["users"]
    lines = [
        ("class", f"{device.class_name} [{device.class_code}]"),
        ("ids", f"{device.vendor_id}:{device.device_id}, subsystem {device.subsystem_id}"),
        ("driver", or_dash(device.driver)),
        ("driver_override", or_dash(device.driver_override)),
        ("first state", or_dash(facts["origin"])),
        ("iommu group", or_dash(device.iommu_group)),
        *(
            ("group member", f"{d} on {d.driver or 'no driver'}")
            for d in host.group_members(device.iommu_group)
            if d is not device
        ),
        ("numa node", or_dash(device.numa_node)),
        ("power", _power(device)),
        ("reset", _reset(device, facts["reset_unavailable"])),  # type: ignore[arg-type]
        *(
            ("bar", f"{bar.index}: {_size(bar.size)}{' prefetchable' * bar.is_prefetchable}")
            for bar in device.bars
            if bar.is_memory
        ),
    ]
    if device.sriov_totalvfs:
        lines.append(("vfs", f"{device.sriov_numvfs or 0} of {device.sriov_totalvfs}"))
    if device.physical_function:
        lines.append(("vf of", str(device.physical_function)))
    lines += [("vgpu", uuid) for uuid in facts["vgpus"]]  # type: ignore[attr-defined]
    lines += [("host use", what) for what in facts["host_uses"]]  # type: ignore[attr-defined]
    unseen = "unknown: only root of a running host sees every process"
    held = unseen if users is None else ", ".join(users) or "nobody"  # type: ignore[arg-type]
    lines.append(("held by", held))
    lines.append(("guest-ready", _readiness(host, device, facts["refusal"])))
    return lines


def _power(device: PciDevice) -> str:
    cold = {True: ", D3cold allowed", False: ", D3cold not allowed", None: ""}
    state, control = or_dash(device.power_state), or_dash(device.power_control)
    return f"{state}, control {control}{cold[device.d3cold_allowed]}"


def _reset(device: PciDevice, unavailable: dict[ResetMethod, str]) -> str:
    """The methods that work; of the common ones that do not, why."""
    works = " ".join(name for name in device.reset_method if name not in unavailable)
    told = [f"{name}: {unavailable[name]}" for name in COMMON_RESETS if name in unavailable]
    return "; ".join([works or "none", *told])


def _readiness(host: HostSnapshot, device: PciDevice, refusal: object) -> str:
    if device.is_on_vfio and device.iommu_group is not None and host.is_viable(device.iommu_group):
        return f"yes, as {vfio_group_node(device.iommu_group)}"
    if refusal:
        return f"no: {refusal}"
    return f"not yet: vfiomgr bind {device.address}"


def _size(size: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
