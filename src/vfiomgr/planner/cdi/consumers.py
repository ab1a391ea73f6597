"""Who reads CDI specifications, with which library, and what one bad file does to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from vfiomgr.model.cdi_scalars import Family

ANY = "any"


@dataclass(frozen=True, slots=True)
class Consumer:
    """A program, as far as its way to read specifications goes.

    The library in Go is tags.cncf.io/container-device-interface, the one in Rust the crate
    container-device-interface; both have the version of the newest CDI that they read.
    """

    name: str
    title: str
    library: Version
    is_rust: bool = False
    is_kata: bool = False
    """One file that it cannot read, or one name twice, fails every request for a CDI device.

    Go: WithCDI of Kata's src/runtime returns the error of Refresh, which others only log; Rust: so
    does handle_cdi_devices of pod-resources-rs, whose cache stops at the first such file besides.
    """

    @property
    def family(self) -> Family:
        """Whose library it is."""
        return "rust" if self.is_rust else "go"

    @property
    def prefers_static(self) -> bool:
        """Of one name in both directories, whose counts: the crate is given them in reverse."""
        return self.is_rust

    def __str__(self) -> str:
        """`Kata's Go runtime (CDI library 0.6)`."""
        kind = "crate" if self.is_rust else "library"
        return f"{self.title} (CDI {kind} {self.library.major}.{self.library.minor})"


CONSUMERS = (
    Consumer("kata-go", "Kata's Go runtime", Version(0, 6), is_kata=True),
    Consumer("kata-rs", "Kata's runtime-rs", Version(1, 1), is_rust=True, is_kata=True),
    Consumer("containerd-1.7", "containerd 1.7", Version(0, 5, 4)),
    Consumer("containerd-2.0", "containerd 2.0", Version(0, 8)),
    Consumer("containerd-2.3", "containerd 2.3", Version(1, 1)),
    Consumer("podman-4.3", "Podman 4.3", Version(0, 5, 2)),
    Consumer("podman-4.9", "Podman 4.9", Version(0, 6)),
)
NAMES = (
    ANY,
    *dict.fromkeys(c.name.partition("-")[0] for c in CONSUMERS),
    *(c.name for c in CONSUMERS),
)


def consumers_named(name: str) -> tuple[Consumer, ...]:
    """One consumer, all of a family (`kata`, `containerd`, `podman`), or all.

    Raises:
        UsageError: nobody is called so.

    """
    found = tuple(c for c in CONSUMERS if name in (ANY, c.name, c.name.partition("-")[0]))
    if not found:
        message = f"{name!r} is no consumer of CDI that vfiomgr knows"
        raise UsageError(message, f"name one of {', '.join(NAMES)}")
    return found
