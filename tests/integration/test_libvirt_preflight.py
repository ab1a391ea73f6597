"""Preflights of domains that a real libvirt knows: its test driver, in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from benchmarks.domains import COUNT, make_node
from benchmarks.trees import make_tree
from tests.fakes.libvirt_node import node_uri
from tests.unit.libvirt.preflight.situations import pci_element, xml
from vfiomgr.libvirt.client.connection import connect

if TYPE_CHECKING:
    from pathlib import Path

GPU = "0000:01:00.0"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host of one GPU, one adapter and 60 virtual functions, and domains that claim the GPU."""
    place = tmp_path_factory.mktemp("preflight")
    make_tree(str(place / "host"), 64)
    make_node(str(place / "node.xml"), 1)
    return place


def preflight(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vfiomgr", "--root", str(directory / "host")]
    command += ["check", "domain", "--connect", f"test://{directory}/node.xml"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def reports(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    answer = preflight(directory, *arguments, "--format", "json")
    items: list[dict[str, Any]] = json.loads(answer.stdout)["items"]
    return items


def test_all_domains_are_judged_and_know_of_each_other(directory: Path) -> None:
    found = reports(directory, "--all")
    assert len(found) == COUNT
    assert [report["summary"]["blocker"] for report in found] == [0] * COUNT
    display, sound = [f for f in found[0]["findings"] if f["id"] == "claimed-by-domain"]
    assert display["title"] == f"{COUNT - 1} other domains also claim {GPU}"
    assert display["evidence"][0].startswith("guest0:")
    assert display["evidence"][-1] == f"and {COUNT - 5} more: vfiomgr libvirt list"
    assert sound["title"].endswith("0000:01:00.1")


@pytest.mark.parametrize("name", ["guest7", "00000000-0000-0000-0000-000000000008"])
def test_a_domain_is_named_or_identified(directory: Path, name: str) -> None:
    (report,) = reports(directory, name)
    assert (report["domain"], report["source"]) == ("guest7", "guest7")
    assert not any("libvirt was not queried" in text for text in report["not_checked"])


def test_a_file_is_judged_against_the_domains_of_libvirt(directory: Path) -> None:
    file = directory / "new.xml"
    file.write_text(xml(pci_element(GPU), before="", name="new"))
    (report,) = reports(directory, str(file))
    rules = {finding["id"]: finding for finding in report["findings"]}
    assert rules["on-host-driver"]["evidence"][0].startswith(f"{file}:13: ")
    assert rules["claimed-by-domain"]["title"].startswith(f"{COUNT} other domains")
    assert preflight(directory, str(file)).returncode == 1


def test_the_next_definition_of_a_domain_does_not_compete_with_the_present_one(
    directory: Path,
) -> None:
    file = directory / "next.xml"
    text = xml(pci_element(GPU, managed="yes"), before="", name="guest0")
    file.write_text(text.replace("<memory", f"<uuid>{UUID(int=1)}</uuid><memory"))
    (report,) = reports(directory, str(file))
    (claim,) = [f["title"] for f in report["findings"] if f["id"] == "claimed-by-domain"]
    assert claim.startswith(f"{COUNT - 1} other domains")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nobody",), "no such domain or file: nobody"),
        (("--connect", "test:///no/such/node.xml", "--all"), "node.xml"),
    ],
)
def test_what_is_not_there_is_told(directory: Path, arguments: tuple[str, ...], words: str) -> None:
    answer = preflight(directory, *arguments)
    assert answer.returncode in (1, 2, 65)
    assert words in answer.stderr
    assert "remedy:" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_domains_that_start_with_the_host_are_known(tmp_path: Path) -> None:
    with connect(node_uri(tmp_path)) as connection:
        handle = connection._handle.lookupByName("test")
        assert [d.autostarts for d in connection.hypervisor().domains] == [False]
        handle.setAutostart(1)
        assert [d.autostarts for d in connection.hypervisor().domains] == [True]


def test_a_libvirt_elsewhere_needs_a_snapshot_of_its_host(directory: Path) -> None:
    command = [sys.executable, "-m", "vfiomgr", "check", "domain", "--all"]
    command += ["--connect", "qemu+ssh://elsewhere.example/system"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert ": they start on another host" in answer.stderr
    assert "--snapshot" in answer.stderr
    assert directory
