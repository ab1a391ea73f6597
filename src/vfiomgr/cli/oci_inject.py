"""`vfiomgr oci inject`."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.oci_files import conclude, read_bundle
from vfiomgr.cli.output import note
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import UsageError
from vfiomgr.host.cdi import read_cdi_files
from vfiomgr.host.device_node import read_node
from vfiomgr.model.hostdev import DeviceWish
from vfiomgr.model.oci import Injection
from vfiomgr.model.path import HostPath
from vfiomgr.planner import container_nodes
from vfiomgr.planner.cdi.grammar import is_device_name, is_kind
from vfiomgr.planner.guest.units import units_of
from vfiomgr.planner.kata.mediated import refuse_mediated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.oci import ContainerRuntime, NodeForm
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.guest.units import Unit


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
    from vfiomgr.adapters.oci import edit  # noqa: PLC0415 - not for help

    names = _paired(devices, cdi)
    session.require_live(
        "a snapshot does not hold the numbers of nodes, which differ from boot to boot",
        "run it on the host itself, or with --root",
    )
    document = read_bundle(bundle)
    host = session.devices()
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
    from vfiomgr.model.cdi_document import read_quickly  # noqa: PLC0415 - not for help

    asked = dict.fromkeys(names)
    made = map(read_quickly, read_cdi_files(tree)) if asked else ()
    known = {f"{each.kind}={device.name}" for each in made for device in each.devices}
    for name in (name for name in asked if name not in known):
        kind = name.partition("=")[0]
        yield (
            f"no CDI specification of this host has {name}, and who looks for it fails: vfiomgr "
            f"cdi list shows those there are, vfiomgr cdi generate --kind {kind} --write makes one"
        )


def tell_who_comes_along(host: HostSnapshot, units: Sequence[Unit]) -> None:
    """Functions of other devices that share a group with those that are given."""
    for line in _companions(host, units):
        note(line)


def _companions(host: HostSnapshot, units: Sequence[Unit]) -> list[str]:
    return [
        f"the container gets {device}, too: it is in IOMMU group {device.iommu_group}"
        for device in container_nodes.companions(host, units)
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
) -> list[tuple[Unit, tuple[str, ...]]]:
    """What is named, slots whole, each once, with its names in CDI."""
    found: dict[str, tuple[Unit, tuple[str, ...]]] = {}
    for device, cdi in names:
        (unit,) = units_of(host, [DeviceWish(device, is_alone=only)])
        known = found.get(unit.name, (unit, ()))[1]
        more = () if cdi is None or cdi in known else (cdi,)
        found[unit.name] = (unit, (*known, *more))
    return list(found.values())


def _refuse(
    session: Session, host: HostSnapshot, units: Sequence[Unit], runtime: ContainerRuntime | None
) -> None:
    """What no container could open, and what Kata cannot attach.

    Raises:
        Refusal: there is such a device.

    """
    if runtime != "runc":
        lifted = "" if runtime else "; --runtime runc is for containers on this kernel, which can"
        for unit in units:
            refuse_mediated(host, unit.name, lifted)
    container_nodes.refuse_noiommu(host, units)
    if container_nodes.waiting(host, units):
        container_nodes.refuse_unready(session.host(), units)


def _injection(
    session: Session,
    unit: Unit,
    form: NodeForm,
    runtime: ContainerRuntime | None,
    cdi: tuple[str, ...],
) -> Injection:
    device = container_nodes.container_device(unit, form, runtime)
    return Injection(device, tuple(read_node(session.tree, path) for path in device.nodes), cdi)
