"""What is missing when libvirt prints a domain back."""

from __future__ import annotations

from vfiomgr.libvirt.client.define import find_drops

QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"


def drops(before: str, after: str) -> list[str]:
    return [
        str(drop)
        for drop in find_drops(
            f"<domain xmlns:q='{QEMU}'>{before}</domain>".encode(),
            f"<domain xmlns:qemu='{QEMU}'>{after}</domain>".encode(),
        )
    ]


def hostdev(bus: str, extra: str = "") -> str:
    address = f"<address domain='0' bus='{bus}' slot='0' function='5'/>"
    return f"<hostdev><driver{extra}/><source>{address}</source></hostdev>"


def test_nothing_is_missing_where_libvirt_only_adds_and_rewrites() -> None:
    before = "<memory unit='GiB'>1</memory><devices>" + hostdev("65") + "</devices>"
    after = (
        "<memory unit='KiB'>1048576</memory><devices><emulator>/q</emulator>"
        + hostdev("0x41", " model='vfio-pci'")
        + "<memballoon model='virtio'/></devices>"
    )
    assert drops(before, after) == []


def test_an_attribute_is_missed_at_the_element_that_had_it() -> None:
    before = hostdev("0x41") + hostdev("0x42", " iommufd='yes'")
    after = hostdev("0x41") + hostdev("0x42")
    assert drops(f"<devices>{before}</devices>", f"<devices>{after}</devices>") == [
        "domain/devices/hostdev/driver/@iommufd (hostdev 0000:42:00.5)"
    ]


def test_likes_are_told_apart_by_what_they_hold_whatever_their_order() -> None:
    both = hostdev("0x41", " iommufd='yes'") + hostdev("0x42")
    turned = hostdev("0x42") + hostdev("0x41", " iommufd='yes'")
    assert drops(f"<devices>{both}</devices>", f"<devices>{turned}</devices>") == []


def test_one_of_several_likes_is_missed() -> None:
    before = f"<devices>{hostdev('1')}{hostdev('3')}{hostdev('2')}</devices>"
    after = f"<devices>{hostdev('3')}{hostdev('1')}</devices>"
    assert drops(before, after) == ["domain/devices/hostdev (hostdev 0000:02:00.5)"]


def test_elements_of_a_namespace_are_missed_whatever_its_prefix() -> None:
    before = "<q:commandline><q:arg value='-x'/></q:commandline>"
    assert drops(before, "<qemu:commandline><qemu:arg value='-x'/></qemu:commandline>") == []
    assert drops(before, "") == ["domain/q:commandline"]


def test_metadata_is_kept_by_namespace_and_not_looked_into() -> None:
    before = "<metadata><a:x xmlns:a='urn:a'><a:y/></a:x><b:x xmlns:b='urn:b'/></metadata>"
    after = "<metadata><a:x xmlns:a='urn:a'/></metadata>"
    assert drops(before, before) == []
    assert drops(before, after) == ["domain/metadata/b:x"]


def test_what_libvirt_tells_of_a_running_domain_is_not_missed() -> None:
    before = (
        "<devices><disk><source file='/d' index='1'/><alias name='virtio-disk0'/><backingStore/>"
        "</disk><console type='pty' tty='/dev/pts/1'><source path='/dev/pts/1'/></console>"
        "</devices><seclabel type='dynamic'><label>x</label></seclabel>"
    )
    after = (
        "<devices><disk><source file='/d'/></disk><console type='pty'/></devices>"
        "<seclabel type='dynamic'/>"
    )
    assert drops(before, after) == []


def test_an_empty_container_says_nothing_and_an_empty_element_does() -> None:
    assert drops("<features/><devices/><cputune/>", "") == []
    assert drops("<features><acpi/></features>", "<features/>") == ["domain/features/acpi"]


def test_the_alias_of_a_user_is_missed() -> None:
    before = "<devices><disk><alias name='ua-one'/></disk></devices>"
    assert drops(before, "<devices><disk/></devices>") == ["domain/devices/disk/alias (disk)"]
