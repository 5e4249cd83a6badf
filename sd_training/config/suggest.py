"""The known key that a misspelt one most probably meant."""

import difflib
from collections.abc import Iterable

_CLOSE = 0.6
"""Similarity (difflib ratio) from which two names count as close."""


def suggest(key: str, known: Iterable[str]) -> str | None:
    """Nearest known dotted key: a sibling, then the same last name elsewhere, then any key.

    Args:
        key: the unknown dotted key.
        known: every dotted key of the schema, groups included.

    Returns:
        A full dotted key, or None when nothing is close.
    """
    keys = list(known)
    parent, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    namesakes = [k for k in keys if k.rpartition(".")[2] == name]
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=_CLOSE):
        return siblings[near[0]]
    if namesakes:
        return max(namesakes, key=lambda k: difflib.SequenceMatcher(None, key, k).ratio())
    return next(iter(difflib.get_close_matches(key, keys, n=1, cutoff=_CLOSE)), None)
