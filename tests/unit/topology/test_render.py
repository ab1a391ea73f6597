"""The picture as text, SVG and HTML: golden files, and what must hold of each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click
import pytest
from lxml import etree, html
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from tests.unit.topology.hosts import dgx, nodes, vgpu_server
from vfiomgr.pci.model import PciAddress
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import rows, view
from vfiomgr.topology.render import ASCII, render_html, render_svg, render_text

if TYPE_CHECKING:
    from tests.unit.conftest import Matches
    from vfiomgr.snapshot.model import HostSnapshot

HOSTS = {"vgpu": vgpu_server, "dgx": dgx}


def parsed(text: str) -> Any:
    """A page as its elements."""
    return html.fromstring(text)


def parsed_xml(text: bytes) -> Any:
    """A document as its elements."""
    return etree.fromstring(text)


def svg(host: HostSnapshot, *, unfold: bool = False) -> str:
    topology = tree_of(host)
    return render_svg(topology, view(topology), unfold=unfold)


def page(host: HostSnapshot, *, unfold: bool = False) -> str:
    topology = tree_of(host)
    return render_html(topology, view(topology), unfold=unfold)


@pytest.mark.parametrize("name", HOSTS)
def test_the_tree_is_golden(matches: Matches, name: str) -> None:
    matches(f"topology-{name}.txt", render_text(view(tree_of(HOSTS[name]()))))


def test_the_other_formats_are_golden(matches: Matches) -> None:
    matches("topology-vgpu.svg", svg(vgpu_server()))
    matches("topology-vgpu.html", page(vgpu_server()))


def test_ascii_draws_the_same_tree() -> None:
    root = view(tree_of(dgx()))
    plain = render_text(root, glyphs=ASCII)
    assert plain.isascii()
    table = str.maketrans({"├": "|", "│": "|", "└": "`", "─": "-"})
    assert render_text(root).translate(table) == plain


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", HOSTS)
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    root = view(tree_of(HOSTS[name]()))
    text = render_text(root, width=width)
    deepest = max(3 * row.depth + 3 for row in rows(root, unfold=False))
    assert max(map(len, text.splitlines())) <= max(width, deepest + 36)
    assert _words(text) == _words(render_text(root))


def _words(text: str) -> str:
    """Without blanks: a name that is longer than a line is broken."""
    return "".join(re.sub("[├│└─]", " ", text).split())


def test_colours_change_no_text() -> None:
    root = view(tree_of(dgx()))
    coloured = render_text(root, has_colours=True)
    assert coloured != render_text(root)
    assert click.unstyle(coloured) == render_text(root)
    (dead,) = (line for line in coloured.splitlines() if "does not respond" in line)
    assert click.style("! does not respond", fg="red") in dead


def test_unfolded_it_has_every_function() -> None:
    host = dgx()
    text = render_text(view(tree_of(host)), unfold=True)
    assert all(str(device.address) in text for device in host.devices)
    assert "0000:06:00.1" not in render_text(view(tree_of(host)))


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("unfold", [False, True])
def test_in_the_svg_no_boxes_overlap_and_all_are_inside(name: str, *, unfold: bool) -> None:
    root = parsed_xml(svg(HOSTS[name](), unfold=unfold).encode())
    width, height = (float(root.get(side, "")) for side in ("width", "height"))
    boxes = [_place(rect) for rect in root.iterfind(".//{*}rect[@class='box']")]
    frames = [_place(rect) for rect in root.iterfind(".//{*}rect[@class='frame']")]
    shown = list(rows(view(tree_of(HOSTS[name]())), unfold=unfold))
    assert len(boxes) + len(frames) == len(shown)
    for left, top, right, bottom in (*boxes, *frames):
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    for number, one in enumerate(boxes):
        assert not any(_overlap(one, other) for other in boxes[number + 1 :])
        assert any(_inside(one, frame) for frame in frames)


def test_headings_fit_into_the_svg_of_few_functions() -> None:
    address = PciAddress.parse("0000:82:00.0")
    narrow = host_of(replace(pci_device(), name="x", driver=None, iommu_group=None))
    for topology in (
        tree_of(host_of()),
        tree_of(vgpu_server(), [address]),
        tree_of(narrow),
    ):
        root = parsed_xml(render_svg(topology, view(topology)).encode())
        for frame in root.iterfind(".//{*}rect[@class='frame']"):
            heading = frame.getnext()
            end = float(heading.get("x")) + 7.3 * len(heading.text)
            assert end < _place(frame)[2] < float(root.get("width"))


def _place(rect: Any) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.get(n, "")) for n in ("x", "y", "width", "height"))
    return (x, y, x + width, y + height)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _inside(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return other[0] <= one[0] and other[1] <= one[1] and one[2] <= other[2] and one[3] <= other[3]


def test_the_page_is_a_tree_for_screen_readers() -> None:
    topology = tree_of(dgx())
    document = parsed(page(dgx()))
    items = document.xpath("//*[@role='treeitem']")
    expected = list(rows(view(topology), unfold=True))
    assert len(items) == len(expected)
    for item, row in zip(items, expected, strict=True):
        assert item.get("aria-level") == str(row.depth + 1)
        assert item.get("aria-posinset") == str(row.position)
        assert item.get("aria-setsize") == str(row.siblings)
        assert (item.get("aria-expanded") is None) == (row.is_open is None)
        assert item.findtext("./span[@class='title']") == row.item.title
        (description,) = document.xpath(f"//dl[@id='{item.get('aria-describedby')}']")
        labels, texts = description.xpath("dt/text()"), description.xpath("dd/text()")
        assert tuple(zip(labels, texts, strict=True)) == row.item.details
    assert [item.get("tabindex") for item in items].count("0") == 1
    assert document.xpath("//*[@role='tree']/@aria-label")
    assert document.xpath("//label[@for='search']")


def test_the_page_loads_nothing_and_allows_only_its_own_script() -> None:
    text = page(vgpu_server())
    document = parsed(text)
    assert not document.xpath("//@src | //@href | //@style | //@*[starts-with(name(), 'on')]")
    assert "url(" not in text
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text
    (policy,) = document.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_what_is_folded_stays_open_where_it_is_asked_for() -> None:
    assert parsed(page(dgx())).xpath("//*[@data-folded]")
    assert not parsed(page(dgx(), unfold=True)).xpath("//*[@data-folded]")


def test_json_has_every_function_and_vgpu() -> None:
    host = vgpu_server()
    kinds = [node.kind for node in nodes(tree_of(host).root)]
    assert kinds.count("vgpu") == len(host.vgpus.active) == 3
