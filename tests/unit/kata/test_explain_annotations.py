"""`vfiomgr check pod`: annotations of a pod that change Kata's configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.kata_breaks import breaks, is_certain, said
from tests.unit.kata_nodes import CONFIGURATION, KataNode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

HYPERVISOR = "io.katacontainers.config.hypervisor."
VFIO_MODE = "io.katacontainers.config.runtime.vfio_mode"


def explained(
    run: Run, directory: Path, runtime: str, annotations: dict[str, str], allow: str
) -> Any:
    node = KataNode(directory / "node", runtime)
    node.add_gpus()
    node.publish()
    node.change(CONFIGURATION, "^kernel_params$", allow)
    node.change(node.pod, "annotations: {}", f"annotations: {json.dumps(annotations)}")
    line = ("--root", str(node.root), "check", "pod", str(node.pod), "--format", "json")
    (item,) = json.loads(run(*line).stdout)["items"]
    return item


@pytest.mark.parametrize(
    ("annotation", "what", "fate"),
    [
        ("go default_memory 9000 ^x$", "default_memory is not enabled'", (False, True)),
        ("rs default_memory 9000 ^x$", "runtime-rs ignores annot", (True, False)),
        ("rs pcie_switch_port x port", "pcie_switch_port has the invalid value 'x'", (False, True)),
        ("rs pcie_root_port 17 port", "pcie_root_port has the invalid value '17'", (False, True)),
        ("rs use_legacy_serial 1 serial", "is allowed, but not supported", (False, True)),
        ("rs indep_iothreads 1 ^x$", "runtime-rs ignores annot", (True, False)),
        ("rs nosuch 4 nosuch", "is allowed, but not supported", (False, True)),
        ("go nosuch 4 nosuch", "does not support annotation io.katacontainers", (True, False)),
        ("go cc_init_data x data", "does not support annotation io.katacontainers", (True, False)),
        (
            "go default_memory 8Gi memory",
            "default_memory has the invalid value '8Gi'",
            (False, True),
        ),
        (
            "rs default_memory 8Gi memory",
            "default_memory has the invalid value '8Gi'",
            (False, True),
        ),
        ("go default_memory 16 memory", "default_memory has the invalid value '16'", (False, True)),
        ("go enable_iommu yes iommu", "enable_iommu has the invalid value 'yes'", (False, True)),
    ],
)
def test_an_annotation_goes_through_the_allow_list_and_the_table_of_keys(
    run: Run, tmp_path: Path, annotation: str, what: str, fate: tuple[bool, bool]
) -> None:
    runtime, name, value, allow = annotation.split()
    (found,) = breaks(explained(run, tmp_path, runtime, {HYPERVISOR + name: value}, allow))
    assert what in said(found)
    assert (found["is_silent"], is_certain(found)) == fate


@pytest.mark.parametrize("runtime", ["go", "rs"])
def test_an_allowed_annotation_is_what_the_later_links_go_by(
    run: Run, tmp_path: Path, runtime: str
) -> None:
    annotations = {f"{HYPERVISOR}default_memory": "60000"}
    item = explained(run, tmp_path / "a", runtime, annotations, "^default_memory$")
    told = [said(found) for found in breaks(item)]
    assert any("less than default_memory (60000" in what for what in told), told
    assert any(
        "60000 MiB and container limits of 16384 MiB is larger than the host" in w for w in told
    )
    annotations = {f"{HYPERVISOR}kernel_params": "quiet", f"{HYPERVISOR}default_memory": "4096"}
    item = explained(run, tmp_path / "b", runtime, annotations, "^(kernel_params|default_memory)$")
    assert breaks(item) == []


def test_the_root_ports_that_are_annotated_are_taken(run: Run, tmp_path: Path) -> None:
    for runtime in ("go", "rs"):
        annotations = {f"{HYPERVISOR}pcie_root_port": "4"}
        item = explained(run, tmp_path / runtime, runtime, annotations, "^pcie_root_port$")
        assert breaks(item) == []


@pytest.mark.parametrize("runtime", ["go", "rs"])
def test_the_mode_of_vfio_is_annotated_without_leave(
    run: Run, tmp_path: Path, runtime: str
) -> None:
    item = explained(run, tmp_path / "a", runtime, {VFIO_MODE: "vfio"}, "^x$")
    (found,) = breaks(item)
    assert (
        "vfio_mode is annotated as 'vfio', but enable_iommu is not set: VFIO in the guest needs "
        "an IOMMU there, so containers with a device do not start"
    ) in said(found)
    assert not is_certain(found), "a guest without an IOMMU can allow VFIO without one"
    item = explained(run, tmp_path / "b", runtime, {VFIO_MODE: "both"}, "^x$")
    assert "invalid vfio_mode in an annotation: 'both'" in said(breaks(item)[0])
    item = explained(run, tmp_path / "c", runtime, {VFIO_MODE: "guest-kernel"}, "^x$")
    assert breaks(item) == []
