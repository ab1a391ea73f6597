"""`vfiomgr laptop`: show or set the graphics mode of a laptop."""

from __future__ import annotations

from typing import get_args

import click

from vfiomgr.cli.options import CHANGING, session_options
from vfiomgr.cli.output import note, print_document, print_table
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.engine.changes import change
from vfiomgr.laptop.state import discrete_gpus, laptop_of, mode_of
from vfiomgr.laptop.steps import LaptopMode, SetLaptopMode
from vfiomgr.snapshot.completion import complete_gpu
from vfiomgr.snapshot.session import Session, pass_session

_MEANINGS: dict[LaptopMode | None, str] = {
    "integrated": "no discrete GPU found",
    "hybrid": "the discrete GPU is for the host",
    "vfio": "the discrete GPU is for a guest",
    "discrete": "the panel is on the discrete GPU",
    None: "a switch cannot be read",
}


@click.command("laptop")
@click.argument("mode", required=False, type=click.Choice(get_args(LaptopMode)))
@click.argument("address", required=False, shell_complete=complete_gpu)
@session_options(*CHANGING)
@pass_session
def laptop(session: Session, *, mode: LaptopMode | None, address: str | None) -> None:
    """Show or set the graphics mode of a laptop.

    \b
    integrated  turn the discrete GPU off (dgpu_disable)
    hybrid      the host uses both GPUs, and the panel is on the integrated one
    vfio        bind the discrete GPU for a guest, until hybrid or a reboot
    discrete    wire the panel to the discrete GPU (gpu_mux_mode) at the next boot

    Only the firmware's own switches are used; the kernel has them for laptops of ASUS. A change of
    the MUX needs a reboot. The discrete GPU cannot be assigned or turned off while the panel is
    wired to it, or while a program or a guest uses it. ADDRESS is needed if there are several,
    e.g. with an external GPU.

    \b
    Examples:
      vfiomgr laptop
      vfiomgr laptop --format json
      vfiomgr laptop vfio --dry-run
      vfiomgr laptop integrated
      vfiomgr laptop hybrid
    """
    if mode is None:
        _show(session)
        return
    named = None if address is None else session.address(address)
    outcome = change(session, SetLaptopMode(mode, named))
    is_changed = outcome is not None and outcome.is_changed
    if mode == "vfio" and is_changed and session.format == "table":
        note("until reboot; undo with: vfiomgr laptop hybrid")


def _show(session: Session) -> None:
    host = session.scan(with_users=True, with_desktop=True)
    facts, mode, cards = laptop_of(host), mode_of(host), discrete_gpus(host)
    if session.format != "table":
        gpus = [{"address": card.address, "driver": card.driver} for card in cards]
        document = {"mode": mode, "discrete_gpus": gpus, **to_jsonable(facts)}
        print_document("LaptopGraphics", document, session.format)
        return
    rows: list[tuple[str, str, str]] = [("mode", mode or "unknown", _MEANINGS[mode])]
    for name, switch, off, on in (
        ("gpu_mux_mode", facts.mux, "panel on the discrete GPU", "panel on the integrated GPU"),
        ("dgpu_disable", facts.dgpu_disable, "discrete GPU on", "discrete GPU off"),
    ):
        if switch is None or switch.value is None:
            rows.append((name, "-", "no such switch" if switch is None else "cannot be read"))
        else:
            rows.append((name, str(int(switch.value)), on if switch.value else off))
    rows += [("GPU", str(card.address), f"on {card.driver or 'no driver'}") for card in cards]
    rows += [("panel", address, "GPU with the built-in panel") for address in facts.panels]
    print_table(("SETTING", "VALUE", "MEANING"), rows)
    if facts.is_pending:
        note("a change of the MUX waits for a reboot")
