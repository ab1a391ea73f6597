"""Every line of docs/python.md is run, and prints what is written below it."""

from __future__ import annotations

import doctest
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vfiomgr
from tests.fakes.vgpu_hosts import a40_host
from tests.unit.kata_nodes import POD
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

DOCUMENTS = Path(__file__).parents[3] / "docs"
TUTORIAL, EXAMPLE = DOCUMENTS / "python.md", DOCUMENTS / "examples/passthrough.py"
PCI_IDS = """\
# as /usr/share/misc/pci.ids
10de  NVIDIA Corporation
\t22ba  AD102 High Definition Audio Controller
\t2235  GA102GL [A40]
\t2684  AD102 [GeForce RTX 4090]
"""
LAYOUT = """\
version: vfiomgr/v1
layouts:
  desk: {devices: [{select: {address: "0000:04:00.0"}, state: passthrough}]}
"""


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """The host of the tutorial."""
    kernel = a40_host(tmp_path, total_vfs=2)
    kernel.add_driver("snd_hda_intel", ids=[("10de", "*", "0403")])
    functions = (("0", "2684", "030000", "nvidia"), ("1", "22ba", "040300", "snd_hda_intel"))
    for function, device, class_code, driver in functions:
        kernel.add_pci(
            f"0000:04:00.{function}",
            vendor="10de",
            device=device,
            class_code=class_code,
            driver=driver,
            group=38,
        )
    names = Path(kernel.root, "usr/share/misc/pci.ids")
    names.parent.mkdir(parents=True)
    names.write_text(PCI_IDS)
    return kernel


@pytest.fixture
def _place(tmp_path: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is that host, and the files that the tutorial names are here."""
    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: kernel)
    (tmp_path / "host.yaml").write_text(LAYOUT)
    (tmp_path / "pod.yaml").write_text(POD)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/config.json").write_text('{"ociVersion": "1.2.0", "linux": {}}')
    kernel.sysfs.put_bytes("/usr/bin/crun", b"", 0o755)
    (tmp_path / "host.json").write_text(write_snapshot(scan(kernel, kernel)))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_place")
def test_the_example_takes_a_gpu_to_a_guest_and_back(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libvirt is not there: what it is given is looked at, and how the host is meanwhile."""
    given: list[tuple[object, str | None, str | None]] = []

    def virsh(words: list[str], **options: object) -> None:
        driver = vfiomgr.Host(kernel).device("04:00.0").driver
        xml = options.get("input")
        given.append((words[1], driver, None if xml is None else str(xml)))

    monkeypatch.setattr("subprocess.run", virsh)
    monkeypatch.setattr("sys.argv", ["passthrough.py", "04:00.0", "A40-4Q"])
    runpy.run_path(str(EXAMPLE))
    (create, bound, xml), (destroy, *_) = given
    assert (create, bound, destroy) == ("create", "vfio-pci", "destroy")
    assert xml is not None
    assert "<name>example</name>" in xml
    assert "bus='0x04' slot='0x00' function='0x1'" in xml
    host = vfiomgr.Host(kernel)
    assert (host.device("04:00.0").driver, host.vgpus) == ("nvidia", ())
    assert "vGPU: " in capsys.readouterr().out


@pytest.mark.usefixtures("_place")
def test_every_line_of_the_tutorial_is_true() -> None:
    text = TUTORIAL.read_text()
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    tutorial = doctest.DocTestParser().get_doctest(text, {}, "python.md", str(TUTORIAL), 0)
    results = runner.run(tutorial, out=told.append)
    assert not results.failed, "".join(told)
    lines = [line for line in text.splitlines() if line.startswith((">>> ", "... "))]
    assert sum(example.source.count("\n") for example in tutorial.examples) == len(lines)


def test_all_python_of_the_tutorial_has_prompts() -> None:
    blocks = TUTORIAL.read_text().split("```python\n")[1:]
    assert blocks
    assert all(block.startswith(">>> ") for block in blocks)
