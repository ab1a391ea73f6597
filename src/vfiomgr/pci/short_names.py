"""Names of devices as people say them: `NVIDIA A40`, for `NVIDIA Corporation GA102GL [A40]`."""

from __future__ import annotations

import re
from functools import lru_cache

_COMPANY = frozenset(
    {
        *("ag", "co", "communications", "company", "corp", "corporation", "electronics", "gmbh"),
        *("group", "inc", "international", "limited", "llc", "ltd", "semiconductor", "systems"),
        *("technologies", "technology", "and", "subsidiaries"),
    }
)
"""Words after the name of a maker in pci.ids that are not part of what people call it."""
_WORD = re.compile(r"\S+\s*")
_BRACKET = re.compile(r"\[([^\[\]]+)\]\s*")
_LAST_BRACKET = re.compile(r"(.+?)\s*\[([^\[\]]+)\]")
_MOST_WORDS = 4
"""Within so many words the name of a maker ends."""


@lru_cache(maxsize=4096)
def short_name(name: str, *, has_marketing_name: bool) -> str:
    """The maker without its legal form, and the model.

    With `has_marketing_name` the model is what stands in brackets at the end: that is so in pci.ids
    of GPUs and network adapters, while others have modes, revisions and code names there.
    """
    maker, model = maker_and_model(name)
    if maker and has_marketing_name and (found := _LAST_BRACKET.fullmatch(model)):
        model = found[2]
    is_named_twice = model.casefold().startswith(maker.casefold())
    return model if is_named_twice else f"{maker} {model}".strip()


def maker_and_model(name: str) -> tuple[str, str]:
    """The maker as people call it (`AMD` for `Advanced Micro Devices, Inc. [AMD/ATI]`), the model.

    Where no legal form shows the end of the maker's name, all of it is the model.
    """
    words = [word[0] for word in _WORD.finditer(name)]
    first = next((i for i, word in enumerate(words[:_MOST_WORDS]) if i and _is_form(word)), None)
    if first is None:
        return "", name
    last = first
    while last + 1 < len(words) and _is_form(words[last + 1]):
        last += 1
    maker = "".join(words[:first]).rstrip(" ,/")
    model = "".join(words[last + 1 :])
    if called := _BRACKET.match(model):
        maker, model = called[1].partition("/")[0], model[called.end() :]
    return (maker, model) if model else ("", name)


def _is_form(word: str) -> bool:
    parts = re.split(r"[.,]+", word.strip().casefold().rstrip(".,"))
    return all(part in _COMPANY for part in parts)
