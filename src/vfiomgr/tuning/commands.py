"""The command of the service that keeps interrupts on a guest's CPUs."""

from __future__ import annotations

import time

import click

from vfiomgr.cli.options import CHANGING, session_options
from vfiomgr.cli.output import note
from vfiomgr.engine.locks import require_rights
from vfiomgr.errors import UsageError
from vfiomgr.host.notifying import notify
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.tuning.interrupts import InterruptWatch
from vfiomgr.units import parse_cpulist

_SECONDS = 2.0
"""Between two looks."""


@click.command("interrupts", hidden=True)
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")
@click.option("--cpus", required=True, metavar="LIST", help="The CPUs, e.g. 2-5,10.")
@session_options(*CHANGING)
@pass_session
def interrupts(session: Session, *, addresses: tuple[str, ...], cpus: str) -> None:
    """Keep interrupts of VFIO for some functions on CPUs.

    Runs until interrupted. libvirt's hook starts a service that runs it for guests for which
    `vfiomgr libvirt hook install DOMAIN --interrupts` was run.

    \b
    Examples:
      vfiomgr interrupts --cpus 2-5,10 0000:01:00.0 0000:01:00.1
    """
    if session.snapshot is not None:
        message = "cannot move interrupts of a recorded host"
        raise UsageError(message, "leave out --snapshot")
    numbers = parse_cpulist(cpus)
    if not numbers:
        message = f"not a list of CPUs: {cpus}"
        raise UsageError(message, "write for example 2-5,10")
    require_rights(session.tree)
    watch = InterruptWatch(session.tree, session.addresses(addresses), numbers)
    while True:
        for line in watch.place():
            note(line)
        notify("READY=1")
        time.sleep(_SECONDS)
