"""`vfiomgr libvirt edit`: add devices to the XML of a domain, remove them, or define the domain."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import click
from msgspec.structs import replace

from vfiomgr.cli.keywords import fields_of
from vfiomgr.cli.options import (
    CHANGING,
    declared,
    file_option,
    flag,
    function_only_option,
    session_options,
    typed_options,
)
from vfiomgr.cli.output import note, print_document, print_text, say, say_text
from vfiomgr.documents.difference import unified
from vfiomgr.documents.text import STANDARD_INPUT, source_of
from vfiomgr.documents.xml_text import Document, read_document
from vfiomgr.errors import HostError, UsageError, forbid_together
from vfiomgr.guests.device import units_of
from vfiomgr.guests.model import AttachOptions, DeviceOptions, DeviceRequest, GuestDevice
from vfiomgr.host.rewrite import rewrite
from vfiomgr.libvirt.attach.domain_edit import Edited, Placed, edited
from vfiomgr.libvirt.build import teaming, vf_token
from vfiomgr.libvirt.build.hostdevs import check
from vfiomgr.libvirt.client.domains import DefineForecast
from vfiomgr.libvirt.commands.connection import (
    DEFAULT_URI,
    complete_domain_or_file,
    connect_option,
    connected,
    require_running_host,
)
from vfiomgr.libvirt.commands.hostdev import version_options
from vfiomgr.libvirt.named import refuse_to_hurt, require_iommu, tell_what_waits
from vfiomgr.libvirt.versions import Versions
from vfiomgr.libvirt.xml.edit import without_screens
from vfiomgr.libvirt.xml.read import domain_of, read_domain, read_xml
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.value import Value
from vfiomgr.vgpu.completion import complete_device

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


_NO_NEWLINE = "\\ No newline at end of file"


def print_edited(session: Session, done: Edited, *, is_piped: bool, undo: str) -> None:
    """Print the changes; on stderr if stdout has the text. `undo` removes what was added."""
    if is_piped:
        for line in _told(done):
            note(line)
    elif session.format == "table":
        say(*_told(done))
        if done.additions.placed and not done.removals.devices:
            names = " ".join(f"--remove {one.names[0]}" for one in done.additions.placed)
            note(f"undo with: {undo} {names}")
    else:
        print_document("DomainEdit", _body(done), session.format)


def _told(done: Edited) -> Iterator[str]:
    source = done.before.source
    yield from (f"removed {device.name}" for device in done.removals.devices)
    if done.screens:
        yield "removed the emulated screen"
    for port in done.additions.ports:
        yield f"added root port {port.index} for {port.device}"
    for placed in done.additions.placed:
        where = "" if placed.guest is None else f", in the guest {_place(placed)}"
        yield f"added {', '.join(placed.names)}{where}"
    yield from (f"{name} is already in {source}" for name in done.additions.already)
    yield from (f"{name} is not in {source}" for name in done.removals.absent)
    for name in done.removals.orphans:
        yield f"{name} stays, but the guest cannot find it without function 0 of its slot"
    if not done.is_changed:
        yield "nothing to do"


def _place(placed: Placed) -> str:
    guest = placed.guest
    return "" if guest is None else f"{guest.bus:02x}:{guest.slot:02x}"


def _body(done: Edited) -> dict[str, object]:
    additions, removals = done.additions, done.removals
    return {
        "source": done.before.source,
        "changed": done.is_changed,
        "added": [{"names": one.names, "guest": one.guest} for one in additions.placed],
        "root_ports": additions.ports,
        "removed": [device.name for device in removals.devices],
        "already": additions.already,
        "absent": removals.absent,
        "screens": done.screens,
        "orphans": removals.orphans,
    }


def print_difference(session: Session, done: Edited) -> None:
    """Print the difference like diff -u, and the notes on stderr."""
    difference = "".join(_difference(done))
    if session.format != "table":
        body = {**_body(done), "difference": difference}
        print_document("DomainEdit", body, session.format)
        return
    say_text(difference)
    for line in _told(done):
        note(line.replace("added", "would add", 1).replace("removed", "would remove", 1))


def _difference(done: Edited) -> Iterator[str]:
    """Lines end with line feeds; a carriage return is part of its line."""
    encoding, source = done.before.encoding, done.before.source
    before, after = (_lines(text, encoding) for text in (done.before.text, done.after))
    for line in unified(before, after, source, source):
        yield line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n"


def _lines(text: bytes, encoding: str) -> list[str]:
    decoded = text.decode(encoding)
    return [line for line in decoded.replace("\n", "\n\0").split("\0") if line]


_OWN_DIRECTORY = "/libvirt/qemu"


class FilePlace(Value):
    """A file, or a pipe; `output` is another file for the text."""

    path: str
    output: str | None = None

    @property
    def target(self) -> str:
        """The destination of the text; a pipe is written to a pipe."""
        return self.path if self.output is None else self.output

    @property
    def argument(self) -> str:
        """Its name in commands, quoted for a shell."""
        return shlex.quote(self.target)

    @property
    def is_pipe(self) -> bool:
        """Whether the text itself is printed."""
        return self.target == STANDARD_INPUT

    def read(self) -> Document:
        """Read the current domain."""
        return read_document(read_xml(self.path), source_of(self.path))

    def write(self, before: bytes, after: bytes) -> None:
        """Write the text to its destination, unless it is unchanged."""
        if self.is_pipe:
            print_text(after)
        elif self.output is not None:
            _refuse_own_file(self.output)
            rewrite(self.output, None, after)
        elif after != before:
            _refuse_own_file(self.path)
            rewrite(self.path, before, after)


class DomainPlace(Value):
    """The definition in libvirt; a running guest uses a new one after a restart."""

    name: str
    uri: str
    with_secrets: bool
    """Whether to read passwords too: a definition without them would lose them."""

    @property
    def argument(self) -> str:
        """Its name in commands, quoted for a shell."""
        words = [self.name] if self.uri == DEFAULT_URI else [self.name, "--connect", self.uri]
        return shlex.join(words)

    @property
    def is_pipe(self) -> bool:
        """Always false: the text is defined."""
        return False

    def read(self) -> Document:
        """Read the definition of the domain."""
        with connected(self.uri, read_only=not self.with_secrets) as connection:
            text = connection.domain_xml(self.name, secure=self.with_secrets)
        return read_document(text, self.name)

    def write(self, before: bytes, after: bytes) -> None:
        """Redefine the domain if the text differs."""
        if after == before:
            return
        with connected(self.uri) as connection:
            if connection.domain_xml(self.name, secure=True) != before:
                message = f"the definition of {self.name} was changed meanwhile by another program"
                raise HostError(message, "check it, then run the command again")
            connection.define(after, self.name)


def place_of(
    target: str, output: str | None, uri: str, *, is_change: bool
) -> FilePlace | DomainPlace:
    """The file or domain that a user names: a file exists, has a / or ends in .xml."""
    is_file = "/" in target or target.endswith(".xml") or os.path.exists(target)
    if is_file or target == STANDARD_INPUT:
        return FilePlace(target, output)
    if output is not None:
        message = f"--output is only for files, but {target} is a libvirt domain"
        remedy = f"virsh dumpxml --inactive {shlex.quote(target)} | vfiomgr libvirt edit - …"
        raise UsageError(message, remedy)
    return DomainPlace(target, uri, with_secrets=is_change)


def _refuse_own_file(path: str) -> None:
    """Refuse files that libvirtd keeps in memory and overwrites."""
    directory, name = os.path.split(os.path.realpath(path))
    if directory.endswith(_OWN_DIRECTORY):
        guest = name.removesuffix(".xml")
        message = f"cannot edit {path}: libvirt does not read it again, and overwrites it"
        remedy = f"edit the definition in libvirt: vfiomgr libvirt edit {shlex.quote(guest)} …"
        raise UsageError(message, remedy)


_DEVICE = "ADDRESS|UUID"


@click.command("edit")
@click.argument("target", metavar="FILE|DOMAIN", shell_complete=complete_domain_or_file)
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar=_DEVICE,
    shell_complete=complete_device,
    help="Add this device; repeatable.",
)
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar=_DEVICE,
    shell_complete=complete_device,
    help="Remove this device before others are added; repeatable.",
)
@file_option("--output", text="Write to this file instead; - for a pipe.")
@flag("--no-video", text="Remove the emulated graphics card, once a GPU shows the screen.")
@flag("--define", text="Define the domain of FILE in libvirt.")
@declared(DeviceOptions)
@function_only_option("Leave the other functions of the slot unchanged.")
@version_options
@connect_option
@session_options(*CHANGING)
@pass_session
def edit(
    session: Session,
    *,
    target: str,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    output: str | None,
    no_video: bool,
    define: bool,
    only: bool,
    libvirt_version: str | None,
    qemu_version: str | None,
    uri: str,
    **options: Unpack[DeviceOptions],
) -> None:
    """Add devices to the XML of a domain, or remove them.

    A FILE exists, has a / or ends in .xml; - reads from a pipe. Any other name is a DOMAIN of
    libvirt, whose definition is changed: a running guest uses it after a restart.

    Nothing else changes: comments, order, indentation, line ends and unknown elements stay.
    Removing what was added restores the original file exactly. All functions of a slot are added
    and removed as one multifunction guest device behind a free root port. If no port is free, one
    is added, and removed together with the device.

    With --define and no device, the domain of FILE is defined as it is. libvirt validates the file
    against its schema. Then the definition that libvirt prints is compared with the file: if an
    element or attribute is missing, the previous definition is restored and the missing parts are
    listed. A file without <uuid> is for the domain of its name, if there is one.

    \b
    Examples:
      vfiomgr libvirt edit guest.xml --add 0000:04:00.0
      vfiomgr libvirt edit guest.xml --add 0000:04:00.0 --dry-run    # show the difference
      vfiomgr libvirt edit guest.xml --remove 0000:04:00.0 --output new.xml
      vfiomgr libvirt edit guest --add 0000:04:00.0                  # the definition of a domain
      vfiomgr libvirt edit guest --connect qemu:///session --add 04:00.0 --function-only
      vfiomgr libvirt edit guest.xml --add 04:00.0 --rom /var/lib/libvirt/gpu.rom --boot-order 1
      vfiomgr libvirt edit guest.xml --display --ramfb \\
        --add f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr libvirt edit guest.xml --add 05:00.0 --managed --unassigned
      vfiomgr libvirt edit gb200.xml --add 0009:01:00.0 --acpi-nodes 1-8 --iommufd \\
        --libvirt-version 12.1 --qemu-version 10.2
      vfiomgr libvirt edit guest.xml --add 41:00.4 --managed --driver-model mlx5_vfio_pci \\
        --libvirt-version 10.0
      vfiomgr libvirt edit guest.xml --add 05:10.0 --teaming ua-net0     # to migrate the guest
      vfiomgr libvirt edit guest --no-video                 # when its GPU shows the desktop
      virsh dumpxml --inactive guest | vfiomgr libvirt edit - --add 04:00.0 > guest.xml
      vfiomgr libvirt edit guest.xml --define
      vfiomgr libvirt edit guest.xml --define --dry-run     # whether the domain already exists
    """
    if define:
        if added or removed or output is not None:
            message = "--define takes no --add, --remove or --output"
            raise UsageError(message, "edit the file first, then define it")
        for option in typed_options(
            (*options, "no_video", "only", "libvirt_version", "qemu_version")
        ):
            forbid_together("--define", option, "the file is defined as it is")
        _define(session, target, uri)
        return
    if not (added or removed or no_video):
        message = "no device given"
        raise UsageError(message, "pass --add ADDRESS or --remove ADDRESS, e.g. --add 0000:04:00.0")
    host = _host(session, required=bool(added))
    given = AttachOptions(**fields_of(DeviceOptions, options))
    requests = [DeviceRequest(name, given, is_alone=only) for name in added]
    units = units_of(host, requests) if host is not None else ()
    versions = Versions(session, libvirt_version, qemu_version)
    check(units, lambda: versions.libvirt, lambda: versions.qemu)
    for line in teaming.advice(units):
        note(line)
    if host is not None:
        require_iommu(session, host, versions, units)
    place = place_of(target, output, uri, is_change=not session.dry_run)
    _edit(session, place, host, units, removed, only=only, no_video=no_video)


def _edit(
    session: Session,
    place: FilePlace | DomainPlace,
    host: HostSnapshot | None,
    units: tuple[GuestDevice, ...],
    removed: tuple[str, ...],
    *,
    only: bool,
    no_video: bool,
) -> None:
    """Remove devices from the domain, and add others."""
    if isinstance(place, DomainPlace):
        require_running_host(session)
    done, hostdevs = edited(place.read(), host, units, removed, only=only)
    if no_video:
        after, screens = without_screens(read_document(done.after, done.before.source))
        done = replace(done, after=after, screens=screens)
    if host is not None:
        refuse_to_hurt(lambda: session.scan(with_users=True), hostdevs, host)
    _write(session, place, done, only=only)
    if host is not None:
        coming = [unit for unit in units if unit.function_names in done.added]
        if not vf_token.is_in(domain_of(done.before.root)):
            for line in vf_token.notes(host, coming):
                note(line)
        tell_what_waits(session, lambda: host, hostdevs, host)


def _write(session: Session, place: FilePlace | DomainPlace, done: Edited, *, only: bool) -> None:
    if session.dry_run:
        print_difference(session, done)
        return
    place.write(done.before.text, done.after)
    undo = f"vfiomgr libvirt edit {place.argument}{' --function-only' if only else ''}"
    print_edited(session, done, is_piped=place.is_pipe, undo=undo)


def _host(session: Session, *, required: bool) -> HostSnapshot | None:
    """The host, which is not needed to remove devices."""
    try:
        return session.scan()
    except (HostError, UsageError):
        if required or session.snapshot is not None:
            raise
        return None


def _define(session: Session, file: str, uri: str) -> None:
    """Define the domain of a file, and compare the definition that libvirt has then."""
    xml, source = read_xml(file), source_of(file)
    name = read_domain(xml, source).name
    require_running_host(session)
    if session.dry_run:
        _tell(session, name, _forecast(xml, source, name, uri), is_changed=False)
        return
    with connected(uri) as connection:
        is_changed = connection.define(xml, source)
        is_active = connection.state(name).is_active
    later = ", for its next start" if is_active and is_changed else ""
    text = f"defined: {name}{later}" if is_changed else f"{name} already has this definition"
    _tell(session, name, text, is_changed=is_changed)


def _forecast(xml: bytes, source: str, name: str, uri: str) -> str:
    """What a run would do; only libvirt can tell whether an existing definition would change."""
    with connected(uri, read_only=True) as connection:
        forecast = connection.would_define(xml, source)
    return {
        DefineForecast.NEW: f"would define {name} from {source} at {uri}",
        DefineForecast.SAME: f"{name} already has this definition",
        DefineForecast.ANOTHER: f"would redefine {name} from {source}: it exists at {uri}",
    }[forecast]


def _tell(session: Session, name: str, text: str, *, is_changed: bool) -> None:
    if session.format == "table":
        say(text)
    else:
        body = {"domain": name, "changed": is_changed, "message": text}
        print_document("DefineOutcome", body, session.format)
