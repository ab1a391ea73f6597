"""Plans for the initramfs: it must contain the rules if it contains the driver of a function."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from vfiomgr.persistence.initramfs.model import (
    COMMANDS,
    HOOKS,
    VERIFIED,
    dracut_lines,
    hook_mode,
    render_hook,
)
from vfiomgr.persistence.model import rule_file
from vfiomgr.persistence.part import Part, bindings, replaced
from vfiomgr.persistence.steps import RebuildInitramfs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.engine.plan import Step
    from vfiomgr.paths import HostPath
    from vfiomgr.persistence.initramfs.model import Initramfs
    from vfiomgr.persistence.model import PersistedBinding
    from vfiomgr.persistence.part import Bindings
    from vfiomgr.snapshot.model import HostSnapshot

_NEW_ROOT = {
    "rpm-ostree": "the new initramfs belongs to a new deployment: reboot to use it, and upgrade "
    "with rpm-ostree, since `bootc upgrade` refuses a system that rpm-ostree changed",
    "transactional-update": "the new initramfs belongs to a new snapshot: reboot to use it, or "
    "pass --continue to further transactional-update commands",
}
"""What is not in effect at each next boot, since another deployment may be made in between."""
_BY_HAND = {
    "rpm-ostree": "run rpm-ostree status, which lists them as InitramfsEtc",
    "transactional-update": "after the reboot, run lsinitrd IMAGE, with the path in the boot entry",
}
"""How to look for the rules in the images of tools that are not VERIFIED."""


def initramfs_part(
    host: HostSnapshot, wanted: Bindings, *, rebuild: bool, is_changed: bool
) -> Part:
    """Plan the hook if the initramfs includes a driver, and the rebuild if rules change."""
    image = host.files.initramfs
    if image is None:
        return Part()
    hook = HOOKS.get(image.tool)
    if hook is not None:
        return _by_hook(host, image, hook, wanted, rebuild=rebuild, is_changed=is_changed)
    if not is_changed:
        return Part()
    if image.tool == "rpm-ostree":
        return _tracked(host, wanted, rebuild=rebuild)
    if not image.is_known:
        return _unsupported(host, image, wanted)
    brought = [binding for binding in wanted.values() if _is_brought(host, binding)]
    return Part(notes=(_of_image(brought),)) if brought else Part()


def _by_hook(  # noqa: PLR0913 - what `initramfs_part` was given, and what it found
    host: HostSnapshot,
    image: Initramfs,
    hook: HostPath,
    wanted: Bindings,
    *,
    rebuild: bool,
    is_changed: bool,
) -> Part:
    had_hook = host.files.text(hook) is not None
    needed = bool(wanted) and (had_hook or any(_is_brought(host, b) for b in wanted.values()))
    if not (needed or had_hook):
        return Part()
    text = render_hook(image.tool, wanted.values()) if needed else None
    command = COMMANDS[image.tool]
    if text is not None and not image.reads_fragments:
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        place = image.configuration or "/etc/mkinitcpio.conf"
        advice = f"add {' and '.join(lines)} to {place}, then run {' '.join(command)}"
        note = f"the initramfs includes a host driver: {advice}"
        return Part(notes=(note,) if is_changed else ())
    steps: list[Step] = [*replaced(host, hook, text, hook_mode(image.tool))]
    if not (steps or is_changed):
        return Part()
    return _rebuilt(image.tool, command, steps, rebuild=rebuild)


def _tracked(host: HostSnapshot, wanted: Bindings, *, rebuild: bool) -> Part:
    """Have rpm-ostree add the rules to the initramfs of each deployment, or no longer.

    A rule alone keeps host drivers away: it sets driver_override; the module is loaded later. If a
    tracked file does not exist, no deployment can be made any more (initramfs.rs); to track no
    file twice, or not to track one that is not tracked, changes nothing (treefile.rs).
    """
    before = bindings(host)
    gone = sorted(before.keys() - wanted.keys())
    if not any(_is_brought(host, binding) for binding in (*before.values(), *wanted.values())):
        return Part()
    untracked = (f"--untrack={rule_file(address)}" for address in gone)
    tracked = (f"--track={rule_file(address)}" for address in sorted(wanted))
    command = (*COMMANDS["rpm-ostree"], *untracked, *tracked)
    part = _rebuilt("rpm-ostree", command, (), rebuild=rebuild)
    if rebuild or not gone:
        return part
    told = "rpm-ostree cannot deploy anything while it tracks a file that does not exist"
    return part.with_notes((told,))


def _rebuilt(tool: str, command: Sequence[str], steps: Iterable[Step], *, rebuild: bool) -> Part:
    if rebuild:
        told = _NEW_ROOT.get(tool)
        notes = () if told is None else (told,)
        if tool not in VERIFIED:
            what = "vfiomgr does not verify that the new initramfs contains the rules"
            notes = (*notes, f"{what}: to look for them, {_BY_HAND[tool]}")
        return Part((*steps, RebuildInitramfs(tuple(command))), notes)
    how = f"rebuild it with {shlex.join(command)}"
    return Part(
        tuple(steps), (f"the initramfs must include the rules: {how}, or pass --update-initramfs",)
    )


def _of_image(brought: Sequence[PersistedBinding]) -> str:
    """What to change in the image of a bootc host, whose initramfs is built with the image."""
    files = " ".join(rule_file(binding.address) for binding in brought)
    lines = " and ".join(dracut_lines(brought).splitlines())
    return (
        "the initramfs includes a host driver, and belongs to the bootc image: when the image is "
        f"built, copy {files} into it, write {lines} to /usr/lib/dracut/dracut.conf.d/"
        "90-vfiomgr.conf, and run dracut"
    )


def _unsupported(host: HostSnapshot, image: Initramfs, wanted: Bindings) -> Part:
    """What to do if vfiomgr does not know what a tool includes.

    Hooks for other tools are removed: they name rules that may not exist any more.
    """
    hooks = {hook: hook_mode(tool) for tool, hook in HOOKS.items()}
    steps = [step for hook, mode in hooks.items() for step in replaced(host, hook, None, mode)]
    if wanted:
        files = " ".join(rule_file(address) for address in sorted(wanted))
        note = (
            "cannot tell whether the initramfs includes a host driver: "
            f"{image.tool} is not supported. If it does, leave the driver out, or add {files}; "
            "then rebuild it"
        )
    else:
        note = f"{image.tool} is not supported: rebuild the initramfs if it includes removed rules"
    return Part(tuple(steps), (note,))


def _is_brought(host: HostSnapshot, binding: PersistedBinding) -> bool:
    """Whether the initramfs includes the function's host driver or its VFIO driver."""
    image = host.files.initramfs
    return image is not None and (
        image.brings(_host_module(host, binding), binding.device.class_code)
        or binding.module in image.modules
    )


def _host_module(host: HostSnapshot, binding: PersistedBinding) -> str | None:
    """The module of the function's host driver."""
    device = next((d for d in host.devices if d.address == binding.address), None)
    origin = None if device is None else host.origin(device)
    return origin.driver_module if origin else device.driver_module if device else None
