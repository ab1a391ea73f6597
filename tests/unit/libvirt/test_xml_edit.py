from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.libvirt.domain_texts import RECORDED, domain_texts
from tests.unit.libvirt.domains import hostdevs
from vfiomgr.documents.xml_text import Document, Element, read_document
from vfiomgr.errors import InvalidDocument
from vfiomgr.guests.model import AttachOptions
from vfiomgr.libvirt.xml.edit import add_elements, remove_hostdevs, root_port, without_screens
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

GPU = replace(pci_device("0000:c1:00.0"), name="Tücky & Co -- <GPU>")
AUDIO = replace(GPU, address=moved(GPU.address, function=1))
VF = replace(pci_device("0000:c2:00.4"), name="VF")
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
VGPU = Vgpu(UUID, "mdev", "mtty", "mtty-2", "Dual", None, 9, None, None)
HOST = with_facts(host_of(GPU, AUDIO, VF), vgpus=(VGPU,))
PORT = 0xF0
ELEMENTS = {
    "slot": hostdevs(HOST, str(GPU.address), first_bus=PORT),
    "vf": hostdevs(HOST, str(VF.address), options=AttachOptions(is_managed=True)),
    "vgpu": hostdevs(HOST, UUID),
}
PORTS = [root_port(PORT, str(GPU.address))]
SHARING = {
    *("single-line", "single-line-blanks", "short-devices", "short-devices-single-line"),
    *("crowded-lines", "cdata", "spaced-end-tag"),
}
"""Where an element, or the end of `<devices>`, stands in a line with something else."""
NAMES = {"slot": ["0000:c1:00.0", "0000:c1:00.1"], "vf": ["0000:c2:00.4"], "vgpu": [UUID]}


def document(text: bytes) -> Document:
    return read_document(text, "g.xml")


def added(text: bytes, *sets: str) -> bytes:
    for name in sets:
        text = add_elements(document(text), ELEMENTS[name], PORTS if name == "slot" else ())
    return text


def removed(text: bytes, names: Sequence[str]) -> bytes:
    devices = read_domain(text, "g.xml").hostdevs
    return remove_hostdevs(document(text), [one for one in devices if one.name in names])


def is_ours(element: Element) -> bool:
    """Whether it is one of those that these tests put in."""
    source = element.find("source/address")
    of_host = source is not None and source.get("bus") in {"0xc1", "0xc2"}
    is_vgpu = source is not None and source.get("uuid") == UUID
    return of_host or is_vgpu or element.get("index") == str(PORT)


def others(text: bytes) -> list[bytes]:
    """The bytes of all devices that are not ours, in their order, and what surrounds them."""
    found = document(text)
    devices = found.root.each("devices")
    kept = [one for holder in devices for one in holder.children if not is_ours(one)]
    return [
        text[: devices[0].start.stop].replace(b"/>", b">"),
        *(text[one.whole.start : one.whole.stop] for one in kept),
        text[devices[-1].end.stop :],
    ]


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("sets", [("slot",), ("vf",), ("vgpu",), ("slot", "vgpu", "vf")])
def test_a_recorded_domain_gets_what_was_asked_and_nothing_else(
    name: str, sets: tuple[str, ...]
) -> None:
    text = RECORDED[name]
    edited = added(text, *sets)
    assert others(edited) == others(text)
    before, after = read_domain(text, name), read_domain(edited, name)
    names = [one for each in sets for one in NAMES[each]]
    known = {one.name for one in before.hostdevs}
    assert [one.name for one in after.hostdevs if one.name not in known] == names
    assert len(after.controllers) == len(before.controllers) + sets.count("slot")
    for each in sets:
        edited = removed(edited, NAMES[each])
    assert edited == text


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - SHARING))
def test_all_lines_stay_where_elements_have_lines_of_their_own(name: str) -> None:
    left = iter(added(RECORDED[name], "slot", "vgpu").splitlines(keepends=True))
    assert all(line in left for line in RECORDED[name].splitlines(keepends=True))


def test_what_is_added_has_the_indentation_and_the_line_ends_of_the_file() -> None:
    line = b"\n\t\t\t\t<address domain='0x0000' bus='0xc1' slot='0x00' function='0x0'/>\n"
    assert line in added(RECORDED["tabs"], "slot")
    wide = b"\n                <address domain='0x0000' bus='0xc1' slot='0x00' function='0x0'/>\n"
    assert wide in added(RECORDED["long-empty-devices"], "slot")
    crlf = added(RECORDED["crlf"], "slot")
    assert crlf.count(b"\n") == crlf.count(b"\r\n") > RECORDED["crlf"].count(b"\r\n")
    assert b"\n" not in added(RECORDED["old-mac"], "slot")
    assert b"\n" not in added(RECORDED["single-line"], "slot")


def test_hostdevs_come_after_the_last_one_and_ports_after_the_last_controller() -> None:
    devices = document(added(RECORDED["nova"], "slot")).root.each("devices")[0].children
    names = [f"{one.name} {one.get('index') or one.get('type')}" for one in devices]
    assert names[1:9] == [
        "controller 0",
        "controller 1",
        "controller 2",
        f"controller {PORT}",
        "interface bridge",
        "hostdev mdev",
        "hostdev pci",
        "hostdev pci",
    ]


def test_of_several_devices_elements_those_with_hostdevs_get_more() -> None:
    first, second = document(added(RECORDED["two-devices"], "vf")).root.each("devices")
    assert [one.name for one in first.children] == ["hostdev", "hostdev"]
    assert [one.name for one in second.children] == ["memballoon"]


def test_a_comment_at_the_end_of_a_line_stays_with_its_element() -> None:
    text = added(RECORDED["comments"], "vf")
    assert b"</hostdev> <!-- end of the GPU --> <!-- really -->\n    <hostdev " in text


def test_the_encoding_is_that_of_the_file() -> None:
    assert "Tücky".encode("latin-1") in added(RECORDED["latin1"], "slot")
    assert "Tücky".encode() in added(RECORDED["bom"], "slot")
    ascii_text = RECORDED["latin1"].replace(b"ISO-8859-1", b"us-ascii").replace(b"\xfc", b"ue")
    assert b"T&#252;cky" in added(ascii_text, "slot")


def test_a_device_that_a_person_wrote_goes_with_its_line_alone() -> None:
    text = removed(RECORDED["qemu-override"], ["0000:01:00.0"])
    assert b"<!-- the display of the guest -->\n\n        <memballoon" in text
    commented = removed(RECORDED["proxmox"], ["0000:01:00.1"])
    assert b"<!-- hostpci0 -->\n     <!-- hostpci0, its audio -->\n" in commented


def test_a_port_goes_with_the_last_device_behind_it() -> None:
    text = added(RECORDED["nova"], "slot")
    one_left = removed(text, ["0000:c1:00.0"])
    assert any(one.index == PORT for one in read_domain(one_left, "g.xml").controllers)
    assert removed(one_left, ["0000:c1:00.1"]) == RECORDED["nova"]


def test_a_port_that_another_device_uses_or_that_somebody_changed_stays() -> None:
    text = added(RECORDED["nova"], "slot")
    used = text.replace(
        b"<stats period='10'/>", b"<address type='pci' bus='0xf0' slot='0' function='7'/>"
    )
    assert any(
        one.index == PORT for one in read_domain(removed(used, NAMES["slot"]), "g").controllers
    )
    changed = text.replace(b"<!-- vfiomgr: for", b"<target hotplug='off'/><!-- vfiomgr: for")
    left = removed(changed, NAMES["slot"])
    assert any(one.index == PORT for one in read_domain(left, "g").controllers)


def test_a_port_that_a_person_wrote_stays() -> None:
    text = removed(RECORDED["qemu-override"], ["0000:01:00.0"])
    assert [one.index for one in read_domain(text, "g.xml").controllers] == [0, 1]


def test_nothing_to_do_changes_nothing() -> None:
    for text in RECORDED.values():
        assert add_elements(document(text), []) == text
        assert remove_hostdevs(document(text), []) == text


def test_a_domain_without_devices_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="no <devices>") as caught:
        added(b"<domain type='kvm'><name>g</name></domain>", "vf")
    assert caught.value.hint == "add <devices/>"


def test_a_port_and_its_device_behind_a_comment_go_with_their_lines() -> None:
    text = (
        b"<domain type='kvm'><name>g</name><devices><disk type='file'/>\n"
        b"<controller type='pci' index='0' model='pcie-root'/><!-- a > b --></devices></domain>"
    )
    edited = added(text, "slot")
    assert edited.count(b"\n") > text.count(b"\n")
    for names in ([NAMES["slot"]], [[name] for name in NAMES["slot"]]):
        left = edited
        for some in names:
            left = removed(left, some)
        assert left == text


@settings(max_examples=400)
@given(
    domain_texts(),
    st.lists(st.sampled_from(sorted(ELEMENTS)), min_size=1, max_size=3, unique=True),
    st.randoms(use_true_random=False),
)
def test_no_domain_is_changed_but_for_the_devices_that_were_asked_for(
    text: bytes, sets: list[str], chance: Random
) -> None:
    read_domain(text, "g.xml")
    edited = added(text, *sets)
    assert others(edited) == others(text)
    names = [name for each in sets for name in NAMES[each]]
    found = [one.name for one in read_domain(edited, "g.xml").hostdevs]
    assert [name for name in found if name in names] == names
    chance.shuffle(names)
    for name in names:
        edited = removed(edited, [name])
    assert edited == text


@settings(max_examples=200)
@given(domain_texts())
def test_taking_out_a_device_leaves_all_others_by_the_byte(text: bytes) -> None:
    def parts(of: bytes) -> list[bytes]:
        root = document(of).root
        elements = [one for holder in root.each("devices") for one in holder.children]
        return [of[one.whole.start : one.whole.stop] for one in elements]

    gone = [one for one in parts(text) if b"bus='0x91'" in one and one.startswith(b"<hostdev")]
    left = removed(text, ["0000:91:00.0"])
    assert parts(left) == [one for one in parts(text) if one not in gone]
    assert (left == text) is not bool(gone)


@pytest.mark.parametrize("name", RECORDED)
def test_only_emulated_screens_are_replaced(name: str) -> None:
    text = RECORDED[name]
    before = read_domain(text, "g.xml").screen.videos
    shown = [model for _, model in before if model != "none"]
    after, screens = without_screens(document(text))
    assert screens == len(shown)
    left = [model for _, model in read_domain(after, "g.xml").screen.videos]
    assert left == (["none"] if before else [])
    assert without_screens(document(after)) == (after, 0)
    if not shown:
        assert after == text


def test_several_screens_become_one_that_is_none() -> None:
    text = (
        b"<domain><name>g</name><devices>\n  <!-- a -->\n  <video><model type='qxl'/></video>\n"
        b"  <video>\n    <model type='vga'/>\n  </video>\n  <sound model='ich9'/>\n"
        b"</devices></domain>"
    )
    expected = (
        b"<domain><name>g</name><devices>\n  <!-- a -->\n"
        b"  <video><model type='none'/></video>\n  <sound model='ich9'/>\n</devices></domain>"
    )
    assert without_screens(document(text)) == (expected, 2)
