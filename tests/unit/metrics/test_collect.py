"""What is read for metrics, what is left alone, and which devices are remembered."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests import api
from tests.fakes.nvidia.driver import NVIDIA_SMI
from tests.fakes.servers import vgpu_server
from tests.unit.layout.test_apply_commands import RULES, write
from tests.unit.runtimes import put
from vfiomgr.host.tree import HostTree
from vfiomgr.metrics.collect import collect, remember
from vfiomgr.metrics.model import DEVICES
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import PCI_DEVICES, HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.installed_layout import FILE
from vfiomgr.snapshot.health import RECORD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from tests.fakes.kernel import FakeKernel
    from tests.fakes.programs import Said
    from tests.unit.conftest import Run

GPU = "0000:02:00.0"


def samples(text: str, name: str) -> dict[str, float]:
    """The values of a metric by address, or by the only label."""
    return {
        sample.labels.get("address") or next(iter(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"vfiomgr_{name}"
    }


def counts(kernel: FakeKernel, address: str, fatal: int) -> None:
    """Have a function count errors."""
    directory = kernel.functions.directory(address)
    assert directory is not None
    kernel.sysfs.put(directory / "aer_dev_fatal", f"DLP {fatal}\nTOTAL_ERR_FATAL {fatal}")


def test_a_device_in_d3cold_is_not_touched(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.apply(Bind((PciAddress.parse(GPU),)), tree=kernel)
    kernel.sleeps_cold(GPU)
    kernel.guest_opens(11)
    kernel.guest_closes(11)
    assert kernel.read(PCI_DEVICES / GPU / "power_state") == "D3cold"
    opened: list[str] = []
    truly_open = os.open

    def noted(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(str(path))
        return truly_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", noted)
    host, facts = collect(api.host_at(kernel))
    assert host.device(PciAddress.parse(GPU)).runtime_status == "suspended"
    touched = {path.rpartition("/")[2] for path in opened if f"{GPU}/" in path}
    assert "runtime_status" in touched
    waking = {"config", "vpd", "rom", "current_link_speed", "current_link_width", "max_link_width"}
    assert not touched & waking
    assert not [name for name in touched if name.endswith("_resize")]
    assert facts.known_devices == ()


def test_nvidia_smi_is_not_run_while_one_of_its_gpus_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = vgpu_server(tmp_path)
    run: list[str] = []
    smi = kernel.programs.known[NVIDIA_SMI]
    truly_run = smi.run

    def noted(arguments: Sequence[str]) -> Said:
        run.extend(arguments)
        return truly_run(arguments)

    monkeypatch.setattr(smi, "run", noted)
    collect(api.host_at(kernel))
    assert run
    run.clear()
    directory = kernel.functions.directory("0000:08:00.0")
    assert directory is not None
    kernel.sysfs.put(directory / "power/runtime_status", "suspended")
    collect(api.host_at(kernel))
    assert not run


def test_errors_of_devices_and_of_the_ports_above_are_counted(run: Run, kernel: FakeKernel) -> None:
    counts(kernel, GPU, 2)
    counts(kernel, "0000:00:01.1", 3)
    found = samples(run("metrics").stdout, "aer_errors_total")
    assert found == {GPU: 2, "0000:00:01.1": 3}


def test_a_device_that_is_gone_is_missing_until_that_is_accepted(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    file = str(tmp_path / "vfiomgr.prom")
    assert run("metrics").status == 0
    assert not kernel.exists(DEVICES)  # printing remembers nothing
    assert not kernel.exists(RECORD)
    for _ in range(2):
        assert run("metrics", "--output", file).status == 0
        assert kernel.exists(RECORD)
        assert samples(run("metrics").stdout, "device_missing")[GPU] == 0
    kernel.unplug(GPU)
    run("metrics", "--output", file)
    with open(file, encoding="utf-8") as text:
        assert samples(text.read(), "device_missing")[GPU] == 1
    accepted = run("metrics", "accept")
    assert f"no longer expected: {GPU}" in accepted.stdout
    found = samples(run("metrics").stdout, "device_missing")
    assert found
    assert GPU not in found


def test_a_damaged_record_is_not_replaced_and_nothing_is_missing(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    put(kernel, DEVICES, "{")
    written = run("metrics", "--output", str(tmp_path / "vfiomgr.prom"))
    assert written.status == 0
    assert f"missing devices are unknown: cannot read {DEVICES}" in written.stderr
    assert kernel.read_text(DEVICES) == "{"
    assert samples(run("metrics").stdout, "device_missing") == {}
    assert "cannot read" in run("metrics", "accept").stdout
    assert GPU in samples(run("metrics").stdout, "device_missing")


def test_records_that_cannot_be_written_are_noted_and_the_metrics_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostTree, "replace", refuse)
    file = tmp_path / "vfiomgr.prom"
    written = run("metrics", "--output", str(file))
    assert written.status == 0
    assert f"cannot update {DEVICES}: No space left on device" in written.stderr
    assert f"cannot write {RECORD}: No space left on device" in written.stderr
    assert samples(file.read_text(), "device_info")


def test_devices_accepted_meanwhile_are_not_recorded_again(kernel: FakeKernel, run: Run) -> None:
    source = api.host_at(kernel)
    remember(source, *collect(source))
    kernel.unplug(GPU)
    host, facts = collect(source)
    assert GPU in {str(one.address) for one in facts.known_devices or ()}
    assert run("metrics", "accept").status == 0
    remember(source, host, facts)
    assert GPU not in (kernel.read_text(DEVICES) or "")


def test_drift_from_the_installed_layout_is_counted(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    assert samples(run("metrics").stdout, "layout_differences") == {}
    file = write(tmp_path / "layout.yaml", lab=RULES[:1])
    assert run("layout", "install", file).status == 0
    asserted = json.loads(run("layout", "assert", file, "--format", "json").stdout)
    (number,) = samples(run("metrics").stdout, "layout_differences").values()
    assert number == len(asserted["differences"]) > 0
    assert run("apply", file).status == 0
    assert samples(run("metrics").stdout, "layout_differences") == {"lab": 0}
    kernel.store(FILE, "layouts: [\n")
    unknown = run("metrics")
    assert unknown.status == 0
    assert "drift from the layout is unknown: " in unknown.stderr
    assert samples(unknown.stdout, "layout_differences") == {}


def test_drift_is_unknown_where_serial_numbers_would_be_read(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    file = write(tmp_path / "layout.yaml", lab=RULES[:1])
    assert run("layout", "install", file).status == 0
    text = kernel.read_text(FILE) or ""
    layout = json.loads(text)
    layout["layouts"]["lab"]["devices"] = [{"select": {"serial": "1"}, "state": "passthrough"}]
    kernel.store(FILE, json.dumps(layout))
    unknown = run("metrics")
    assert "a rule selects devices by serial number" in unknown.stderr
    assert samples(unknown.stdout, "layout_differences") == {}


def test_a_snapshot_has_the_metrics_that_it_has_facts_for(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    text = run("--snapshot", str(file), "metrics").stdout
    assert (
        samples(text, "device_info").keys() == samples(run("metrics").stdout, "device_info").keys()
    )
    assert samples(text, "device_missing") == {}
    assert run("--snapshot", str(file), "metrics", "accept").status == 2
    assert kernel.exists(HostPath("/sys"))


def test_the_file_is_readable_for_others_and_its_temporary_name_is_no_metrics(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "textfile" / "vfiomgr.prom"
    file.parent.mkdir()
    names: list[str] = []
    truly_replace = os.replace

    def noted(source: Any, target: Any, **options: Any) -> None:
        names.extend([str(source), str(target)])
        truly_replace(source, target, **options)

    monkeypatch.setattr(os, "replace", noted)
    before = os.umask(0o077)
    try:
        assert run("metrics", "--output", str(file)).status == 0
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        file.chmod(0o600)
        assert run("metrics", "--output", str(file)).status == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    written = [(a, b) for a, b in zip(names[::2], names[1::2], strict=True) if b == file.name]
    assert len(written) == 2
    assert not any(temporary.endswith(".prom") for temporary, _ in written)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_library_for_metrics_is_named_if_it_is_absent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_name: str) -> None:
        raise ModuleNotFoundError

    monkeypatch.setattr("vfiomgr.host.installation.import_module", absent)
    for words in (("metrics",), ("metrics", "install")):
        answer = run(*words)
        assert answer.status == 2
        assert "cannot print metrics: the libraries of the extra 'node'" in answer.stderr


def test_layouts_are_only_imported_if_one_is_installed(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    program = (
        "import sys; from vfiomgr.main.program import main; "
        f"sys.argv = ['vfiomgr', '--root', {str(tmp_path)!r}, 'metrics']; main(); "
        "sys.exit('pydantic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "vfiomgr_build_info" in done.stdout
