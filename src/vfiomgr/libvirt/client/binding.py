"""libvirt-python, an optional dependency: its only importer, and calls of it that end.

Nothing interrupts a call of libvirt, which waits in C for a daemon that may be stuck, or for a host
that is gone. So calls are made in a thread of the conversation's own, which is left behind with a
call that does not end within the deadline; nothing more is asked then.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct, field

from vfiomgr.errors import HostError, LibvirtFailed, LibvirtSilent, UsageError
from vfiomgr.libvirt.client.errors import Code, explain
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_LOOP_TICK = 200
"""Milliseconds after which the event loop wakes up without an event."""


@functools.cache
def library() -> Any:  # noqa: ANN401
    """libvirt-python, told not to print its errors by itself."""
    try:
        import libvirt  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        message = f"this needs libvirt-python, which is not there: {error}"
        hint = (
            f"{sys.executable} -m pip install libvirt-python (it is built with gcc, pkg-config, "
            "python3-dev and libvirt-dev)"
        )
        raise HostError(message, hint) from None
    libvirt.registerErrorHandler(_be_silent, None)
    return libvirt


def _be_silent(_context: object, _error: object) -> None:
    """Libvirt's default handler prints on stderr."""


@contextmanager
def event_loop() -> Iterator[None]:
    """Hear events within; begun before a connection is opened, and ended after it is closed.

    The thread must not be in libvirt when the interpreter ends, which frees what it works with.
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
    """Once a process. The timeout wakes the loop, which else sleeps until a descriptor is ready."""
    libvirt = library()
    with explaining("the event loop"):
        libvirt.virEventRegisterDefaultImpl()
        libvirt.virEventAddTimeout(_LOOP_TICK, _do_nothing, None)


def _do_nothing(_timer: int, _data: object) -> None:
    """The loop needed to wake up, no more."""


def _loop(stop: threading.Event) -> None:
    libvirt = library()
    while not stop.is_set():
        libvirt.virEventRunDefaultImpl()


@contextmanager
def explaining(subject: str) -> Iterator[None]:
    """Errors of libvirt within are vfiomgr's, about a domain, a file or a URI."""
    libvirt = library()
    try:
        yield
    except libvirt.libvirtError as error:
        raise explained(error, subject) from None


def explained(error: Any, subject: str) -> Exception:  # noqa: ANN401
    """An error of libvirt as one of vfiomgr."""
    code = error.get_error_code()
    if code is None:
        return LibvirtFailed(f"libvirt failed: {error}", "see its log: journalctl -u libvirtd")
    return explain(code, error.get_error_message() or "", subject)


_DRIVERS = re.compile(
    "bhyve|ch|esx|gsx|hyperv|interface|libxl|lxc|network|nodedev|nwfilter|openvz|parallels|"
    "phyp|qemu|secret|storage|test|uml|vbox|vmwarefusion|vmwareplayer|vmwarews|vpx|vz|xen"
)
"""Those of all releases (src/*/*_driver.c); one that a host lacks its daemon names itself."""
_REMEDY = "--connect takes URIs like qemu:///system: https://libvirt.org/uri.html"


def split_uri(uri: str) -> SplitResult:
    """The parts of a URI; of an alias from libvirt.conf the path alone.

    Raises:
        UsageError: it is none, or no libvirt has a driver of its name.

    """
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        message = f"--connect {uri} is no URI: {error}"
        raise UsageError(message, _REMEDY) from None
    driver = parts.scheme.partition("+")[0]
    if driver and not _DRIVERS.fullmatch(driver):
        message = f"libvirt has no driver {driver!r}, which the URI {uri} asks for"
        raise UsageError(message, _REMEDY)
    return parts


_LIBRARY = "libvirt"
DEADLINE = 30.0
"""Seconds for an answer where nobody said another number."""
_LONG_DEADLINE = 300.0
_LONG = frozenset(
    {"attachDeviceFlags", "detachDeviceFlags", "create", "destroy", "nodeDeviceDefineXML"}
)
"""Calls that wait for drivers of the host, for mdevctl, or for QEMU, which pins memory."""
KEEP_ALIVE = (5, 3)
"""After how many seconds of silence libvirt is asked whether it is there, and how often in vain."""
_LOST = "connection closed due to keepalive timeout"
"""src/rpc/virnetclient.c of libvirt, in this process and its language."""
_FAREWELL = 2.0
"""Seconds for the end of a connection, which is left open else."""


class _Answer(Struct):
    """What a call gave, once `is_there`."""

    is_there: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None


@contextmanager
def converse(open_it: Callable[[str], Any], uri: str, deadline: float) -> Iterator[Any]:
    """A connection, and with it all that it gives, whose calls return by the deadline or raise.

    Raises:
        LibvirtSilent: it could not be opened until then; within, that a call was not answered.

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
    """Calls of one connection, one after the other."""

    def __init__(self, uri: str, deadline: float) -> None:
        self._uri = uri
        self._deadline = deadline
        self._silence = 0.0
        """For how many seconds it was waited in vain."""
        self._asked: tuple[_Answer, float, float] | None = None
        """The last answer, how long it may take, and until when: an interrupt ends no call."""
        self._questions: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._ask_all, name="libvirt", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], Any], name: str = "") -> Any:  # noqa: ANN401 - untyped
        """What a call of libvirt's gives, whose own errors are raised as they are."""
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
            raise _unanswered(self._uri, self._silence)
        if answer.error is not None:
            raise answer.error
        return self._guarded(answer.value)

    def _wait_out(self) -> None:
        """Let the call that was interrupted end: what is asked next is answered after it."""
        if self._asked is None:
            return
        answer, seconds, end = self._asked
        if not answer.is_there.wait(max(end - time.monotonic(), 0)):
            self._silence = self._silence or seconds
        self._asked = None

    def close(self, handle: _Guarded) -> None:
        """Close the connection; one that does not answer is left, for closing would wait, too."""
        if not self._silence and not self._put(handle.target.close).is_there.wait(_FAREWELL):
            self._silence = _FAREWELL

    def end(self) -> None:
        """End the thread, which must not be in libvirt when the interpreter frees what it uses."""
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
        """With its methods as calls of this conversation, where it is an object of libvirt."""
        if isinstance(value, list):
            return [self._guarded(one) for one in value]
        return _Guarded(value, self) if type(value).__module__ == _LIBRARY else value


class _Guarded:
    """An object of libvirt whose methods are calls of a conversation."""

    def __init__(self, target: Any, conversation: _Conversation) -> None:  # noqa: ANN401
        self.target = target
        self._conversation = conversation

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        method = getattr(self.target, name)

        def call(*arguments: Any) -> Any:  # noqa: ANN401
            bare = [one.target if isinstance(one, _Guarded) else one for one in arguments]
            return self._conversation.ask(partial(method, *bare), name)

        return call


def _unanswered(uri: str, seconds: float) -> LibvirtSilent:
    """What to tell of a libvirt that is silent."""
    host = split_uri(uri).hostname
    look = "systemctl status libvirtd virtqemud; journalctl -u libvirtd -u virtqemud"
    where = (
        f"is {host} up, and what does libvirtd do there: ssh {host} '{look}'"
        if host
        else f"what does it do: {look}; a restart of it leaves guests running"
    )
    message = f"libvirtd at {uri} has not answered for {seconds:g} s"
    return LibvirtSilent(message, f"{where}; --timeout SECONDS waits longer")


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
