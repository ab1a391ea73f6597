"""Remedies that a rule states as values, so that the runner can drop those that are in place."""

from __future__ import annotations

from vfiomgr.diagnostic import Remedy


class Setting(Remedy, kw_only=True):
    """A setting of a file, a module or the kernel command line."""

    present: str | None
    """Its value now; None if it is not set, or unknown."""
    wanted: str

    def is_useful(self, _host: object) -> bool:
        """Whether it has another value."""
        return self.present != self.wanted

    def instead(self, _host: object) -> tuple[Remedy, ...]:
        """Why nothing is left to do with it."""
        if self.present != self.wanted:
            return ()
        return (Remedy(f"{self.wanted} is set already, and nothing else is known to help"),)


def kernel_option(
    word: str, command_line: str | None, before: str = "", then: str = "", joint: str = ", or "
) -> Setting:
    """The remedy to add an option to the kernel command line; `then` follows the option."""
    present = word if word in (command_line or "").split() else None
    text = f"{before}add {word} to the kernel command line{then}"
    return Setting(text, joint=joint, present=present, wanted=word)
