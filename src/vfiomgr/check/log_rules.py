"""Rules about the kernel: its log, and faults of single releases."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.documents.text import parse_toml
from vfiomgr.messages.known import clause, messages_by_name
from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.messages.known import LoggedMessage
    from vfiomgr.snapshot.model import HostSnapshot


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
    }
    tools = facts.distribution.tools if facts.distribution is not None else ()
    pin = " (proxmox-boot-tool kernel pin RELEASE)" if "proxmox-boot-tool" in tools else ""
    for each in _faults():
        devices = affected[each["of"]]
        if devices and release.startswith(tuple(each["releases"])):
            yield finding(
                "kernel-fault",
                each.get("severity", "warning"),
                f"a fault of kernel {release}: {each['fault']}",
                (f"/proc/sys/kernel/osrelease: {release}", *(f"{d} is on VFIO" for d in devices)),
                f"reported without a cause in the configuration: {each['source']}",
                f"update the kernel, or boot an older one without the fault, e.g. "
                f"{each['without']}{pin}",
            )
