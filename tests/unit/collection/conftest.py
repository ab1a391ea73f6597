"""Modules of the Ansible collection, run in this process; their command is the one of `run`."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.conftest import Run

COLLECTION = Path(__file__).parents[3] / "ansible"
_MODULES = "ansible_collections.vfiomgr.host.plugins.modules"
_PROGRAM = "/usr/bin/vfiomgr"


class Play(Protocol):
    """`play("bind", devices=[...])` runs a task, and returns what it returns."""

    def __call__(self, module: str, *, check: bool = False, **parameters: Any) -> dict[str, Any]:
        """Run it, with --diff."""


class _Input(io.TextIOWrapper):
    """What a task gives its command, or without it a terminal where nobody answers."""

    def __init__(self, data: str | None) -> None:
        super().__init__(io.BytesIO((data or "").encode()))
        self._is_terminal = data is None

    def isatty(self) -> bool:
        """Whether it can be asked."""
        return self._is_terminal


@pytest.fixture(scope="session")
def _collection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The collection where Python finds it, as Ansible's loader arranges it."""
    place = tmp_path_factory.mktemp("collections")
    home = place / "ansible_collections/vfiomgr"
    home.mkdir(parents=True)
    (home / "host").symlink_to(COLLECTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(place), *sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        yield


@pytest.fixture
def play(
    _collection: None,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Play:
    """Run a task on the fake kernel."""

    def find(_: AnsibleModule, name: str) -> str | None:
        return _PROGRAM if name == "vfiomgr" else None

    def command(
        _: AnsibleModule,
        words: list[str],
        *,
        data: str | None = None,
        environ_update: dict[str, str] | None = None,
    ) -> tuple[int, str, str]:
        assert words[0] == _PROGRAM
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", _Input(data))
            for name, value in (environ_update or {}).items():
                patch.setenv(name, value)
            answer = run(*words[1:])
        return answer.status, answer.stdout, answer.stderr

    monkeypatch.setattr(AnsibleModule, "get_bin_path", find)
    monkeypatch.setattr(AnsibleModule, "run_command", command)

    def task(module: str, *, check: bool = False, **parameters: Any) -> dict[str, Any]:
        named = importlib.import_module(f"{_MODULES}.{module}")
        internal = {"_ansible_check_mode": check, "_ansible_diff": True}
        with patch_module_args({**parameters, **internal}), pytest.raises(SystemExit):
            named.main()
        result = json.loads(capsys.readouterr().out)
        assert isinstance(result, dict)
        return result

    return task
