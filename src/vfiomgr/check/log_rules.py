"""Rules about the kernel: its log, and faults of single releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.documents.text import parse_toml
from vfiomgr.messages.known import clause, first_address, first_group, messages_by_name
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.check.model import Readiness
    from vfiomgr.messages.known import KnownMessage, LoggedMessage
    from vfiomgr.snapshot.model import HostSnapshot


def on_host(known: KnownMessage, text: str, host: HostSnapshot) -> KnownMessage:
    """The message as the first of its cases has it that holds for a text on this host.

    Its remedy names the function that the text is about.
    """
    device = host.device_named(first_address(text))
    own = [d for d in host.devices if d.is_on_vfio and d.is_graphics_or_accelerator]
    facts = {
        "absent": device is None and bool(first_address(text) and host.devices),
        "in-use": device is not None and not device.is_on_vfio and bool(host.holders(device)),
        "laptop": bool(own) and all(d.is_muxless for d in own),
        "not-amd": device is not None and device.vendor_id != _AMD,
    }
    facts |= dict.fromkeys(host.kernel.words, True)
    case = next((each for each in known.cases if facts.get(each.when)), None)
    meaning, remedy = (case.meaning, case.remedy) if case is not None else ("", "")
    remedy = remedy or known.remedy
    named = remedy.replace("ADDRESS", _address_for(remedy, text, host))
    return replace(known, meaning=meaning or known.meaning, remedy=named)


_AMD = "1002"


def _address_for(remedy: str, text: str, host: HostSnapshot) -> str:
    """The address for commands of a remedy; a bridge only reports the errors of other devices."""
    device = host.device_named(first_address(text))
    if device is None:
        members = host.group_members(first_group(text))
        device = next((member for member in members if member.is_on_vfio), None)
    if device is None or device.is_bridge:
        return "ADDRESS"
    is_of_parent = "physical function" in remedy or "sriov set" in remedy
    return str((is_of_parent and device.physical_function) or device.address)


def kernel_log(
    host: HostSnapshot, facts: Readiness, find: Callable[..., Iterator[Diagnostic]]
) -> Iterator[Diagnostic]:
    """Report known messages about functions of this host, or about none.

    If the rules that `find` runs by name have found the cause, their finding has the remedy.
    """
    for logged in facts.kernel_log or ():
        known = messages_by_name().get(logged.name)
        if known is None or (logged.address and host.device_named(logged.address) is None):
            continue  # a snapshot of another release, or a function that was removed
        known = on_host(known, logged.text, host)
        subject = f"{logged.address}: " if logged.address else ""
        causes = (one for one in find(*known.see) if one.severity in ("blocker", "warning"))
        rules = dict.fromkeys(
            one.rule for one in causes if not one.subject or logged.address in one.subject
        )
        yield finding(
            "kernel-log",
            known.severity,
            f"{subject}{clause(known.meaning)}",
            (f"kernel log{_when(logged)}: {logged.text}",),
            f"see the finding of rule {', '.join(rules)}" if rules else "",
            "" if rules else clause(known.remedy),
            subject=logged.address,
        )


def _when(logged: LoggedMessage) -> str:
    """`, 3 times, last 120 s after boot`."""
    count = f", {counted(logged.count, 'time')}, last" if logged.count > 1 else ""
    if logged.seconds is None:
        return count.removesuffix(", last")
    return f"{count or ','} {logged.seconds} s after boot"


_RELEASE, _LARGE_PAGE = "/proc/sys/kernel/osrelease", 64 << 10


@cache
def _faults() -> tuple[dict[str, Any], ...]:
    text = (files(__package__) / "kernel_faults.toml").read_text(encoding="utf-8")
    return tuple(parse_toml(text).values())


def kernel_fault(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report a known fault of the running release, if a function is there that it affects."""
    release, own = host.kernel.release or "", [d for d in host.devices if d.is_on_vfio]
    affected = {
        "vf": [d for d in own if d.physical_function is not None],
        "gpu": [d for d in own if d.is_graphics_or_accelerator and d.reset_method == ("bus",)],
        "small-bar": [d for d in own if any(b.is_memory and b.size < _LARGE_PAGE for b in d.bars)],
        "any": host.devices[:1],
    }
    tools = facts.distribution.tools if facts.distribution is not None else ()
    pin = " (proxmox-boot-tool kernel pin RELEASE)" if "proxmox-boot-tool" in tools else ""
    for each in _faults():
        devices = affected[each["of"]]
        if not devices or not _is_of(each, host, facts):
            continue
        option = each.get("config")
        shown = f"{facts.config_source}: CONFIG_{option}=y" if option else f"{_RELEASE}: {release}"
        how = f"reported without a cause in the configuration: {each['source']}"
        yield finding(
            "kernel-fault",
            each.get("severity", "warning"),
            each["fault"] if option else f"a fault of kernel {release}: {each['fault']}",
            (shown, *(f"{d} is on VFIO" for d in devices if d in own)),
            f"reported in {each['source']}" if option else how,
            each.get("remedy")
            or "update the kernel, or boot an older one without the fault, e.g. "
            f"{each['without']}{pin}",
        )


def _is_of(fault: dict[str, Any], host: HostSnapshot, facts: Readiness) -> bool:
    """Whether a fault is one of this kernel, its configuration, its machine and its programs."""
    tools = facts.distribution.tools if facts.distribution is not None else ()
    release, machines = host.kernel.release or "", host.kernel.compatible
    return (
        ("releases" not in fault or release.startswith(tuple(fault["releases"])))
        and ("config" not in fault or facts.config.get(fault["config"]) == "y")
        and ("program" not in fault or fault["program"] in tools)
        and ("machine" not in fault or any(m.startswith(fault["machine"]) for m in machines))
    )
