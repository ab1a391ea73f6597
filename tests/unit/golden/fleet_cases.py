"""What is typed for the golden files about fleets; tests/golden/commands has the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.devices import with_facts
from tests.unit.fleet.hosts import a_card, a_snapshot, write
from tests.unit.golden.transcripts import Scenario
from vfiomgr.fleet.commands import common

if TYPE_CHECKING:
    from tests.unit.golden.transcripts import Place

_NOW = 1795949100.0
"""2026-11-29T10:45:00Z."""
_RESERVED = """\
version: vfiomgr/v1
reservations:
- {host: gpu1, gpus: ["0000:01:00.0"], until: 2026-12-24, note: training}
- {host: gpu3}
"""


def _with_fleet(place: Place) -> None:
    """Four hosts: free, with guests, not read by root, and with a damaged file."""
    place.patch.setattr(common, "now", lambda: _NOW)
    before, after = place.directory / "before", place.directory / "snapshots"
    cards = [a_card(number) for number in range(4)]
    small = [a_card(0, "27b8"), a_card(1, "27b8")]
    for directory in (before, after):
        directory.mkdir()
        write(directory, "gpu1", a_snapshot(*cards))
        write(directory, "gpu2", a_snapshot(*cards, win=0, lab=1), "2026-11-27T08:00:00Z")
        write(directory, "gpu3", with_facts(a_snapshot(*small), users=None))
    write(after, "gpu1", a_snapshot(a_card(0, driver="nvidia"), *cards[1:]))
    (after / "gpu4.json").write_text('{"kind": "HostSnapshot",')


FLEET_SCENARIOS = (
    Scenario("fleet list", "fleet list snapshots", prepare=_with_fleet, in_json=True),
    Scenario("fleet check", "fleet check snapshots", prepare=_with_fleet, in_json=True),
    Scenario(
        "fleet diff",
        """
        fleet diff before snapshots
        fleet diff before/gpu1.json.gz before
        """,
        prepare=_with_fleet,
        in_json=True,
    ),
    Scenario(
        "fleet place",
        """
        fleet place snapshots --gpu 2xA40 --same-numa --memory 128G
        fleet place snapshots --gpu 3xA40 --spread --all --reservations reserved.yaml
        fleet place snapshots --vgpu A40-8Q
        fleet place snapshots
        """,
        files={"reserved.yaml": _RESERVED},
        prepare=_with_fleet,
        in_json=True,
    ),
    Scenario(
        "fleet drain",
        """
        fleet drain snapshots --host gpu2
        fleet drain snapshots --host gpu3
        """,
        prepare=_with_fleet,
        in_json=True,
    ),
    Scenario(
        "fleet export",
        """
        fleet export before snapshots --output export
        fleet list export/before
        """,
        prepare=_with_fleet,
        in_json=True,
    ),
)
