"""The readers of CDI specifications, their libraries, and how one bad file affects them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.scalars import Family

ANY = "any"


class Consumer(Value):
    """A program that reads specifications.

    The Go library is tags.cncf.io/container-device-interface, the Rust library is the crate
    container-device-interface; the version is that of the newest CDI that they support (go.mod and
    Cargo.lock at the tags; Debian builds with its own library).
    """

    name: str
    title: str
    library: Version
    is_rust: bool = False
    is_kata: bool = False
    """Whether one unreadable file, or a duplicate name, makes all requests for CDI devices fail.

    Go: WithCDI of Kata's src/runtime returns the error of Refresh, which others only log. Rust: so
    does handle_cdi_devices of pod-resources-rs, and its cache also stops at the first such file."""

    @property
    def family(self) -> Family:
        """The family of its library."""
        return "rust" if self.is_rust else "go"

    @property
    def ignores_unknown_keys(self) -> bool:
        """Whether the library ignores unknown keys: only the crate before 1.0."""
        return self.is_rust and self.library < Version(1, 0)

    @property
    def checks_edits(self) -> bool:
        """Whether a device without edits is refused: by all except the crate before 1.0."""
        return not self.ignores_unknown_keys

    @property
    def refuses_node_types(self) -> bool:
        """Whether a valid node type is refused: the crate before 1.0 has the test inverted."""
        return self.ignores_unknown_keys

    @property
    def prefers_static(self) -> bool:
        """Which directory wins if both have a name: the crate gets them in reverse order."""
        return self.is_rust

    def __str__(self) -> str:
        """`Kata's Go runtime (CDI library 0.6)`."""
        kind = "crate" if self.is_rust else "library"
        return f"{self.title} (CDI {kind} {self.library.major}.{self.library.minor})"


CONSUMERS = (
    Consumer("kata-go", "Kata's Go runtime", Version(0, 6), is_kata=True),
    Consumer("kata-rs-3.31", "Kata's runtime-rs 3.31", Version(0, 7), is_rust=True, is_kata=True),
    Consumer("kata-rs", "Kata's runtime-rs", Version(1, 1), is_rust=True, is_kata=True),
    Consumer("containerd-1.7", "containerd 1.7", Version(0, 5, 4)),
    Consumer("containerd-1.7.12", "containerd 1.7.12", Version(0, 6)),
    Consumer("containerd-1.7.16", "containerd 1.7.16", Version(0, 7)),
    Consumer("containerd-1.7.27", "containerd 1.7.27", Version(0, 8)),
    Consumer("containerd-2.0", "containerd 2.0", Version(0, 8)),
    Consumer("containerd-2.1", "containerd 2.1", Version(1, 0)),
    Consumer("containerd-2.3", "containerd 2.3", Version(1, 1)),
    Consumer("podman-4.3", "Podman 4.3", Version(0, 5, 2)),
    Consumer("podman-4.9", "Podman 4.9", Version(0, 6)),
    Consumer("podman-5.4", "Podman 5.4", Version(0, 8)),
    Consumer("podman-5.8", "Podman 5.8", Version(1, 0)),
)
"""Each name stands for that release and later ones: runtime-rs has crate 0.1.2 up to 3.32 and
1.1.1 since 4.0, containerd-2.1 is 2.0.5 to 2.2.0, and containerd-2.3 is 2.2.1 and later."""
NAMES = (
    ANY,
    *dict.fromkeys(c.name.partition("-")[0] for c in CONSUMERS),
    *(c.name for c in CONSUMERS),
)


def consumers_named(name: str) -> tuple[Consumer, ...]:
    """One consumer, all of a family (`kata`, `containerd`, `podman`), or all.

    Raises:
        UsageError: there is no such consumer.

    """
    found = tuple(c for c in CONSUMERS if name in (ANY, c.name, c.name.partition("-")[0]))
    if not found:
        message = f"unknown CDI consumer: {name!r}"
        raise UsageError(message, f"use one of {', '.join(NAMES)}")
    return found
