"""Perform steps on files, node owners, kernel modules and the initramfs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from errno import EACCES, EBUSY, EDQUOT, ENOSPC, EPERM, EROFS
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.registry import performs
from vfiomgr.errors import HostError
from vfiomgr.host import selinux, udev
from vfiomgr.paths import SCRIPT, HostPath
from vfiomgr.pci import drivers
from vfiomgr.pci.iommu import group_number
from vfiomgr.pci.model import pci_device
from vfiomgr.persistence import installed_layout
from vfiomgr.persistence.facts import has_systemd, read_preset_image
from vfiomgr.persistence.model import COMMANDS, HOOKS, RULES, UNIT, UNITS, VERIFIED, is_rule_file
from vfiomgr.persistence.steps import LoadModule, RebuildInitramfs, ReplaceFile, SetNodeAccess

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_LISTING = 60.0
"""Seconds to unpack an image and list it."""
_UNIT_DIRECTORIES = frozenset({UNITS, installed_layout.WANTED.parent, UNITS / "timers.target.d"})
"""The directories of systemd units and drop-ins."""


@performs(SetNodeAccess)
def set_node_access(tree: HostTree, step: SetNodeAccess) -> None:
    """Set the owner of the existing nodes.

    Raises:
        HostError: a node has another owner afterwards.
    """
    for node in _nodes(tree, step):
        if tree.access(node) == step.after:
            continue
        tree.change_access(node, step.after)
        if tree.access(node) not in (step.after, None):
            message = f"cannot set the owner of {node} to {step.after}: it is {tree.access(node)}"
            raise HostError(message, "check whether a udev rule sets another owner")


def _nodes(tree: HostTree, step: SetNodeAccess) -> Iterator[paths.HostPath]:
    """The VFIO nodes of a function; none if it is back on a host driver."""
    device = pci_device(step.device.address)
    nodes = [paths.VFIO_CDEVS / name for name in tree.children(device / "vfio-dev")]
    group = group_number(tree, device) if step.group is None else step.group
    if group is not None:
        nodes.append(paths.vfio_group_node(group))
    return (node for node in nodes if tree.exists(node))


_PATIENCE = 10.0
"""Seconds for systemd or udevd to reload."""
_REMEDY = "check dmesg, and that the file system is mounted and writable"
_ROOM = "free space on its file system, then run the command again"
_LOCKED = "check that it is not immutable (lsattr), then run the command again"
_REMEDIES = {
    EBUSY: "it is a mount point (findmnt): change the source of the mount",
    ENOSPC: _ROOM,
    EDQUOT: _ROOM,
    EROFS: "its file system is read-only: remount it, or change its source image",
    EACCES: _LOCKED,
    EPERM: _LOCKED,
}


@performs(ReplaceFile)
def replace_file(tree: HostTree, step: ReplaceFile) -> None:
    """Replace the text of a file; refuse if someone else changed it."""
    target = HostPath(step.path)
    current = tree.read_text(target)
    if current not in (step.before, step.after):
        message = f"{target} was changed by another program during this run"
        raise HostError(message, "check the file, then run the command again")
    try:
        if step.after is None:
            tree.remove(target)
        elif current != step.after:
            tree.make_directory(target.parent)
            tree.replace(target, step.after.encode(), step.mode)
        else:
            tree.remove_leftovers(target)
    except OSError as error:
        what = "remove" if step.after is None else "write"
        message = f"cannot {what} {target}: {error.strerror or error}"
        raise HostError(message, _REMEDIES.get(error.errno or 0, _REMEDY)) from error
    if tree.read_text(target) != step.after:
        message = f"cannot write {target}: its content differs afterwards"
        raise HostError(message, _REMEDY)
    if target == SCRIPT and step.after is not None:
        _label_hook(tree)
    _tell_readers(tree, target, is_there=step.after is not None)


def _label_hook(tree: HostTree) -> None:
    """Give libvirt's hook and its directories the types of the SELinux policy.

    A new file has the type of its directory, which is wrong if a program made that without
    restorecon (ublue-os/bazzite #4246). A failure only causes a warning.
    """
    if not tree.is_machine or not selinux.is_enabled(tree):
        return
    command = ("restorecon", SCRIPT.parent.parent, SCRIPT.parent, SCRIPT)
    trouble = ""
    try:
        tree.call(*command, limit=_PATIENCE)
    except HostError as error:
        trouble = error.message
    else:
        found = selinux.type_of(tree, SCRIPT)
        is_known = tree.exists(selinux.boolean_file(selinux.HOOKS_BOOLEAN))
        if is_known and found != selinux.HOOK_TYPE:
            trouble = f"its type is {found or 'not readable'}, not {selinux.HOOK_TYPE}"
    if trouble:
        warnings.warn(
            f"{SCRIPT} is written, but its SELinux label could not be restored: {trouble}; run "
            f"{' '.join(command)}",
            stacklevel=2,
        )


@performs(RebuildInitramfs)
def rebuild_initramfs(tree: HostTree, step: RebuildInitramfs) -> None:
    """Run the tool that rebuilds the initramfs, and look for the rules in the image."""
    if not tree.is_machine:
        message = f"cannot rebuild the initramfs of {tree.root}: it is not the running host"
        raise HostError(message, f"run on that host: {' '.join(step.command)}")
    tree.call(*step.command, limit=None)  # whoever runs the step has a deadline
    for tool in VERIFIED:
        if COMMANDS[tool] == step.command and tree.exists(HOOKS[tool]):
            _verify_image(tree, tool)


def _verify_image(tree: HostTree, tool: str) -> None:
    """Warn about rules that the image of the running kernel lacks, or that it cannot be listed.

    Another tool may have built it, e.g. one that vfiomgr does not know.
    """
    command, trouble = _listing(tree, tool)
    shown = " ".join(command or ())
    answer = tree.ask(command, _LISTING) if command else None
    rules = [name for name in tree.children(RULES) if is_rule_file(name)]
    if answer is None or answer.status:
        sought = ", ".join(str(RULES / name) for name in rules)
        if not trouble:
            trouble = f"{shown} was not found or did not end within {_LISTING:g} seconds"
            if answer is not None:
                said = " ".join(answer.error.split()) or "no message"
                trouble = f"{shown} ended with {answer.status}: {said}"
            trouble += f"; run {shown} manually"
        warnings.warn(
            f"the new initramfs was not verified: {trouble}, and look for {sought}", stacklevel=2
        )
        return
    missing = [str(RULES / name) for name in rules if name not in answer.output]
    if missing:
        warnings.warn(
            f"the new initramfs does not contain {', '.join(missing)}: at boot, the host driver "
            f"may take the device first; see {shown}, and which tool builds the initramfs",
            stacklevel=2,
        )


def _listing(tree: HostTree, tool: str) -> tuple[tuple[str, ...] | None, str]:
    """The command that lists the image of the running kernel; None with the reason and a remedy."""
    release = tree.read(HostPath("/proc/sys/kernel/osrelease")) or ""
    if tool == "initramfs-tools":
        return ("lsinitramfs", f"/boot/initrd.img-{release}"), ""
    if tool == "dracut":
        return ("lsinitrd", "--kver", release), ""
    image = read_preset_image(tree, release)
    if image is not None:
        return ("lsinitcpio", image), ""
    if not tree.exists(HostPath(f"/usr/lib/modules/{release}")):
        gone = f"the modules of kernel {release} are gone (it was upgraded)"
        return None, f"{gone}: reboot, then list the image of the new kernel with lsinitcpio"
    unnamed = f"no preset in /etc/mkinitcpio.d names the image of kernel {release}"
    return None, f"{unnamed}: list it with lsinitcpio"


def _tell_readers(tree: HostTree, target: HostPath, *, is_there: bool) -> None:
    """Make udevd or systemd reload the file; a failure only causes a warning.

    udevd notices changes itself within three seconds; systemd reads them at the next boot.
    """
    state = "written" if is_there else "removed"
    for tell in _readers(tree, target, is_there=is_there):
        try:
            tell()
        except HostError as error:
            text = f"{target} is {state}, but could not be reloaded: {error.message}"
            warnings.warn(f"{text}; {error.hint}", stacklevel=2)


def _readers(tree: HostTree, target: HostPath, *, is_there: bool) -> Iterator[Callable[[], None]]:
    """The commands that reload a file on this machine."""
    if not tree.is_machine:
        return
    if target.parent == RULES:
        yield partial(udev.reload_rules, tree, _PATIENCE)
    elif target == UNIT and has_systemd(tree):
        systemctl = partial(tree.call, "systemctl", limit=_PATIENCE)
        if not is_there:
            yield partial(systemctl, "--no-block", "stop", UNIT.name)
        yield partial(systemctl, "daemon-reload")
        if is_there:
            yield partial(systemctl, "--no-block", "start", UNIT.name)
    elif target.parent in _UNIT_DIRECTORIES and has_systemd(tree):
        systemctl = partial(tree.call, "systemctl", limit=_PATIENCE)
        is_timer = target.name.endswith(".timer")
        is_running = is_timer or target == installed_layout.WATCH
        if is_running and not is_there:
            yield partial(systemctl, "--no-block", "stop", target.name)
        yield partial(systemctl, "daemon-reload")  # what else they start is for the next boot
        if is_running and is_there:
            verb = "restart" if is_timer else "try-restart"
            yield partial(systemctl, "--no-block", verb, target.name)


@performs(LoadModule)
def load_module(tree: HostTree, step: LoadModule) -> None:
    """Load the module and verify that it provides the driver."""
    if not tree.exists(paths.PCI_DRIVERS / step.driver):
        tree.load_module(step.module)
    if not tree.exists(paths.PCI_DRIVERS / step.driver):
        brought = drivers.driver_of_module(tree, step.module)
        other = f" but {brought}" if brought else ""
        message = (
            f"the module {step.module} is loaded but does not provide the driver "
            f"{step.driver}{other}"
        )
        raise HostError(
            message,
            "run the command again, or choose another driver (--driver; in a layout: driver)",
        )
