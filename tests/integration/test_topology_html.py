"""The page of `vfiomgr topology --format html` in Chromium: read, searched, folded by keyboard."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from benchmarks.trees import make_tree
from tests import api
from tests.unit.devices import with_facts
from tests.unit.topology.hosts import dgx, vgpu_server
from tests.unit.topology.test_hostile import MARKUP
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import rows, view
from vfiomgr.topology.render import render_html, render_svg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vfiomgr.snapshot.model import HostSnapshot

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402 - where it is installed
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    None in (CHROMIUM, DRIVER), reason="Chromium is not installed (Debian: chromium-driver)"
)
VISIBLE = '[role="treeitem"]:not([hidden])'


class Page:
    """A page in a browser."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.browser = browser
        browser.execute_cdp_cmd("Performance.enable", {})
        browser.get(file.as_uri())
        self.titles()

    def counts(self) -> dict[str, int]:
        """What the browser has done for this page, and how many nodes it has."""
        found = self.browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return {one["name"]: int(one["value"]) for one in found}

    def titles(self) -> list[str]:
        """Of the lines that are visible, from the top to the bottom."""
        return self._titles(VISIBLE)

    def all_titles(self) -> list[str]:
        """Of all lines."""
        return self._titles('[role="treeitem"]')

    def _titles(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        found: list[str] = self.browser.execute_script(script, f"{selector} .title")
        return found

    def press(self, *keys: str) -> None:
        """Type on what has the focus."""
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def search(self, text: str) -> None:
        """Type into the search."""
        box = self.browser.find_element(By.ID, "search")
        box.clear()
        box.send_keys(text)

    @property
    def focused(self) -> str:
        """The title of the line that has the focus."""
        element = self.browser.switch_to.active_element
        return str(element.find_element(By.CLASS_NAME, "title").text)

    def focus(self, title: str) -> None:
        """Focus a line as a script of a screen reader does."""
        script = (
            "[...document.querySelectorAll('[role=\"treeitem\"]')]"
            ".find(e => e.querySelector('.title').textContent === arguments[0])"
            ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        )
        self.browser.execute_script(script, title)

    def text(self, name: str) -> str:
        """What an element shows."""
        return str(self.browser.find_element(By.ID, name).text)

    def complaints(self) -> list[str]:
        """What the console says."""
        return [str(entry) for entry in self.browser.get_log("browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium that reaches no network, and Debian's driver."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--window-size=1400,1000",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=str(DRIVER))
    made = webdriver.Chrome(options=options, service=service)
    yield made
    made.quit()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[[HostSnapshot], Page]]:
    """Open the page of a host; afterwards the console must be empty."""
    pages: list[Page] = []

    def open_it(host: HostSnapshot) -> Page:
        topology = tree_of(host)
        file = tmp_path / "host.html"
        file.write_text(render_html(topology, view(topology)))
        pages.append(Page(browser, file))
        return pages[-1]

    yield open_it
    assert [text for page in pages for text in page.complaints()] == []


def expected(host: HostSnapshot) -> list[str]:
    """The titles that a page shows at first: what is folded is closed."""
    closed: list[int] = []
    found = []
    for row in rows(view(tree_of(host)), unfold=True):
        while closed and closed[-1] >= row.depth:
            closed.pop()
        if not closed:
            found.append(row.item.title)
        if row.item.starts_closed:
            closed.append(row.depth)
    return found


@pytest.mark.parametrize("host", [vgpu_server(), dgx()], ids=["vgpu", "dgx"])
def test_it_shows_the_tree_with_folds_closed(opened: Any, host: HostSnapshot) -> None:
    page = opened(host)
    assert page.titles() == expected(host)
    assert page.all_titles() == [row.item.title for row in rows(view(tree_of(host)), unfold=True)]


def test_it_is_a_tree_for_those_who_do_not_see_it(opened: Any) -> None:
    page = opened(vgpu_server())
    tree = page.browser.find_element(By.ID, "tree")
    assert (tree.aria_role, tree.accessible_name) == ("tree", "PCI topology")
    items = tree.find_elements(By.CSS_SELECTOR, VISIBLE)
    assert {item.aria_role for item in items} == {"treeitem"}
    (gpu,) = (item for item in items if "0000:08:00.0" in item.accessible_name)
    assert gpu.accessible_name.startswith("0000:08:00.0 NVIDIA A40 driver nvidia group 38")
    assert "! link width x8, both ends support x16" in gpu.accessible_name
    search = page.browser.find_element(By.ID, "search")
    assert (search.aria_role, search.accessible_name) == ("searchbox", "Search")


def test_arrows_move_and_fold(opened: Any) -> None:
    page = opened(vgpu_server())
    titles = page.titles()
    page.focus("host")
    page.press(Keys.ARROW_DOWN)
    assert page.focused == "NUMA node 0" == titles[1]
    page.press(Keys.ARROW_LEFT)
    assert page.titles()[:3] == ["host", "NUMA node 0", "NUMA node 1"]
    page.press(Keys.ARROW_RIGHT)
    assert page.titles() == titles
    page.press(Keys.ARROW_RIGHT)
    assert page.focused == "root complex 0000:00"
    page.press(Keys.END)
    assert page.focused == titles[-1]
    page.press(Keys.ARROW_UP)
    assert page.focused == titles[-2]
    page.press(Keys.HOME, Keys.ENTER)
    assert page.titles() == ["host"]
    page.press(Keys.SPACE)
    assert page.titles() == titles


def test_a_fold_opens_by_keyboard_and_by_mouse(opened: Any) -> None:
    page = opened(vgpu_server())
    page.focus("16 VFs")
    page.press(Keys.ARROW_RIGHT)
    assert sum(title.startswith("VF 0000:08") for title in page.titles()) == 16
    page.press(Keys.ARROW_LEFT)
    assert not any(title.startswith("VF 0000:08") for title in page.titles())
    (item,) = (
        item
        for item in page.browser.find_elements(By.CSS_SELECTOR, VISIBLE)
        if item.find_element(By.CLASS_NAME, "title").text == "16 VFs"
    )
    item.find_element(By.CLASS_NAME, "toggle").click()
    assert item.get_attribute("aria-expanded") == "true"
    assert sum(title.startswith("VF 0000:08") for title in page.titles()) == 16


def test_a_fold_that_hides_trouble_is_open(opened: Any) -> None:
    host = vgpu_server()
    broken = PciAddress.parse("0000:08:00.5")
    devices = [replace(d, is_responsive=d.address != broken) for d in host.devices]
    page = opened(with_facts(host, devices=tuple(devices)))
    assert f"VF {broken}" in page.titles()
    assert "VF 0000:04:10.1" in page.all_titles()
    assert "VF 0000:04:10.1" not in page.titles()


def test_all_can_be_opened_and_closed(opened: Any) -> None:
    page = opened(vgpu_server())
    page.browser.find_element(By.ID, "expand").click()
    assert page.titles() == page.all_titles()
    page.browser.find_element(By.ID, "collapse").click()
    assert page.titles() == ["host", "NUMA node 0", "NUMA node 1"]


def test_a_search_shows_matches_with_what_is_above_them(opened: Any) -> None:
    page = opened(vgpu_server())
    before = page.titles()
    page.search("A40-4q vGPU")
    vgpus = vgpu_server().vgpus.active
    shown = page.titles()
    assert page.text("count") == "3 matches"
    assert [title for title in shown if title.startswith("vGPU")] == [
        f"vGPU {vgpu.name}" for vgpu in vgpus
    ]
    assert shown[:5] == [
        *("host", "NUMA node 0", "root complex 0000:00", "root port 0000:00:03.0", "0000:08:00.0")
    ]
    assert len(shown) == 6 + 2 * len(vgpus)
    page.press(Keys.ENTER)
    assert page.focused == f"vGPU {vgpus[0].name}"
    page.press("/", Keys.ESCAPE)
    assert page.titles() == before
    page.search("no such thing")
    assert (page.titles(), page.text("count")) == ([], "0 matches")
    page.press(Keys.ESCAPE)
    assert page.titles() == before


def test_details_are_shown_of_what_has_the_focus(opened: Any) -> None:
    page = opened(vgpu_server())
    page.focus("0000:08:00.0")
    shown = page.text("details").splitlines()
    assert shown[0] == "0000:08:00.0"
    assert "NVIDIA Corporation GA102GL [A40]" in shown
    assert "8 GT/s x8, maximum 8 GT/s x16" in shown
    page.focus("0000:01:00.0")
    peers = page.browser.find_elements(By.CSS_SELECTOR, ".peer .title")
    assert [peer.text for peer in peers] == ["0000:01:00.0", "0000:01:00.1"]


def test_groups_have_colours_in_light_and_dark(opened: Any) -> None:
    page = opened(vgpu_server())
    script = (
        "return ['body', '.group'].map(s => getComputedStyle(document.querySelector(s)))"
        ".map(s => s.backgroundColor + s.color)"
    )
    seen = []
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        seen.append(page.browser.execute_script(script))
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]
    colours = page.browser.execute_script(
        "return [...document.querySelectorAll('.group')].map(e => [e.textContent,"
        " getComputedStyle(e).color])"
    )
    assert len({colour for _, colour in colours}) > 8
    assert len({tuple(pair) for pair in colours}) == len({group for group, _ in colours})


@pytest.mark.parametrize("columns", [1400, 700])
def test_lines_stand_below_each_other_and_further_right_by_level(opened: Any, columns: int) -> None:
    page = opened(dgx())
    page.browser.set_window_size(columns, 1000)
    page.browser.find_element(By.ID, "expand").click()
    script = (
        "return [...document.querySelectorAll(arguments[0])].map(e => [e.ariaLevel,"
        " e.getBoundingClientRect(), e.querySelector('.title').getBoundingClientRect()])"
    )
    drawn = page.browser.execute_script(script, VISIBLE)
    lefts: dict[str, set[float]] = {}
    bottom = 0.0
    for level, line, title in drawn:
        assert line["top"] >= bottom
        bottom = line["bottom"]
        assert line["left"] < title["left"] < title["right"] < columns
        assert line["top"] <= title["top"] < title["bottom"] <= line["bottom"]
        lefts.setdefault(level, set()).add(round(title["left"]))
    assert [len(found) for found in lefts.values()] == [1] * len(lefts)
    places = [min(lefts[str(level)]) for level in range(1, len(lefts) + 1)]
    assert places == sorted(set(places))


@pytest.mark.parametrize("host", [vgpu_server(), dgx()], ids=["vgpu", "dgx"])
def test_the_texts_of_the_svg_fit_into_their_boxes(
    browser: Any, tmp_path: Path, host: HostSnapshot
) -> None:
    """The widths that the SVG reckons with are those of a real font."""
    topology = tree_of(host)
    file = tmp_path / "host.svg"
    file.write_text(render_svg(topology, view(topology)))
    browser.get(file.as_uri())
    script = (
        "return [...document.querySelectorAll('g')].flatMap(g => {"
        " const box = g.querySelector('rect').getBBox();"
        " return [...g.querySelectorAll('text')].map(t => { const own = t.getBBox();"
        " return [t.textContent, own.x - box.x, own.y - box.y,"
        " box.x + box.width - own.x - own.width, box.y + box.height - own.y - own.height]; }); })"
    )
    drawn = browser.execute_script(script)
    assert len(drawn) > len(host.groups)
    assert [(text, *room) for text, *room in drawn if min(room) < 0] == []


def test_names_of_a_host_run_nothing(opened: Any) -> None:
    in_json = json.dumps(MARKUP)[1:-1]
    text = write_snapshot(vgpu_server()).replace("NVIDIA Corporation", in_json)
    host = read_snapshot(text, "host.json")
    page = opened(host)
    assert page.browser.title == "PCI topology"
    assert page.browser.find_elements(By.TAG_NAME, "img") == []
    assert page.titles() == expected(host)


@pytest.mark.parametrize("functions", [64, 2048])
def test_a_change_of_the_tree_does_not_lay_out_the_page_for_each_function(
    opened: Any, tmp_path: Path, functions: int
) -> None:
    """A script that reads a size after each change would lay out the page for each function.

    Counted after the page was loaded: while it loads, a browser lays out what it has so far. Typing
    lays out the page about ten times: for the focus, each key and the result.
    """
    make_tree(str(tmp_path / "host"), functions)
    page = opened(api.scan(HostTree(tmp_path / "host"), with_links=True))
    assert len(page.all_titles()) > functions
    before = page.counts()
    page.search("0000")
    after = page.counts()
    assert after["LayoutCount"] - before["LayoutCount"] <= 20
    assert after["RecalcStyleCount"] - before["RecalcStyleCount"] <= 20
    script = "return document.getElementsByTagName('*').length"
    assert page.browser.execute_script(script) < 50 * functions
