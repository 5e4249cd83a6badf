"""What is wrong with the data, counted by reason with the first examples named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from sd_training.log import redacted_values

EXAMPLES_KEPT = 100
"""Named examples per reason; the count goes on."""


class SkippedSample(NamedTuple):
    """One sample, member or shard that could not be used. `key` is empty when the whole shard is meant."""

    shard: str
    key: str
    reason: str
    """`what is wrong` or `what is wrong: details`; problems are counted by the part before the colon."""
    position: int | None = None
    """In the global order of the run, when it was found while training."""


class BadSample(Exception):
    """Raised while one sample is read; the sample is skipped, counted and named. The message is its reason."""


@dataclass
class Problems:
    """Counts by reason, and the first `EXAMPLES_KEPT` of each."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[SkippedSample]] = field(default_factory=dict)

    def add(self, problem: SkippedSample, count: int = 1) -> None:
        """Counts `problem` as `count` cases and keeps it as an example while there is room."""
        kind = problem.reason.partition(":")[0]
        self.merge(Problems({kind: count}, {kind: [problem]}))

    def merge(self, other: Problems) -> None:
        """Adds the counts and examples of `other`."""
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            named = self.examples.setdefault(kind, [])
            named.extend(other.examples.get(kind, [])[: EXAMPLES_KEPT - len(named)])

    def forget(self, kind: str) -> None:
        """Removes a reason with its examples."""
        self.counts.pop(kind, None)
        self.examples.pop(kind, None)

    def total(self) -> int:
        """Cases of all reasons."""
        return sum(self.counts.values())

    def named(self) -> Iterator[SkippedSample]:
        """All kept examples."""
        return chain.from_iterable(self.examples.values())

    def text(self) -> str:
        """One line: `caption missing 32 (first: a.tar 000001), …`, most frequent first; empty without problems."""
        lines = []
        for kind, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            shard, key, reason, _ = self.examples[kind][0]
            details = reason.partition(":")[2]
            first = printable(" ".join(filter(None, (shard, key))) + (f",{details}" if details else ""))
            lines.append(f"{kind} {count:,} (first: {first})")
        return "; ".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values without secrets, to be written; `from_json` is the way back."""
        return {"counts": self.counts, "examples": redacted_values(self.examples)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Problems:
        """The inverse of `to_json`."""
        examples = {kind: [SkippedSample(*p) for p in named] for kind, named in value["examples"].items()}
        return cls(dict(value["counts"]), examples)


def printable(text: str, limit: int = 300) -> str:
    """`text` from outside made safe for a terminal: control characters escaped, length capped."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
    escaped = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped)
    return escaped if len(escaped) <= limit else f"{escaped[: limit - 1]}…"
