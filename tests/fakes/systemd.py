"""systemd's services of the fake host, as processes that have device nodes open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.programs import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fakes.kernel import FakeKernel

_PLACE = "/usr/bin/systemctl"


class Systemd:
    """The program systemctl, and the services that are known to it."""

    def __init__(self, kernel: FakeKernel) -> None:
        self._sysfs = kernel.sysfs
        self._pids: dict[str, int] = {}
        self._opened: dict[str, Callable[[], Sequence[str]]] = {}
        self.parts: dict[str, tuple[str, ...]] = {}
        """The services that end with each one."""
        self.log: list[str] = []
        """What was started and stopped."""
        self.broken: set[str] = set()
        """The services that do not start or stop."""
        self.states: dict[str, str] = {}
        """Those of services that neither run nor have ended."""
        self.mute: set[str] = set()
        """The verbs that are not answered."""
        kernel.programs.install(_PLACE)
        kernel.programs.known[_PLACE] = self

    def add(self, name: str, opens: Callable[[], Sequence[str]] = list) -> None:
        """A service that runs, and opens nodes when it starts."""
        self._pids[name] = 900 + len(self._pids)
        self._opened[name] = opens
        self._start(name)

    def is_active(self, name: str) -> bool:
        """Whether a service runs."""
        return name in self._pids and self._sysfs.exists(f"/proc/{self._pids[name]}")

    def changes(self, arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return arguments[0] in {"start", "stop", "try-restart"}

    def run(self, arguments: Sequence[str]) -> Said:
        """Do it."""
        verb, *names = (each for each in arguments if not each.startswith("-"))
        if verb in self.mute:
            return Said(code=1, error="Failed to connect to bus: No such file or directory")
        if verb == "show":
            return Said(output=f"{' '.join(self.parts.get(names[0], ()))}\n\n")
        if verb == "is-active":
            (name,) = names
            state = self.states.get(name, "active" if self.is_active(name) else "inactive")
            return Said(code=0 if state == "active" else 3, output=f"{state}\n")
        for name in names:
            if name in self.broken:
                return Said(code=1, error=f"Job for {name} failed.")
            self._act(verb, name)
        return Said()

    def _act(self, verb: str, name: str) -> None:
        was_active = self.is_active(name)
        if verb != "start" and was_active:
            self.log.append(f"stop {name}")
            for part in self.parts.get(name, ()):
                self._act("stop", part)
            self._sysfs.drop(f"/proc/{self._pids[name]}")
        if (verb == "start" and not was_active) or (verb == "try-restart" and was_active):
            self.log.append(f"start {name}")
            self._start(name)

    def _start(self, name: str) -> None:
        pid = self._pids[name]
        self._sysfs.put(f"/proc/{pid}/comm", f"{name.partition('.')[0]}\n")
        self._sysfs.put(f"/proc/{pid}/cgroup", f"0::/system.slice/{name}\n")
        for number, node in enumerate(self._opened[name](), start=3):
            self._sysfs.link_absolute(f"/proc/{pid}/fd/{number}", node)
