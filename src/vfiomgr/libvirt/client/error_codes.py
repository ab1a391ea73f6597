"""What libvirt reports of an error: its code and its domain (include/libvirt/virterror.h)."""

from __future__ import annotations

from enum import IntEnum

from vfiomgr.value import Value


class Code(IntEnum):
    """virErrorNumber, as far as causes are known."""

    INTERNAL_ERROR = 1
    NO_SUPPORT = 3
    NO_CONNECT = 5
    INVALID_ARG = 8
    OPERATION_FAILED = 9
    NO_NAME = 21
    XML_ERROR = 27
    OPERATION_DENIED = 29
    XML_DETAIL = 35
    SYSTEM_ERROR = 38
    RPC = 39
    NO_DOMAIN = 42
    AUTH_FAILED = 45
    NO_NODE_DEVICE = 53
    OPERATION_INVALID = 55
    CONFIG_UNSUPPORTED = 67
    OPERATION_TIMEOUT = 68
    HOOK_SCRIPT_FAILED = 70
    ARGUMENT_UNSUPPORTED = 74
    AUTH_CANCELLED = 79
    NO_DOMAIN_METADATA = 80
    ACCESS_DENIED = 88
    XML_INVALID_SCHEMA = 92
    AUTH_UNAVAILABLE = 94
    DEVICE_MISSING = 99


class ErrorDomain(IntEnum):
    """virErrorDomain, the part of libvirt that reports an error, as far as it shows the cause."""

    NONE = 0
    RPC = 7
    QEMU = 10
    NODEDEV = 22


class ReportedError(Value):
    """An error as libvirt reports it; `errno` is -1 if no system call failed."""

    code: int
    text: str
    domain: int = ErrorDomain.NONE
    errno: int = -1
