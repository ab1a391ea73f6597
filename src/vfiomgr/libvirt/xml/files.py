"""Files with the XML of a domain, as users name them."""

from __future__ import annotations

import sys

from vfiomgr.documents.named_file import STANDARD_INPUT, source_of
from vfiomgr.errors import InvalidDocument, UsageError

MOST_BYTES = 10 << 20
"""What virsh reads of a file, too (VSH_MAX_XML_FILE of tools/vsh.h)."""
_REMEDY = "name a file that is there, or - for a pipe; virsh dumpxml makes one"


def read_xml(path: str, remedy: str = _REMEDY) -> bytes:
    """A file byte by byte, as long as a domain's may be.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: it is longer, or never ends.

    """
    try:
        if path == STANDARD_INPUT:
            text = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with open(path, "rb") as file:
                text = file.read(MOST_BYTES + 1)
    except OSError as error:
        message = f"cannot read the domain {path}: {error.strerror}"
        raise UsageError(message, remedy) from None
    if len(text) > MOST_BYTES:
        message = f"{source_of(path)} has more than {MOST_BYTES >> 20} MiB: it is no domain's XML"
        raise InvalidDocument(message, "virsh reads no longer ones either; is it the right file?")
    return text
