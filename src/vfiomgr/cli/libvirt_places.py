"""Where the XML of a domain comes from, and where it goes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from vfiomgr.adapters.libvirt.document import read_document
from vfiomgr.cli.layout_files import STANDARD_INPUT, source_of
from vfiomgr.errors import UsageError
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
    def is_pipe(self) -> bool:
        """Whether the text itself is what is printed."""
        return self.target == STANDARD_INPUT

    def read(self) -> Document:
        """The domain as it is.

        Raises:
            UsageError: it cannot be read.
            InvalidDocument: it is no XML.

        """
        try:
            if self.path == STANDARD_INPUT:
                text = sys.stdin.buffer.read()
            else:
                with open(self.path, "rb") as file:
                    text = file.read()
        except OSError as error:
            message = f"cannot read the domain {self.path}: {error.strerror}"
            remedy = "name a file that is there, or - for a pipe; virsh dumpxml makes one"
            raise UsageError(message, remedy) from None
        return read_document(text, source_of(self.path))

    def write(self, before: bytes, after: bytes) -> None:
        """Put the text where it is to go; a file that is so already is left alone.

        Raises:
            UsageError: that is a file of libvirt's own.
            HostError: it cannot be written.

        """
        if self.is_pipe:
            click.echo(after, nl=False)
        elif self.output is not None:
            rewrite(self.output, None, after)
        elif after != before:
            _refuse_own_file(self.path)
            rewrite(self.path, before, after)


def _refuse_own_file(path: str) -> None:
    """Leave the files alone that libvirtd keeps in memory, and writes when it likes.

    Raises:
        UsageError: it is one.

    """
    directory, name = os.path.split(os.path.realpath(path))
    if directory.endswith(_OWN_DIRECTORY):
        guest = name.removesuffix(".xml")
        message = f"{path} is libvirt's own: it does not read it again, and overwrites it"
        remedy = f"virsh dumpxml --inactive {guest} > {guest}.xml, edit that, virsh define it"
        raise UsageError(message, remedy)
