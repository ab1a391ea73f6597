"""`vfiomgr layout install`, `uninstall`, `import` and `check layout`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from vfiomgr.cli.options import (
    CHANGING,
    READING,
    allow_option,
    complete_file,
    file_option,
    flag,
    session_options,
)
from vfiomgr.cli.output import items_document, note, print_document, print_text, print_yaml, say
from vfiomgr.diagnostic import OVERRIDES, Diagnostic, Override, Position, flaw
from vfiomgr.documents.text import source_of, text_of
from vfiomgr.engine.changes import plan_or_apply, print_outcome, update_initramfs_option
from vfiomgr.errors import HostError, InvalidDocument, Refusal, UsageError, forbid_together
from vfiomgr.layout.commands.changes import layout_option
from vfiomgr.layout.document import document_of, find_flaws, render_layouts
from vfiomgr.layout.guest_files import read_guest_files
from vfiomgr.layout.imports import Boards, import_layouts
from vfiomgr.layout.named import layout_of_text
from vfiomgr.layout.requests import InstallLayout, UninstallLayout
from vfiomgr.layout.schema import layout_schema
from vfiomgr.layout.vgpu_device_manager import VgpuConfigs, read_vgpu_configs
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.named import program_for_units
from vfiomgr.snapshot.completion import complete_board
from vfiomgr.snapshot.session import Session, pass_session, session_of
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.layout.model import LayoutFile
    from vfiomgr.snapshot.model import HostSnapshot


@click.command("install")
@click.argument("file", shell_complete=complete_file)
@layout_option
@allow_option(*OVERRIDES, text="Override a safety check at each boot; in-use: only now.")
@flag("--enforce", text="Also correct drift after the boot (layout watch --enforce).")
@flag(
    "--adopt",
    text="Replace driverctl's entries for its devices, and adopt vGPUs at boot (apply --adopt).",
)
@update_initramfs_option
@session_options(*CHANGING)
@pass_session
def install(
    session: Session,
    *,
    file: str,
    name: str | None,
    allow: tuple[Override, ...],
    enforce: bool,
    adopt: bool,
    update_initramfs: bool,
) -> None:
    """Install a layout, to apply it at each boot.

    No device is changed now. The command writes /etc/vfiomgr/layout.yaml, udev rules that keep host
    drivers from functions for passthrough, and vfiomgr-layout.service, which runs `vfiomgr apply`
    before display managers, libvirt, kubelet and container runtimes start. A layout that this host
    cannot have is refused. A repeated installation only updates what differs.

    \b
    Examples:
      vfiomgr layout install host.yaml
      vfiomgr layout install fleet.yaml --layout kata-node --dry-run
      vfiomgr layout install host.yaml --enforce --update-initramfs
      vfiomgr layout install fleet.yaml --layout kata-node --adopt
    """
    text = text_of(file, "the layout file")
    applied = layout_of_text(session, text, source_of(file), name, frozenset(allow))
    applied = replace(applied, adopt=adopt)
    request = InstallLayout(
        applied,
        text,
        enforce=enforce,
        update_initramfs=update_initramfs,
        program=program_for_units(session),
    )
    _told(session, plan_or_apply(session, request), "vfiomgr layout uninstall", layout=applied.name)


@click.command("uninstall")
@update_initramfs_option
@session_options(*CHANGING)
@pass_session
def uninstall(session: Session, *, update_initramfs: bool) -> None:
    """Uninstall the layout: remove its file, udev rules and units.

    Devices are not changed. Rules that `bind --persist` had written before are restored.

    \b
    Examples:
      vfiomgr layout uninstall --dry-run
      vfiomgr layout uninstall
    """
    _told(
        session,
        plan_or_apply(session, UninstallLayout(update_initramfs, _program_if_trusted(session))),
    )


def _program_if_trusted(session: Session) -> str | None:
    """The path for the unit of restored rules; a layout can be uninstalled without one."""
    try:
        return program_for_units(session)
    except Refusal as refusal:
        note(f"no unit is written: {refusal.message}")
        return None


def _told(session: Session, outcome: Outcome | None, undo: str = "", **facts: object) -> None:
    if outcome is None:
        return
    print_outcome(session, outcome, None, **facts)
    if undo and outcome.is_changed and session.format == "table":
        note(f"undo with: {undo}")


@click.command("validate")
@click.argument("files", nargs=-1, metavar="FILE...", shell_complete=complete_file)
@flag("--schema", "is_schema", text="Print the JSON schema of layout files.")
@session_options(*READING)
@click.pass_context
def validate(context: click.Context, files: tuple[str, ...], *, is_schema: bool) -> None:
    """Check layout files; no host is needed.

    Each error is one line: file, line, column, error and remedy. - reads from a pipe. --schema
    prints what a layout file may contain (JSON schema, draft 2020-12), for other programs.

    Exit status: 0 if all files are valid, 65 if one is not.

    \b
    Examples:
      vfiomgr check layout gpu-node.yaml
      vfiomgr check layout host.yaml fleet.yaml --format json
      vfiomgr layout export | vfiomgr check layout -
      vfiomgr check layout --schema > layout.schema.json
    """
    session = session_of(context)
    if is_schema:
        if files:
            forbid_together("--schema", "FILE", "the schema is the same for all files")
        document = layout_schema()
        if session.format == "yaml":
            print_yaml(document)
        else:
            print_text(json.dumps(document, indent=2) + "\n")
        return
    if not files:
        message = "missing argument: FILE"
        raise UsageError(message, "e.g. vfiomgr check layout gpu-node.yaml")
    items = [_validated(path) for path in files]
    if session.format == "table":
        for item in items:
            _print_validated(item)
    else:
        print_document("LayoutValidation", {"items": items}, session.format)
    if not all(item["valid"] for item in items):
        context.exit(InvalidDocument.exit_code)


def _validated(path: str) -> dict[str, Any]:
    """The result for one file."""
    source = source_of(path)
    try:
        file, flaws = find_flaws(text_of(path, "the layout file"))
    except InvalidDocument as error:
        file, flaws = None, (flaw("unreadable", Position(), "", error.message, error.hint),)
    return {
        "file": source,
        "valid": file is not None,
        "layouts": list(_counts(file)),
        **items_document(flaws, partial(_flaw_document, source), "findings"),
    }


def _flaw_document(source: str, found: Diagnostic) -> dict[str, object]:
    place = found.place or Position()
    return {
        "file": source,
        "line": place.line,
        "column": place.column,
        "where": found.subject,
        "message": found.summary,
        "remedy": found.remedy,
    }


def _counts(file: LayoutFile | None) -> Iterator[dict[str, Any]]:
    """The layouts of a file, and the number of rules in each."""
    for name, layout in () if file is None else file.layouts.items():
        yield {"name": name, "rules": len(layout.devices)}


def _print_validated(item: dict[str, Any]) -> None:
    source = item["file"]
    if item["valid"]:
        layouts = ", ".join(
            f"{one['name']} ({counted(one['rules'], 'rule')})" for one in item["layouts"]
        )
        say(f"{source}: {counted(len(item['layouts']), 'layout')}: {layouts}")
    for found in item["findings"]:
        where = f"{found['where']}: " if found["where"] else ""
        remedy = f"; {found['remedy']}" if found["remedy"] else ""
        place = f"{source}:{found['line']}:{found['column']}"
        say(f"{place}: {where}{found['message']}{remedy}")
    if "omitted" in item:
        say(f"{source}: and {item['omitted']} more")


@click.command("import")
@click.argument("files", nargs=-1, metavar="[FILE]...", shell_complete=complete_file)
@file_option(
    "--vgpu-device-manager",
    "configuration",
    text="Import a vGPU Device Manager configuration too; - reads from a pipe.",
)
@click.option(
    "--board",
    "boards",
    metavar="ADDRESS|all",
    multiple=True,
    shell_complete=complete_board,
    help="Boards for guests, if several share an ID of vfio-pci.",
)
@session_options(*READING)
@pass_session
def import_(
    session: Session, files: tuple[str, ...], configuration: str | None, boards: tuple[str, ...]
) -> None:
    """Print a layout made from the configuration of other tools.

    From the host: /etc/driverctl.d, /etc/mdevctl.d, and the PCI IDs of vfio-pci on the kernel
    command line and in modprobe.d, as one layout. From each FILE, the devices of guests: nova.conf,
    a virtual machine or the PCI mappings of Proxmox VE, and what `incus config show` or `lxc config
    show` prints. From the vGPU Device Manager: a layout for each of its configurations. Items that
    could not be imported are listed on stderr with the reason.

    PCI IDs that match several boards, some of which are on host drivers, are refused unless --board
    names the boards for guests.

    \b
    Examples:
      vfiomgr layout import > layout.yaml
      vfiomgr layout import /etc/nova/nova.conf
      vfiomgr layout import /etc/pve/qemu-server/100.conf /etc/pve/mapping/pci.cfg
      vfiomgr layout import --vgpu-device-manager /etc/nvidia-vgpu-device-manager/config.yaml
      vfiomgr --snapshot host.json layout import
      vfiomgr layout import --board 0000:41:00.0
    """
    configs = None
    if configuration is not None:
        text = text_of(configuration, "the configuration")
        configs = read_vgpu_configs(text, source_of(configuration))
    guests = read_guest_files({source_of(one): text_of(one, "the file") for one in files})
    host = _host(session, None if files else configs)
    found = import_layouts(host, configs, _boards(host, boards), guests)
    for text in found.left:
        note(f"not imported exactly: {text}")
    for diagnostic in found.diagnostics:
        note(f"`vfiomgr apply` would refuse this now: {diagnostic.summary}; {diagnostic.hint}")
    file = found.file
    if file is None:
        message = "nothing to import: no driver or vGPU is configured on this host"
        raise HostError(
            message, "to import a configuration file, pass --vgpu-device-manager FILE; see --help"
        )
    if session.format == "json":
        print_text(json.dumps(document_of(file), indent=2) + "\n")
    else:
        print_text(render_layouts(file))


def _boards(host: HostSnapshot | None, named: tuple[str, ...]) -> Boards:
    if "all" in named:
        return "all"
    known = [device.address for device in host.devices] if host else []
    return frozenset(PciAddress.parse(text, known) for text in named)


def _host(session: Session, configs: VgpuConfigs | None) -> HostSnapshot | None:
    """The host; a configuration file can be imported without one."""
    try:
        return session.scan(with_readiness=True)
    except (HostError, UsageError) as error:
        if configs is None or session.snapshot is not None:
            raise
        note(f"the host is not imported: {error.message}")
        return None
