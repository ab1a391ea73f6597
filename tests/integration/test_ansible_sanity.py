"""ansible-test on the Ansible collection: `VFIOMGR_LAB_EVERY_MOMENT=1` with the path of this file.

Its environments are kept in the cache of the laboratory. The first run needs the network, and takes
three minutes; the next ones take one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.kernel import cache_root
from tools.package.collection import SOURCE

pytestmark = pytest.mark.thorough
_GET_PIP = "import ensurepip\nensurepip.bootstrap(default_pip=True)\n"
"""In place of the program that ansible-test downloads from a server of Ansible for an environment.

https://github.com/ansible/ansible/blob/stable-2.19/test/lib/ansible_test/_util/target/setup/requirements.py
"""
_VERSIONS = ("24_2", "25_2")


def test_the_sanity_tests_of_ansible_find_nothing() -> None:
    home = cache_root() / "ansible-test"
    programs = home / ".ansible/test/cache"
    programs.mkdir(parents=True, exist_ok=True)
    for version in _VERSIONS:
        (programs / f"get_pip_{version}.py").write_text(_GET_PIP)
    collection = home / "ansible_collections/vfiomgr/host"
    shutil.rmtree(collection, ignore_errors=True)
    shutil.copytree(SOURCE, collection, ignore=shutil.ignore_patterns("__pycache__"))
    # A shim of pyenv without a version is an error for ansible-test.
    own = Path(sys.executable).parent
    path = [place for place in os.environ["PATH"].split(os.pathsep) if "shims" not in place]
    ran = subprocess.run(
        (str(own / "ansible-test"), "sanity", "--local", "--color", "no"),
        check=False,
        capture_output=True,
        text=True,
        cwd=collection,
        env={"HOME": str(home), "LC_ALL": "C.UTF-8", "PATH": os.pathsep.join([str(own), *path])},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert 'Running sanity test "validate-modules"' in ran.stdout + ran.stderr
