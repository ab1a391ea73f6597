"""The only importer of libvirt-python, an optional dependency; its calls have a deadline.

A call of libvirt cannot be interrupted: it waits in C for a daemon that may be stuck, or for a host
that is gone. So calls run in a thread of their own, which is left behind if a call misses the
deadline; no further calls are made then.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct, field

from vfiomgr.errors import HostError, LibvirtFailed, LibvirtSilent, UsageError
from vfiomgr.expressions import expression
from vfiomgr.host.installation import remedy_for_libvirt
from vfiomgr.libvirt.client.errors import LOGS, Code, ReportedError, explain
from vfiomgr.units import Version

_LOOP_TICK = 200
"""Milliseconds after which the event loop wakes up without an event."""


@functools.cache
def library() -> Any:  # noqa: ANN401
    """Import libvirt-python, and keep it from printing errors itself."""
    with _importing():
        import libvirt  # noqa: PLC0415 - an optional dependency
    libvirt.registerErrorHandler(_do_nothing, None)
    return libvirt


@contextmanager
def _importing() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        message = f"cannot import libvirt-python: {error}"
        raise HostError(message, remedy_for_libvirt()) from None


def _do_nothing(_one: object, _other: object) -> None:
    """Replace libvirt's default error handler, which prints on stderr; or only wake its loop up."""


@contextmanager
def event_loop() -> Iterator[None]:
    """Run libvirt's event loop; start it before a connection opens, and end it after it closes.

    The thread must have left libvirt when the interpreter exits and frees what it uses.
    """
    _register_event_loop()
    stop = threading.Event()
    thread = threading.Thread(target=_loop, args=(stop,), name="libvirt-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@functools.cache
def _register_event_loop() -> None:
    """Register once per process. The timeout wakes the loop, which only waits for descriptors."""
    libvirt = library()
    with explaining("the event loop"):
        libvirt.virEventRegisterDefaultImpl()
        libvirt.virEventAddTimeout(_LOOP_TICK, _do_nothing, None)


def _loop(stop: threading.Event) -> None:
    libvirt = library()
    while not stop.is_set():
        libvirt.virEventRunDefaultImpl()


@contextmanager
def explaining(subject: str) -> Iterator[None]:
    """Turn libvirt's errors about a domain, a file or a URI into those of vfiomgr."""
    libvirt = library()
    try:
        yield
    except libvirt.libvirtError as error:
        raise explained(error, subject) from None


def explained(error: Any, subject: str) -> Exception:  # noqa: ANN401
    """An error of libvirt as an error of vfiomgr."""
    code = error.get_error_code()
    if code is None:
        return LibvirtFailed(f"libvirt failed: {error}", f"see its log: {LOGS}")
    text, domain = error.get_error_message() or "", error.get_error_domain()
    return explain(ReportedError(code, text, domain, error.get_int1()), subject)


_DRIVERS = expression(
    "bhyve|ch|esx|gsx|hyperv|interface|libxl|lxc|network|nodedev|nwfilter|openvz|parallels|"
    "phyp|qemu|secret|storage|test|uml|vbox|vmwarefusion|vmwareplayer|vmwarews|vpx|vz|xen"
)
"""The drivers of all releases (src/*/*_driver.c); the daemon reports one that its host lacks."""
_REMEDY = "use a URI such as qemu:///system: https://libvirt.org/uri.html"


def split_uri(uri: str) -> SplitResult:
    """The parts of a URI; for an alias from libvirt.conf only the path.

    Raises:
        UsageError: it is not a URI, or no libvirt has such a driver.
    """
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        message = f"invalid URI: --connect {uri}: {error}"
        raise UsageError(message, _REMEDY) from None
    driver = parts.scheme.partition("+")[0]
    if driver and not _DRIVERS.fullmatch(driver):
        message = f"no such libvirt driver: {driver!r} in {uri}"
        raise UsageError(message, _REMEDY)
    return parts


DEADLINE = 30.0
"""Default number of seconds to wait for an answer."""
_LONG_DEADLINE = 300.0
_LONG = frozenset(
    {"attachDeviceFlags", "detachDeviceFlags", "create", "destroy", "nodeDeviceDefineXML"}
)
"""Calls that wait for host drivers, for mdevctl, or for QEMU, which pins memory."""
KEEP_ALIVE = (5, 3)
"""Seconds of silence before a keepalive request, and how many may stay unanswered."""
_LOST = "connection closed due to keepalive timeout"
"""The message in src/rpc/virnetclient.c of libvirt, in this process and its language."""
_FAREWELL = 2.0
"""Seconds to wait for a connection to close before it is left open."""


class _Answer(Struct):
    """The result of a call, once `is_there`."""

    is_there: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None


@contextmanager
def converse(open_it: Callable[[str], Any], uri: str, deadline: float) -> Iterator[Any]:
    """Open a connection whose calls, and those of its objects, return by the deadline or raise.

    Raises:
        LibvirtSilent: the connection did not open in time, or a later call was not answered.
    """
    conversation = _Conversation(uri, deadline)
    try:
        handle = conversation.ask(partial(open_it, uri))
        try:
            yield handle
        finally:
            conversation.close(handle)
    finally:
        conversation.end()


class _Conversation:
    """The calls of one connection, one after the other."""

    def __init__(self, uri: str, deadline: float) -> None:
        self._uri = uri
        self._deadline = deadline
        self._silence = 0.0
        """The number of seconds waited without an answer."""
        self._asked: tuple[_Answer, float, float] | None = None
        """The last answer, its time limit, and its deadline: an interrupt does not end a call."""
        self._questions: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._ask_all, name="libvirt", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], Any], name: str = "") -> Any:  # noqa: ANN401 - untyped
        """Call libvirt and return the result; libvirt's own errors are raised unchanged."""
        if not self._thread.is_alive():
            return call()  # of a connection that is closed, which libvirt says by itself
        seconds = max(self._deadline, _LONG_DEADLINE) if name in _LONG else self._deadline
        self._wait_out()
        if not self._silence:
            answer = self._put(call)
            self._asked = answer, seconds, time.monotonic() + seconds
            if not answer.is_there.wait(seconds):
                self._silence = seconds
            elif _LOST in str(answer.error):
                self._silence = KEEP_ALIVE[0] * (KEEP_ALIVE[1] + 1)
        if self._silence:
            raise self._unanswered()
        if answer.error is not None:
            raise answer.error
        return self._guarded(answer.value)

    def _unanswered(self) -> LibvirtSilent:
        host = split_uri(self._uri).hostname
        look = f"systemctl status libvirtd virtqemud; {LOGS}"
        where = f"see its state and logs: {look}; guests keep running while it restarts"
        if host:
            where = f"check that {host} is up and see its logs: ssh {host} '{look}'"
        message = f"libvirtd at {self._uri} did not answer within {self._silence:g} s"
        return LibvirtSilent(message, f"{where}; pass --timeout SECONDS to wait longer")

    def _wait_out(self) -> None:
        """Wait for the interrupted call to end, because libvirt answers later calls after it."""
        if self._asked is None:
            return
        answer, seconds, end = self._asked
        if not answer.is_there.wait(max(end - time.monotonic(), 0)):
            self._silence = self._silence or seconds
        self._asked = None

    def close(self, handle: _Guarded) -> None:
        """Close the connection, unless libvirt does not answer: closing would wait too."""
        if not self._silence and not self._put(handle.target.close).is_there.wait(_FAREWELL):
            self._silence = _FAREWELL

    def end(self) -> None:
        """End the thread, which must have left libvirt when the interpreter frees what it uses."""
        self._questions.put(None)
        if not self._silence:
            self._thread.join(_FAREWELL)

    def _put(self, call: Callable[[], Any]) -> _Answer:
        answer = _Answer()
        self._questions.put((call, answer))
        return answer

    def _ask_all(self) -> None:
        while (question := self._questions.get()) is not None:
            call, answer = question
            try:
                answer.value = call()
            except BaseException as error:  # noqa: BLE001 - raised where it was asked
                answer.error = error
            answer.is_there.set()

    def _guarded(self, value: Any) -> Any:  # noqa: ANN401
        """Wrap an object of libvirt, so that its methods are calls of this conversation."""
        if isinstance(value, list):
            return [self._guarded(one) for one in value]
        return _Guarded(value, self) if type(value).__module__ == "libvirt" else value


_LOCAL = frozenset({"name", "UUIDString"})
"""Answered from the object, without libvirtd (virDomainGetName in src/libvirt-domain.c)."""


class _Guarded:
    """An object of libvirt whose methods, except local ones, are calls of a conversation."""

    def __init__(self, target: Any, conversation: _Conversation) -> None:  # noqa: ANN401
        self.target = target
        self._conversation = conversation

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        method = getattr(self.target, name)
        if name in _LOCAL:
            return method

        def call(*arguments: Any) -> Any:  # noqa: ANN401
            bare = [one.target if isinstance(one, _Guarded) else one for one in arguments]
            return self._conversation.ask(partial(method, *bare), name)

        return call

    def ask_qemu(self, command: str) -> Any:  # noqa: ANN401
        """Send a command to QEMU of this domain, and return the answer; it taints the domain."""
        with _importing():
            from libvirt_qemu import qemuMonitorCommand  # noqa: PLC0415 - an optional dependency
        return self._conversation.ask(partial(qemuMonitorCommand, self.target, command, 0))


_LACKING = frozenset(
    {Code.NO_SUPPORT, Code.INVALID_ARG, Code.CONFIG_UNSUPPORTED, Code.OPERATION_DENIED}
)
"""A driver, a host, or a read-only connection that does not support a call."""
_Result = TypeVar("_Result")


class Caller:
    """An open connection, and the lookup of its domains."""

    def __init__(self, handle: Any, uri: str) -> None:  # noqa: ANN401 - libvirt is untyped
        self._handle = handle
        self.uri = uri

    def version(self) -> Version:
        """The version of libvirt on the other side."""
        with explaining(self.uri):
            return Version.from_number(self._handle.getLibVersion())

    def keep_alive(self) -> None:
        """Send keepalive requests; without an answer the connection is lost."""
        self._if_supported(lambda: self._handle.setKeepAlive(*KEEP_ALIVE))

    def _if_supported(self, call: Callable[[], _Result | None]) -> _Result | None:
        """The result of a call; None if this libvirt or connection does not support it."""
        libvirt = library()
        try:
            return call()
        except libvirt.libvirtError as error:
            if error.get_error_code() in _LACKING:
                return None
            raise explained(error, self.uri) from None

    def _find(self, name: str) -> Any | None:  # noqa: ANN401
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
            raise explain(ReportedError(Code.NO_DOMAIN, ""), name)
        return handle
