"""The commands `vfiomgr show` and `vfiomgr snapshot`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import READING, flag, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_text, print_yaml, say, unknown
from vfiomgr.diagnostic import READ_IT, refuse_if_any
from vfiomgr.engine.host import tell_of_cut_off_runs
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.libvirt.migration.devices import migratability_of
from vfiomgr.listing import first_of
from vfiomgr.passthrough.guards import is_for_gim, unusable
from vfiomgr.passthrough.isolation import iommu_unread
from vfiomgr.passthrough.readiness_hints import BOUND_BY_CLAIM
from vfiomgr.passthrough.reset import methods_in_words
from vfiomgr.passthrough.reset import unavailable as unavailable_resets
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.bars import offered_sizes
from vfiomgr.pci.capabilities import COMMON_RESETS
from vfiomgr.pci.iommu import blockers
from vfiomgr.snapshot.completion import complete_address
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.filters import group_cell
from vfiomgr.snapshot.hardware import without_requester_ids
from vfiomgr.snapshot.named import find_device
from vfiomgr.snapshot.redaction import Redaction
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import GIB, MIB, is_uuid
from vfiomgr.vgpu.commands.active import show_active
from vfiomgr.vgpu.commands.quotas import quota_item, quota_items

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_KIB = 1 << 10
_MOST = 3
"""Lines of one kind at most, so that the output fits on a screen; JSON has all."""


@click.command("show")
@click.argument("address", shell_complete=complete_address)
@session_options(*READING)
@pass_session
def show(session: Session, address: str) -> None:
    """Show the details of a device or an active vGPU.

    The details are its IOMMU group and peers, driver, users, reset methods, power state, NUMA node,
    BARs, vGPUs, and whether ATS and PASID are enabled.

    \b
    Examples:
      vfiomgr show 0000:04:00.0
      vfiomgr show 04:00.0 --format yaml
    """
    tell_of_cut_off_runs(session)
    about = session.addresses_in((address,))
    host = session.scan(with_users=True, with_resets=True, with_guests=True, about=about)
    session.note_unknown_users(host)
    vgpu = host.vgpus.named(address) if is_uuid(address) else None
    if vgpu is not None:
        show_active(session, host, vgpu)
        return
    device = find_device(host, address)
    facts = _facts(host, device)
    if session.format != "table":
        print_document("Device", {**_own_facts(device), **facts}, session.format)
        return
    say(str(device))
    lines = _lines(host, device, facts, is_live=session.is_live)
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        say(f"  {label.ljust(width)}  {text}")


def _own_facts(device: PciDevice) -> dict[str, object]:
    return {name: getattr(device, name) for name in device.__struct_fields__}


def _facts(host: HostSnapshot, device: PciDevice) -> dict[str, object]:
    origin = host.origin(device)
    refusal = _refusal(host, device)
    binding = host.files.binding(device.address)
    is_pending = binding and binding.is_of(device.identity) and binding.driver != device.driver
    return {
        "group_members": [d.address for d in host.group_members(device.iommu_group)],
        "slot": [d.address for d in host.slot(device)],
        "vgpus": [v.name for v in host.vgpus.active if v.parent == str(device.address)],
        "vgpu_types": [
            t.id for p in host.vgpus.parents if p.name == str(device.address) for t in p.types
        ],
        "users": _users(host, device),
        "host_uses": [u.what for u in host.users.host_uses or () if u.address == device.address],
        "driver_at_next_boot": binding.driver if is_pending and binding else None,
        "origin": origin.state if origin else None,
        "reset_unavailable": unavailable_resets(host, device),
        "migration": None if device.is_bridge else migratability_of(host, device),
        "quotas": _quotas(host, device),
        "msix_vectors": host.vectors_of(device.address),
        "address_translation": host.translation_of(device),
        "cxl_type": next((c.type for c in host.cxl or () if c.address == device.address), None),
        "refusal": refusal.message if refusal else None,
        "remedy": refusal.hint if refusal else None,
    }


def _quotas(host: HostSnapshot, device: PciDevice) -> list[dict[str, object]]:
    """The quota of a virtual function; for a physical function, those of all its virtual ones."""
    known, own = host.vgpus.quotas_of(device), host.function_quotas(device)
    if known is not None:
        return quota_items(host, known)
    return [] if own is None else [quota_item(own, device.address)]


def _users(host: HostSnapshot, device: PciDevice) -> list[str] | None:
    """The pod or claim that has the function, and its processes; None if they cannot be seen."""
    pod, claim = host.pod_of(device), host.claim_of(device)
    users = host.holders(device)
    if not (pod or claim or users or host.knows_users_of(device)):
        return None
    is_named = pod is None or any(user.pod == pod for user in users)
    given = [] if is_named else [f"pod {pod}"]
    if claim:
        given.append(f"claim {claim}{_origin(host, device)}")
    return list(dict.fromkeys((*given, *map(str, users))))


def _origin(host: HostSnapshot, device: PciDevice) -> str:
    """From which driver a claim bound the function; empty if it did not."""
    claims = () if host.users.agent is None else host.users.agent.claims
    slot = {str(each.address) for each in host.slot(device)}
    found = next((each.origin for each in claims if each.device in slot), "")
    return f" ({found})" if found else ""


def _refusal(host: HostSnapshot, device: PciDevice) -> Refusal | None:
    """Why `vfiomgr bind` would refuse the device, or no guest can use it as it is bound."""
    try:
        plan(host, Bind((device.address,)))
        refuse_if_any(unusable(host, device) if device.is_on_vfio else ())
    except Refusal as refusal:
        return refusal
    return None


def _lines(
    host: HostSnapshot, device: PciDevice, facts: dict[str, object], *, is_live: bool
) -> list[tuple[str, str]]:
    return [
        ("class", f"{device.class_name} [{device.class_code}]"),
        ("ids", f"{device.vendor_id}:{device.device_id}, subsystem {device.subsystem_id}"),
        ("driver", _driver(device)),
        *_at_next_boot(facts["driver_at_next_boot"]),
        ("original driver", or_dash(facts["origin"])),
        ("IOMMU group", group_cell(host, device)),
        *_members(host, device),
        ("NUMA node", or_dash(device.numa_node)),
        ("power", _power(device)),
        ("reset", _reset(host, device)),
        ("memory", ", ".join(_bars(device)) or "-"),
        *_accelerator(host, device),
        *_virtual(host, device),
        *_several("quota", _shares(host, device)),
        *_several("vgpu", facts["vgpus"]),  # type: ignore[arg-type]
        *_for_guests(host, device),
        *_several("host use", facts["host_uses"]),  # type: ignore[arg-type]
        ("in use by", _held(host, facts["users"], is_live=is_live)),  # type: ignore[arg-type]
        *_shared(host, device),
        *_left_out(host, device),
        *_readiness(host, device, facts),
    ]


def _at_next_boot(driver: object) -> Iterator[tuple[str, str]]:
    if driver:
        yield ("at next boot", f"bound to {driver}")


def _several(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """One line for each text; if there are many, the number of the rest."""
    lines = list(texts)
    shown, more = first_of(lines, _MOST)
    yield from ((label, text) for text in (*shown, *more))


def _members(host: HostSnapshot, device: PciDevice) -> Iterator[tuple[str, str]]:
    """The other members of the IOMMU group: all of other slots, then some of the same slot."""
    label = "group member"
    slot = host.slot(device)
    others = [d for d in host.group_members(device.iommu_group) if d is not device]
    foreign = [d for d in others if d not in slot]
    yield from ((label, _on_driver(d)) for d in foreign)
    yield from _several(label, (_on_driver(d) for d in others if d in slot))


def _on_driver(device: PciDevice) -> str:
    return f"{device} on {device.driver or 'no driver'}"


def _driver(device: PciDevice) -> str:
    if device.stuck:
        return f"{or_dash(device.driver)}, stuck in the kernel: {device.stuck} has not returned"
    override = f" (driver_override {device.driver_override})" if device.driver_override else ""
    return or_dash(device.driver) + override


def _virtual(host: HostSnapshot, device: PciDevice) -> Iterator[tuple[str, str]]:
    if device.sriov_totalvfs:
        yield ("vfs", f"{device.sriov_numvfs or 0} of {device.sriov_totalvfs}")
    if device.sriov_vf_total_msix:
        yield ("MSI-X of vfs", f"{device.sriov_vf_total_msix} vectors in total")
    if device.physical_function:
        yield ("vf of", str(device.physical_function))
    vectors = host.vectors_of(device.address)
    if vectors is not None:
        yield ("MSI-X", f"{vectors} vectors")


def _for_guests(host: HostSnapshot, device: PciDevice) -> Iterator[tuple[str, str]]:
    """ATS and PASID, migration with a guest, and the state for confidential guests."""
    services = host.translation_of(device)
    if services is not None:
        width = f", {services.pasid_bits} bits" if services.pasid_bits else ""
        yield ("ATS", services.ats)
        yield ("PASID", f"{services.pasid}{width}")
    if not device.is_bridge:
        yield ("migration", str(migratability_of(host, device)))
    if device.tsm is not None:
        yield ("TSM", str(device.tsm))


_CXL = {
    1: "type 1 (caches memory of the host)",
    2: "type 2 (caches memory of the host, and has memory of its own)",
    3: "type 3 (memory)",
}


def _accelerator(host: HostSnapshot, device: PciDevice) -> Iterator[tuple[str, str]]:
    """The partitions of an AMD GPU, and what a CXL device is."""
    if device.compute_partition:
        memory = f", memory {device.memory_partition}" if device.memory_partition else ""
        yield ("partitions", f"compute {device.compute_partition}{memory}")
    yield from (("CXL", _CXL[cxl.type]) for cxl in host.cxl or () if cxl.address == device.address)


def _shares(host: HostSnapshot, device: PciDevice) -> Iterator[str]:
    """The quota of a virtual function; for a physical function, those of the existing ones."""
    own = host.function_quotas(device)
    if own is not None:
        yield str(own)
    for address in device.virtual_functions:
        quotas = host.function_quotas(host.device(address)) if host.vgpus.quotas else None
        if quotas is not None:
            yield f"{address}: {quotas}"


def _held(host: HostSnapshot, users: list[str] | None, *, is_live: bool) -> str:
    if users is None:
        return "unknown" if host.users.processes is not None else unknown(is_live=is_live)
    return ", ".join(users) or "nobody"


def _power(device: PciDevice) -> str:
    cold = {True: ", D3cold allowed", False: ", D3cold not allowed", None: ""}
    state, control = or_dash(device.power_state), or_dash(device.power_control)
    return f"{state}, control {control}{cold[device.d3cold_allowed]}"


def _reset(host: HostSnapshot, device: PciDevice) -> str:
    """The working reset methods, and why other common ones do not work."""
    reasons = unavailable_resets(host, device)
    told = [f"{name}: {reasons[name]}" for name in COMMON_RESETS if name in reasons]
    usable = methods_in_words(host, device) or "none"
    return "; ".join(["bus reset only" if usable == "bus" else usable, *told])


def _bars(device: PciDevice) -> Iterator[str]:
    for bar in device.bars:
        if bar.is_memory:
            kind = " prefetchable" if bar.is_prefetchable else ""
            sizes = "" if bar.sizes == () else f" (resizable: {offered_sizes(bar)})"
            yield f"BAR {bar.index} {_size(bar.size)}{kind}{sizes}"


def _readiness(
    host: HostSnapshot, device: PciDevice, facts: dict[str, object]
) -> Iterator[tuple[str, str]]:
    refusal = facts["refusal"]
    unread = iommu_unread(host)
    if unread:
        yield ("guest-ready", f"unknown: {'; '.join(unread)}")
        yield ("remedy", READ_IT)
    elif _is_usable(host, device):
        nodes = host.existing_nodes(device)
        is_held = host.users.open_nodes.intersection(host.guest_nodes(device))
        others = [d for d in host.group_members(device.iommu_group) if not d.is_bridge][1:]
        now = (
            " (in use: its group is assigned together, to one guest)" if is_held and others else ""
        )
        word = "nodes" if len(nodes) > 1 else "node"
        yield ("guest-ready", f"yes, VFIO {word}: {', '.join(nodes)}{now}")
    elif host.vgpus.is_vendor_function(device) and host.vgpus.is_ready_for_guests(device):
        yield ("guest-ready", f"yes, vGPU on driver {device.driver}")
    elif refusal:
        yield ("guest-ready", f"no: {refusal}".replace(f"{device} ", "it ", 1))
        yield ("remedy", str(facts["remedy"]))
    elif device.driver is None and is_for_gim(host, device):
        yield ("guest-ready", "no: the driver gim is loaded, but does not use it")
        yield ("remedy", "if guests are to get virtual functions: vfiomgr explain gim-no-sriov")
    elif host.is_on_demand(device) and not device.is_on_vfio:
        yield ("guest-ready", BOUND_BY_CLAIM)
    else:
        left = blockers(host.group_members(device.iommu_group)) if device.is_on_vfio else ()
        names = " ".join(str(each.address) for each in left or (device,))
        yield ("guest-ready", f"not yet: vfiomgr bind {names}")


def _shared(host: HostSnapshot, device: PciDevice) -> Iterator[tuple[str, str]]:
    """That the IOMMU of a SoC does not isolate functions from each other."""
    if device.iommu_group is not None and host.iommu.is_on and (soc := without_requester_ids(host)):
        weak = f"the IOMMU of {soc} ignores which function asks, and interrupts are not isolated"
        yield ("isolation", f"only for trusted guests: {weak}")


def _left_out(host: HostSnapshot, device: PciDevice) -> Iterator[tuple[str, str]]:
    """A function of the slot of a GPU that the guest of the GPU could have, and does not."""
    held = host.users.open_nodes
    if device.is_graphics_or_accelerator and held.intersection(host.guest_nodes(device)):
        for other in host.slot(device):
            if other.is_on_vfio and held.isdisjoint(host.guest_nodes(other)):
                why = "drivers may need all functions of the card"
                yield ("left out", f"{other} is not in the guest: assign it too, as {why}")


def _is_usable(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether a guest can open the function on its VFIO driver, and use it."""
    if not device.is_on_vfio or device.iommu_group is None or any(unusable(host, device)):
        return False
    return host.is_viable(device.iommu_group)


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


@click.command("snapshot")
@flag(
    "--redact",
    text="Replace serial numbers, UUIDs, MAC and IP addresses, and the names of hosts, guests, "
    "pods and users, for a public report.",
)
@session_options(*READING)
@pass_session
def snapshot(session: Session, *, redact: bool) -> None:
    """Print a snapshot of this host, for use with --snapshot.

    A snapshot contains all facts about the host as JSON or YAML, its time and the name of the host.
    With --snapshot, other commands answer from it on any machine; gzip may have compressed it.

    \b
    Examples:
      vfiomgr snapshot > host.json
      vfiomgr snapshot --redact > report.json
      vfiomgr --snapshot host.json snapshot --redact > report.json
      vfiomgr --snapshot host.json bind 04:00.0 --dry-run
    """
    host = session.scan(
        with_users=True,
        with_readiness=True,
        with_resets=True,
        with_gpu_modes=True,
        with_health=True,
        with_guests=True,
        with_programs=True,
        with_desktop=True,
        with_cores=True,
    )
    text = write_snapshot(host, Redaction() if redact else None, session.created)
    if session.format == "yaml":
        print_yaml(json.loads(text))
    else:
        print_text(text)
    missing = list(_not_included(host))
    if missing and session.snapshot is None and session.tree.is_live:
        note(f"not included: {', '.join(missing)}; run vfiomgr as root on the host")
    if redact:
        note(
            "comments and descriptions in files stay as they are: read the output before you "
            "publish it"
        )


def _not_included(host: HostSnapshot) -> Iterator[str]:
    """The facts that only root of a running host can read."""
    if host.users.processes is None:
        yield "processes"
        if host.devices and not host.reset_capabilities:
            yield "reset capabilities"
