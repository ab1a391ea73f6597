"""`vfiomgr oci eject`."""

from __future__ import annotations

import click

from vfiomgr.cli.oci_files import conclude, read_bundle
from vfiomgr.cli.session import Session, complete_address, session_options


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
    from vfiomgr.adapters.oci import edit  # noqa: PLC0415 - not for help

    conclude(session, edit.eject(read_bundle(bundle), devices or None))
