"""Rules about limits on locked memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.snapshot.model import HostSnapshot


def memlock(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report limits on locked memory; CAP_IPC_LOCK lifts them.

    libvirt's system daemon raises the limit of each QEMU itself.
    """
    if not facts.memlock:
        return
    tight = [x for x in facts.memlock if not x.is_unlimited and x.kind != "virtualization"]
    evidence = tuple(f"{x.subject}: {x.setting} ({x.source})" for x in tight or facts.memlock)
    why = "VFIO locks all memory of a guest, and QEMU without CAP_IPC_LOCK cannot exceed the limit"
    if not tight:
        yield finding("memlock", "ok", "no relevant limit on locked memory", evidence, why)
        return
    drop_in = "LimitMEMLOCK=infinity in a drop-in of the service (systemctl edit SERVICE)"
    yield finding(
        "memlock",
        "info",
        "locked memory of guests is limited",
        evidence,
        f"{why}; guests of root and of libvirt's system daemon are not affected",
        f"for rootless Kata or QEMU of that user: {drop_in}, and memlock unlimited for the user",
    )
