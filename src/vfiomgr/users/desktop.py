"""The desktop of a host: what shows its console, its user sessions, and the programs of these.

Sessions are read from logind's files in /run/systemd/sessions (session_save in
src/login/logind-session.c of systemd; elogind writes the same), not over D-Bus: they can be read
without root, and in a recording. What cannot be read is reported in `unread`; nothing else may be
taken for its absence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.pci.function import address_of
from vfiomgr.pci.model import is_address
from vfiomgr.users.laptop import LaptopFacts, read_laptop
from vfiomgr.users.processes import shows_all, unit_of
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


class VirtualConsole(Value):
    """A driver of the text console."""

    name: str
    """`vtcon1`; the numbers change when drivers come and go."""
    driver: str
    """`(M) frame buffer device`; those with (S) belong to the system and cannot be unbound."""
    is_bound: bool
    """Whether it drives the text console now."""


class Framebuffer(Value):
    """A frame buffer device, or a platform device of the firmware's framebuffer."""

    name: str
    """`fb0`, `efi-framebuffer.0`."""
    driver: str
    """`i915drmfb`, `efi-framebuffer`; empty if none is bound."""
    device: str
    """The PCI address or the platform device that it belongs to; empty if unknown."""


class UserSession(Value):
    """A session of logind."""

    id: str
    """`2`, `c1`."""
    user: str
    """The name of its user."""
    uid: int | None
    """The number of its user; null if unknown."""
    type: str
    """`x11`, `wayland`, `mir`, `tty`; empty or `unspecified` if the session does not say."""
    kind: str
    """logind's class: `user`, `greeter`, `manager`, `background`."""
    seat: str
    """`seat0`; empty without one, as over SSH."""
    vt: str
    """The number of its virtual terminal; empty without one."""
    service: str
    """The PAM service that opened it: `gdm-password`, `login`, `sshd`."""
    state: str
    """logind's state: `active`, `online`, `closing`."""
    is_remote: bool
    """Whether it came over the network."""
    nodes: tuple[str, ...] = ()
    """The DRM nodes that logind opened for its compositor (TakeDevice)."""

    @property
    def is_graphical(self) -> bool:
        """Whether it is a local session of a compositor or X server that has not ended."""
        is_shown = self.type in ("x11", "wayland", "mir") or bool(self.nodes)
        return is_shown and not self.is_remote


class DesktopProcess(Value):
    """A program of the desktop, or a process that has a device node open."""

    pid: int
    """The number of the process."""
    command: str
    """As the kernel shortens it, to 15 characters."""
    unit: str | None
    """Its systemd unit; null if unknown."""
    uid: int | None
    """The user in whose slice of systemd it runs; None for services of the system."""
    session: str | None
    """The session in whose scope it runs; None for services of the user."""

    def __str__(self) -> str:
        """`gnome-shell (PID 4711)`."""
        return f"{self.command} (PID {self.pid})"


class DesktopFacts(Value):
    """What a card of the desktop is used for."""

    consoles: tuple[VirtualConsole, ...] = ()
    """The drivers of the text console."""
    framebuffers: tuple[Framebuffer, ...] = ()
    """The frame buffer devices."""
    platform_framebuffers: tuple[Framebuffer, ...] = ()
    """The platform devices of the firmware's framebuffer."""
    sessions: tuple[UserSession, ...] = ()
    """The sessions of logind."""
    processes: tuple[DesktopProcess, ...] = ()
    """The known programs, and the processes that have device nodes open, if those were read."""
    display_manager: str | None = None
    """The unit behind display-manager.service, or of the display manager that runs."""
    lingering: tuple[str, ...] = ()
    """Users whose services go on after their last session."""
    laptop: LaptopFacts = LaptopFacts()
    """The graphics switches of a laptop."""
    has_ssh: bool | None = None
    """Whether sshd runs, or something else waits for connections at port 22; None if unknown."""
    user_sockets: tuple[str, ...] = ()
    """The sockets that can start services of users: `pipewire.socket`."""
    nvidia_modules: tuple[str, ...] = ()
    """NVIDIA's modules that are loaded, each after those that it needs."""
    unread: tuple[str, ...] = ()
    """What could not be read, as `NAME: REASON`."""

    @property
    def knows_programs(self) -> bool:
        """Whether the processes of all users were read."""
        return not any(text.startswith(f"{_PROGRAMS}: ") for text in self.unread)

    def named(self, commands: Collection[str]) -> tuple[DesktopProcess, ...]:
        """The processes of these programs."""
        return tuple(process for process in self.processes if process.command in commands)

    def session_of(self, process: DesktopProcess) -> UserSession | None:
        """The session of a process; of a user's service, the graphical session of the user."""
        for session in self.sessions:
            is_own = session.id == process.session
            is_of_user = process.session is None and process.uid is not None
            if is_own or (is_of_user and session.uid == process.uid and session.is_graphical):
                return session
        return None


MUTTER = ("gnome-shell", "mutter", "gnome-kiosk")
KWIN = ("kwin_wayland",)
WLROOTS = ("sway", "labwc", "wayfire", "river", "cage", "dwl")
HYPRLAND = ("Hyprland", "hyprland")
NIRI = ("niri",)
XORG = ("Xorg", "X", "Xorg.bin")
OTHERS = ("cosmic-comp", "weston", "gamescope", "gamescope-wl")
COMPOSITORS = (*MUTTER, *KWIN, *WLROOTS, *HYPRLAND, *NIRI, *XORG, *OTHERS)
"""Programs that open the cards of a seat."""
AUDIO = ("pipewire", "pipewire-pulse", "wireplumber", "pulseaudio")
DISPLAY_MANAGERS = (
    *("gdm", "gdm3", "sddm", "lightdm", "greetd", "plasmalogin", "lxdm", "slim", "xdm"),
    *("ly", "ly-dm", "cosmic-greeter-"),
)
FBCON = "frame buffer device"
"""The name of the console's driver on frame buffers (con_driver in drivers/tty/vt/vt.c)."""
NVIDIA_SERVICES = {
    "nvidia-persiste": "nvidia-persistenced.service",
    "nvidia-powerd": "nvidia-powerd.service",
}
"""Services of NVIDIA's driver that keep a GPU open, by command."""
_PROGRAMS, _SYSTEMD, _SSH = "programs of the desktop", "systemd", "sshd"
KNOWN = frozenset({*COMPOSITORS, *AUDIO, *DISPLAY_MANAGERS, *NVIDIA_SERVICES})
"""The programs of a desktop that use cards."""

_PROC, _CLASS = HostPath("/proc"), HostPath("/sys/class")
_MODULES = HostPath("/sys/module")
_SESSIONS = HostPath("/run/systemd/sessions")
_LINGER = HostPath("/var/lib/systemd/linger")
DISPLAY_MANAGER_ALIAS = HostPath("/etc/systemd/system/display-manager.service")
_USER_UNITS = tuple(
    HostPath(f"{above}/systemd/user")
    for above in (
        "/etc",
        "/run",
        "/usr/local/lib",
        "/usr/local/share",
        "/usr/lib",
        "/usr/share",
        "/lib",
    )
)
"""The directories of all users' units."""
_PLATFORM = HostPath("/sys/bus/platform/devices")
_OF_FIRMWARE = expression(r"(?:efi|vesa|simple|platform)-framebuffer\.\d+")
_FRAMEBUFFER = expression(r"fb\d+")
_SESSION_SCOPE = expression(r"/session-([^/\s]+)\.scope")
_USER_SLICE = expression(r"/user-(\d+)\.slice")
_LISTENING = expression(r"(?m)^\s*\d+: (?!0100007F)(?!0{24}01000000)[0-9A-F]+:0016 \S+ 0A")
"""Port 22 of other addresses than loopback, in state TCP_LISTEN (tcp4_seq_show)."""


class _Reader:
    """Reads a tree, and collects what it could not read."""

    def __init__(self, tree: HostTree) -> None:
        self.tree = tree
        self.unread: list[str] = []

    def names(self, place: HostPath, what: str) -> list[str]:
        """The names in a directory.

        It is empty without being reported only if the host has no such directory, which the other
        entries beside it prove on a running host.
        """
        why = self.tree.why_unlisted(place)
        if why is None:
            return self.tree.children(place)
        beside = self.tree.children(place.parent) if self.tree.is_live else []
        if not beside or place.name in beside:
            self.unread.append(f"{what}: cannot list {place}: {why}")
        return []

    def names_of_systemd(self, place: HostPath, what: str) -> list[str]:
        """The names in a directory of systemd; it may be missing if PID 1 is another program."""
        init = self.tree.read(_PROC / "1/comm") or _SYSTEMD
        return [] if init != _SYSTEMD and not self.tree.exists(place) else self.names(place, what)

    def consoles(self) -> Iterator[VirtualConsole]:
        """The drivers of the text console (show_bind in drivers/tty/vt/vt.c)."""
        what, place = "virtual consoles", _CLASS / "vtconsole"
        for name in self.names(place, what):
            bound = self.tree.read(place / name / "bind")
            if bound is None:
                self.unread.append(f"{what}: cannot read {place}/{name}/bind")
            else:
                driver = self.tree.read(place / name / "name") or ""
                yield VirtualConsole(name, driver, bound == "1")

    def framebuffers(self) -> Iterator[Framebuffer]:
        """The frame buffer devices."""
        place = _CLASS / "graphics"
        for name in filter(_FRAMEBUFFER.fullmatch, self.names(place, "frame buffers")):
            driver = self.tree.read(place / name / "name") or ""
            device = self.tree.link_name(place / name / "device")
            address = address_of(self.tree, device)
            yield Framebuffer(name, driver, str(address) if address else device or "")

    def platform_framebuffers(self) -> Iterator[Framebuffer]:
        """The firmware's framebuffers (drivers/firmware/sysfb.c), since 6.11 below the card."""
        found = self.names(_PLATFORM, "framebuffers of the firmware")
        for name in filter(_OF_FIRMWARE.fullmatch, found):
            driver = self.tree.link_name(_PLATFORM / name / "driver") or ""
            above = (self.tree.link(_PLATFORM / name) or "").split("/")
            card = next((part for part in reversed(above) if is_address(part)), "")
            yield Framebuffer(name, driver, card)

    def sessions(self) -> Iterator[UserSession]:
        """The sessions of logind; beside each file, a pipe has its name with `.ref`."""
        what = "user sessions"
        for name in self.names_of_systemd(_SESSIONS, what):
            if name.startswith(".") or name.endswith(".ref"):
                continue
            text = self.tree.read(_SESSIONS / name)
            if text is None:
                self.unread.append(f"{what}: cannot read {_SESSIONS}/{name}")
                continue
            pairs = (line.partition("=") for line in text.splitlines())
            yield self._session(name, {key: value.strip('"') for key, _, value in pairs})

    def _session(self, name: str, fields: dict[str, str]) -> UserSession:
        uid = fields.get("UID", "")
        nodes = (
            self.tree.link_name(HostPath("/sys/dev/char") / number) or ""
            for number in fields.get("DEVICES", "").split()
        )
        return UserSession(
            id=name,
            user=fields.get("USER", uid),
            uid=int(uid) if uid.isdecimal() else None,
            type=fields.get("TYPE", ""),
            kind=fields.get("CLASS", ""),
            seat=fields.get("SEAT", ""),
            vt=fields.get("VTNR", ""),
            service=fields.get("SERVICE", ""),
            state=fields.get("STATE", ""),
            is_remote=fields.get("REMOTE") == "1",
            nodes=tuple(f"/dev/dri/{n}" for n in nodes if n.startswith(("card", "renderD"))),
        )

    def processes(self, holders: Collection[int]) -> Iterator[DesktopProcess]:
        """The known programs and these processes, with the units that systemd has them in."""
        pids = [name for name in self.tree.children(_PROC) if name.isdecimal()]
        if not pids or not shows_all(self.tree):
            why = "/proc does not show the processes of all users"
            self.unread.append(f"{_PROGRAMS}: {why if pids else 'no process in /proc'}")
            return
        for pid in pids:
            command = self.tree.read(_PROC / pid / "comm") or ""
            if command not in (*KNOWN, _SSH) and int(pid) not in holders:
                continue
            cgroups = self.tree.read(_PROC / pid / "cgroup") or ""
            user, scope = _USER_SLICE.search(cgroups), _SESSION_SCOPE.search(cgroups)
            yield DesktopProcess(
                int(pid),
                command,
                unit_of(cgroups),
                int(user[1]) if user else None,
                scope[1] if scope else None,
            )

    def display_manager(self, processes: Collection[DesktopProcess]) -> str | None:
        """The unit of the display manager that runs, or the one that is set up.

        The alias of some units is made by the package or not at all (ly@tty2.service).
        """
        running = (p.unit for p in processes if p.command in DISPLAY_MANAGERS and p.uid is None)
        unit = next(filter(None, running), None)
        return unit or self.tree.link_name(DISPLAY_MANAGER_ALIAS)

    def lingering(self) -> list[str]:
        """Users whose services linger (method_set_user_linger in src/login/logind-dbus.c)."""
        return self.names_of_systemd(_LINGER, "lingering users")

    def user_sockets(self) -> set[str]:
        """The sockets for services of users (systemd.unit(5))."""
        names = (name for place in _USER_UNITS for name in self.tree.children(place))
        return {name for name in names if name.endswith(".socket")}

    def ssh(self, processes: Collection[DesktopProcess]) -> bool | None:
        """Whether sshd runs, or systemd waits for it at its port."""
        if any(process.command == _SSH for process in processes):
            return True
        tables = [self.tree.read_text(_PROC / "net" / name) for name in ("tcp", "tcp6")]
        if any(_LISTENING.search(text or "") for text in tables):
            return True
        return None if tables[0] is None else False


def modules_above(tree: HostTree, name: str) -> tuple[str, ...]:
    """A loaded module, and all that need it, each after those that it needs.

    The names come from `holders` (add_usage_links in kernel/module/sysfs.c).
    """
    last_first: list[str] = []

    def visit(module: str) -> None:
        for holder in tree.children(_MODULES / module / "holders"):
            if holder not in last_first:
                visit(holder)
        last_first.append(module)

    if tree.exists(_MODULES / name):
        visit(name)
    return tuple(reversed(last_first))


def read_desktop(tree: HostTree, holders: Collection[int] = ()) -> DesktopFacts:
    """Read the desktop of a host; `holders` are further processes whose sessions matter."""
    reader = _Reader(tree)
    processes = tuple(reader.processes(holders))
    return DesktopFacts(
        consoles=tuple(reader.consoles()),
        framebuffers=tuple(reader.framebuffers()),
        platform_framebuffers=tuple(reader.platform_framebuffers()),
        sessions=tuple(reader.sessions()),
        processes=processes,
        display_manager=reader.display_manager(processes),
        lingering=tuple(reader.lingering()),
        user_sockets=tuple(sorted(reader.user_sockets())),
        nvidia_modules=modules_above(tree, "nvidia"),
        laptop=read_laptop(tree),
        has_ssh=reader.ssh(processes),
        unread=tuple(reader.unread),
    )
