"""The Ansible collection as it is built, installed and run by ansible-core of this environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from tests.fakes.hosts import workstation
from tools.package.collection import SOURCE, build_collection
from vfiomgr import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULES = sorted(place.stem for place in (SOURCE / "plugins/modules").glob("*.py"))
_PROGRAMS = Path(sys.executable).parent


class Ansible:
    """The programs of ansible-core, with a home of their own and this collection."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.collection = place / "ansible_collections/vfiomgr/host"

    def run(
        self,
        *command: str,
        status: int = 0,
        within: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """What a program prints; it ends with the status."""
        own = {
            "ANSIBLE_HOME": str(self.place / "home"),
            "ANSIBLE_COLLECTIONS_PATH": str(self.place),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "HOME": str(self.place),
            "LC_ALL": "C.UTF-8",
            "PATH": f"{_PROGRAMS}:{os.environ['PATH']}",
        }
        ran = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=within or self.place,
            env={**own, **(variables or {})},
        )
        assert ran.returncode == status, ran.stdout + ran.stderr
        return ran.stdout

    def tasks(self, tasks: dict[str, dict[str, Any]], *options: str, root: str) -> dict[str, Any]:
        """Run tasks on a recorded host, and return the result of each, a failure too."""
        results = self.place / "results.json"
        named = [
            {"name": name, "register": name, "ignore_errors": True, **task}
            for name, task in tasks.items()
        ]
        told = "{{ {" + ", ".join(f"'{name}': {name}" for name in tasks) + "} | to_json }}"
        written = {"content": told, "dest": str(results), "mode": "0644"}
        play = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "environment": {"VFIOMGR_ROOT": root},
            "tasks": [*named, {"ansible.builtin.copy": written, "check_mode": False}],
        }
        (self.place / "play.json").write_text(json.dumps([play]))
        self.run("ansible-playbook", "play.json", *options)
        found = json.loads(results.read_text())
        assert isinstance(found, dict)
        return found

    def roles(self, cases: dict[str, dict[str, Any]], *options: str) -> dict[str, str]:
        """Run the role, or a file of its tasks, for each case; return the messages of failures."""
        results = self.place / "failures.json"
        blocks = [
            {
                "block": [
                    {
                        "ansible.builtin.include_role": {
                            "name": "vfiomgr.host.install",
                            "tasks_from": case.pop("tasks", "main"),
                        },
                        "vars": case,
                    }
                ],
                "rescue": [{"ansible.builtin.set_fact": {name: "{{ ansible_failed_result.msg }}"}}],
            }
            for name, case in cases.items()
        ]
        known = " ".join(f"'{name}': {name} | default(''), " for name in cases)
        written = {"content": "{{ {" + known + "} | to_json }}", "dest": str(results)}
        last = {"ansible.builtin.copy": {**written, "mode": "0644"}, "check_mode": False}
        play = {"hosts": "localhost", "connection": "local", "gather_facts": False}
        (self.place / "roles.json").write_text(json.dumps([{**play, "tasks": [*blocks, last]}]))
        self.run("ansible-playbook", "roles.json", *options)
        found = json.loads(results.read_text())
        assert isinstance(found, dict)
        return {name: message for name, message in found.items() if message}


@pytest.fixture(scope="module")
def ansible(tmp_path_factory: pytest.TempPathFactory) -> Ansible:
    """Ansible with the collection."""
    return installed_collection(tmp_path_factory.mktemp("ansible"))


def installed_collection(place: Path) -> Ansible:
    """Ansible in an empty directory, with the collection as `make package` builds it."""
    found = Ansible(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        built = build_collection(found.place)
    found.run("ansible-galaxy", "collection", "install", str(built), "--offline", "-p", ".")
    return found


def test_the_collection_has_the_version_of_vfiomgr() -> None:
    assert YAML(typ="safe").load(SOURCE / "galaxy.yml")["version"] == __version__


def test_the_collection_is_unchanged_where_it_is_installed(ansible: Ansible) -> None:
    said = ansible.run("ansible-galaxy", "collection", "verify", "vfiomgr.host", "--offline")
    assert "successfully verified" in said.lower() or not said
    packed = {str(one.relative_to(ansible.collection)) for one in ansible.collection.rglob("*.py")}
    assert packed == {str(one.relative_to(SOURCE)) for one in SOURCE.rglob("*.py")}


def test_every_module_and_the_role_are_documented(ansible: Ansible) -> None:
    names = [f"vfiomgr.host.{name}" for name in MODULES]
    documents = json.loads(ansible.run("ansible-doc", "--json", *names))
    assert sorted(documents) == names
    for name, document in documents.items():
        assert document["doc"]["attributes"]["check_mode"]["support"] == "full", name
        assert document["examples"], name
        assert document["return"], name
    role = json.loads(ansible.run("ansible-doc", "--json", "-t", "role", "vfiomgr.host.install"))
    options = role["vfiomgr.host.install"]["entry_points"]["main"]["options"]
    assert set(options) == set(YAML(typ="safe").load(SOURCE / "roles/install/defaults/main.yml"))


def test_ansible_lint_finds_nothing(ansible: Ansible) -> None:
    command = (
        "ansible-lint",
        "--offline",
        "--profile",
        "production",
        "--strict",
        "-q",
        "--nocolor",
    )
    (ansible.collection / "galaxy.yml").write_bytes((SOURCE / "galaxy.yml").read_bytes())
    try:
        assert ansible.run(*command, within=ansible.collection) == ""
    finally:
        (ansible.collection / "galaxy.yml").unlink()


def test_a_playbook_reads_checks_and_plans(ansible: Ansible, tmp_path: Path) -> None:
    """With the real command on a recorded host, in a process of its own for each task."""
    gpu = "0000:01:00.0"
    kernel = workstation(tmp_path, vfio_loaded=True)
    rule = {"select": {"address": gpu}, "state": "passthrough"}
    content = {"version": "vfiomgr/v1", "layouts": {"guests": {"devices": [rule]}}}
    program = str(_PROGRAMS / "vfiomgr")
    tasks: dict[str, dict[str, Any]] = {
        "read": {"vfiomgr.host.host_info": {}},
        "check": {"vfiomgr.host.check": {"fail_on": "never"}},
        "plan": {"vfiomgr.host.layout": {"content": content}},
        "drift": {"vfiomgr.host.layout": {"content": content, "fail_on_drift": True}},
    }
    for task in tasks.values():
        next(iter(task.values()))["executable"] = program
    found = ansible.tasks(tasks, "--check", "--diff", root=kernel.root)
    assert found["read"]["version"] == __version__
    assert gpu in {one["address"] for one in found["read"]["devices"]}
    assert "findings" in found["check"]
    assert found["plan"]["changed"]
    assert found["plan"]["diff"][0]["after"].endswith(": passthrough (VFIO)\n")
    assert found["drift"]["failed"]
    assert found["drift"]["msg"].startswith("the host differs from the layout guests: ")


def test_the_role_installs_nothing_in_check_mode_on_a_new_host(
    ansible: Ansible, tmp_path: Path
) -> None:
    """And nothing that no one authenticates: packages are not signed."""
    common = {"install_completion": False, "install_cache": str(tmp_path / "cache")}
    cases: dict[str, dict[str, Any]] = {}
    for ending in ("deb", "rpm"):
        (tmp_path / f"vfiomgr.{ending}").write_text("a package")
        cases[ending] = {**common, "install_package": str(tmp_path / f"vfiomgr.{ending}")}
    insecure = "http://packages.example.org/vfiomgr.deb"
    cases["insecure"] = {**common, "install_package": insecure}
    failures = ansible.roles(cases, "--check")
    assert list(failures) == ["insecure"]
    assert failures["insecure"].startswith(f"cannot install {insecure}: ")
    assert not (tmp_path / "cache").exists()


def test_the_role_removes_the_records_that_a_failed_removal_left(
    ansible: Ansible, tmp_path: Path
) -> None:
    """Unless a device is on a VFIO driver, a vGPU is active, or an operation was interrupted."""
    ended = '{"event":"start"}\n{"event":"end","outcome":"done"}\n'
    broken = ("", f'{ended}{{"event":"start"}}\n', '{"event":"end","outcome":"incomplete"}\n')
    hosts = {
        "ended": ("nvidia", (ended,)),
        "bound": ("vfio-pci", (ended,)),
        "asked": ("nvgrace_gpu_vfio_pci", (ended,)),
        "broken": ("nvidia", (ended, *broken)),
    }
    vgpu = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    cases: dict[str, dict[str, Any]] = {}
    for name, (driver, journals) in hosts.items():
        state = tmp_path / name / "state"
        for path in ("state/journal", "state/origins", "run/vgpus", f"drivers/{driver}"):
            (tmp_path / name / path).mkdir(parents=True)
        for number, journal in enumerate(journals):
            (state / f"journal/{number}.jsonl").write_text(journal)
        (state / "origins/0000:01:00.0.json").touch()
        (tmp_path / name / f"drivers/{driver}/0000:01:00.0").symlink_to(tmp_path)
        (tmp_path / name / "drivers/vfio-pci").mkdir(exist_ok=True)
        (tmp_path / name / "drivers/vfio-pci/0000:02:00.0").symlink_to(tmp_path)
        cases[name] = {"install_unbind": name == "asked"}
    (tmp_path / "asked/run/vgpus" / vgpu).touch()
    for name, case in cases.items():
        place = tmp_path / name
        directories = [str(place / "state"), str(place / "run")]
        drivers = {"install_directories": directories, "install_drivers": str(place / "drivers")}
        case.update(drivers, tasks="leftovers")
    failures = ansible.roles(cases)
    left = {
        name: {one for one in ("state", "run") if (tmp_path / name / one).exists()}
        for name in hosts
    }
    both = {"state", "run"}
    assert left == {"ended": set(), "bound": both, "asked": both, "broken": both}
    assert set(failures) == {"asked", "broken"}
    needed = f": 0000:01:00.0 is on a VFIO driver, {vgpu} is a vGPU of vfiomgr. Remedy: "
    assert needed in failures["asked"]
    named = [f"{number}.jsonl is of an interrupted" in failures["broken"] for number in range(4)]
    assert named == [False, True, True, True]
