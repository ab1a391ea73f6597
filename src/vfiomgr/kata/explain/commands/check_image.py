"""`vfiomgr kata check-image`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.findings import counted, print_findings, report_document
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import UsageError
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.image import check_guest_image
from vfiomgr.kata.model import DEFAULT_HANDLER
from vfiomgr.kata.settings import read_settings
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.kata.explain.image import GuestImage
    from vfiomgr.kata.model import KataConfigurationFile
    from vfiomgr.pci.model import PciDevice

_BLOCKED = 1


@click.command("check-image")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option(
    "--config",
    metavar="FILE",
    help="Kata's configuration, as a path of the host.  [default: the one of the handler "
    "kata-vfio, else the first that is there in /etc/kata-containers and of Kata's own]",
)
@click.option("--all", "every", is_flag=True, help="Show also what is fine.")
@session_options()
@click.pass_context
def check_image(
    context: click.Context, addresses: tuple[str, ...], *, config: str | None, every: bool
) -> None:
    """Say whether the guest of a Kata configuration can use the devices of this host.

    Looked at are the files that it names, the file system of the image, and what names and hooks
    tell of driver and toolkit; for ADDRESSES, or for the GPUs that are ready for guests. What is
    inside an image is not looked at.

    Exit status: 0 where nothing blocks, 1 where no guest would start.

    \b
    Examples:
      vfiomgr kata check-image
      vfiomgr kata check-image 0000:04:00.0 --all
      vfiomgr kata check-image --config /opt/kata/share/defaults/kata-containers/configuration.toml
    """
    session: Session = context.obj
    session.require_live(
        "a snapshot holds no files of Kata",
        "run it on the host itself, or with --root",
    )
    report = check_guest_image(_guest_image(session, config), _devices(session, addresses))
    if session.format != "table":
        print_document("CheckReport", report_document(report), session.format)
    else:
        print_findings(report, every=every)
        verdict = "no guest starts" if report.is_blocked else "nothing blocks"
        counts = [counted(report, severity) for severity in ("blocker", "warning", "info")]
        say(f"{verdict}: {', '.join(counts)}, {report.count('ok')} fine")
        for text in report.not_checked:
            note(f"not checked: {text}")
    if report.is_blocked:
        context.exit(_BLOCKED)


def _devices(session: Session, addresses: tuple[str, ...]) -> list[PciDevice]:
    host = session.scan_devices()
    if not addresses:
        known = (d for d in host.devices if d.is_graphics_or_accelerator)
        return [device for device in known if host.is_ready_for_guests(device)]
    return [host.device(host.parse_address(text)) for text in addresses]


def _guest_image(session: Session, config: str | None) -> GuestImage:
    """What the configuration says, and what is there of it."""
    file = _configuration(session, config)
    drop_ins = [(HostPath(each.path), each.text) for each in file.drop_ins]
    return gather.image_of(session.tree, read_settings(file.path, file.text, drop_ins))


def _configuration(session: Session, config: str | None) -> KataConfigurationFile:
    """The one that is named, or the first of those that are usual.

    Raises:
        UsageError: there is none.

    """
    if config is None:
        facts = gather.configuration_of(session, DEFAULT_HANDLER)
    else:
        facts = gather.read_settings_of(session.tree, (HostPath(config),))
    if facts.file is not None:
        return facts.file
    message = f"cannot read a configuration of Kata: {', '.join(facts.looked_for)}"
    raise UsageError(message, "name one: --config FILE; or install Kata Containers")
