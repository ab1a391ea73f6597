"""The connection where there is no library, and no libvirt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import pytest

from vfiomgr.adapters.libvirt import connection
from vfiomgr.adapters.libvirt.connection import Connection, connect
from vfiomgr.cli.libvirt_attach import attach
from vfiomgr.cli.libvirt_connection import complete_domain
from vfiomgr.errors import HostError, LibvirtFailed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    connection._library.cache_clear()
    monkeypatch.setitem(sys.modules, "libvirt", None)
    yield
    connection._library.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_the_optional_dependency_is_named_where_it_is_missing() -> None:
    with pytest.raises(HostError, match="needs libvirt-python") as caught, connect("test:///x"):
        pass
    assert f"{sys.executable} -m pip install libvirt-python" in caught.value.hint


def test_a_connection_is_closed_also_where_its_use_fails() -> None:
    seen: list[Connection] = []

    def use() -> None:
        with connect("test:///default") as opened:
            seen.append(opened)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    with pytest.raises(LibvirtFailed, match="invalid connection"):
        seen[0].domain_names()


def test_events_can_be_heard_more_than_once_in_a_process() -> None:
    for _ in range(2):
        with connect("test:///default", with_events=True) as opened:
            assert opened.domain_names() == ("test",)


def test_names_of_domains_are_completed_and_silence_is_no_error() -> None:
    context = click.Context(attach)
    context.params["uri"] = "test:///default"
    parameter = attach.params[0]
    assert complete_domain(context, parameter, "te") == ["test"]
    assert complete_domain(context, parameter, "x") == []
    context.params["uri"] = "qemu+tcp://127.0.0.1:1/system"
    assert complete_domain(context, parameter, "te") == []


def test_no_daemon_is_told_with_its_socket() -> None:
    with (
        pytest.raises(LibvirtFailed, match="no libvirt daemon"),
        connect("qemu+tcp://127.0.0.1:1/"),
    ):
        pass
