"""Create a Kata configuration for the devices of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack, get_args

from msgspec.structs import replace

from vfiomgr.diagnostic import MOST_FINDINGS, refusal
from vfiomgr.errors import Refusal, UsageError, forbid_together, require_choice, require_known
from vfiomgr.kata.config import bases
from vfiomgr.kata.config.bases import (
    Base,
    found_base,
    named_base,
    tell_of_drop_ins,
    tell_of_taken_in,
    with_drop_in,
)
from vfiomgr.kata.config.check import check_keys, check_one_by_one, check_together
from vfiomgr.kata.config.plan import plan_config
from vfiomgr.kata.explain.mediated import devices_named
from vfiomgr.kata.facts import installation_of, kata_release
from vfiomgr.kata.model import (
    DROP_IN,
    KUBELET_ROOT,
    KUBELET_ROOTS,
    POD_RESOURCES_SOCKET,
    KataHypervisor,
    KataPlan,
    KataRequest,
    KataSetup,
    Plug,
    RuntimeName,
    guest_mebibytes,
    key_table,
)
from vfiomgr.kata.settings import parse
from vfiomgr.listing import first_of
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciDevice
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.source import HostSource

_FIRMWARE = HostPath("/opt/kata/share/ovmf/OVMF.fd")


class KataConfiguration(Value):
    """A configuration, where it belongs, and what it was made from."""

    text: str
    """TOML: a drop-in, or a complete configuration."""
    path: str
    """The path of a drop-in: `…/config.d/50-vfiomgr.toml`, as far as known."""
    plan: KataPlan
    asked: tuple[PciDevice, ...]
    """The named devices with their slots; empty for all available devices."""
    host: HostSnapshot

    def __str__(self) -> str:
        """The text."""
        return self.text


class ConfigurationOptions(TypedDict, total=False):
    """What a configuration is for; every option may be omitted."""

    version: str | None
    """The release of Kata: `3.31`.  [the installed one]"""
    runtime: RuntimeName | None
    """`go` or `rs`."""
    hypervisor: KataHypervisor
    """`qemu` or `clh`.  [qemu]"""
    plug: Plug | None
    """`cold` or `hot`.  [cold if possible]"""
    whole: str | None
    """A configuration file, to get it with the changes instead of a drop-in."""
    beside: str | None
    """The configuration that a drop-in is for."""
    memory: str | None
    """The guest memory, with its unit: `16G`."""
    firmware: str | None
    """The OVMF of this Kata, a path on the host."""
    pod_resources: bool | None
    """Ask the kubelet for a pod's devices.  [if possible]"""
    annotations: Iterable[str]
    """Hypervisor annotations that pods may use."""
    kernel_params: str | None
    """Arguments for the guest kernel, added to those of the configuration."""


def configuration(
    host: HostSource, *devices: str | PciAddress, **options: Unpack[ConfigurationOptions]
) -> KataConfiguration:
    """Kata's configuration for a guest with these devices, or with all available ones.

    The result is a drop-in for config.d; with `whole` it is that configuration file with changes.
    Only keys that the release supports are written. Notes report what else should be known.

    Raises:
        UsageError: a name, a size, a version or a file is invalid.
        UnknownDevice: the host has no such device.
        InvalidDocument: the original configuration is invalid.
        Refusal: this Kata does not support it, or a device cannot be assigned.

    """
    require_known(options, ConfigurationOptions)
    made = planned_configuration(host, map(str, devices), options)
    tell_of_devices(host, made)
    return made


def planned_configuration(
    host: HostSource, names: Iterable[str], said: ConfigurationOptions, *, is_verbose: bool = False
) -> KataConfiguration:
    """Like `configuration`, but without the notes of `tell_of_devices`."""
    whole, beside = said.get("whole"), said.get("beside")
    runtime, hypervisor = said.get("runtime"), said.get("hypervisor", "qemu")
    plug, memory = said.get("plug"), said.get("memory")
    if whole is not None and beside is not None:
        forbid_together(
            "--whole", "--beside", "a complete configuration does not use vfiomgr's drop-in"
        )
    require_choice("--kata-runtime", runtime, get_args(RuntimeName))
    require_choice("--hypervisor", hypervisor, get_args(KataHypervisor))
    require_choice("--plug", plug, get_args(Plug))
    seen = host.scan()
    asked = _named(seen, tuple(names))
    bound = tuple(device for device in seen.devices if seen.vgpus.is_ready_for_guests(device))
    installation = installation_of(host)
    named_file = whole or beside
    base = named_base(host, named_file, hypervisor, runtime) if named_file else None
    runtime = base.settings.runtime if base is not None else runtime
    release = kata_release(host, installation, said.get("version"), runtime)
    base = base or found_base(host, installation, release, hypervisor)
    request = KataRequest(
        release=release,
        functions=asked or bound,
        hypervisor=hypervisor,
        plug=plug,
        memory_mib=None if memory is None else guest_mebibytes("--memory", memory),
        firmware=_firmware(host, said.get("firmware")),
        has_pod_resources=said.get("pod_resources"),
        annotations=tuple(filter(str.strip, ",".join(said.get("annotations", ())).split(","))),
        kernel_params=tuple((said.get("kernel_params") or "").split()),
    )
    settings = None if base is None else base.settings
    plan = plan_config(seen, request, key_table(), settings, _setup(host))
    text = _rendered(host, plan, base if whole is not None else None, is_verbose=is_verbose)
    if whole is None:
        tell_of_drop_ins(host, installation, base, plan)
    if base is not None and whole is not None:
        tell_of_taken_in(host, base)
    elif base is not None:
        _tell_of_configured(host, base, plan, is_verbose=is_verbose)
    return KataConfiguration(text, _path(base, is_whole=whole is not None), plan, asked, seen)


def _named(host: HostSnapshot, names: tuple[str, ...]) -> tuple[PciDevice, ...]:
    """The devices with these names, with all functions of their slots."""
    slots = (host.slot(device) for device in devices_named(host, names))
    return tuple({d.address: d for slot in slots for d in slot}.values())


def _firmware(host: HostSource, path: str | None) -> str | None:
    """The firmware path for Kata; with a note if it does not exist."""
    path = _absolute("--firmware", path)
    is_seen = path is not None and host.snapshot is None
    if path is not None and is_seen and not host.tree.exists(HostPath(path)):
        host.on_note(f"--firmware {path} does not exist yet; Kata cannot start guests without it")
    return path


def _absolute(option: str, path: str | None) -> str | None:
    if path is not None and not path.startswith("/"):
        message = f"{option} {path} is not an absolute path"
        raise UsageError(message, f"write an absolute path, e.g. {option} {_FIRMWARE}")
    return path


def _setup(host: HostSource) -> KataSetup:
    """The facts of the host, as far as its tree has them."""
    if host.snapshot is not None:
        return KataSetup()
    tree = host.tree
    kubelets = (root for root in KUBELET_ROOTS.values() if tree.exists(root))
    return KataSetup(
        pod_resources=next(kubelets, KUBELET_ROOT) / POD_RESOURCES_SOCKET,
        firmware=_FIRMWARE if tree.exists(_FIRMWARE) else None,
    )


def _rendered(host: HostSource, plan: KataPlan, whole: Base | None, *, is_verbose: bool) -> str:
    """The text, which this Kata accepts."""
    if whole is None:
        text = bases.render_drop_in(plan)
    else:
        file = whole.file
        text = bases.render_whole(file.text, file.resolved, whole.drop_ins, plan)
    source = whole.file.path if whole is not None else DROP_IN
    document = parse(text, source)
    findings = check_keys(
        document, plan.release, key_table(), source=source, is_drop_in=whole is None
    )
    blockers = [each for each in findings if each.severity == "blocker" and not _is_foreign(each)]
    if blockers:
        refused = refusal(
            replace(each, summary=f"{each.summary}: {each.why}", why="") for each in blockers
        )
        message = f"{source}: {refused.message}"
        raise Refusal(message, refused.hint, refused.diagnostics)
    _tell_of_findings(host, source, findings, is_verbose=is_verbose)
    return text


def _tell_of_configured(host: HostSource, base: Base, plan: KataPlan, *, is_verbose: bool) -> None:
    """Note what Kata refuses in existing files, and with -v what it ignores."""
    main = (base.file.resolved, base.file.text, False)
    table = key_table()
    for path, text, is_drop_in in (main, *((*each, True) for each in base.drop_ins)):
        findings = check_one_by_one(
            parse(text, path), plan.release, table, source=path, is_drop_in=is_drop_in
        )
        refused = (each for each in findings if each.severity == "blocker")
        _tell_of_findings(
            host, path, findings if is_verbose else tuple(refused), is_verbose=is_verbose
        )
    source = f"{base.file.resolved} with its drop-ins and this one"
    document = with_drop_in(base, bases.render_drop_in(plan))
    together = check_together(document, plan.release, table, source=source)
    _tell_of_findings(host, source, together, is_verbose=is_verbose)


def _is_foreign(finding: Diagnostic) -> bool:
    """Whether it is about a key that vfiomgr did not write, which its user may know better."""
    return finding.rule == "kata-unknown-key"


def _tell_of_findings(
    host: HostSource, source: str, findings: Iterable[Diagnostic], *, is_verbose: bool
) -> None:
    """Print what Kata refuses; and the ignored keys in one line, unless -v is given."""
    ignored: list[str] = []
    lines: list[str] = []
    for each in findings:
        if each.severity == "warning" and _is_foreign(each) and not is_verbose:
            ignored.append(each.subject)
        elif each.severity != "info":
            lines.append(f"{source}: {each.summary}: {each.why}; {each.remedy}")
        elif is_verbose:
            lines.append(f"{source}: {each.summary}: {each.why}")
    shown, more = first_of(lines, MOST_FINDINGS)
    for line in (*shown, *more):
        host.on_note(line)
    if ignored:
        shown, more = first_of(ignored, MOST_FINDINGS)
        names = ", ".join((*shown, *more))
        host.on_note(f"{source} has keys that this Kata ignores: {names} (-v shows details)")


def _path(base: Base | None, *, is_whole: bool) -> str:
    """Where the text belongs, as far as known."""
    if is_whole:
        return ""
    return base.file.drop_in_directory / DROP_IN if base is not None else f"config.d/{DROP_IN}"


def tell_of_devices(host: HostSource, made: KataConfiguration) -> None:
    """Print the notes of the plan, and the devices that are not or never available to guests."""
    for line in made.plan.notes:
        host.on_note(line)
    seen = made.host
    if not made.asked and not any(map(seen.vgpus.is_ready_for_guests, seen.devices)):
        host.on_note(
            "no device is available yet; run vfiomgr bind ADDRESS or vfiomgr vgpu create, then "
            "this command again"
        )
    waiting = [d for d in made.asked if not seen.vgpus.is_ready_for_guests(d)]
    tell_how_to_bind(host, seen, waiting)
    if any(vgpu.uuid is not None for vgpu in seen.vgpus.active):
        host.on_note(
            "mediated vGPUs are omitted: Kata cannot attach them; use libvirt: vfiomgr libvirt "
            "hostdev UUID"
        )
