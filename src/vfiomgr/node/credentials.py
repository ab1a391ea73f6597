"""The token of a service account, and the authority of its API server.

The files are those that a pod gets for its service account. The kubelet replaces the token there,
so it is read again for each request.
"""

from __future__ import annotations

import os
import ssl

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.node.model import SERVICE_ACCOUNT

_TOKEN = expression(r"[A-Za-z0-9._~+/-]+=*")


def require_usable(directory: str, option: str) -> None:
    """Read the token and the authority once, before the first request.

    Raises:
        UsageError: one of them cannot be read.
    """
    try:
        authorization(directory)
        trusted(authority(directory))
    except (OSError, ValueError) as error:
        message = f"{option}: cannot use token and ca.crt in {directory}: {error}"
        raise UsageError(message, f"in a pod they are in {SERVICE_ACCOUNT}") from None


def authorization(directory: str) -> dict[str, str]:
    """The header with the present token.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a token (RFC 6750, section 2.1).
    """
    with open(os.path.join(directory, "token"), encoding="ascii") as file:
        token = file.read().strip()
    if not _TOKEN.fullmatch(token):  # its text must not get into messages
        message = "the file token does not contain a bearer token"
        raise ValueError(message)
    return {"Authorization": f"Bearer {token}"}


def authority(directory: str) -> str:
    """The certificates that the API server is verified with.

    Raises:
        OSError: the file cannot be read.
    """
    path = os.path.join(directory, "ca.crt")
    with open(path, encoding="ascii", errors="ignore") as file:
        return file.read()


def trusted(certificates: str) -> ssl.SSLContext:
    """A context that accepts servers of this authority only.

    Raises:
        OSError: a certificate is malformed.
        ValueError: there is none.
    """
    if not certificates:  # an empty text would mean the authorities of the system
        message = "ca.crt is empty"
        raise ValueError(message)
    return ssl.create_default_context(cadata=certificates)
