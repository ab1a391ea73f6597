"""What the source of one release says about its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


class UnreadableSourceError(Exception):
    """The source has something that these readers do not understand."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a release reads the value of a key."""

    type: str
    """As in `vfiomgr.kata.model.KeyType`."""
    range: str = ""
    """Of an integer: `u32`, `i8`; empty where all 64 bits of TOML's own are taken."""
    unit: str = ""
    """`ms` or `s`, where the source of the release says it and the name of the key does not."""


@dataclass(slots=True)
class Configuration:
    """The keys of one runtime in one release."""

    keys: dict[tuple[str, str], Form] = field(default_factory=dict)
    """By section and name; the name of a hypervisor or an agent is no part of a section."""
    strict: set[str] = field(default_factory=set)
    """Sections in which an unknown key makes the runtime refuse the file."""
    annotations: set[str] = field(default_factory=set)
    """What a pod can annotate of the hypervisor's: io.katacontainers.config.hypervisor.NAME."""

    def add(self, section: str, key: str, form: Form) -> None:
        """Add a key.

        Raises:
            UnreadableSourceError: two fields have the same name in the file.

        """
        if (section, key) in self.keys:
            message = f"{key} in [{section}] is declared twice"
            raise UnreadableSourceError(message)
        self.keys[section, key] = form
