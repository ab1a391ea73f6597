"""`vfiomgr layout install` and `uninstall`: a layout for every boot, and no more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.changes import (
    plan_or_apply,
    print_outcome,
    update_initramfs_option,
)
from vfiomgr.cli.options import CHANGING, READING, session_options
from vfiomgr.cli.output import note, print_document, print_text, print_yaml, say
from vfiomgr.cli.session import Session, pass_session, session_of
from vfiomgr.diagnostic import OVERRIDES, Position, flaw
from vfiomgr.documents.named_file import source_of, text_of
from vfiomgr.errors import HostError, InvalidDocument, Refusal, UsageError
from vfiomgr.layout.document import document_of, find_flaws, render_layouts
from vfiomgr.layout.import_driverctl import import_layouts
from vfiomgr.layout.named import layout_of_text
from vfiomgr.layout.requests import InstallLayout, UninstallLayout
from vfiomgr.layout.schema import layout_schema
from vfiomgr.layout.vgpu_device_manager import read_vgpu_configs
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.program import program_for_units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.run import Outcome
    from vfiomgr.layout.identifiers import Boards
    from vfiomgr.layout.model import LayoutFile
    from vfiomgr.layout.vgpu_device_manager import VgpuConfigs
    from vfiomgr.snapshot.model import HostSnapshot


@click.command("install")
@click.argument("file")
@click.option("--layout", "name", metavar="NAME", help="Which one, where FILE has several.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(OVERRIDES),
    help="Override a guard, at each boot; in-use holds for now alone.",
)
@click.option(
    "--enforce", is_flag=True, help="Also correct drift from boot on (layout watch --enforce)."
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
    update_initramfs: bool,
) -> None:
    """Have this host brought to a layout at each boot; nothing moves now.

    Written are /etc/vfiomgr/layout.yaml, rules of udev for functions that go to guests whole, so
    that no host driver gets them first, and vfiomgr-layout.service, which runs `vfiomgr apply`
    before display managers, libvirt, kubelet and container runtimes start. A layout that this host
    cannot have is refused. Installed again, only what differs is changed.

    \b
    Examples:
      vfiomgr layout install host.yaml
      vfiomgr layout install fleet.yaml --layout kata-node --dry-run
      vfiomgr layout install host.yaml --enforce --update-initramfs
    """
    text = text_of(file, "a layout file")
    applied = layout_of_text(session, text, source_of(file), name, frozenset(allow))
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
    """Take back what `vfiomgr layout install` wrote: file, rules, units. Devices stay as they are.

    Rules that `bind --persist` had written before are there again.

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
    """For the unit of rules that come back; a layout can be uninstalled without one."""
    try:
        return program_for_units(session)
    except Refusal as refusal:
        note(f"no unit is written: {refusal.message}")
        return None


def _told(session: Session, outcome: Outcome | None, undo: str = "", **facts: object) -> None:
    if outcome is None:
        return
    steps = outcome.plan.steps if outcome.is_changed else ()
    print_outcome(session, outcome, [f"done: {step.describe()}" for step in steps], **facts)
    if undo and outcome.is_changed and session.format == "table":
        note(f"undo with: {undo}")


@click.command("schema")
@session_options("format")
@pass_session
def schema(session: Session) -> None:
    """Print the JSON schema of layout files (draft 2020-12), for editors and generators.

    \b
    Examples:
      vfiomgr layout schema > layout.schema.json
      vfiomgr layout schema --format yaml
    """
    document = layout_schema()
    if session.format == "yaml":
        print_yaml(document)
    else:
        print_text(json.dumps(document, indent=2) + "\n")


@click.command("validate")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@session_options(*READING)
@click.pass_context
def validate(context: click.Context, files: tuple[str, ...]) -> None:
    """Check layout files; no host is needed. - reads from a pipe.

    Each flaw is one line: file, line, column, what is wrong, and what would be right.

    Exit status: 0 where all are layouts, 65 where one is not.

    \b
    Examples:
      vfiomgr check layout gpu-node.yaml
      vfiomgr check layout host.yaml fleet.yaml --format json
      vfiomgr layout export | vfiomgr check layout -
    """
    session = session_of(context)
    items = [_validated(path) for path in files]
    if session.format == "table":
        for item in items:
            _print_validated(item)
    else:
        print_document("LayoutValidation", {"items": items}, session.format)
    if not all(item["valid"] for item in items):
        context.exit(InvalidDocument.exit_code)


def _validated(path: str) -> dict[str, Any]:
    """What there is to say about one file."""
    source = source_of(path)
    try:
        file, flaws = find_flaws(text_of(path, "the layout file"))
    except InvalidDocument as error:
        file, flaws = None, (flaw("unreadable", Position(), "", error.message, error.hint),)
    return {
        "file": source,
        "valid": file is not None,
        "layouts": list(_counts(file)),
        "findings": [
            {
                "file": source,
                "line": found.place.line,
                "column": found.place.column,
                "where": found.subject,
                "message": found.summary,
                "remedy": found.remedy,
            }
            for found in flaws
            if found.place is not None
        ],
    }


def _counts(file: LayoutFile | None) -> Iterator[dict[str, Any]]:
    """The layouts of a file, and how many rules each has."""
    for name, layout in () if file is None else file.layouts.items():
        yield {"name": name, "rules": len(layout.devices)}


def _print_validated(item: dict[str, Any]) -> None:
    source = item["file"]
    if item["valid"]:
        layouts = ", ".join(f"{one['name']} ({_rules(one['rules'])})" for one in item["layouts"])
        word = "layout" if len(item["layouts"]) == 1 else "layouts"
        say(f"{source}: {len(item['layouts'])} {word}: {layouts}")
    for found in item["findings"]:
        where = f"{found['where']}: " if found["where"] else ""
        remedy = f"; {found['remedy']}" if found["remedy"] else ""
        place = f"{source}:{found['line']}:{found['column']}"
        say(f"{place}: {where}{found['message']}{remedy}")


def _rules(count: int) -> str:
    return "1 rule" if count == 1 else f"{count} rules"


@click.command("import")
@click.option(
    "--vgpu-device-manager",
    "configuration",
    metavar="FILE",
    help="Also the configuration of NVIDIA's vGPU Device Manager; - reads from a pipe.",
)
@click.option(
    "--board",
    "boards",
    metavar="ADDRESS|all",
    multiple=True,
    help="Which of several boards with one ID of vfio-pci go to guests.",
)
@session_options(*READING)
@pass_session
def import_(session: Session, configuration: str | None, boards: tuple[str, ...]) -> None:
    """Print a layout file of what other tools keep; nothing is changed.

    Of the host: /etc/driverctl.d, /etc/mdevctl.d, and the identifiers of vfio-pci on the kernel's
    command line and in modprobe.d, as one layout. Of the vGPU Device Manager: a layout for each of
    its configurations. What could not be carried over, and why, is told on stderr, item by item.

    Identifiers of vfio-pci that mean several boards, of which host drivers have some, are refused
    until --board names the boards for guests.

    \b
    Examples:
      vfiomgr layout import > layout.yaml
      vfiomgr layout import --vgpu-device-manager /etc/nvidia-vgpu-device-manager/config.yaml
      vfiomgr --snapshot host.json layout import
      vfiomgr layout import --board 0000:41:00.0
    """
    configs = None if configuration is None else _configs(configuration)
    host = _host(session, configs)
    found = import_layouts(host, configs, _boards(host, boards))
    for text in found.left:
        note(f"not as it was: {text}")
    for diagnostic in found.diagnostics:
        note(f"`vfiomgr apply` would refuse it now: {diagnostic.summary}; {diagnostic.hint}")
    file = found.file
    if file is None:
        message = "there is nothing to import: no driver or vGPU is set for this host"
        raise HostError(message, "--vgpu-device-manager FILE reads a configuration; see --help")
    if session.format == "json":
        print_text(json.dumps(document_of(file), indent=2) + "\n")
    else:
        print_text(render_layouts(file))


def _boards(host: HostSnapshot | None, named: tuple[str, ...]) -> Boards:
    if "all" in named:
        return "all"
    known = [device.address for device in host.devices] if host else []
    return frozenset(PciAddress.parse(text, known) for text in named)


def _configs(path: str) -> VgpuConfigs:
    return read_vgpu_configs(text_of(path, "the configuration"), source_of(path))


def _host(session: Session, configs: VgpuConfigs | None) -> HostSnapshot | None:
    """The host; a configuration file alone does without one."""
    try:
        return session.scan(with_readiness=True)
    except (HostError, UsageError) as error:
        if configs is None or session.snapshot is not None:
            raise
        note(f"the host is left out: {error.message}")
        return None
