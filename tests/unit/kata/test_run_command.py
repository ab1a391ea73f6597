from __future__ import annotations

import json
import shlex

import pytest

from vfiomgr.errors import Refusal
from vfiomgr.kata.command_lines import RunRequest, Tool, command_for
from vfiomgr.kata.model import KataRelease, RuntimeName
from vfiomgr.units import Version

GROUPS = ("/dev/vfio/23", "/dev/vfio/24")
CDEV = ("/dev/vfio/devices/vfio0",)
CONFIG = "/etc/kata containers/configuration.toml"


def wanted(tool: Tool, nodes: tuple[str, ...] = GROUPS, **more: object) -> RunRequest:
    return RunRequest(tool, "kata-0000-04-00.0", nodes, "ubuntu", **more)  # type: ignore[arg-type]


def release(version: str, runtime: RuntimeName = "go") -> KataRelease:
    return KataRelease(Version.parse(version), runtime)


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (
            "ctr",
            (
                "ctr run --rm --tty --runtime io.containerd.kata.v2 "
                "--runtime-config-path '/etc/kata containers/configuration.toml' "
                "--device /dev/vfio/23 --device /dev/vfio/24 ubuntu kata-0000-04-00.0 "
                "sh -c 'ls /dev'"
            ),
        ),
        (
            "nerdctl",
            (
                "nerdctl run --rm --interactive --tty --name kata-0000-04-00.0 "
                "--runtime io.containerd.kata.v2 "
                "--annotation "
                "'io.katacontainers.config_path=/etc/kata containers/configuration.toml' "
                "--device /dev/vfio/23 --device /dev/vfio/24 ubuntu sh -c 'ls /dev'"
            ),
        ),
        (
            "docker",
            (
                "docker run --rm --interactive --tty --name kata-0000-04-00.0 --runtime kata "
                "--device /dev/vfio/23 --device /dev/vfio/24 ubuntu sh -c 'ls /dev'"
            ),
        ),
    ],
)
def test_each_tool_has_its_words(tool: Tool, text: str) -> None:
    found = command_for(wanted(tool, command=("sh", "-c", "ls /dev"), config=CONFIG))
    assert found.text == text
    assert shlex.split(found.text) == list(found.words)


def test_without_a_configuration_kata_finds_its_own() -> None:
    for tool in ("ctr", "nerdctl", "docker"):
        words = command_for(wanted(tool)).words
        assert not {"--runtime-config-path", "--annotation"} & set(words)


def test_ctr_pulls_no_image_by_itself() -> None:
    assert command_for(wanted("ctr")).before == (("ctr", "image", "pull", "ubuntu"),)
    assert command_for(wanted("nerdctl")).before == ()


def test_docker_without_kata_in_its_configuration_is_told_what_to_write_there() -> None:
    notes = command_for(wanted("docker", config=CONFIG)).notes
    entry = json.loads(notes[0].partition("daemon.json: ")[2])["runtimes"]["kata"]
    assert entry["runtimeType"] == "/opt/kata/bin/containerd-shim-kata-v2"
    assert entry["options"] == {"ConfigPath": CONFIG}
    known = command_for(wanted("docker", docker_runtime="kata-vfio"))
    assert "--runtime kata-vfio" in known.text
    assert not any("runtimeType" in line for line in known.notes)


@pytest.mark.parametrize(
    ("version", "told"),
    [(None, "need Kata 3.29"), ("3.28", "Docker 25"), ("3.29", None), ("4.1", None)],
)
def test_new_dockers_need_a_new_kata(version: str | None, told: str | None) -> None:
    known = release(version) if version else None
    notes = " ".join(command_for(wanted("docker", docker_runtime="kata", release=known)).notes)
    assert (told in notes) if told else not notes


@pytest.mark.parametrize(
    ("version", "runtime", "is_taken"),
    [
        ("3.14", "go", False),
        ("3.15", "go", True),
        ("3.30", "rs", False),
        ("3.31", "rs", True),
        ("4.1", "rs", True),
    ],
)
def test_cdevs_need_a_kata_that_takes_them(
    version: str, runtime: RuntimeName, *, is_taken: bool
) -> None:
    asked = wanted("ctr", CDEV, release=release(version, runtime))
    if is_taken:
        assert "--device /dev/vfio/devices/vfio0" in command_for(asked).text
        return
    with pytest.raises(Refusal) as refusal:
        command_for(asked)
    assert "--node group" in refusal.value.hint
