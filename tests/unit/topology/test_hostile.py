"""Nothing of a host becomes markup, a command of a terminal, or another node of a graph."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from lxml import etree, html

from tests.unit.cli.test_hostile_names import IN_JSON, free_places, poisoned, require_harmless
from tests.unit.topology.hosts import nodes, vgpu_server
from vfiomgr.documents.text import printable
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import view
from vfiomgr.topology.render import render_html, render_svg, render_text

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

MARKUP = (
    '"\'>]]></title></dl></div></script><script>document.title="x"</script>'
    "<img src=x onerror=alert(1)><!-- {{ 7 * 7 }} {% raw %} &lt; \\N\\"
)
POISONS = {"markup": MARKUP, "controls": IN_JSON, "both": MARKUP + IN_JSON, "no text": "\x01\ufffe"}


def parsed(text: str) -> Any:
    """A page as its elements."""
    return html.fromstring(text)


def parsed_xml(text: bytes) -> Any:
    """A document as its elements."""
    return etree.fromstring(text)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The facts of a host with every kind of node."""
    found: dict[str, Any] = json.loads(write_snapshot(vgpu_server()))
    return found


@pytest.fixture(scope="module")
def places(document: dict[str, Any]) -> frozenset[str]:
    """Where any text is taken, of the facts that the picture shows."""
    shown = (".devices", ".vgpus", ".host_uses", ".users", ".groups", ".kernel_release")
    return frozenset(p for p in free_places(document) if p.startswith(shown))


@pytest.fixture(params=POISONS)
def poison(request: pytest.FixtureRequest) -> str:
    """What the names of the host end with."""
    return POISONS[request.param]


NAMES = frozenset(
    {
        *(".devices[].name", ".devices[].class_name", ".vgpus[].type_name", ".vgpus[].driver"),
        *(".host_uses[].what", ".users[].command", ".users[].guest", ".kernel_release"),
    }
)
"""Texts that decide nothing of what is drawn, so that the picture keeps its shape."""


@pytest.fixture
def named(document: dict[str, Any], poison: str) -> HostSnapshot:
    """The host with hostile names."""
    return read_snapshot(json.dumps(poisoned(document, "", NAMES, poison)), "host.json")


@pytest.fixture
def host(document: dict[str, Any], places: frozenset[str], poison: str) -> HostSnapshot:
    """The host with hostile texts wherever there can be one."""
    kept = places - {".devices[].class_code", ".devices[].bridge_path"}
    return read_snapshot(json.dumps(poisoned(document, "", kept, poison)), "host.json")


def test_the_places_are_those_that_the_picture_shows(places: frozenset[str]) -> None:
    assert NAMES | {".devices[].driver", ".vgpus[].uuid", ".vgpus[].parent"} <= places


def test_the_tree_is_harmless(host: HostSnapshot, poison: str) -> None:
    text = render_text(view(tree_of(host)), unfold=True)
    require_harmless(text)
    assert printable(poison) in text


def test_the_page_has_the_elements_of_a_plain_one(named: HostSnapshot, poison: str) -> None:
    made, plain = (parsed(_page(one)) for one in (named, vgpu_server()))
    assert _shape(made) == _shape(plain)
    assert printable(poison) in made.text_content()
    assert made.findtext(".//script") == plain.findtext(".//script")


def test_the_page_is_harmless(host: HostSnapshot) -> None:
    text = _page(host)
    require_harmless(text)
    assert len(re.findall("<script", text)) == len(re.findall("</script", text)) == 1
    kinds = {str(one.tag) for one in parsed(text).iter()}
    assert kinds == {str(one.tag) for one in parsed(_page(vgpu_server())).iter()}


def test_the_svg_is_well_formed_and_has_no_other_elements(host: HostSnapshot) -> None:
    root = parsed_xml(_svg(host).encode())
    kinds = {etree.QName(element).localname for element in root.iter()}
    assert kinds == {"svg", "title", "style", "rect", "g", "text", "path"}
    require_harmless(_svg(host))


def test_the_svg_has_the_boxes_of_a_plain_one(named: HostSnapshot, poison: str) -> None:
    made, plain = (parsed_xml(_svg(one).encode()) for one in (named, vgpu_server()))
    for name in ("g", "rect", "path", "style"):
        assert len(list(made.iter(f"{{*}}{name}"))) == len(list(plain.iter(f"{{*}}{name}")))
    titles = " ".join(element.text or "" for element in made.iter("{*}title"))
    assert printable(poison) in titles


def test_json_has_the_names_as_they_are(host: HostSnapshot, poison: str) -> None:
    names = [node.name for node in nodes(tree_of(host).root) if node.kind == "function"]
    assert names
    assert all(name is not None and name.endswith(poison) for name in names)


def _page(host: HostSnapshot) -> str:
    topology = tree_of(host)
    return render_html(topology, view(topology))


def _svg(host: HostSnapshot) -> str:
    topology = tree_of(host)
    return render_svg(topology, view(topology))


def _shape(element: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Every element with its attributes' names, in the order of the document."""
    return [(str(one.tag), tuple(one.keys())) for one in element.iter()]
