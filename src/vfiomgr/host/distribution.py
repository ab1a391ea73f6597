"""Which distribution a host runs, and with which tools it is administered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.text import exists, text_of
from vfiomgr.model.readiness import Distribution

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_RELEASES = ("/etc/os-release", "/usr/lib/os-release")
_PLACES = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
_TOOLS = (
    "proxmox-boot-tool",
    "rpm-ostree",
    "kernelstub",
    "grubby",
    "update-grub",
    "grub2-mkconfig",
    "grub-mkconfig",
    "bootctl",
    "update-initramfs",
    "dracut",
    "mkinitcpio",
    "apt-get",
    "dnf",
    "zypper",
    "pacman",
)
_KERNEL_COMMAND_LINE = "/etc/kernel/cmdline"
"""What kernel-install and proxmox-boot-tool give to new boot entries."""


def read_distribution(tree: HostTree) -> Distribution | None:
    """Of os-release(5); None where the host has none."""
    text = next((t for place in _RELEASES if (t := text_of(tree, place))), None)
    if text is None:
        return None
    fields = {
        key.strip(): value.strip().strip("\"'")
        for key, _, value in (line.partition("=") for line in text.splitlines())
    }
    tools = [t for t in _TOOLS if any(exists(tree, f"{place}/{t}") for place in _PLACES)]
    if exists(tree, _KERNEL_COMMAND_LINE):
        tools.append(_KERNEL_COMMAND_LINE)
    identifier = fields.get("ID") or "linux"
    return Distribution(
        id=identifier,
        name=fields.get("PRETTY_NAME") or fields.get("NAME") or identifier,
        tools=tuple(tools),
    )
