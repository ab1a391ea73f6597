"""Tables as text, at any width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.cells import cell_len

from vfiomgr.cli.table import Column, Lines, cut, lines_of, wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = (Column("ADDRESS"), cut("NAME"), Column("DRIVER"), wrapped("NOTES"))
ROWS = (
    ("0000:01:00.0", "Matrox MGA G200EH (iLO4)", "mgag200", "console's display"),
    ("0000:08:00.0", "NVIDIA A2 / A16", "nvidia", "16 VFs, 3 vGPUs"),
    ("0000:09:00.0", "NVIDIA A2 / A16", "-", ""),
)


def text_of(found: Lines) -> str:
    return "\n".join((*found.headings, *found.body))


def test_elsewhere_columns_are_as_wide_as_their_cells() -> None:
    assert text_of(lines_of(COLUMNS, ROWS)) == (
        "ADDRESS       NAME                      DRIVER   NOTES\n"
        "0000:01:00.0  Matrox MGA G200EH (iLO4)  mgag200  console's display\n"
        "0000:08:00.0  NVIDIA A2 / A16           nvidia   16 VFs, 3 vGPUs\n"
        "0000:09:00.0  NVIDIA A2 / A16           -"
    )


def test_the_name_is_cut_first() -> None:
    assert text_of(lines_of(COLUMNS, ROWS, width=60)) == (
        "ADDRESS       NAME                DRIVER   NOTES\n"
        "0000:01:00.0  Matrox MGA G200EH…  mgag200  console's display\n"
        "0000:08:00.0  NVIDIA A2 / A16     nvidia   16 VFs, 3 vGPUs\n"
        "0000:09:00.0  NVIDIA A2 / A16     -"
    )


def test_then_notes_are_wrapped() -> None:
    notes = "original driver nvidia, driver_override vfio-pci, does not answer"
    rows = [(*ROWS[0][:3], notes)]
    assert text_of(lines_of(COLUMNS, rows, width=68)) == (
        "ADDRESS       NAME              DRIVER   NOTES\n"
        "0000:01:00.0  Matrox MGA G200…  mgag200  original driver nvidia,\n"
        "                                         driver_override vfio-pci,\n"
        "                                         does not answer"
    )


def test_then_notes_stand_below() -> None:
    assert text_of(lines_of(COLUMNS, ROWS, width=45)) == (
        "ADDRESS       NAME                    DRIVER\n"
        "              NOTES\n"
        "0000:01:00.0  Matrox MGA G200EH (iL…  mgag200\n"
        "              console's display\n"
        "0000:08:00.0  NVIDIA A2 / A16         nvidia\n"
        "              16 VFs, 3 vGPUs\n"
        "0000:09:00.0  NVIDIA A2 / A16         -"
    )


def test_what_is_typed_into_commands_is_complete_on_any_terminal() -> None:
    assert text_of(lines_of(COLUMNS, ROWS[1:], width=30)) == (
        "ADDRESS       NAME      DRIVER\n"
        "              NOTES\n"
        "0000:08:00.0  NVIDIA…   nvidia\n"
        "              16 VFs, 3 vGPUs\n"
        "0000:09:00.0  NVIDIA…   -"
    )


def test_columns_that_do_not_fit_stand_below_their_row() -> None:
    uuid = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    columns = (*map(Column, ("VGPU", "PARENT", "DRIVER", "BY")), wrapped("USED BY"))
    rows = [(uuid, "0000:08:00.4", "nvidia-vgpu-vfio", "-", "win (qemu 4711)")]
    rows.append((uuid, "0000:08:00.5", "-", "-", "-"))
    assert text_of(lines_of(columns, rows, width=60)) == (
        "VGPU                                  PARENT\n"
        "    DRIVER            BY  USED BY\n"
        f"{uuid}  0000:08:00.4\n"
        "    nvidia-vgpu-vfio  -   win (qemu 4711)\n"
        f"{uuid}  0000:08:00.5"
    )
    assert text_of(lines_of(columns, rows, width=80)).splitlines()[2:4] == [
        f"{uuid}  0000:08:00.4  nvidia-vgpu-vfio  -",
        "                                      win (qemu 4711)",
    ]


def test_a_uuid_among_addresses_has_a_line_of_its_own() -> None:
    uuid = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    rows = [("1", f"0000:0{n}:00.0", "NVIDIA A2 / A16", "nvidia") for n in range(5)]
    rows.append(("2", uuid, "vGPU nvidia-754", "nvidia-vgpu-vfio"))
    columns = (Column("GROUP"), Column("ADDRESS"), cut("NAME"), Column("DRIVER"))
    assert lines_of(columns, rows, width=60).body[4:] == (
        "1      0000:04:00.0  NVIDIA A2 / A16  nvidia",
        "2      f715f63c-0d00-4007-9c5a-b07b0c6c05de",
        "                     vGPU nvidia-754  nvidia-vgpu-vfio",
    )
    assert lines_of(columns, rows).body[5] == f"2      {uuid}  vGPU nvidia-754  nvidia-vgpu-vfio"


def test_a_uuid_does_not_cut_the_names_of_other_groups_at_a_hundred_columns() -> None:
    name = "Intel 82599ES 10-Gigabit SFI/SFP+"
    rows = [(str(n), "yes", "no", f"0000:0{n}:00.0", name, "ixgbe", "yes") for n in range(5)]
    uuid = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    rows.append(("5", "yes", "yes", uuid, "vGPU A2-4Q of 0000:08:00.0", "nvidia-vgpu-vfio", "-"))
    headings = ("GROUP", "ISOLATED", "BOUND", "ADDRESS", "NAME", "DRIVER", "BLOCKS")
    columns = [cut(each) if each == "NAME" else Column(each) for each in headings]
    assert lines_of(columns, rows, width=100).body == (
        *(
            f"{n}      yes       no     0000:0{n}:00.0  {name}  ixgbe             yes"
            for n in range(5)
        ),
        f"5      yes       yes    {uuid}",
        f"{'':38}vGPU A2-4Q of 0000:08:00.0         nvidia-vgpu-vfio  -",
    )


def test_wide_characters_take_two_columns() -> None:
    rows = [("a", "图形处理器图形处理器图形处理器", "x"), ("b", "GPU", "y")]
    columns = (Column("A"), cut("NAME"), Column("B"))
    found = lines_of(columns, rows, width=24)
    assert found.body == ("a  图形处理器图形处…   x", "b  GPU                 y")
    assert [cell_len(line) for line in found.body] == [24, 24]


@pytest.mark.parametrize("width", range(40, 120))
def test_an_address_is_never_broken(width: int) -> None:
    columns = (Column("NAME"), wrapped("FUNCTIONS"), Column("FILE"))
    row = ("vfiomgr.io/vfio=a", "0000:05:00.0, 0000:05:00.1 (vfio-pci)", "/etc/cdi/a.json")
    lines = text_of(lines_of(columns, [row], width=width))
    assert "0000:05:00.0" in lines
    assert "0000:05:00.1" in lines


def test_headings_can_be_left_out() -> None:
    assert lines_of(COLUMNS, ROWS, with_headings=False) == Lines((), lines_of(COLUMNS, ROWS).body)
    assert lines_of(COLUMNS, (), with_headings=False) == Lines((), ())
    assert lines_of(COLUMNS, (), width=80).headings == ("ADDRESS  NAME  DRIVER  NOTES",)


@pytest.mark.parametrize("ellipsis", ["…", "..."])
def test_an_ellipsis_can_be_written_in_ascii(ellipsis: str) -> None:
    found = lines_of(COLUMNS, ROWS, width=60, ellipsis=ellipsis)
    assert found.body[0].isascii() == (ellipsis == "...")
    assert f"{ellipsis}  mgag200" in found.body[0]


@given(
    some.lists(some.tuples(*(some.text("abc 0:é图", max_size=40) for _ in range(4))), min_size=1),
    some.integers(1, 120),
)
def test_fixed_cells_are_never_cut(rows: Sequence[tuple[str, ...]], width: int) -> None:
    lines = text_of(lines_of(COLUMNS, rows, width=width))
    for row in rows:
        assert row[0].rstrip() in lines
        assert row[2].rstrip() in lines
    for column in COLUMNS:
        assert column.heading in lines


def test_a_single_column_of_notes_fits_any_terminal() -> None:
    assert lines_of((wrapped("NOTES"),), [("16 VFs, 3 vGPUs",)], width=8).headings == ("NOTES",)
