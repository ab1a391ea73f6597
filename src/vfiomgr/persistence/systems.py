"""Systems that keep settings in a configuration of their own, and not in files of /etc."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refuse
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.persistence.model import FileFacts
    from vfiomgr.snapshot.model import HostSnapshot


class System(Value, kw_only=True):
    """Where a system keeps what others have in /etc; empty if it is the same there.

    `{ids}` is for vendor:device pairs, `{rule}` for a udev rule, `{functions}` for what Unraid
    reads, `{line}` for a line of modprobe.d, `{module}` for the name of a module.
    """

    name: str
    command_line: str
    """How to change the kernel command line."""
    why: str = ""
    """Why files in /etc are lost."""
    by_ids: str = ""
    """What binds at boot by PCI IDs, before host drivers load."""
    by_rule: str = ""
    """What binds at boot by address."""
    line: str = ""
    """How to add a line of modprobe.d."""
    module: str = ""
    """How to load a module at boot."""


_REBUILD = "in configuration.nix, then run nixos-rebuild boot and reboot"
_ARGUMENTS = (
    "customization.extraKernelArgs of its image (Talos before 1.10 and GRUB: "
    "machine.install.extraKernelArgs), then run talosctl upgrade"
)
_MACHINE = "machine.kernel.modules of the machine configuration"
_BOOT = "settings.boot.kernel-parameters (apiclient apply), then run apiclient reboot"
SYSTEMS: dict[str, System] = {
    "nixos": System(
        name="NixOS",
        command_line=f"add WORD to boot.kernelParams {_REBUILD}",
        why="it generates /etc from configuration.nix, with udev's rules in the read-only store",
        by_ids='boot.initrd.kernelModules = [ "vfio_pci" ] and boot.kernelParams = '
        f'[ "vfio-pci.ids={{ids}}" ] {_REBUILD}',
        by_rule="boot.initrd.services.udev.rules = ''{rule}'' and boot.kernelModules = "
        f'[ "vfio_pci" ] {_REBUILD}',
        line=f"add `{{line}}` to boot.extraModprobeConfig {_REBUILD}",
        module=f"add {{module}} to boot.kernelModules {_REBUILD}",
    ),
    "talos": System(
        name="Talos",
        command_line=f"add WORD to {_ARGUMENTS}",
        why="its root is a read-only image",
        by_ids=f"vfio-pci.ids={{ids}} in {_ARGUMENTS}",
        by_rule=f"'{{rule}}' in machine.udev.rules and vfio_pci in {_MACHINE}",
        line=f"add `{{line}}` as parameters in {_MACHINE}",
        module=f"add {{module}} to {_MACHINE}",
    ),
    "bottlerocket": System(
        name="Bottlerocket",
        command_line=f"set WORD in {_BOOT}",
        why="its root is a read-only image, and it generates /etc from its settings at each boot",
        by_ids=f'"vfio-pci.ids" = ["{{ids}}"] in {_BOOT}',
        line=f"set the parameters of `{{line}}` in {_BOOT}",
        module="set settings.kernel.modules.{module}.autoload=true (apiclient set)",
    ),
    "harvester": System(
        name="Harvester",
        command_line="add WORD to third_party_kernel_args of /oem/grubenv (grub2-editenv)",
        why="changes of /etc are in memory, and the add-on pcidevices-controller binds functions",
        by_rule="a PCIDeviceClaim for each function (Advanced > PCI Devices > Enable Passthrough)",
    ),
    "unraid": System(
        name="Unraid",
        command_line="add WORD to the append line of /boot/syslinux/syslinux.cfg",
        why="its root is in memory, and only /boot is kept",
        by_rule="BIND={functions} in /boot/config/vfio-pci.cfg (Tools > System Devices)",
        line="add `{line}` to a file in /boot/config/modprobe.d",
        module="add `modprobe {module}` to /boot/config/go",
    ),
    "truenas": System(
        name="TrueNAS",
        command_line="add WORD to kernel_extra_options (midclt call system.advanced.update)",
        why="its root is an image, and an update discards the files of /etc",
        by_rule="the isolated GPUs of the advanced settings, or for other devices a udev tunable "
        "(midclt call tunable.create, type UDEV): '{rule}'",
    ),
    "flatcar": System(
        name="Flatcar",
        command_line='add `set linux_append="$linux_append WORD"` to /oem/grub.cfg (older '
        "releases: /usr/share/oem/grub.cfg)",
    ),
}
"""By ID of os-release, or by a file that only this system has.

NixOS: nixos/modules/system/boot/{kernel,modprobe,stage-1}.nix, services/hardware/udev.nix. Talos:
reference/configuration/v1alpha1/config; a unified kernel image (since 1.10) leaves out
machine.install. Bottlerocket: api/settings/{boot,kernel}. Harvester: harv-install and bootargs.cfg
of harvester-installer. Unraid: SysDevs.php and update.vfio.php of unraid/webgui. TrueNAS: plugins
tunables and system_advanced of middlewared. Flatcar: build_library/grub.cfg of flatcar/scripts.
"""


def why_lost(files: FileFacts) -> str:
    """Why files that are written to /etc do not last; empty if they do, as far as is known."""
    system = SYSTEMS.get(files.system)
    return (system.why if system is not None else "") or files.unkept


def lost_rules(host: HostSnapshot, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Refuse rules that the system does not keep, with what binds functions there at boot."""
    system = SYSTEMS.get(host.files.system)
    way = "" if system is None else _at_boot(host, system, devices)
    yield from _not_kept(host.files, f"bind at boot with {way}" if way else "")


def lost_files(files: FileFacts, what: str) -> Iterator[Diagnostic]:
    """Refuse other files in /etc that the system does not keep."""
    system = SYSTEMS.get(files.system)
    way = "" if system is None else f"have the configuration of {system.name} write {what}"
    yield from _not_kept(files, way)


def _not_kept(files: FileFacts, remedy: str) -> Iterator[Diagnostic]:
    why, system = why_lost(files), SYSTEMS.get(files.system)
    if why:
        yield blocker(
            "rules-not-kept",
            "",
            f"{'this host' if system is None else system.name} does not keep files in /etc: {why}",
            remedy or "run it again after each boot, or add it to what the host boots from",
        )


def refuse_lost(name: str, paths: Iterable[str]) -> None:
    """Refuse files in /etc that a system loses; NixOS keeps those that it does not generate.

    Raises:
        Refusal: one of the files is in /etc.
    """
    path = next((path for path in paths if path.startswith("/etc/")), None)
    system = SYSTEMS.get(name)
    if path is not None and name != "nixos" and system is not None and system.why:
        why = f"{system.name} does not keep {path}: {system.why}"
        refuse("rules-not-kept", path, why, f"have the configuration of {system.name} write it")


def _at_boot(host: HostSnapshot, system: System, devices: Sequence[PciDevice]) -> str:
    """What binds functions at boot, by PCI IDs if no other function has the same ones."""
    if not devices:
        return ""
    pairs = {(device.vendor_id, device.device_id) for device in devices}
    has_twin = any((d.vendor_id, d.device_id) in pairs for d in host.devices if d not in devices)
    how = system.by_rule if has_twin or not system.by_ids else system.by_ids
    names = "|".join(str(device.address) for device in devices)
    rule = f'ACTION=="add", SUBSYSTEM=="pci", KERNEL=="{names}", ATTR{{driver_override}}="vfio-pci"'
    return how.format(
        ids=",".join(sorted(f"{vendor}:{device}" for vendor, device in pairs)),
        rule=rule,
        functions=" ".join(f"{d.address}|{d.vendor_id}:{d.device_id}" for d in devices),
    )
