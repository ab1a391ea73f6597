"""What all calls of a connection to libvirt start from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from vfiomgr.libvirt.client.binding import explained, explaining, library
from vfiomgr.libvirt.client.deadline import KEEP_ALIVE
from vfiomgr.libvirt.client.errors import Code, explain
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable

_LACKING = frozenset(
    {Code.NO_SUPPORT, Code.INVALID_ARG, Code.CONFIG_UNSUPPORTED, Code.OPERATION_DENIED}
)
"""A driver, a host, or a connection for reading, that does not have a call."""
_Result = TypeVar("_Result")


class Caller:
    """An open connection, and how a domain of it is found."""

    def __init__(self, handle: Any, uri: str) -> None:  # noqa: ANN401 - libvirt is untyped
        self._handle = handle
        self.uri = uri

    def version(self) -> Version:
        """Of libvirt, on the other side."""
        with explaining(self.uri):
            return Version.from_number(self._handle.getLibVersion())

    def keep_alive(self) -> None:
        """Have the other side say now and then that it is there; without an answer it is lost."""
        self._if_supported(lambda: self._handle.setKeepAlive(*KEEP_ALIVE))

    def _if_supported(self, call: Callable[[], _Result | None]) -> _Result | None:
        """What a call gives; None where there is no such call here."""
        libvirt = library()
        try:
            return call()
        except libvirt.libvirtError as error:
            if error.get_error_code() in _LACKING:
                return None
            raise explained(error, self.uri) from None

    def _find(self, name: str) -> Any | None:  # noqa: ANN401
        """A domain by its name or its UUID."""
        libvirt = library()
        for look in (self._handle.lookupByName, self._handle.lookupByUUIDString):
            try:
                return look(name)
            except libvirt.libvirtError as error:
                if error.get_error_code() not in (Code.NO_DOMAIN, Code.INVALID_ARG):
                    raise explained(error, name) from None
        return None

    def _lookup(self, name: str) -> Any:  # noqa: ANN401
        handle = self._find(name)
        if handle is None:
            raise explain(Code.NO_DOMAIN, "", name)
        return handle
