"""`vfiomgr bind --reserve`: compositors leave a card alone that stays on its host driver."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, ClassVar

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes import desktop as desktops
from tests.unit.devices import with_facts
from tests.unit.engine.faults import Course, Courses, EveryFault
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.passthrough.reserve import Reserve
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.reservation import (
    Reservation,
    parse_reservation,
    render_reservation,
    reservation_file,
    reservations,
)
from vfiomgr.persistence.steps import ForgetPersisted

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

FIRST, SECOND, AUDIO = map(PciAddress.parse, ("0000:01:00.0", "0000:02:00.0", "0000:02:00.1"))
RULES = reservation_file(SECOND)
RESERVE = Reserve((SECOND,))


def two_cards(tmp_path: Path) -> FakeKernel:
    return desktops.gnome(tmp_path, 2).kernel


def refusal(kernel: FakeKernel, *addresses: PciAddress) -> str:
    with pytest.raises(Refusal) as caught:
        api.apply(Reserve(addresses), tree=kernel)
    assert caught.value.remedy
    return f"{caught.value.message}: {caught.value.remedy}"


def test_the_rules_give_the_card_another_seat_and_no_master_of_it(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    before = kernel.driver_of(str(SECOND))
    api.apply(RESERVE, tree=kernel)
    lines = (kernel.read_text(RULES) or "").replace(", \\\n  ", ", ").splitlines()
    card = ", ".join(
        f'ATTR{{[pci/{SECOND}]{name}}}=="0x{value}"'
        for name, value in (
            ("vendor", "1002"),
            ("device", "744c"),
            ("subsystem_vendor", "1002"),
            ("subsystem_device", "0e3b"),
            ("class", "030000"),
        )
    )
    of_card = f'KERNEL=="card[0-9]*", KERNELS=="{SECOND}", {card}'
    of_audio = f'KERNEL=="card[0-9]*", KERNELS=="{AUDIO}", {card}'
    seat = 'ENV{ID_SEAT}="seat-vfiomgr"'
    tags = 'TAG-="master-of-seat", TAG+="mutter-device-ignore"'
    ignored = 'ENV{ACP_IGNORE}="1", ENV{PULSE_IGNORE}="1"'
    assert [line for line in lines if not line.startswith("#")] == [
        f'ACTION!="remove", SUBSYSTEM=="drm", {of_card}, {seat}, {tags}',
        f'ACTION!="remove", SUBSYSTEM=="sound", {of_audio}, {seat}, {ignored}',
    ]
    assert kernel.driver_of(str(SECOND)) == before == "amdgpu"


def test_the_file_is_read_after_the_tags_and_before_the_seat() -> None:
    assert "71-seat.rules" < RULES.name < "73-seat-late.rules"
    assert RULES.name > "72-seat-pci.rules", "after that of loginctl attach"


def test_the_audio_function_stands_for_its_card_and_twice_is_once(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    assert api.apply(Reserve((AUDIO, SECOND)), tree=kernel).plan.steps
    host = api.scan(kernel)
    assert reservations(host.files).keys() == {SECOND}
    again = api.apply(RESERVE, tree=kernel)
    assert not again.is_changed
    assert again.plan.already == (f"{host.device(SECOND)} is already reserved",)


def test_what_takes_effect_when_is_told(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    (note,) = api.plan(api.scan(kernel), RESERVE).notes
    assert note == (
        f"compositors leave {SECOND} alone from the next boot on; earlier: udevadm trigger "
        "--action=change --name-match=/dev/dri/card1, then restart the display manager, which ends "
        "its sessions"
    )
    host = api.scan(kernel)
    own = replace(host.device(SECOND), driver="nvidia", nodes=())
    changed = replace(host, devices=tuple(own if d.address == SECOND else d for d in host.devices))
    at_boot, open_nodes = api.plan(changed, RESERVE).notes
    assert at_boot == f"compositors leave {SECOND} alone from the next boot on"
    assert open_nodes.startswith("nodes of the nvidia driver have no seat: ")
    assert open_nodes.endswith(f"; see which: vfiomgr show {SECOND}")


def test_a_bound_card_needs_no_rules_before_its_return(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    api.apply(Bind((SECOND,), allow=frozenset({"in-use"}), persist=True), tree=kernel)
    (note,) = api.apply(RESERVE, tree=kernel).plan.notes
    assert note.startswith(f"no compositor opens {SECOND} on a VFIO driver")
    api.apply(Unbind((SECOND,), forget=True), tree=kernel)
    assert not kernel.children(RULES.parent)


def test_the_desktop_keeps_its_display(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    assert "0000:01:00.0" in refusal(kernel, FIRST)
    assert "is the console's display" in refusal(kernel, FIRST)
    third = desktops.Desktop(tmp_path / "dark", 2).kernel
    third.sysfs.put("/sys/bus/pci/devices/0000:01:00.0/boot_vga", "0")
    both = refusal(third, FIRST, SECOND)
    assert "no display is left for the desktop without 0000:01:00.0" in both
    api.apply(RESERVE, tree=third)
    assert "no display is left" in refusal(third, FIRST)
    api.apply(ForgetPersisted((SECOND,)), tree=third)
    api.apply(Bind((SECOND,), persist=True, at_boot=True), tree=third)
    assert "no display is left" in refusal(third, FIRST)


def test_only_displays_are_reserved(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    with pytest.raises(UsageError, match=r"not a display: 0000:00:01\.1"):
        api.apply(Reserve((PciAddress.parse("0000:00:01.1"),)), tree=kernel)


def test_a_system_that_keeps_no_rules_refuses_them(tmp_path: Path) -> None:
    host = with_facts(api.scan(two_cards(tmp_path)), settings_system="nixos")
    with pytest.raises(Refusal) as caught:
        api.plan(host, RESERVE)
    assert "NixOS does not keep files in /etc" in caught.value.message
    assert caught.value.remedy == "have the configuration of NixOS write these udev rules"


def test_an_attribute_that_no_rule_can_contain_is_refused(tmp_path: Path) -> None:
    host = api.scan(two_cards(tmp_path))
    reserved = Reservation(replace(host.device(SECOND).identity, class_code='03"'))
    with pytest.raises(Refusal, match="unsupported class"):
        render_reservation(reserved)


@pytest.mark.parametrize(
    "text", ["", "# vfiomgr-reservation: [", "# vfiomgr-reservation: {}", "# vfiomgr-record: {}"]
)
def test_a_text_without_a_record_is_no_reservation(text: str) -> None:
    assert parse_reservation(text) is None


def test_a_record_of_another_version_is_no_reservation(tmp_path: Path) -> None:
    text = render_reservation(Reservation(api.scan(two_cards(tmp_path)).device(SECOND).identity))
    assert parse_reservation(text) is not None
    assert parse_reservation(text.replace("vfiomgr/v1", "vfiomgr/v2")) is None


def test_the_command_and_its_undo(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = two_cards(tmp_path)
    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: kernel)
    done = run("bind", "--reserve", "02:00.0")
    assert (done.status, done.stderr) == (0, f"undo with: vfiomgr unbind {SECOND} --forget-only\n")
    assert f"wrote {RULES}" in done.stdout
    listed = run("list", "--persistent").stdout.splitlines()[1].split()
    assert listed == [str(SECOND), "-", "vfiomgr", "same", "-", "yes", "amdgpu"]
    (item,) = json.loads(run("list", "--persistent", "--format", "json").stdout)["items"]
    assert (item["driver"], item["reserved"]) == (None, True)
    removed = run("unbind", "--forget-only", "--all").stdout
    assert f"compositors open {SECOND} again from the next boot on" in removed
    assert not kernel.exists(RULES)
    nothing = run("unbind", "--forget-only", "02:00.0").stdout
    assert f"no rule for {SECOND}" in nothing


@pytest.mark.parametrize("option", ["--persist", "--at-boot", "--with-group", "--update-initramfs"])
def test_no_other_option_goes_with_it(run: Run, option: str) -> None:
    refused = run("bind", "--reserve", "02:00.0", option)
    assert refused.status == 2
    assert "--reserve only takes addresses and --match" in refused.stderr


def test_a_file_of_someone_else_is_reported_and_kept(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    kernel.sysfs.put(RULES, "# mine\n")
    with pytest.warns(UserWarning, match="no record of vfiomgr found"):
        assert not reservations(api.scan(kernel).files)


def test_a_disk_that_is_full_leaves_no_rules(tmp_path: Path) -> None:
    kernel = two_cards(tmp_path)
    kernel.fail(at=1, errno=errno.ENOSPC)
    with pytest.raises(Exception, match=r"No space left"):
        api.apply(RESERVE, tree=kernel)
    assert not kernel.exists(RULES)


def _reserving(tmp_path: Path) -> Course:
    return Course(
        tmp_path,
        lambda place: (two_cards(place), RESERVE),
        lambda kernel: api.apply(ForgetPersisted((SECOND,)), tree=kernel),
    )


def _forgetting(tmp_path: Path) -> Course:
    def prepared(place: Path) -> tuple[FakeKernel, ForgetPersisted]:
        kernel = two_cards(place)
        api.apply(RESERVE, tree=kernel)
        return kernel, ForgetPersisted(every=True)

    return Course(tmp_path, prepared)


class TestFaults(EveryFault):
    """A fault at each operation of a reservation, and of its removal."""

    courses: ClassVar[Courses] = {"reserve": _reserving, "forget": _forgetting}
