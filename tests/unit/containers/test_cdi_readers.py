"""Whether the programs of a host read CDI specifications at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.containers.cdi.readers import READER_RULES, DockerSettings, Readers, read_readers
from vfiomgr.host.tree import HostTree
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

MAIN = "/etc/docker/daemon.json"
USER = "/home/u/.config/docker/daemon.json"
TOML = "/etc/containerd/config.toml"
OFF, OLD, PLACE = "reader-not-enabled", "reader-too-old", "reader-directory"


def docker(flag: str = "", path: str = MAIN, *, directories: bool = False) -> DockerSettings:
    """The settings of a file with a value of features.cdi, or none."""
    return DockerSettings(path, flag == "on" if flag else None, directories, path == USER)


CTL = "/dev/nvidiactl"


def found(versions: dict[str, str], **facts: Any) -> list[str]:
    known = {name: Version.parse(text) for name, text in versions.items()}
    readers = Readers(known, facts.pop("has_static", True), **facts)
    return [each.rule for each in READER_RULES.find(readers)]


@pytest.mark.parametrize(("podman", "is_told"), [("5.0", True), ("3.4", False)])
def test_a_podman_that_reads_the_file_is_named_where_docker_does_not(
    podman: str,
    is_told: bool,  # noqa: FBT001
) -> None:
    known = {"docker": Version(25, 0), "podman": Version.parse(podman)}
    readers = Readers(known, has_static=True, docker=(docker(),))
    (off,) = (each for each in READER_RULES.find(readers) if each.rule == OFF)
    assert off.summary.endswith("Podman 5.0.0 reads it") is is_told


@pytest.mark.parametrize(
    ("versions", "facts", "rules"),
    [
        ({"podman": "3.4"}, {}, [OLD]),
        ({"podman": "4.1"}, {}, []),
        ({"podman": "4.2", "crio": "1.25.1"}, {"has_static": False}, [PLACE, PLACE]),
        ({"podman": "4.3", "crio": "1.26"}, {"has_static": False}, []),
        ({"crio": "1.22"}, {"has_static": False}, [OLD]),
        ({"docker": "24.0"}, {"docker": (docker(),)}, [OLD]),
        ({"docker": "25.0"}, {"docker": (docker(),)}, [OFF]),
        ({"docker": "28.1"}, {"docker": (docker("on"),)}, []),
        ({"docker": "28.2"}, {"docker": (docker(),)}, []),
        ({"docker": "28.2"}, {"docker": (docker("off"),)}, [OFF]),
        ({"docker": "28.2"}, {"docker": (docker("", USER),)}, [PLACE]),
        ({"docker": "27.0"}, {"docker": (docker("on", USER, directories=True),)}, []),
        ({}, {"docker": (docker(),)}, []),
        ({"containerd": "1.7.20"}, {"containerd": ((TOML, None),)}, [OFF]),
        ({"containerd": "1.7.20"}, {"containerd": ((TOML, True),)}, []),
        ({"containerd": "2.0"}, {"containerd": ((TOML, None),)}, []),
        ({"containerd": "2.0"}, {"containerd": ((TOML, False),)}, [OFF]),
        ({"containerd": "1.6"}, {"containerd": ((TOML, None),)}, [OLD]),
        ({"containerd": "1.6"}, {}, []),
        ({"containerd": "1.7"}, {"containerd": ((TOML, None),), "has_other_nodes": False}, []),
        ({"podman": "5.5.1"}, {"files": (("/run/cdi/a", frozenset()),)}, [PLACE]),
        ({"podman": "5.4.2"}, {"files": (("/run/cdi/a", frozenset()),)}, []),
        ({"podman": "5.6.0"}, {"files": (("/run/cdi/a", frozenset()),)}, []),
        ({"podman": "5.5.1"}, {"files": (("/etc/cdi/a", frozenset()),)}, []),
        (
            {"podman": "5.5.1"},
            {"files": (("/run/cdi/a", frozenset()),), "has_podman_directories": True},
            [],
        ),
        ({"podman": "5.0"}, {"closed": ("/etc/cdi",)}, ["reader-permissions"]),
        ({"crio": "1.30"}, {"closed": ("/etc/cdi",)}, []),
        ({}, {"is_refreshed": True}, ["refresh-missing"]),
        (
            {},
            {"is_refreshed": True, "files": (("a", frozenset({"/dev/kfd"})),)},
            ["refresh-missing"],
        ),
        ({}, {"is_refreshed": True, "files": (("a", frozenset({"/dev/nvidia0"})),)}, []),
        (
            {},
            {"mig_nodes": ("/c/12",), "files": (("a", frozenset({"/dev/nvidia0"})),)},
            ["mig-missing"],
        ),
        (
            {},
            {"mig_nodes": ("/c/12",), "files": (("a", frozenset({"/dev/nvidia0", "/c/12"})),)},
            [],
        ),
        ({}, {"mig_nodes": ("/c/12",), "files": (("a", frozenset({"/dev/kfd"})),)}, []),
        ({}, {"files": (("a", frozenset({"/dev/nvidia0", CTL})),)}, ["uvm-missing"]),
        ({}, {"files": (("a", frozenset({"/dev/nvidia0", CTL, "/dev/nvidia-uvm"})),)}, []),
        ({}, {"files": (("a", frozenset({CTL})),)}, []),
    ],
)
def test_what_a_program_needs_depends_on_its_release(
    versions: dict[str, str], facts: dict[str, Any], rules: list[str]
) -> None:
    assert found(versions, **facts) == rules


def test_the_facts_are_read_from_the_files_of_the_host(tmp_path: Path) -> None:
    def write(path: str, text: str, mode: int = 0o644) -> None:
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    tree = HostTree(str(tmp_path))
    file = CdiFile("/etc/cdi/a.yaml", "kind: a/b\n")
    assert read_readers(tree, (file,)) == Readers(
        {}, has_static=False, has_other_nodes=False, files=((file.path, frozenset()),)
    )
    write("/etc/cdi/a.yaml", "", 0o600)
    write(MAIN, '{"features": {"cdi": true}}')
    write("/home/u/.config/systemd/user/docker.service", "")
    write(TOML, 'version = 2\nimports = ["conf.d/*.toml"]\n')
    write("/etc/containerd/conf.d/a.toml", "[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi=true")
    capability = "/proc/driver/nvidia/capabilities/gpu0/mig/gi1"
    write(f"{capability}/access", "DeviceFileMinor: 11\n")
    write(f"{capability}/ci0/access", "DeviceFileMinor: 12\nDeviceFileMode: 292\n")
    facts = read_readers(tree, (file,))
    assert [(each.path, each.has_cdi, each.is_rootless) for each in facts.docker] == [
        (MAIN, True, False),
        (USER, None, True),
    ]
    assert facts.closed == ("/etc/cdi/a.yaml",)
    assert facts.mig_nodes == ("/dev/nvidia-caps/nvidia-cap12",)
    assert facts.containerd == ((TOML, True),)
    write(TOML, "version = 2\n")
    assert read_readers(tree, (file,)).containerd == ((TOML, None),), "it is not imported"
    write("/etc/containers/containers.conf", '#cdi_spec_dirs = ["/etc/cdi"]\n')
    assert not read_readers(tree, (file,)).has_podman_directories
    write("/home/u/.config/containers/containers.conf", "cdi_spec_dirs = ['/run/cdi']\n")
    assert read_readers(tree, (file,)).has_podman_directories
    write("/home/u/.config/containers/containers.conf", "")
    write("/etc/containers/containers.conf.d/a.conf", "[engine]\ncdi_spec_dirs = ['/run/cdi']\n")
    assert read_readers(tree, (file,)).has_podman_directories
    write(TOML, 'disabled_plugins = ["cri"]\n')
    assert read_readers(tree, (file,)).containerd == (), "it only serves Docker"
    write(MAIN, "{")
    assert [each.path for each in read_readers(tree, (file,)).docker] == [USER]


@pytest.mark.parametrize("place", ["/etc/systemd/system", "/usr/lib/systemd/system"])
def test_the_unit_counts_where_the_driver_is_loaded(tmp_path: Path, place: str) -> None:
    tree = HostTree(str(tmp_path))
    unit = tmp_path / place[1:] / "multi-user.target.wants/nvidia-cdi-refresh.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("")
    assert not read_readers(tree, ()).is_refreshed
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    assert not read_readers(tree, ()).is_refreshed
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").write_text("")
    assert read_readers(tree, ()).is_refreshed


DEPENDENCIES = "updates/dkms/nvidia-uvm.ko.xz: updates/dkms/nvidia.ko.xz\nupdates/dkms/{}:\n"
CONDITION = "ExecCondition=/usr/bin/grep -qE '/(nvidia|nvidia-current)\\.ko{}' /l/%v/modules.dep\n"


@pytest.mark.parametrize(
    ("colon", "module", "expected"),
    [
        ("[:]", "nvidia.ko.xz", "nvidia.ko.xz"),
        (":", "nvidia-current.ko.zst", "nvidia-current.ko.zst"),
        ("[:]", "nvidia.ko", ""),
        ("", "nvidia.ko.xz", ""),
        ("[:]", "nvidia-drm.ko.xz", ""),
    ],
)
def test_the_condition_of_the_unit_may_not_match_a_compressed_module(
    tmp_path: Path, colon: str, module: str, expected: str
) -> None:
    def write(place: str, text: str) -> None:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    tree = HostTree(str(tmp_path))
    write("proc/sys/kernel/osrelease", "6.17.8\n")
    write("lib/modules/6.17.8/modules.dep", DEPENDENCIES.format(module))
    assert not read_readers(tree, ()).unmatched, "there is no unit"
    write("usr/lib/systemd/system/nvidia-cdi-refresh.service", CONDITION.format(colon))
    assert read_readers(tree, ()).unmatched == expected
    write("etc/systemd/system/nvidia-cdi-refresh.service.d/override.conf", "ExecCondition=\n")
    assert not read_readers(tree, ()).unmatched, "a drop-in may replace the condition"


def test_a_condition_that_does_not_match_is_not_tried_again() -> None:
    readers = Readers({}, has_static=True, is_refreshed=True, unmatched="nvidia.ko.xz")
    (found,) = READER_RULES.find(readers)
    assert "nvidia.ko.xz" in found.summary
    assert "restart" not in found.remedy


@pytest.mark.parametrize(
    ("package", "setting", "expected"),
    [
        ("1.18.0-1", 'log-level = "info"\n\nmode = "cdi"', "cdi"),
        ("1.18.0-1", 'mode = "auto"', ""),
        ("1.18.0-1", '#mode = "cdi"', ""),
        ("1.18.0-1", "mode = 'cdi' # of 2024", "cdi"),
        ("1.18.0-1", 'mode = "cdi', ""),
        ("1.18.0-1", 'mode = ["cdi"]', ""),
        ("1.18.0-1", '[nvidia-container-runtime.modes.cdi]\nmode = "cdi"', ""),
        ("1.18.1-1", 'mode = "cdi"', ""),
        ("", 'mode = "cdi"', ""),
    ],
)
def test_the_mode_of_the_runtime_may_be_none_of_the_generator(
    tmp_path: Path, package: str, setting: str, expected: str
) -> None:
    tree = HostTree(str(tmp_path))
    for place, text in (
        ("etc/nvidia-container-runtime/config.toml", f"[nvidia-container-runtime]\n{setting}\n"),
        (
            "var/lib/dpkg/status",
            f"Package: nvidia-container-toolkit\nStatus: install ok installed\nVersion: {package}\n"
            if package
            else "",
        ),
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_readers(tree, ()).mode == expected


def test_a_mode_that_the_generator_lacks_is_named_with_what_helps() -> None:
    (found,) = READER_RULES.find(Readers({}, has_static=True, is_refreshed=True, mode="cdi"))
    assert 'mode = "cdi"' in found.summary
    assert "--mode=auto" in found.remedy
    assert "modules-load.d" not in found.remedy
