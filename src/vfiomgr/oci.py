"""Add devices to the configuration of an OCI bundle, and remove them, by name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.document import is_device_name, is_kind, read_file
from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.containers.cdi.model import generating
from vfiomgr.containers.oci import edit, nodes
from vfiomgr.containers.oci.nodes import ContainerRuntime, Injection, NodeForm, read_node
from vfiomgr.documents.difference import unified
from vfiomgr.documents.json_text import JsonDocument, read_object
from vfiomgr.errors import HostError, InvalidDocument, UsageError
from vfiomgr.guests.device import units_of
from vfiomgr.guests.model import DeviceRequest, GuestDevice
from vfiomgr.host.rewrite import read_own, rewrite_own
from vfiomgr.kata.explain.mediated import refuse_mediated
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.containers.oci.edit import Edit
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource

__all__ = ["difference", "eject", "inject", "write"]

_NAME = "config.json"
_MOST_BYTES = 32 << 20
_REMEDY = "name the directory of an OCI bundle, or its config.json"


def inject(  # noqa: PLR0913 - each is an option of the command
    host: HostSource,
    bundle: str | os.PathLike[str],
    *devices: str,
    node: NodeForm | None = None,
    runtime: ContainerRuntime | None = None,
    cdi: Sequence[str] = (),
    only: bool = False,
) -> Edit:
    """The configuration of a bundle with added devices; `write` writes it.

    `bundle` is its directory, or the file. `node` is `group` (/dev/vfio/N) or `cdev`
    (/dev/vfio/devices/vfioN, Linux 6.6), None for the group unless this kernel has none; `runtime`
    is `runc` or `kata`, None for devices that both support; `cdi` has one name
    (vendor/class=device) for each device, or none; `only` omits the
    other functions of the slots.

    Raises:
        UsageError: the host is a snapshot, or the bundle or a name is invalid.
        InvalidDocument: it is not a configuration; the message names line and column.
        UnknownDevice: the host has no such device.
        Refusal: a device is not available to containers.
    """
    names = _paired(devices, cdi)
    host.require_live(
        "a snapshot does not have the numbers of device nodes, which change at each boot",
        "run the command on the host itself, or with --root",
    )
    document = _read_bundle(os.fspath(bundle))
    found = host.scan_devices()
    wanted = _units(found, names, only=only)
    units = [unit for unit, _ in wanted]
    _refuse(host, found, units, runtime)
    node = node or nodes.usual_form(found)
    injections = [_injection(host.tree, unit, node, runtime, cdi) for unit, cdi in wanted]
    for text in _of_nodes(host.tree, (path for one in injections for path in one.device.nodes)):
        host.on_note(text)
    for text in _of_names(host.tree, (name for one in injections for name in one.cdi)):
        host.on_note(text)
    for text in nodes.companion_notes(found, units) if node == "group" else ():
        host.on_note(text)
    return edit.inject(document, injections)


def eject(bundle: str | os.PathLike[str], *devices: str) -> Edit:
    """The configuration of a bundle without devices that `inject` added: all, or the given ones.

    Raises:
        UsageError: it is not readable, a link, or another user's.
        InvalidDocument: it is not a configuration; the message names line and column.
    """
    return edit.eject(_read_bundle(os.fspath(bundle)), devices or None)


def write(change: Edit) -> None:
    """Write the configuration if it changed.

    Raises:
        HostError: another program changed it meanwhile, or it is not writable.
    """
    if change.is_changed:
        before, after = change.before.text.encode(), change.after.text.encode()
        rewrite_own(change.before.source, before, after)


def difference(change: Edit) -> str:
    """The difference like diff -u; a configuration on one line is first split into lines."""
    source = change.before.source
    before, after = (_lines(document) for document in (change.before, change.after))
    return "".join(f"{line}\n" for line in unified(before, after, source, source, end=""))


def _lines(document: JsonDocument) -> list[str]:
    text = document.text
    if "\n" not in text.strip():
        text = json.dumps(document.root.value, indent=2, ensure_ascii=False)
    return text.splitlines()


def _read_bundle(place: str) -> JsonDocument:
    """Read the configuration of a bundle, given as directory or file.

    Raises:
        UsageError: it is not readable, a link, or another user's.
        InvalidDocument: it is not a configuration; the message names line and column.
    """
    path = os.path.join(place, _NAME) if os.path.isdir(place) else place
    try:
        data = read_own(path, _MOST_BYTES + 1)
    except OSError as error:
        message = f"cannot read bundle {path}: {error.strerror}"
        raise UsageError(message, _REMEDY) from None
    except HostError as error:
        raise UsageError(error.message, error.hint) from None
    if len(data) > _MOST_BYTES:
        message = (
            f"{path} is larger than {_MOST_BYTES >> 20} MiB, the limit for a container "
            "configuration"
        )
        raise InvalidDocument(message, _REMEDY)
    try:
        return read_object(data.decode(), path)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{path}:{line}: not UTF-8 text"
        raise InvalidDocument(message, "let the runtime write it again") from None


def _of_nodes(tree: HostTree, paths: Iterable[str]) -> Iterator[str]:
    """Notes about nodes that a recorded tree lacks; their numbers come from sysfs."""
    if tree.is_live and not tree.is_machine:
        return
    for path in dict.fromkeys(paths):
        status = tree.status(HostPath(path))
        if status is None or not stat.S_ISCHR(status.st_mode):
            what = "missing" if status is None else "not a device node"
            yield (
                f"not checked: {path} is {what} below {tree.root}; its numbers are from sysfs, "
                "its mode and owner may differ from those on the host"
            )


def _of_names(tree: HostTree, names: Iterable[str]) -> Iterator[str]:
    """Notes about names without a CDI specification."""
    asked = dict.fromkeys(names)
    made = map(read_file, read_cdi_files(tree)) if asked else ()
    known = {f"{each.kind}={device.name}" for each in made for device in each.devices}
    for name in (name for name in asked if name not in known):
        kind, _, device = name.partition("=")
        yield (
            f"no CDI specification of this host has {name}, so containers with it fail; vfiomgr "
            f"cdi list shows the names, {generating(kind, device)} creates one"
        )


def _paired(devices: Sequence[str], cdi: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each device with its CDI name.

    Raises:
        UsageError: the number of names differs from that of devices, or a name is invalid.
    """
    if not cdi:
        return [(device, None) for device in devices]
    for name in cdi:
        kind, _, device = name.partition("=")
        if not (is_kind(kind) and is_device_name(device)):
            message = f"invalid CDI device name: --cdi {name}"
            raise UsageError(message, "use vendor/class=device, e.g. nvidia.com/pgpu=23")
    if len(cdi) != len(devices):
        message = f"--cdi is given {len(cdi)} times, but there are {len(devices)} devices"
        raise UsageError(message, "give it once per device, in the same order")
    return list(zip(devices, cdi, strict=True))


def _units(
    host: HostSnapshot, names: Sequence[tuple[str, str | None]], *, only: bool
) -> list[tuple[GuestDevice, tuple[str, ...]]]:
    """The named devices with entire slots, each once, with their CDI names."""
    found: dict[str, tuple[GuestDevice, tuple[str, ...]]] = {}
    for device, cdi in names:
        (unit,) = units_of(host, [DeviceRequest(device, is_alone=only)])
        known = found.get(unit.name, (unit, ()))[1]
        more = () if cdi is None or cdi in known else (cdi,)
        found[unit.name] = (unit, (*known, *more))
    return list(found.values())


def _refuse(
    source: HostSource,
    host: HostSnapshot,
    units: Sequence[GuestDevice],
    runtime: ContainerRuntime | None,
) -> None:
    """Refuse devices that no container can open, and those that Kata cannot attach.

    Raises:
        Refusal: there is such a device.
    """
    if runtime != "runc":
        lifted = (
            ""
            if runtime
            else "; use --runtime runc for containers on this kernel, which support it"
        )
        for unit in units:
            refuse_mediated(host, unit.name, lifted)
    nodes.refuse_noiommu(host, units)
    if nodes.waiting(host, units):
        nodes.refuse_unready(source.scan(), units)


def _injection(
    tree: HostTree,
    unit: GuestDevice,
    form: NodeForm,
    runtime: ContainerRuntime | None,
    cdi: tuple[str, ...],
) -> Injection:
    device = nodes.container_device(unit, form, runtime)
    return Injection(device, tuple(read_node(tree, path) for path in device.nodes), cdi)
