"""The PKGBUILD for Arch Linux: what it depends on, and its script."""

from __future__ import annotations

import subprocess

import pytest

from tools.package.__main__ import scripts
from tools.package.arch import TESTED, required
from tools.package.tree import template
from tools.package.wheels import CHECKOUT


def rendered() -> str:
    return template(
        "PKGBUILD",
        maintainer="Jane Doe <jane@example.org>",
        version="1.0.0",
        pythons=("3.11", "3.14"),
        too_new="3.15",
        sum="0" * 64,
        tests="tests/unit/pci",
        **required(),
    )


def array(name: str) -> list[str]:
    """The elements of an array of the PKGBUILD, as bash reads it."""
    script = f'{rendered()}\nprintf "%s\\n" "${{{name}[@]}}"'
    said = subprocess.run(["/bin/bash"], input=script, check=True, capture_output=True, text=True)
    return said.stdout.splitlines()


def test_it_depends_on_packages_of_arch_for_all_requirements() -> None:
    assert array("depends") == [
        "python>=3.11",
        "python<3.15",
        "python-click>=8.1",
        "python-jinja>=3.1",
        "python-msgspec>=0.19",
        "python-pydantic>=2.7",
        "python-pyudev>=0.24",
        "python-rich>=13",
        "python-ruamel-yaml>=0.18",
        "python-tomlkit>=0.12",
    ]


def test_what_commands_need_beside_that_is_optional() -> None:
    assert [one.partition(":")[0] for one in array("optdepends")] == [
        "hwdata",
        "libvirt-python",
        "python-grpclib",
        "python-httpx",
        "python-protobuf",
        "python-prometheus_client",
    ]


def test_it_contains_no_configuration_files() -> None:
    assert (array("backup"), array("license"), array("arch")) == ([""], ["Apache-2.0"], ["any"])


def test_its_check_runs_tests_that_exist() -> None:
    for name in TESTED:
        assert (CHECKOUT / "tests/unit" / name).exists()


@pytest.mark.parametrize(
    "name", ["post_install", "pre_upgrade", "post_upgrade", "pre_remove", "post_remove"]
)
def test_its_script_has_the_functions_that_pacman_calls(name: str) -> None:
    script = template("vfiomgr.install", **scripts(), compile="true", clean="true")
    subprocess.run(
        ["/bin/bash", "-c", f"{script}\ndeclare -F {name}"], check=True, capture_output=True
    )
