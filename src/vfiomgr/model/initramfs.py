"""Which drivers a host's initramfs brings, and what makes it hold vfiomgr's rules.

A driver in the initramfs has its functions before /etc/udev/rules.d is there to be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vfiomgr.model.path import HostPath
from vfiomgr.model.persistence import rule_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.model.persistence import PersistedBinding

Tool = Literal["initramfs-tools", "dracut", "mkinitcpio"]

HOOKS: dict[Tool, HostPath] = {
    "initramfs-tools": HostPath("/etc/initramfs-tools/hooks/vfiomgr"),
    "dracut": HostPath("/etc/dracut.conf.d/90-vfiomgr.conf"),
    "mkinitcpio": HostPath("/etc/mkinitcpio.conf.d/vfiomgr.conf"),
}
MODES: dict[Tool, int] = {"initramfs-tools": 0o755, "dracut": 0o644, "mkinitcpio": 0o644}
COMMANDS: dict[Tool, tuple[str, ...]] = {
    "initramfs-tools": ("update-initramfs", "-u", "-k", "all"),
    "dracut": ("dracut", "--force", "--regenerate-all"),
    "mkinitcpio": ("mkinitcpio", "-P"),
}

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


@dataclass(frozen=True, slots=True)
class Initramfs:
    """What the configuration of the host's tool says; names of modules with `_` for `-`."""

    tool: Tool
    modules: tuple[str, ...] = ()
    """Modules that it names."""
    classes: tuple[str, ...] = ()
    """Beginnings of the PCI classes whose drivers it takes in."""
    omitted: tuple[str, ...] = ()
    """Modules that it leaves out in any case."""
    reads_fragments: bool = True
    """Whether the tool reads the directory that a hook of vfiomgr goes into."""

    def brings(self, module: str | None, class_code: str) -> bool:
        """Whether a function's driver comes with it, as far as its configuration tells."""
        name = (module or "").replace("-", "_")
        if name in self.omitted:
            return False
        return name in self.modules or class_code.startswith(self.classes or ("none",))

    @property
    def hook(self) -> HostPath:
        """The file that makes the tool take vfiomgr's rules in."""
        return HOOKS[self.tool]

    @property
    def command(self) -> str:
        """What makes the initramfs anew."""
        return " ".join(COMMANDS[self.tool])


def render_hook(tool: Tool, bindings: Iterable[PersistedBinding]) -> str:
    """The text of the hook for these bindings."""
    if tool == "initramfs-tools":
        return _HOOK
    kept = sorted(bindings, key=lambda binding: binding.address)
    files = " ".join(rule_file(binding.address) for binding in kept)
    modules = " ".join(sorted({binding.module for binding in kept}))
    head = f"# vfiomgr: its rules, and the modules that they name, for {tool}.\n"
    if tool == "dracut":
        return f'{head}install_items+=" {files} "\nadd_drivers+=" {modules} "\n'
    return f"{head}FILES+=({files})\nMODULES+=({modules})\n"
