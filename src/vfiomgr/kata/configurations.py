"""Create a Kata configuration for the devices of a host, as a drop-in or as a complete file.

TOML also allows sections inline (`agent = {kata = {}}`), dotted (`agent.kata.x = 1`) or in several
places; tomlkit cannot add to those.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from msgspec.structs import replace

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.diagnostic import MOST_FINDINGS, Diagnostic, refusal
from vfiomgr.documents.text import Malformed, parse_toml, unsealed
from vfiomgr.errors import InvalidDocument, Refusal, UsageError, forbid_together
from vfiomgr.expressions import expression
from vfiomgr.guests.model import HOST_FILE
from vfiomgr.kata.check import CheckedFile, check_keys, check_one_by_one, check_together
from vfiomgr.kata.explain.mediated import devices_named
from vfiomgr.kata.facts import (
    KataSettings,
    installation_of,
    kata_release,
    merged,
    parse,
    read_configuration,
    read_settings,
    require_tables,
)
from vfiomgr.kata.model import (
    DROP_IN,
    KUBELET_ROOT,
    KUBELET_ROOTS,
    POD_RESOURCES_SOCKET,
    KataConfigurationFile,
    KataHypervisor,
    KataPlan,
    KataRequest,
    KataRuntime,
    KataVersion,
    KeyEntry,
    Plug,
    RuntimeName,
    guest_mebibytes,
    search_path,
)
from vfiomgr.kata.plan import plan_config
from vfiomgr.listing import first_of, listed
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.rules.runner import by_severity
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.items import Table

    from vfiomgr.kata.model import KataInstallation, KataRelease, KeyValue
    from vfiomgr.snapshot.source import HostSource

_FIRMWARE = HostPath("/opt/kata/share/ovmf/OVMF.fd")
_TABLES: dict[KataHypervisor, tuple[str, ...]] = {
    "qemu": ("qemu",),
    "clh": ("clh", "cloud-hypervisor"),
}
_MOST_NAMED = 3
_UNKNOWN_KEY = "kata-unknown-key"
"""The rule about keys that vfiomgr did not write, which their user may know better."""


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


def split_words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


class ConfigurationOptions(Keywords, total=False):
    """What a configuration is for; every option may be omitted."""

    version: KataVersion
    runtime: KataRuntime
    hypervisor: Annotated[
        KataHypervisor, Option("Configure QEMU or Cloud Hypervisor.", default="qemu")
    ]
    plug: Annotated[
        Plug | None,
        Option("Plug devices before the guest starts or later.  [default: cold if possible]"),
    ]
    whole: Annotated[
        str | None,
        Option(
            "Print this configuration with the changes, not a drop-in.",
            metavar="BASE",
            complete=HOST_FILE,
        ),
    ]
    beside: Annotated[
        str | None,
        Option(
            "Write a drop-in for this configuration.  [default: Kata's default]",
            metavar="FILE",
            complete=HOST_FILE,
        ),
    ]
    memory: Annotated[
        str | None,
        Option(
            "Set default_memory, e.g. 16G.  [default: 8G for GPUs]",
            metavar="SIZE",
            field="memory_mib",
            parse=partial(guest_mebibytes, "--memory"),
        ),
    ]
    firmware: Annotated[
        str | None,
        Option("Set the OVMF of this Kata, for large BARs.", metavar="FILE", complete=HOST_FILE),
    ]
    pod_resources: Annotated[
        bool | None,
        Option(
            "Ask the kubelet for a pod's devices.  [default: if possible]",
            field="has_pod_resources",
        ),
    ]
    annotations: Annotated[
        Iterable[str],
        Option("Allow pods to use these hypervisor annotations.", metavar="NAME[,NAME…]"),
    ]
    kernel_params: Annotated[
        str | None, Option("Add arguments for the guest kernel.", metavar="TEXT", parse=split_words)
    ]


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
    made = planned_configuration(host, map(str, devices), options)
    tell_of_devices(host, made)
    return made


def planned_configuration(
    host: HostSource, names: Iterable[str], said: ConfigurationOptions, *, is_verbose: bool = False
) -> KataConfiguration:
    """Like `configuration`, but without the notes of `tell_of_devices`."""
    fields = fields_of(ConfigurationOptions, said)
    whole, beside = fields.pop("whole", None), fields.pop("beside", None)
    runtime, version = fields.pop("runtime", None), fields.pop("version", None)
    hypervisor = fields["hypervisor"]
    if whole is not None and beside is not None:
        forbid_together(
            "--whole", "--beside", "a complete configuration does not use vfiomgr's drop-in"
        )
    seen = host.scan()
    slots = (seen.slot(device) for device in devices_named(seen, names))
    asked = tuple({d.address: d for slot in slots for d in slot}.values())
    bound = tuple(device for device in seen.devices if seen.vgpus.is_ready_for_guests(device))
    installation = installation_of(host)
    named_file = whole or beside
    base = named_base(host, named_file, hypervisor, runtime) if named_file else None
    runtime = base.settings.runtime if base is not None else runtime
    release = kata_release(host, installation, version, runtime)
    base = base or found_base(host, installation, release, hypervisor)
    fields["firmware"] = _firmware(host, fields.get("firmware"))
    patterns = ",".join(fields.pop("annotations", ())).split(",")
    fields["annotations"] = tuple(filter(str.strip, patterns))
    request = KataRequest(release=release, functions=asked or bound, **fields)
    if host.snapshot is None:
        kubelets = (root for root in KUBELET_ROOTS.values() if host.tree.exists(root))
        request = replace(
            request,
            kubelet_socket=next(kubelets, KUBELET_ROOT) / POD_RESOURCES_SOCKET,
            own_firmware=_FIRMWARE if host.tree.exists(_FIRMWARE) else None,
        )
    plan = plan_config(seen, request, None if base is None else base.settings)
    text = _rendered(host, plan, base if whole is not None else None, is_verbose=is_verbose)
    if whole is not None:
        if base is not None and base.drop_ins:
            names = ", ".join(path for path, _ in base.drop_ins)
            host.on_note(
                f"merged the settings of {names}: a configuration elsewhere has other drop-ins"
            )
        return KataConfiguration(text, "", plan, asked, seen)
    _tell_of_drop_ins(host, installation, base, plan)
    if base is None:
        return KataConfiguration(text, f"config.d/{DROP_IN}", plan, asked, seen)
    _tell_of_configured(host, base, plan, is_verbose=is_verbose)
    return KataConfiguration(text, base.file.drop_in_directory / DROP_IN, plan, asked, seen)


def _firmware(host: HostSource, path: str | None) -> str | None:
    """The firmware path for Kata; with a note if it does not exist."""
    if path is not None and not path.startswith("/"):
        message = f"--firmware {path} is not an absolute path"
        raise UsageError(message, f"write an absolute path, e.g. --firmware {_FIRMWARE}")
    if path is not None and host.snapshot is None and not host.tree.exists(HostPath(path)):
        host.on_note(f"--firmware {path} does not exist yet; Kata cannot start guests without it")
    return path


def _rendered(host: HostSource, plan: KataPlan, whole: Base | None, *, is_verbose: bool) -> str:
    """The text, which this Kata accepts."""
    if whole is None:
        text = render_drop_in(plan)
    else:
        text = render_whole(whole.file.text, whole.file.resolved, whole.drop_ins, plan)
    source = whole.file.path if whole is not None else DROP_IN
    document = parse(text, source)
    findings = check_keys(document, plan.release, source=source, is_drop_in=whole is None)
    blockers = [f for f in findings if f.severity == "blocker" and f.rule != _UNKNOWN_KEY]
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
    texts = ((base.file.resolved, base.file.text), *base.drop_ins)
    for number, (path, text) in enumerate(texts):
        file = CheckedFile(plan.release, path, is_drop_in=number > 0)
        findings = sorted(check_one_by_one(file, parse(text, path)), key=by_severity)
        shown = [each for each in findings if is_verbose or each.severity == "blocker"]
        _tell_of_findings(host, path, shown, is_verbose=is_verbose)
    source = f"{base.file.resolved} with its drop-ins and this one"
    own = (HostPath(base.file.drop_in_directory / DROP_IN), render_drop_in(plan))
    settings = read_settings(base.file.resolved, base.file.text, (*base.drop_ins, own))
    together = check_together(CheckedFile(plan.release, source), settings.document)
    _tell_of_findings(host, source, sorted(together, key=by_severity), is_verbose=is_verbose)


def _tell_of_findings(
    host: HostSource, source: str, findings: Iterable[Diagnostic], *, is_verbose: bool
) -> None:
    """Print what Kata refuses; and the ignored keys in one line, unless -v is given."""
    ignored: list[str] = []
    lines: list[str] = []
    for each in findings:
        if each.severity == "warning" and each.rule == _UNKNOWN_KEY and not is_verbose:
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


class Base(Value):
    """A configuration, and its settings with all drop-ins except vfiomgr's own."""

    file: KataConfigurationFile
    settings: KataSettings

    @property
    def drop_ins(self) -> tuple[tuple[HostPath, str], ...]:
        """The drop-ins of other programs."""
        return tuple((path, text) for path, text in self.file.drop_ins if path.name != DROP_IN)


def named_base(
    host: HostSource, name: str, hypervisor: KataHypervisor, runtime: RuntimeName | None
) -> Base:
    """The configuration with a name, on the host or on this machine.

    Raises:
        UsageError: it does not exist, or is for another hypervisor or runtime.
        InvalidDocument: it is not TOML, or a section is not a table.
    """
    path = HostPath(os.path.abspath(name))
    file = None
    if host.snapshot is None and name.startswith("/"):
        file = read_configuration(host.tree, path)
    file = file or read_configuration(host.machine, path)
    if file is None:
        message = f"cannot read configuration {name}"
        raise UsageError(
            message, "Kata's own configurations are in /opt/kata/share/defaults/kata-containers"
        )
    base = _read(file)
    _require_hypervisor(name, base.settings, hypervisor)
    own = base.settings.runtime
    if runtime not in (None, own):
        words = {"go": "go", "rs": "rust"}
        message = f"{name} is for --kata-runtime {words[own]}, not {words[runtime]}"
        raise UsageError(message, "name another configuration, or leave out --kata-runtime")
    return base


def found_base(
    host: HostSource,
    installation: KataInstallation,
    release: KataRelease,
    hypervisor: KataHypervisor,
) -> Base | None:
    """The runtime's default configuration, if it is readable and for the hypervisor."""
    for path in search_path(release.runtime):
        file = installation.configuration([path])
        if file is None:
            continue
        try:
            base = _read(file)
        except InvalidDocument as error:
            host.on_note(f"{error.message}; ignoring this configuration")
            continue
        if base.settings.hypervisor in _TABLES[hypervisor]:
            return base
    return None


def _read(file: KataConfigurationFile) -> Base:
    """The settings of a file with its drop-ins."""
    drop_ins = [(path, text) for path, text in file.drop_ins if path.name != DROP_IN]
    settings = read_settings(file.resolved, file.text, drop_ins)
    for path, text in ((file.resolved, file.text), *drop_ins):
        require_tables(parse(text, path), path)
    return Base(file, settings)


def _require_hypervisor(name: str, settings: KataSettings, hypervisor: KataHypervisor) -> None:
    """Make sure that a configuration is for the requested hypervisor, which runtime-rs names."""
    tables, wanted = settings.document.get("hypervisor"), _TABLES[hypervisor]
    if not isinstance(tables, dict) or not set(wanted) & set(tables):
        message = f"{name} has no table [hypervisor.{wanted[0]}]"
        raise UsageError(message, "name another configuration, or another --hypervisor")
    named = settings.text("runtime", "hypervisor_name")
    if not named or named in wanted:
        return
    fitting = next((each for each, tables in _TABLES.items() if named in tables), None)
    hint = f"pass --hypervisor {fitting}" if fitting else "name another configuration"
    message = f'{name} has hypervisor_name = "{named}", so [hypervisor.{hypervisor}] has no effect'
    raise UsageError(message, hint)


def _tell_of_drop_ins(
    host: HostSource, installation: KataInstallation, base: Base | None, plan: KataPlan
) -> None:
    """Note the other configurations of a drop-in, and the files that override it."""
    if base is None:
        if installation.shims:
            host.on_note(
                f"no configuration for {plan.hypervisor} found in the default places of "
                f"{plan.release}; name the configuration of the drop-in with --beside"
            )
        return
    neighbours = base.file.neighbours
    if neighbours:
        others = listed([path.name for path in neighbours], _MOST_NAMED)
        host.on_note(
            f"{base.file.drop_in_directory} also applies to {others}, which get these keys too; "
            "use --whole to create a separate configuration"
        )
    for path, text in base.drop_ins:
        if not path.endswith(".toml"):
            host.on_note(f"{path} is read too, whatever its name; move it elsewhere to disable it")
        if path.name > DROP_IN:
            later = {(entry.table, entry.key): entry.value for entry in _entries(parse(text, path))}
            for entry in plan.entries:
                value = later.get((entry.table, entry.key), entry.value)
                if value != entry.value:
                    host.on_note(f"{path} is read later and sets {entry.key} to {_plain(value)!r}")


def make_tables(document: TOMLDocument, places: Iterable[tuple[str, ...]]) -> None:
    """Rewrite the sections of these tables at the end if they are not separate tables."""
    wanted = [place for place in places if place and not _is_plain(document, place)]
    for name in dict.fromkeys(place[0] for place in wanted):
        parts = [item for key, item in document.body if key is not None and key.key == name]
        if parts:
            document.remove(name)
            document.append(name, _one_table(parts))


def _is_plain(document: TOMLDocument, place: tuple[str, ...]) -> bool:
    from tomlkit.items import Table  # noqa: PLC0415 - slow, as tomlkit is

    containers: list[Any] = [document]
    for name in place:
        found = [
            (key, item)
            for container in containers
            for key, item in container.body
            if key is not None and key.key == name
        ]
        if not found:
            break
        if any(key.is_dotted() or not isinstance(item, Table) for key, item in found):
            return False
        containers = [item.value for _, item in found]
    return len(containers) == 1


def _one_table(parts: Sequence[Any]) -> Table:
    """The combined content of tables with one name; values that are not tables are ignored."""
    import tomlkit  # noqa: PLC0415
    from tomlkit.items import AoT, Comment, InlineTable, Table  # noqa: PLC0415

    bodies = [part.value.body for part in parts if isinstance(part, Table | InlineTable)]
    pairs = [pair for body in bodies for pair in body]
    values: list[tuple[str | None, Any]] = []
    tables: dict[str, list[Any]] = {}
    arrays: list[tuple[str, AoT]] = []
    for key, item in pairs:
        if key is None:
            if isinstance(item, Comment):
                values.append((None, item))
        elif isinstance(item, Table | InlineTable):
            tables.setdefault(key.key, []).append(item)
        elif isinstance(item, AoT):
            arrays.append((key.key, item))
        else:
            item.trivia.indent, item.trivia.trail = "", "\n"
            values.append((key.key, item))
    table = tomlkit.table(is_super_table=bool(tables) and not values and not arrays)
    for name, item in values:
        table.add(item) if name is None else table.append(name, item)
    for name, items in tables.items():
        table.append(name, _one_table(items))
    for name, array in arrays:
        table.append(name, array)
    return table


_WHEN = {
    "cold": "Devices are there when the guest starts",
    "hot": "Devices are plugged in when their container comes",
    None: "Devices that a container is given are plugged in when it comes",
}
_HEAD = expression(r"# For Kata [^\n]*: belongs into config\.d beside ")


def render_drop_in(plan: KataPlan) -> str:
    """Only the keys, for config.d beside the configuration that the runtime reads."""
    import tomlkit  # noqa: PLC0415 - slow, and only these renderers need it

    what, ports = f"{plan.release}, {plan.hypervisor}", _WHEN[plan.plug]
    if plan.value("pcie_root_port") is not None:
        ports += ", each behind a PCIe root port of its own"
    document = tomlkit.document()
    document.add(
        tomlkit.comment(
            f"For {what}: belongs into config.d beside the configuration that it reads."
        )
    )
    document.add(tomlkit.comment(f"{ports}."))
    for entry in plan.entries:
        _set(document, entry)
    return tomlkit.dumps(document)


def is_drop_in(text: str) -> bool:
    """Whether `render_drop_in` created a text."""
    return _HEAD.match(text) is not None


def render_whole(
    text: str, path: HostPath, drop_ins: Iterable[tuple[HostPath, str]], plan: KataPlan
) -> str:
    """A configuration with these keys; comments and everything else stay.

    The settings of its drop-ins are merged first, because a configuration elsewhere does not have
    them.

    Raises:
        InvalidDocument: one of the texts is not TOML.
    """
    import tomlkit  # noqa: PLC0415

    text = unsealed(text)
    expected: dict[str, Any] = parse(text, path)
    entries = [
        *(entry for name, content in sorted(drop_ins) for entry in _entries(parse(content, name))),
        *plan.entries,
    ]
    document = tomlkit.parse(text)
    make_tables(document, (entry.table for entry in entries))
    for entry in entries:
        expected = merged(expected, _as_document(entry))
        _set(document, entry)
    made = tomlkit.dumps(document)
    try:
        is_as_planned = parse_toml(made) == expected
    except Malformed:
        is_as_planned = False
    if not is_as_planned:
        message = f"cannot edit {path}: the new text does not contain the new keys"
        raise RuntimeError(message)
    return made


def _as_document(entry: KeyEntry) -> dict[str, Any]:
    """The tables with only this key."""
    document: dict[str, Any] = {entry.key: _plain(entry.value)}
    for name in reversed(entry.table):
        document = {name: document}
    return document


def _entries(document: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[KeyEntry]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _entries(value, (*place, key))
        else:
            yield KeyEntry(place, key, tuple(value) if isinstance(value, list) else value)


def _set(document: Any, entry: KeyEntry) -> None:  # noqa: ANN401 - tomlkit's tables
    """Set a key in its place, or add it; an equal value stays as written."""
    import tomlkit  # noqa: PLC0415

    table = document
    for depth, name in enumerate(entry.table, 1):
        if not isinstance(table.get(name), dict):
            table.pop(name, None)
            table.add(name, tomlkit.table(is_super_table=depth < len(entry.table)))
        table = table[name]
    value = _plain(entry.value)
    old = table.get(entry.key)
    known = old.unwrap() if hasattr(old, "unwrap") else old
    if type(known) is type(value) and known == value:
        return
    if isinstance(known, dict):
        table.remove(entry.key)
    table[entry.key] = value
    if entry.comment and old is None:
        table[entry.key].comment(entry.comment)


def _plain(value: KeyValue) -> str | int | bool | list[str]:
    return list(value) if isinstance(value, tuple) else value
