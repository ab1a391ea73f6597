"""Where the XML of a domain comes from, and where it goes."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.adapters.libvirt.document import read_document
from vfiomgr.cli.layout_files import STANDARD_INPUT, source_of
from vfiomgr.cli.libvirt_connection import DEFAULT_URI, connected
from vfiomgr.cli.libvirt_files import read_xml
from vfiomgr.cli.output import print_text
from vfiomgr.errors import HostError, UsageError
from vfiomgr.host.rewrite import rewrite

if TYPE_CHECKING:
    from vfiomgr.adapters.libvirt.document import Document

_OWN_DIRECTORY = "/libvirt/qemu"


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A file, or a pipe; `output` is where the text goes instead."""

    path: str
    output: str | None = None

    @property
    def target(self) -> str:
        """Where the text goes; what was piped in is piped out."""
        return self.path if self.output is None else self.output

    @property
    def argument(self) -> str:
        """What a command names it by, as a shell takes it."""
        return shlex.quote(self.target)

    @property
    def is_pipe(self) -> bool:
        """Whether the text itself is what is printed."""
        return self.target == STANDARD_INPUT

    def read(self) -> Document:
        """The domain as it is.

        Raises:
            UsageError: it cannot be read.
            InvalidDocument: it is no XML.

        """
        return read_document(read_xml(self.path), source_of(self.path))

    def write(self, before: bytes, after: bytes) -> None:
        """Put the text where it is to go; a file that is so already is left alone.

        Raises:
            UsageError: that is a file of libvirt's own.
            HostError: it cannot be written.

        """
        if self.is_pipe:
            print_text(after)
        elif self.output is not None:
            _refuse_own_file(self.output)
            rewrite(self.output, None, after)
        elif after != before:
            _refuse_own_file(self.path)
            rewrite(self.path, before, after)


@dataclass(frozen=True, slots=True)
class DomainPlace:
    """The definition that a libvirt has; a running guest has a new one once it is started anew."""

    name: str
    uri: str
    with_secrets: bool
    """Whether passwords are read, too: what is defined without them would lose them."""

    @property
    def argument(self) -> str:
        """What a command names it by, as a shell takes it."""
        words = [self.name] if self.uri == DEFAULT_URI else [self.name, "--connect", self.uri]
        return shlex.join(words)

    @property
    def is_pipe(self) -> bool:
        """Never: it is defined."""
        return False

    def read(self) -> Document:
        """The domain as it is defined.

        Raises:
            UsageError: there is no such domain, or no libvirt.

        """
        with connected(self.uri, read_only=not self.with_secrets) as connection:
            text = connection.domain_xml(self.name, secure=self.with_secrets)
        return read_document(text, self.name)

    def write(self, before: bytes, after: bytes) -> None:
        """Define the domain anew, where it differs.

        Raises:
            InvalidDocument: libvirt cannot read it, or would drop a part of it.
            HostError: it was defined anew meanwhile.

        """
        if after == before:
            return
        with connected(self.uri) as connection:
            if connection.domain_xml(self.name, secure=True) != before:
                message = f"{self.name} was defined anew meanwhile, and not by this command"
                raise HostError(message, "look at it, then run the command again")
            connection.define(after, self.name)


def place_of(
    target: str, output: str | None, uri: str, *, is_change: bool
) -> FilePlace | DomainPlace:
    """What a user names: a file is there, has a / or ends in .xml; else it is a domain.

    Raises:
        UsageError: a domain's text is to go to a file.

    """
    is_file = "/" in target or target.endswith(".xml") or os.path.exists(target)
    if is_file or target == STANDARD_INPUT:
        return FilePlace(target, output)
    if output is not None:
        message = f"--output is about files, and {target} is a domain of libvirt's"
        remedy = f"virsh dumpxml --inactive {shlex.quote(target)} | vfiomgr libvirt edit - …"
        raise UsageError(message, remedy)
    return DomainPlace(target, uri, with_secrets=is_change)


def _refuse_own_file(path: str) -> None:
    """Leave the files alone that libvirtd keeps in memory, and writes when it likes.

    Raises:
        UsageError: it is one.

    """
    directory, name = os.path.split(os.path.realpath(path))
    if directory.endswith(_OWN_DIRECTORY):
        guest = name.removesuffix(".xml")
        message = f"{path} is libvirt's own: it does not read it again, and overwrites it"
        remedy = f"change what libvirt has: vfiomgr libvirt edit {shlex.quote(guest)} …"
        raise UsageError(message, remedy)
