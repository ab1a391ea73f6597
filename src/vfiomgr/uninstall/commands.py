"""`vfiomgr uninstall`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import CHANGING, flag, session_options
from vfiomgr.cli.output import note
from vfiomgr.engine.changes import change, confirm, host_of
from vfiomgr.errors import forbid_alone
from vfiomgr.snapshot.completion import complete_address
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.uninstall.found import find, finish


@click.command("uninstall")
@flag("--unbind", text="Also return devices to their original drivers.")
@click.option(
    "--keep",
    metavar="ADDRESS",
    multiple=True,
    shell_complete=complete_address,
    help="With --unbind, leave this device on its driver.",
)
@click.option(
    "--update-initramfs/--no-update-initramfs",
    default=True,
    help="Rebuild the initramfs if it contains udev rules.  [default: rebuild]",
)
@session_options(*CHANGING, "yes")
@pass_session
def uninstall(
    session: Session, *, unbind: bool, keep: tuple[str, ...], update_initramfs: bool
) -> None:
    """Remove everything that vfiomgr wrote on this host.

    Removes udev rules, units, the installed layout, hooks for libvirt and the initramfs, entries of
    container runtimes, drop-ins for Kata, CDI specifications, vGPU definitions, and files of the
    node agent. Devices stay on their drivers, unless --unbind is passed. If a step fails, all files
    and devices are restored. Files and entries of container runtimes that were edited since are
    kept and listed.

    \b
    Examples:
      vfiomgr uninstall --dry-run
      vfiomgr uninstall --unbind
      vfiomgr uninstall --unbind --keep 0000:04:00.0
    """
    if keep and not unbind:
        forbid_alone("--keep", "--unbind", "devices stay on their drivers without it")
    host = host_of(session)
    found = find(host, unbind=unbind, keep=keep, update_initramfs=update_initramfs)
    confirm(session, "Remove everything that vfiomgr wrote on this host?", "the removal")
    if change(session, found.request) is not None:
        for text in finish(session.tree, found):
            note(text)
