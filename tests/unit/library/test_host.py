"""The library: a host, what it has and what is changed, as `import vfiomgr` offers it."""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import vfiomgr
from tests.fakes.hosts import workstation
from tests.fakes.vgpu_hosts import a40_host
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.layout.document import render_layouts
from vfiomgr.layout.from_host import export
from vfiomgr.layout.model import LayoutFile
from vfiomgr.libvirt.attach.named import attaching, detaching
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU, AUDIO = "0000:02:00.0", "0000:02:00.1"
A_GPU_FOR_GUESTS = f"""\
version: vfiomgr/v1
layouts:
  passthrough: {{devices: [{{select: {{address: "{GPU}"}}, state: passthrough}}]}}
"""


@pytest.fixture
def host(kernel: FakeKernel) -> vfiomgr.Host:
    return vfiomgr.Host(kernel)


def drivers(host: vfiomgr.Host) -> tuple[str | None, ...]:
    return host.device(GPU).driver, host.device(AUDIO).driver


def test_it_names_what_there_is(host: vfiomgr.Host) -> None:
    assert {str(gpu.address) for gpu in host.gpus} >= {"0000:01:00.0", GPU}
    assert len(host.devices) > len(host.gpus)
    assert host.device("02:00.0") == host.device(GPU) == host.device(PciAddress.parse(GPU))
    assert {group.number for group in host.groups} >= {10, 11}
    assert host.vgpus == ()


def test_short_addresses_are_looked_up_among_all_domains(host: vfiomgr.Host) -> None:
    with pytest.raises(vfiomgr.UsageError, match="ambiguous: it matches 0000:01"):
        host.device("01:00.0")


def test_a_plan_prints_as_the_command_does(host: vfiomgr.Host, run: Run) -> None:
    plan = host.plan(vfiomgr.Bind("02:00.0"))
    command = ["bind", "02:00.0", "--dry-run"]
    answer = run(*command)
    unseen = [f"not checked: {text}" for text in plan.not_checked]
    assert str(plan).splitlines() == [*answer.stdout.splitlines(), *unseen]
    assert plan.to_json() == run(*command, "--format", "json").stdout
    assert json.loads(plan.to_json())["kind"] == "Plan"
    assert drivers(host) == ("nvidia", "snd_hda_intel")


def test_a_plan_prints_nothing_that_a_terminal_acts_on(host: vfiomgr.Host) -> None:
    plan = host.plan(vfiomgr.Bind("02:00.0"))
    hostile = type(plan)("bind \x1b[2J", plan.steps)
    assert "\x1b" not in str(hostile)
    assert r"bind \x1b[2J" in str(hostile)


def test_a_device_goes_to_vfio_and_back(host: vfiomgr.Host) -> None:
    outcome = host.bind("02:00.0")
    assert outcome.is_changed
    assert drivers(host) == ("vfio-pci", "vfio-pci")
    assert not host.bind("02:00.0").is_changed
    assert host.apply(vfiomgr.Unbind(GPU)).is_changed
    assert drivers(host) == ("nvidia", "snd_hda_intel")


def test_several_devices_are_bound_together(host: vfiomgr.Host) -> None:
    host.bind("0000:01:00.0", "02:00.0")
    assert host.device("0000:01:00.0").driver == host.device(GPU).driver == "vfio-pci"
    host.unbind("0000:01:00.0", "02:00.0")
    assert host.device("0000:01:00.0").driver == "nvidia"


def test_steps_and_notes_are_reported(kernel: FakeKernel) -> None:
    notes: list[str] = []
    steps: list[str] = []
    host = vfiomgr.Host(
        kernel, on_note=notes.append, on_step=lambda step: steps.append(step.describe())
    )
    outcome = host.bind("02:00.0")
    assert steps == [step.describe() for step in outcome.plan.steps]


def test_a_refusal_is_raised_with_its_reasons(host: vfiomgr.Host) -> None:
    with pytest.raises(vfiomgr.Refusal, match="console's display") as refused:
        host.bind("00:02.0")
    assert refused.value.exit_code == 4
    assert host.bind("00:02.0", allow=["boot-display"]).is_changed


def test_reviewed_steps_are_those_that_are_run(host: vfiomgr.Host) -> None:
    plan = host.plan(vfiomgr.Bind("02:00.0"))
    with pytest.raises(vfiomgr.Refusal):
        host.apply(vfiomgr.Bind("02:00.0"), reviewed=plan.steps[:-1])
    assert drivers(host) == ("nvidia", "snd_hda_intel")
    host.apply(vfiomgr.Bind("02:00.0"), reviewed=plan.steps)
    assert drivers(host) == ("vfio-pci", "vfio-pci")


@pytest.mark.parametrize(
    ("mistake", "command"),
    [
        (lambda host: host.bind("4:0"), ["bind", "4:0"]),
        (lambda host: host.bind("0000:99:00.0"), ["bind", "0000:99:00.0"]),
        (lambda host: host.device("0000:99:00.0"), ["show", "0000:99:00.0"]),
        (lambda host: host.unbind("zz:00.0"), ["unbind", "zz:00.0"]),
        (
            lambda host: host.bind(GPU, only=True, with_group=True),
            ["bind", GPU, "--function-only", "--with-group"],
        ),
        (
            lambda host: host.bind(GPU, update_initramfs=True),
            ["bind", GPU, "--update-initramfs"],
        ),
        (lambda host: host.bind(GPU, owner="nobody-here"), ["bind", GPU, "--owner", "nobody-here"]),
        (lambda host: host.create_vgpu(), ["vgpu", "create"]),
        (
            lambda host: host.create_vgpu(framebuffer="much"),
            ["vgpu", "create", "--framebuffer", "much"],
        ),
        (
            lambda host: host.create_vgpu(type="A40-4Q", uuid="7", count=1),
            ["vgpu", "create", "--type", "A40-4Q", "7"],
        ),
        (lambda host: host.remove_vgpu("7"), ["vgpu", "remove", "7"]),
        (lambda host: host.remove_vgpu(), ["vgpu", "remove"]),
        (lambda host: host.apply_layout("/absent.yaml"), ["apply", "/absent.yaml"]),
    ],
)
def test_mistakes_raise_what_the_command_prints(
    host: vfiomgr.Host, run: Run, mistake: Callable[[vfiomgr.Host], object], command: list[str]
) -> None:
    with pytest.raises(vfiomgr.VfiomgrError) as raised:
        mistake(host)
    answer = run(*command)
    assert (
        answer.stderr == f"vfiomgr: error: {raised.value.message}\n  remedy: {raised.value.hint}\n"
    )
    assert answer.status == raised.value.exit_code


def test_a_directory_that_is_no_host_is_told_apart(tmp_path: Path) -> None:
    host = vfiomgr.Host(tmp_path)
    with pytest.raises(vfiomgr.UsageError, match="not a host root: "):
        host.devices  # noqa: B018 - it is what raises


def test_a_snapshot_answers_and_is_not_changed(
    host: vfiomgr.Host, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    recorded = vfiomgr.Host.from_snapshot(file)
    assert recorded.devices == host.devices
    assert recorded.plan(vfiomgr.Bind("02:00.0")).steps == host.plan(vfiomgr.Bind(GPU)).steps
    with pytest.raises(vfiomgr.UsageError, match="a snapshot cannot be changed"):
        recorded.bind("02:00.0")
    with pytest.raises(vfiomgr.UsageError, match="a snapshot has no journal"):
        recorded.recover()
    with pytest.raises(vfiomgr.UsageError, match="cannot read the snapshot"):
        vfiomgr.Host.from_snapshot(tmp_path / "absent.json")


def test_check_says_what_the_command_says(host: vfiomgr.Host, run: Run) -> None:
    report = host.check()
    told = json.loads(run("check", "--format", "json").stdout)
    assert [finding.rule for finding in report.findings] == [item["id"] for item in told["items"]]


def test_the_topology_is_what_the_command_draws(host: vfiomgr.Host, run: Run) -> None:
    for devices in ((), ("02:00.0",)):
        drawn = json.loads(run("topology", *devices, "--format", "json").stdout)
        assert to_jsonable(host.topology(*devices)) == {
            name: value for name, value in drawn.items() if name not in ("api_version", "kind")
        }
    with pytest.raises(vfiomgr.UnknownDevice):
        host.topology("0000:99:00.0")


def test_there_is_nothing_to_recover(host: vfiomgr.Host) -> None:
    assert host.recover() == ()


def test_what_was_cut_off_is_noted_and_recovered(kernel: FakeKernel) -> None:
    notes: list[str] = []
    host = vfiomgr.Host(kernel, on_note=notes.append)
    host.bind("02:00.0")
    (journal,) = _journals(kernel)
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    host.plan(vfiomgr.Bind("02:00.0"))
    assert [note for note in notes if note.startswith("interrupted operation: ")]
    assert len(host.recover()) == 1
    assert drivers(host) == ("nvidia", "snd_hda_intel")


def _journals(kernel: FakeKernel) -> list[Path]:
    from pathlib import Path  # noqa: PLC0415 - of a helper

    return sorted(Path(kernel.root, "var/lib/vfiomgr/journal").iterdir())


def test_a_layout_is_applied_and_reverted(host: vfiomgr.Host, tmp_path: Path) -> None:
    file = tmp_path / "host.yaml"
    file.write_text(A_GPU_FOR_GUESTS)
    assert host.plan(vfiomgr.ApplyLayout(file)).steps
    assert host.apply_layout(file).is_changed
    assert drivers(host) == ("vfio-pci", "vfio-pci")
    assert not host.apply_layout(str(file), "passthrough").is_changed
    assert host.revert_layout().is_changed
    assert drivers(host) == ("nvidia", "snd_hda_intel")


def test_an_exported_layout_changes_nothing(host: vfiomgr.Host, tmp_path: Path) -> None:
    layout = export(host.scan(with_gpu_modes=True))
    document = {"version": "vfiomgr/v1", "layouts": {"now": layout}}
    file = tmp_path / "now.yaml"
    file.write_text(render_layouts(LayoutFile.model_validate(document)))
    assert host.plan(vfiomgr.ApplyLayout(file)).is_empty


def test_vgpus_are_created_and_removed(tmp_path: Path) -> None:
    host = vfiomgr.Host(a40_host(tmp_path))
    outcome = host.create_vgpu(type="A40-4Q", count=2)
    assert len(outcome.names) == 2
    assert {vgpu.name for vgpu in host.vgpus} == set(outcome.names)
    assert host.remove_vgpu(outcome.names[0]).names == outcome.names[:1]
    assert [vgpu.name for vgpu in host.vgpus] == [outcome.names[1]]
    assert host.remove_vgpu(every=True).names == outcome.names[1:]
    by_need = host.plan(vfiomgr.CreateVgpu(framebuffer="3G", series="q"))
    assert "A40-3Q" in str(by_need)


def test_a_series_of_vgpus_is_a_letter_of_nvidias(host: vfiomgr.Host) -> None:
    with pytest.raises(vfiomgr.UsageError, match="'X' is not one of 'A', 'B', 'C', 'Q'"):
        host.create_vgpu(series="x")


def test_a_request_of_the_engine_is_taken_as_it_is(host: vfiomgr.Host) -> None:
    request = vfiomgr.Bind("02:00.0").request(host)
    assert host.plan(request) == host.plan(vfiomgr.Bind("02:00.0"))


def test_an_image_with_another_root_is_read(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    host = vfiomgr.Host(str(kernel.root))
    assert host.device(GPU).driver == "nvidia"
    with pytest.raises(vfiomgr.UsageError, match="a recorded host cannot be changed"):
        host.bind("02:00.0")


def test_importing_it_imports_nothing_of_it() -> None:
    code = "import sys, vfiomgr; print(sorted(n for n in sys.modules if n.startswith('vfiomgr.')))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout == "[]\n"


@pytest.mark.parametrize("package", [vfiomgr.libvirt, vfiomgr.kata], ids=["libvirt", "kata"])
def test_no_module_takes_the_place_of_a_function(package: ModuleType) -> None:
    """Importing a submodule sets its name in the package, whatever that stood for."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
    assert all(callable(getattr(package, name)) for name in package.__all__)


def test_every_name_of_it_is_there() -> None:
    assert [getattr(vfiomgr, name) for name in vfiomgr.__all__]
    assert not hasattr(vfiomgr, "Nothing")
    assert dir(vfiomgr) == sorted(vfiomgr.__all__)


@pytest.mark.parametrize("request_type", [vfiomgr.Bind, vfiomgr.Unbind])
def test_a_request_without_devices_is_an_error(
    host: vfiomgr.Host, request_type: type[vfiomgr.Bind | vfiomgr.Unbind]
) -> None:
    with pytest.raises(vfiomgr.UsageError, match=r"^no device given$"):
        host.plan(request_type())


def test_values_of_another_type_are_named(host: vfiomgr.Host) -> None:
    with pytest.raises(TypeError, match=r"expected a request such as .*, not '02:00\.0'"):
        host.plan("02:00.0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^--count: expected a whole number, not '2'$"):
        host.create_vgpu(type="A40-4Q", count="2")  # type: ignore[arg-type]


def test_a_device_is_named_by_its_address(host: vfiomgr.Host) -> None:
    with pytest.raises(TypeError, match=r"not 0000:02:00\.0 .*: pass its address$"):
        host.bind(host.device(GPU))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected an address such as .*, not \['02:00\.0'\]$"):
        host.bind(["02:00.0"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass its address"):
        host.device(host.device(GPU))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass its address"):
        vfiomgr.libvirt.hostdev_xml(host, host.device(GPU))  # type: ignore[arg-type]


def takes_options(function: Any) -> bool:
    """Whether it takes further keywords, which Python does not check."""
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        return function in (vfiomgr.Bind, vfiomgr.CreateVgpu, vfiomgr.Unbind)
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


PLACES = (vfiomgr, vfiomgr.cdi, vfiomgr.kata, vfiomgr.libvirt, vfiomgr.runtimes)
PUBLIC = [
    *(getattr(place, name) for place in PLACES for name in place.__all__),
    *(function for _, function in inspect.getmembers(vfiomgr.Host)),
    *(attaching, detaching),
]
WITH_OPTIONS = {one.__qualname__: one for one in PUBLIC if takes_options(one)}


@pytest.mark.parametrize("function", WITH_OPTIONS.values(), ids=WITH_OPTIONS)
def test_an_unknown_keyword_is_not_ignored(
    host: vfiomgr.Host, function: Callable[..., object]
) -> None:
    before = drivers(host)
    required = [
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    known = {"self": host, "host": host, "name": "a", "path": "/bin/sh"}
    with pytest.raises(TypeError, match=r"^unknown keyword: memmory \(known: "):
        function(*(known.get(name, GPU) for name in required), memmory="64G")
    assert drivers(host) == before


def test_a_deadline_is_a_time(host: vfiomgr.Host) -> None:
    with pytest.raises(ValueError, match=r"^deadline must be above 0 seconds, not -1$"):
        vfiomgr.Host(host.tree, deadline=-1)


def test_a_single_safety_check_can_be_a_text(host: vfiomgr.Host) -> None:
    one = vfiomgr.Bind(GPU, allow="in-use")  # type: ignore[arg-type]
    assert host.request(one) == host.request(vfiomgr.Bind(GPU, allow=["in-use"]))
    with pytest.raises(vfiomgr.UsageError, match="'in-us' is not one of"):
        host.plan(vfiomgr.Bind(GPU, allow="in-us"))  # type: ignore[arg-type]
