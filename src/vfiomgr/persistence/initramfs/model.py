"""The initramfs of a host: what builds it, and what makes it contain vfiomgr's rules.

Some hosts have a tool that reads a hook of vfiomgr. On image-based hosts, /usr and the initramfs
belong to a deployment, and a command of its manager changes what the next one contains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from vfiomgr.documents.text import sealed
from vfiomgr.paths import HostPath
from vfiomgr.persistence.model import rule_file
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.persistence.model import PersistedBinding


Manager = Literal["rpm-ostree", "bootc", "transactional-update"]
"""What deploys the initramfs of an image-based host."""
TOOLS: tuple[str, ...] = ("initramfs-tools", "dracut", "mkinitcpio", *get_args(Manager))

_DRACUT_HOOK = HostPath("/etc/dracut.conf.d/90-vfiomgr.conf")
_MKINITCPIO_HOOK = HostPath("/etc/mkinitcpio.conf.d/vfiomgr.conf")
HOOKS: dict[str, HostPath] = {
    "initramfs-tools": HostPath("/etc/initramfs-tools/hooks/vfiomgr"),
    "dracut": _DRACUT_HOOK,
    "transactional-update": _DRACUT_HOOK,
    "mkinitcpio": _MKINITCPIO_HOOK,
}
"""The file that the tool reads; those without an entry read none."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "initramfs-tools": ("update-initramfs", "-u", "-k", "all"),
    "dracut": ("dracut", "--force", "--regenerate-all"),
    "mkinitcpio": ("mkinitcpio", "-P"),
    "rpm-ostree": ("rpm-ostree", "initramfs-etc", "--force-sync"),
    "transactional-update": ("transactional-update", "initrd"),
}
"""What rebuilds the initramfs. That of bootc is part of an image, which is built elsewhere.

rpm-ostree adds the files of /etc that it is told to track, without dracut: treefile.rs and
initramfs.rs of its source. transactional-update runs dracut in a new snapshot, which has the /etc
of the running system: sbin/transactional-update.in.
"""
VERIFIED = ("initramfs-tools", "dracut", "mkinitcpio")
"""Tools whose image for the running kernel is listed after a rebuild.

Others write it for a later boot, or to a path that their boot loader chooses.
"""

_HOOK = """\
#!/bin/sh
# vfiomgr: its rules, and the modules that they name, for update-initramfs.
case "$1" in
prereqs)
    echo udev
    exit 0
    ;;
esac
. /usr/share/initramfs-tools/hook-functions
for rules in /etc/udev/rules.d/05-vfiomgr-*.rules; do
    [ -e "$rules" ] || continue
    mkdir -p "$DESTDIR/etc/udev/rules.d"
    cp -p "$rules" "$DESTDIR/etc/udev/rules.d/"
    for module in $(sed -n 's/.*"kmod load \\([A-Za-z0-9_-]*\\)".*/\\1/p' "$rules"); do
        manual_add_modules "$module"
    done
done
"""


class Initramfs(Value):
    """The configuration of the host's initramfs tool; module names with `_` for `-`."""

    tool: str
    """One of `TOOLS`, or the name of another program: it is unknown what that includes."""
    modules: tuple[str, ...] = ()
    """Modules that it includes by name."""
    classes: tuple[str, ...] = ()
    """Prefixes of the PCI classes whose drivers it includes."""
    omitted: tuple[str, ...] = ()
    """Modules that it always excludes."""
    reads_fragments: bool = True
    """Whether the tool reads the directory for vfiomgr's hook."""
    configuration: str | None = None
    """The file that the preset of the running kernel names instead of mkinitcpio.conf."""

    @property
    def is_known(self) -> bool:
        """Whether it is known what it includes, and how to add rules."""
        return self.tool in TOOLS

    def brings(self, module: str | None, class_code: str) -> bool:
        """Whether it includes the driver of a function, as far as is known."""
        name = (module or "").replace("-", "_")
        if not self.is_known:
            return True
        if name in self.omitted:
            return False
        return name in self.modules or class_code.startswith(self.classes or ("none",))


def hook_mode(tool: str) -> int:
    """The mode of the hook's file."""
    return 0o755 if tool == "initramfs-tools" else 0o644


def render_hook(tool: str, bindings: Iterable[PersistedBinding]) -> str:
    """Render the hook for these bindings."""
    if tool == "initramfs-tools":
        return sealed(_HOOK)
    is_for_dracut = HOOKS[tool] == _DRACUT_HOOK
    reader = "dracut" if is_for_dracut else "mkinitcpio"
    head = f"# vfiomgr: its rules, and the modules that they name, for {reader}.\n"
    return sealed(head + (dracut_lines if is_for_dracut else _mkinitcpio_lines)(bindings))


def dracut_lines(bindings: Iterable[PersistedBinding]) -> str:
    """The lines of dracut.conf(5) that add the rules and their modules."""
    files, modules = _contents(bindings)
    return f'install_items+=" {files} "\nadd_drivers+=" {modules} "\n'


def _mkinitcpio_lines(bindings: Iterable[PersistedBinding]) -> str:
    files, modules = _contents(bindings)
    return f"FILES+=({files})\nMODULES+=({modules})\n"


def _contents(bindings: Iterable[PersistedBinding]) -> tuple[str, str]:
    kept = sorted(bindings, key=lambda binding: binding.address)
    files = " ".join(rule_file(binding.address) for binding in kept)
    return files, " ".join(sorted({binding.module for binding in kept}))
