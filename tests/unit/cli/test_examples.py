"""Every example of the documents and of the help can be pasted: a shell and vfiomgr take it."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from tests.fakes.vgpu_hosts import a40_host
from tests.unit.cli.test_usage import commands
from tests.unit.kata_nodes import POD, KataNode
from vfiomgr.main.program import cli
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

CHECKOUT = Path(__file__).parents[3]
DOCUMENTS = (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))
OF_A_PERSON = {
    "xargs",
    "sudo",
    "virsh",
    "kubectl",
    "systemctl",
    "make",
    "cat",
    "udevadm",
    "apt-get",
    "export",
}
"""What stands in an example besides vfiomgr, and is not run."""
ENDLESS = {"layout watch", "node run", "persist watch"}
"""Commands that run until they are ended: their arguments alone are read."""
USAGE = 2
_ADDRESS = re.compile(r"\b(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_ABSENT = re.compile(
    r"(?:error: |\"message\": \")(cannot read |no such (PCI device|domain|mediated device)"
    r"|no such (domain or file|device in the CDI|vGPU-capable device)|no layout is installed"
    r"|no readable configuration of Kata|not a (host root|directory): '/"
    r"|\S+ \(Device \S+\) does not support vGPUs in its current state"
    r"|\S+ is not one of the boards that share an ID|\S+ has no vGPU type |cannot look up "
    r"|missing options: --parent and --type|vGPU definition not found|active vGPU not found"
    r"|--jsonfile \S+: No such file|cannot query the agent on "
    r"|cannot use --viommu smmuv3 on a PC: )"
)
"""Examples that need something which the example host lacks: only their words are checked."""
_SHELL = ("", "sh", "bash", "console")
DOMAIN = """\
<domain type='kvm'><name>win</name><memory>4194304</memory><vcpu>2</vcpu>
<os><type machine='q35'>hvm</type></os><devices/></domain>
"""
LAYOUTS = """\
version: vfiomgr/v1
layouts:
  kata-node: {devices: [{select: {address: "0000:04:00.0"}, state: guest}]}
"""


@dataclass(frozen=True)
class Example:
    """A line, or several that are continued, as a person would paste it."""

    source: str
    text: str

    def __str__(self) -> str:
        """What a failed test is called by."""
        return f"{self.source}: {self.text}"


def in_document(path: Path) -> Iterator[Example]:
    """The commands of indented blocks and of blocks of a shell."""
    number, lines = 0, path.read_text().splitlines()
    fence = None
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.lstrip().startswith("```"):
            fence = line.strip()[3:] if fence is None else None
        is_code = line.startswith("    ") if fence is None else fence in _SHELL
        if not is_code or line.lstrip().startswith("-") or "vfiomgr " not in line.split("#")[0]:
            continue
        first, text = number, line.strip()
        while text.endswith("\\"):
            text = f"{text[:-1].rstrip()} {lines[number].strip()}"
            number += 1
        if re.match(r"(sudo |[A-Z_]+=\S+ |virsh |cat )*vfiomgr |virsh .*\| vfiomgr", text):
            yield Example(f"{path.relative_to(CHECKOUT)}:{first}", text.removeprefix("$ "))


def in_help() -> Iterator[Example]:
    """The lines below `Examples:`, until an empty one."""
    for context in commands(click.Context(cli, info_name="vfiomgr", **cli.context_settings)):
        _, _, text = (context.command.help or "").partition("Examples:\n")
        joined = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
        for line in itertools.takewhile(str.strip, joined):
            yield Example(f"{context.command_path} --help", line.strip())


EXAMPLES = [*itertools.chain.from_iterable(map(in_document, DOCUMENTS)), *in_help()]
PARSERS = {
    context.command_path.removeprefix("vfiomgr "): context.command
    for context in commands(click.Context(cli, info_name="vfiomgr", **cli.context_settings))
}


def calls(text: str) -> list[list[str]]:
    """The calls of a pipe as a shell reads it, without what is redirected."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = list(lexer)
    while words:
        word = words.pop(0)
        if word in ("|", ";", "&&"):
            found.append([])
        elif word in (">", "<", ">>"):
            words.pop(0)
        else:
            found[-1].append(word)
    return found


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> FakeKernel:
    """A host with the devices that examples name, and Kata on it; a dry run changes nothing."""
    directory = tmp_path_factory.mktemp("examples")
    kernel = a40_host(directory, total_vfs=4)
    there = {str(device.address) for device in scan(kernel, kernel).devices}
    for number, address in enumerate(sorted(ADDRESSES - there), start=200):
        kernel.add_pci(
            address,
            vendor="10de",
            device="2684",
            class_code="030000",
            driver="nvidia",
            group=number,
        )
    KataNode(directory / "node", "go", kernel)
    return kernel


@pytest.fixture(scope="module")
def recording(kernel: FakeKernel) -> str:
    """The snapshot of that host."""
    return write_snapshot(scan(kernel, kernel))


def addresses() -> set[str]:
    """All that examples name; one without its domain is in the first one, or where there is one."""
    found = set(_ADDRESS.findall(" ".join(example.text for example in EXAMPLES)))
    full = {name for name in found if name.count(":") > 1}
    placed = {name.partition(":")[2] for name in full}
    return full | {f"0000:{name}" for name in found - full - placed}


ADDRESSES = addresses()


@pytest.fixture
def _place(tmp_path: Path, recording: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with the files that examples name."""
    place = tmp_path / "cwd"
    place.mkdir()
    (place / "today.json").write_text("{}")
    for name in ("host.yaml", "fleet.yaml", "gpu-node.yaml"):
        (place / name).write_text(LAYOUTS)
    for name in ("win.xml", "guest.xml", "gb200.xml"):
        (place / name).write_text(DOMAIN)
    (place / "pod.yaml").write_text(POD)
    (place / "pods.yaml").write_text(POD)
    for name in ("host.json", "worker-1.json", "worker-2.json", "dgx.json"):
        (place / name).write_text(recording)
    for directory in ("snapshots", "before", "after"):
        (place / directory).mkdir()
        for number in ("01", "07"):
            (place / directory / f"gpu{number}.json").write_text(recording)
    (place / "reserved.yaml").write_text("version: vfiomgr/v1\nreservations: []\n")
    monkeypatch.chdir(place)
    monkeypatch.setenv("VFIOMGR_DRY_RUN", "1")
    monkeypatch.setenv("VFIOMGR_CONNECT", "test:///default")


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("example", {e.text: e for e in EXAMPLES}.values(), ids=str)
def test_an_example_can_be_pasted(
    run: Run, monkeypatch: pytest.MonkeyPatch, example: Example
) -> None:
    assert not re.search(r"\S {2,}[^ #]", example.text.partition(" # ")[0]), "a comment without #"
    for words in calls(example.text):
        while words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words[0] in OF_A_PERSON:
            continue
        assert words[0] == "vfiomgr"
        assert not {"...", "…", "·"} & set(words)
        if not only_read(words[1:]):
            piped = io.TextIOWrapper(io.BytesIO(DOMAIN.encode()))
            monkeypatch.setattr(sys, "stdin", piped)
            answer = run(*words[1:])
            said = answer.stderr
            if said.startswith("{"):
                said = f"error: {json.loads(said)['message']}"
            is_absent = _ABSENT.search(said) is not None
            assert is_absent or answer.status != USAGE, answer.stderr
            assert "bug in vfiomgr" not in answer.stderr


def only_read(arguments: list[str]) -> bool:
    """Read the arguments of what runs until it is ended, or asks another machine."""
    paths = [path for path in PARSERS if f"{' '.join(arguments)} ".startswith(f"{path} ")]
    if not (set(paths) & ENDLESS or "--connect" in arguments):
        return False
    path = max(paths, key=len)
    own = arguments[len(path.split()) :]
    PARSERS[path].make_context(path, own, **cli.context_settings)
    return True


def test_there_are_examples_of_every_kind() -> None:
    assert len([e for e in EXAMPLES if e.source.startswith(("README", "docs"))]) > 120
    assert len([e for e in EXAMPLES if e.source.endswith("--help")]) > 150


@pytest.mark.parametrize(
    "text",
    [
        "vfiomgr vgpu list --types | list | create --type A40-4Q",
        "vfiomgr libvirt attach win 41:00.4     a virtual function",
        "vfiomgr reset ADDRESS",
        "vfiomgr list --al",
        "vfiomgr vgpu start NAME · stop NAME",
        "vfiomgr libvirt domain … --memory 1G",
    ],
)
@pytest.mark.usefixtures("_place")
def test_what_cannot_be_pasted_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with pytest.raises(AssertionError):
        test_an_example_can_be_pasted(run, monkeypatch, Example("here", text))
