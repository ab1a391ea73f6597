"""`vfiomgr oci …`."""

from __future__ import annotations

import difflib
import json
import os
import stat
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.main import LazyGroup
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.containers.cdi.names import is_device_name, is_kind
from vfiomgr.containers.oci import plan as oci_plan
from vfiomgr.containers.oci.facts import read_node
from vfiomgr.containers.oci.model import Injection
from vfiomgr.documents.json_text import read_object
from vfiomgr.errors import HostError, InvalidDocument, UsageError
from vfiomgr.kata.explain.image import refuse_mediated
from vfiomgr.paths import HostPath
from vfiomgr.vgpu.guest_device import DeviceRequest, units_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.containers.oci.edit import Edit
    from vfiomgr.containers.oci.model import ContainerRuntime, NodeForm
    from vfiomgr.documents.json_text import JsonDocument
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.guest_device import GuestDevice


_COMMANDS = {
    "inject": ("vfiomgr.containers.oci.commands", "inject"),
    "eject": ("vfiomgr.containers.oci.commands", "eject"),
}


@click.group("oci", cls=LazyGroup, table=_COMMANDS)
@session_options()
def oci() -> None:
    """OCI bundles: devices for a container that has not started yet."""


_NAME = "config.json"
_MOST_BYTES = 32 << 20
_REMEDY = "name the directory of an OCI bundle, or its config.json"


def read_bundle(place: str) -> JsonDocument:
    """The configuration of a bundle: of its directory, or the file itself.

    Raises:
        UsageError: it cannot be read, is a link or another user's.
        InvalidDocument: it is no configuration; the message names line and column.

    """
    from vfiomgr.host.rewrite import read_own  # noqa: PLC0415 - not for help

    path = os.path.join(place, _NAME) if os.path.isdir(place) else place
    try:
        data = read_own(path, _MOST_BYTES + 1)
    except OSError as error:
        message = f"cannot read the bundle {path}: {error.strerror}"
        raise UsageError(message, _REMEDY) from None
    except HostError as error:
        raise UsageError(error.message, error.hint) from None
    if len(data) > _MOST_BYTES:
        message = (
            f"{path} has more than {_MOST_BYTES >> 20} MiB: it is no container's configuration"
        )
        raise InvalidDocument(message, _REMEDY)
    try:
        return read_object(data.decode(), path)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{path}:{line}: no UTF-8 text"
        raise InvalidDocument(message, "have the runtime write it anew") from None


def conclude(session: Session, edit: Edit, notes: Sequence[str] = ()) -> None:
    """Write what is different, and say what came and went; with --dry-run, show it alone."""
    if not session.dry_run and edit.is_changed:
        from vfiomgr.host.rewrite import rewrite_own  # noqa: PLC0415 - not where nothing changes

        before, after = edit.before.text.encode(), edit.after.text.encode()
        rewrite_own(edit.before.source, before, after)
    if session.format != "table":
        print_document("OciEdit", {**_body(session, edit), "notes": notes}, session.format)
        return
    if session.dry_run:
        say_text(_difference(edit))
    tell = note if session.dry_run else say
    for line in _told(edit):
        shown = line.replace("added", "would add", 1).replace("removed", "would remove", 1)
        tell(shown if session.dry_run else line)
    for line in edit.left:
        note(f"{edit.before.source}: {line}")
    for line in notes:
        note(line)


def _told(edit: Edit) -> Iterator[str]:
    source = edit.before.source
    for injection in edit.added:
        nodes = ", ".join(map(str, injection.nodes))
        names = "".join(f", {name}" for name in injection.cdi)
        yield f"added {injection.device.name}: {nodes}{names}"
    yield from (f"removed {name}" for name in edit.removed)
    yield from (f"{name} is in {source} already" for name in edit.already)
    yield from (f"vfiomgr put no {name} into {source}" for name in edit.absent)
    if not edit.is_changed:
        yield f"{source} is unchanged"


def _body(session: Session, edit: Edit) -> dict[str, object]:
    body: dict[str, object] = {
        "source": edit.before.source,
        "changed": edit.is_changed,
        "added": [
            {
                "name": one.device.name,
                "functions": one.device.functions,
                "nodes": one.nodes,
                "cdi": one.cdi,
            }
            for one in edit.added
        ],
        "already": edit.already,
        "removed": edit.removed,
        "absent": edit.absent,
        "left": edit.left,
    }
    return {**body, "difference": _difference(edit)} if session.dry_run else body


def _difference(edit: Edit) -> str:
    """As diff -u shows it; of a configuration on one line, as if it had many."""
    source = edit.before.source
    before, after = (_lines(document) for document in (edit.before, edit.after))
    return "".join(
        f"{line}\n" for line in difflib.unified_diff(before, after, source, source, lineterm="")
    )


def _lines(document: JsonDocument) -> list[str]:
    text = document.text
    if "\n" not in text.strip():
        text = json.dumps(document.root.value, indent=2, ensure_ascii=False)
    return text.splitlines()


@click.command("eject")
@click.argument("bundle")
@click.argument("devices", nargs=-1, metavar="[ADDRESS|UUID...]", shell_complete=complete_address)
@session_options()
@click.pass_obj
def eject(session: Session, *, bundle: str, devices: tuple[str, ...]) -> None:
    """Take out of an OCI bundle what `vfiomgr oci inject` put in: all, or these devices.

    What somebody else put there stays, and so does what was changed since, which is told. Where
    nothing else was changed, the file is what it was before, to the byte. The host need not have
    the devices any more.

    \b
    Examples:
      vfiomgr oci eject /run/bundle
      vfiomgr oci eject /run/bundle 0000:04:00.0
      vfiomgr oci eject /run/bundle --dry-run --format json
    """
    from vfiomgr.containers.oci import edit  # noqa: PLC0415 - not for help

    conclude(session, edit.eject(read_bundle(bundle), devices or None))


@click.command("inject")
@click.argument("bundle")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_address
)
@click.option(
    "--node",
    type=click.Choice(["group", "cdev"]),
    default="group",
    show_default=True,
    help="/dev/vfio/N, or /dev/vfio/devices/vfioN (Linux 6.6).",
)
@click.option(
    "--runtime",
    type=click.Choice(["runc", "kata"]),
    help="What starts the container; without it, only what both can take.",
)
@click.option(
    "--cdi",
    multiple=True,
    metavar="KIND=NAME",
    help="Also ask for this CDI device in an annotation; one for each device, in their order.",
)
@click.option("--only", is_flag=True, help="Leave the other functions of the slot out.")
@session_options()
@click.pass_obj
def inject(
    session: Session,
    *,
    bundle: str,
    devices: tuple[str, ...],
    node: NodeForm,
    runtime: ContainerRuntime | None,
    cdi: tuple[str, ...],
    only: bool,
) -> None:
    """Put devices into the config.json of an OCI bundle, before its container starts.

    BUNDLE is its directory, or the file. It gets the nodes of VFIO with the numbers, mode and owner
    that they have on this host (linux.devices), the cgroup rules that let the container open them
    (linux.resources.devices), and a note of what was put in, by which `vfiomgr oci eject` takes
    back exactly that. Nothing else changes by a byte. A second run writes nothing.

    \b
    Examples:
      vfiomgr oci inject /run/bundle 0000:04:00.0
      vfiomgr oci inject /run/bundle 04:00.0 --dry-run             # show the difference
      vfiomgr oci inject /run/bundle 04:00.0 --runtime kata --cdi nvidia.com/pgpu=23
      vfiomgr oci inject config.json 04:00.0 --node cdev --only --format json
      vfiomgr oci inject /run/bundle f715f63c-0d00-4007-9c5a-b07b0c6c05de --runtime runc
    """
    from vfiomgr.containers.oci import edit  # noqa: PLC0415 - not for help

    names = _paired(devices, cdi)
    session.require_live(
        "a snapshot does not hold the numbers of nodes, which differ from boot to boot",
        "run it on the host itself, or with --root",
    )
    document = read_bundle(bundle)
    host = session.scan_devices()
    units = _units(host, names, only=only)
    _refuse(session, host, [unit for unit, _ in units], runtime)
    injections = [_injection(session, unit, node, runtime, cdi) for unit, cdi in units]
    notes = [
        *_of_nodes(session.tree, (path for one in injections for path in one.device.nodes)),
        *_of_names(session.tree, (name for one in injections for name in one.cdi)),
        *(_companions(host, [unit for unit, _ in units]) if node == "group" else ()),
    ]
    conclude(session, edit.inject(document, injections), notes)


def _of_nodes(tree: HostTree, paths: Iterable[str]) -> Iterator[str]:
    """Those that a tree does not have, as recordings: sysfs alone told of them."""
    if tree.is_live and not tree.is_machine:
        return
    for path in dict.fromkeys(paths):
        status = tree.status(HostPath(path))
        if status is None or not stat.S_ISCHR(status.st_mode):
            what = "not there" if status is None else "no device node"
            yield (
                f"not checked: {path} is {what} below {tree.root}: its numbers are those of sysfs, "
                "its mode and owner need not be those of the host"
            )


def _of_names(tree: HostTree, names: Iterable[str]) -> Iterator[str]:
    """Those that no specification of CDI has."""
    from vfiomgr.containers.cdi.document import read_file  # noqa: PLC0415 - not for help

    asked = dict.fromkeys(names)
    made = map(read_file, read_cdi_files(tree)) if asked else ()
    known = {f"{each.kind}={device.name}" for each in made for device in each.devices}
    for name in (name for name in asked if name not in known):
        kind = name.partition("=")[0]
        yield (
            f"no CDI specification of this host has {name}, and who looks for it fails: vfiomgr "
            f"cdi list shows those there are, vfiomgr cdi generate --kind {kind} --write makes one"
        )


def tell_who_comes_along(host: HostSnapshot, units: Sequence[GuestDevice]) -> None:
    """Functions of other devices that share a group with those that are given."""
    for line in _companions(host, units):
        note(line)


def _companions(host: HostSnapshot, units: Sequence[GuestDevice]) -> list[str]:
    return [
        f"the container gets {device}, too: it is in IOMMU group {device.iommu_group}"
        for device in oci_plan.companions(host, units)
    ]


def _paired(devices: Sequence[str], cdi: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each device with its name in CDI.

    Raises:
        UsageError: as many names as devices are wanted, or none; or one is no such name.

    """
    if not cdi:
        return [(device, None) for device in devices]
    for name in cdi:
        kind, _, device = name.partition("=")
        if not (is_kind(kind) and is_device_name(device)):
            message = f"--cdi {name} is no name of a CDI device"
            raise UsageError(message, "write it as vendor/class=device, e.g. nvidia.com/pgpu=23")
    if len(cdi) != len(devices):
        message = f"--cdi is given {len(cdi)} times, for {len(devices)} devices"
        raise UsageError(message, "give it once for each device, in their order")
    return list(zip(devices, cdi, strict=True))


def _units(
    host: HostSnapshot, names: Sequence[tuple[str, str | None]], *, only: bool
) -> list[tuple[GuestDevice, tuple[str, ...]]]:
    """What is named, slots whole, each once, with its names in CDI."""
    found: dict[str, tuple[GuestDevice, tuple[str, ...]]] = {}
    for device, cdi in names:
        (unit,) = units_of(host, [DeviceRequest(device, is_alone=only)])
        known = found.get(unit.name, (unit, ()))[1]
        more = () if cdi is None or cdi in known else (cdi,)
        found[unit.name] = (unit, (*known, *more))
    return list(found.values())


def _refuse(
    session: Session,
    host: HostSnapshot,
    units: Sequence[GuestDevice],
    runtime: ContainerRuntime | None,
) -> None:
    """What no container could open, and what Kata cannot attach.

    Raises:
        Refusal: there is such a device.

    """
    if runtime != "runc":
        lifted = "" if runtime else "; --runtime runc is for containers on this kernel, which can"
        for unit in units:
            refuse_mediated(host, unit.name, lifted)
    oci_plan.refuse_noiommu(host, units)
    if oci_plan.waiting(host, units):
        oci_plan.refuse_unready(session.scan(), units)


def _injection(
    session: Session,
    unit: GuestDevice,
    form: NodeForm,
    runtime: ContainerRuntime | None,
    cdi: tuple[str, ...],
) -> Injection:
    device = oci_plan.container_device(unit, form, runtime)
    return Injection(device, tuple(read_node(session.tree, path) for path in device.nodes), cdi)
