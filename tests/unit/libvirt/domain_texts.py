"""Texts of domains: the recorded ones beside this file, and any number of random ones."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

DOMAINS = Path(__file__).parent / "xml_domains"
RECORDED = {path.stem: path.read_bytes() for path in sorted(DOMAINS.glob("*.xml"))}

GAPS = ("", " ", "\n", "\n  ", "\n    ", "\n\t\t", "\r\n    ", "\r  ", "\n\n  ", "  \n", "\t\r\n")
NOTES = (
    "<!-- a > b, <hostdev/> -->",
    "<!--\n  <devices>\n-->",
    "<?editor fold?>",
    "<?editor\n'>'?>",
    "<![CDATA[ ]]>",
)
DEVICES = (
    "<disk type='file' device='disk'><source file='/a&amp;b'/><target bus='virtio'/></disk>",
    '<disk type="network"\n  device="cdrom"><target dev="sda" bus="sata"/></disk >',
    "<interface type='network'><source network='default'/></interface>",
    "<interface type='bridge'>\n <mac address='52:54::1'/>\r\n <model type='e1000'/>\n</interface>",
    "<interface type='hostdev'><source><address bus='0x81' slot='0x10'/></source></interface>",
    "<controller type='usb' model='qemu-xhci'/>",
    "<controller type='pci' index='0' model='pcie-root'/>",
    "<controller type='pci' model='pcie-root-port'\n/>",
    "<controller type='pci' index='0x7' model='pcie-root-port'><target chassis='7'/></controller>",
    "<rng model='virtio'><address type='pci' bus='0x03' slot='0x00' function='0x0'/></rng>",
    "<hostdev mode='subsystem' type='usb'><source><vendor id='0x1'/></source></hostdev>",
    "<hostdev type='pci'>\n  <source>\n    <address bus='0x91'/>\n  </source>\n</hostdev>",
    "<hostdev type='pci'><source><address/></source><address type='pci' bus='2'/></hostdev>",
    "<x:thing xmlns:x='urn:x'><hostdev/><x:devices>]]&gt;</x:devices></x:thing>",
    "<thing-of-tomorrow level=\">3'\"><address type='pci' bus='9' new='1'/></thing-of-tomorrow>",
    "<memballoon model='none'/>",
)
OTHERS = (
    "<memory unit='GiB'>4</memory>",
    "<vcpu>2</vcpu>",
    "<os><type arch='x86_64' machine='q35'>hvm</type></os>",
    "<os><type machine='pc'>hvm</type></os>",
    "<metadata><n:i xmlns:n='urn:n'><n:devices><hostdev/></n:devices></n:i></metadata>",
    "<description><![CDATA[</domain>]]></description>",
    "<unknown><devices/></unknown>",
)
_BETWEEN = st.lists(st.sampled_from((*GAPS, *NOTES)), max_size=4).map("".join)


@st.composite
def domain_texts(draw: st.DrawFn) -> bytes:
    """A domain with anything in it, in any shape."""

    def mixed(parts: tuple[str, ...], most: int) -> str:
        chosen = draw(st.lists(st.sampled_from(parts), max_size=most))
        return "".join(draw(_BETWEEN) + part for part in chosen) + draw(_BETWEEN)

    short = draw(st.sampled_from(("<devices/>", "<devices />", "<devices\n/>", "")))
    start = draw(st.sampled_from(("<devices>", "<devices\n  >", "<devices x='>'>")))
    end = draw(st.sampled_from(("</devices>", "</devices >", "</devices  >", "</devices\n>")))
    devices = short or start + mixed(DEVICES, 6) + end
    before, after = mixed(OTHERS, 3), mixed(OTHERS, 2)
    body = f"<domain type='kvm'>{draw(_BETWEEN)}<name>random</name>{before}{devices}{after}"
    head = draw(st.sampled_from(("", "\ufeff", "<?xml version='1.0'?>\r\n", "<!-- <domain> -->\n")))
    tail = draw(st.sampled_from(("</domain>", "</domain>\n", "</domain >\r\n<!-- end -->")))
    return f"{head}{body}{tail}".encode()
