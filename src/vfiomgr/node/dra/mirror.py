"""The objects of a collection, kept up to date by a watch."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from vfiomgr.node.dra.api import GONE, ApiError, Backoff, Trouble, name_of, version_of
from vfiomgr.node.serving import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vfiomgr.node.dra.api import Api, Change, Collection, Object


class Mirror:
    """The objects as the server stores them, some moments ago.

    A watch that ends is resumed at the last version; if the server has forgotten that version, the
    objects are listed again.
    """

    def __init__(
        self,
        api: Api,
        collection: Collection,
        fields: Mapping[str, str],
        tell: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.objects: dict[str, Object] = {}
        """By `name_of`."""
        self.is_complete = False
        """Whether the objects were listed at least once."""
        self._api, self._collection, self._fields = api, collection, fields
        self._changed = changed
        self._trouble = Trouble(tell)
        self._backoff = Backoff()
        self._version = ""

    async def run(self) -> None:
        """Follow the changes until the task is cancelled."""
        while True:
            pause = 0.0
            try:
                await self._follow()
            except ApiError as error:
                pause = error.retry_after
                if error.status == GONE:
                    self._version = ""
                else:
                    self._trouble.report(text_of(error))
            await asyncio.sleep(pause + self._backoff.pause())

    def note(self, thing: Object) -> bool:
        """Store what the server answered to a request; returns whether it is news.

        An answer can arrive after the events of the watch. An object that the watch should have
        shown by then, but does not, was deleted in the meantime.
        """
        is_known = name_of(thing) in self.objects
        if not is_known and version_of(thing) <= int(self._version or 0):
            return False
        return self._store(thing)

    def forget(self, name: str) -> None:
        """Remove an object that was deleted."""
        self.objects.pop(name, None)

    async def _follow(self) -> None:
        if not self._version:
            await self._list()
        changes = self._api.watch(self._collection, self._version, self._fields)
        async with aclosing(changes):
            async for change in changes:
                self._backoff.reset()
                self._trouble.end()
                self._apply(change)

    async def _list(self) -> None:
        listing = await self._api.list(self._collection, self._fields)
        version = int(listing.version)
        held = self.objects.values()
        self.objects = {name_of(each): each for each in held if version_of(each) > version}
        for thing in listing.objects:
            self._store(thing)
        self._version, self.is_complete = listing.version, True
        self._changed()

    def _apply(self, change: Change) -> None:
        self._version = str(version_of(change.object))
        if change.type == "DELETED":
            is_news = self._drop(change.object)
        else:
            is_news = change.type != "BOOKMARK" and self._store(change.object)
        if is_news:
            self._changed()

    def _store(self, thing: Object) -> bool:
        """Store an object unless a newer one is stored; returns whether it is news."""
        held = self.objects.get(name_of(thing))
        if held is not None and version_of(held) >= version_of(thing):
            return False
        self.objects[name_of(thing)] = thing
        return True

    def _drop(self, thing: Object) -> bool:
        """Remove an object unless it was created again since."""
        held = self.objects.get(name_of(thing))
        if held is None or version_of(held) > version_of(thing):
            return False
        self.forget(name_of(thing))
        return True
