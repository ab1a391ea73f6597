"""What fakes of the kubelet share: calls whose errors say when their channel was closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable

_CLOSED = "the connection is closing"


async def answer(call: Awaitable[Any]) -> Any:
    """The answer to a call; raises AioRpcError, as in Go also if the channel is closed.

    Python's gRPC cancels the caller then, as if its task had been cancelled.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        nothing = grpc.aio.Metadata()
        code = grpc.StatusCode.CANCELLED
        raise grpc.aio.AioRpcError(code, nothing, nothing, _CLOSED, "") from None
