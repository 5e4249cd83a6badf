"""Which members of a tar shard belong to one sample."""

from collections.abc import Iterator, MutableMapping, Set
from typing import Any

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp"})


class Groups:
    """Tells the members of a sample from those of a later sample with the same key.

    Members of a sample need not be neighbours, so the second sample shows itself only when a name, or a role that an
    earlier run of neighbours has filled, comes again. What its own run gave until then is taken back.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._repeating: set[str] = set()
        self._key = ""
        self._run: dict[str, str] = {}
        """Role → name of the members of `_key` since another key was there."""

    def repeated(self, key: str, role: str, name: str, spans: MutableMapping[str, Any]) -> list[str]:
        """Looks at the next member.

        Args:
            key: of its sample.
            role: of the member in the sample.
            name: of the member.
            spans: by role, what the sample has; loses what is of the second sample.

        Returns:
            Names of members that must be left out: this one, and perhaps others before it. Empty where all is well.
        """
        if key != self._key:
            self._key, self._run = key, {}
        is_new = name not in self._names
        self._names.add(name)
        if key in self._repeating or (is_new and role in self._run):  # `1.jpg 1.png`: two images of one sample
            return [name]
        if is_new and role not in spans:
            self._run[role] = name
            return []
        self._repeating.add(key)
        begun = self._run if len(self._run) < len(spans) else {}
        for taken in begun:
            del spans[taken]
        return [*begun.values(), name]


class IgnoredMembers:
    """Members of extensions that are none of ours."""

    def __init__(self) -> None:
        self.first = ""
        """The first one's name."""
        self._images: list[tuple[str, str, str]] = []
        self._captioned: set[str] = set()

    def add(self, name: str, key: str, extension: str) -> None:
        """Takes note of a member."""
        self.first = self.first or name
        stem, _, kind = name.rpartition(".")
        if kind.lower() in IMAGE_EXTENSIONS:
            self._images.append((name, key, extension))
        elif kind.lower() == "txt":
            self._captioned.add(stem)

    def images(self, with_image: Set[str]) -> Iterator[tuple[str, str]]:
        """Name and extension of images that seem meant as samples: with a caption, or without a sample to belong to.

        Args:
            with_image: keys of the samples that have an image.
        """
        for name, key, extension in self._images:
            if name.rpartition(".")[0] in self._captioned or key not in with_image:
                yield name, extension
