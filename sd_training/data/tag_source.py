"""Tag folders as LunNova's trainer reads them: `metadata/**.json` name an image, its score and its tags.

Which samples take part is decided when the folder is indexed (`tag_rules.judge`); the caption is put together anew at
every visit.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sd_training.data.byte_files import Access
from sd_training.data.file_reader import FileReader
from sd_training.data.file_samples import FileSample, ImageInfo, SampleColumns, measure
from sd_training.data.index import DatasetIndex
from sd_training.data.locations import local_folders
from sd_training.data.problems import Problems
from sd_training.data.source import Unit, UnitScan
from sd_training.data.tag_rules import (
    TagRecord,
    TagRules,
    considered,
    judge,
    judge_aspect,
    judged_by,
    read_tag_record,
    write_tags,
)
from sd_training.errors import DataError

METADATA = "metadata"


class TagSource:
    """The source of tag folders; one unit per folder of JSON files.

    Args:
        folders: roots, each with a folder `metadata`; paths in the JSON files start there.
        access: of the images.
        rules: which samples take part.
    """

    def __init__(self, folders: Sequence[str], access: Access, rules: TagRules) -> None:
        self.roots = [Path(folder) for folder in local_folders(folders)]
        self.access, self.rules = access, rules

    @property
    def identity(self) -> str:
        return json.dumps(["tags", list(map(str, self.roots)), judged_by(self.rules)])

    def units(self) -> list[Unit]:
        units = [unit for root in self.roots for unit in _units_below(root)]
        if not units:
            raise DataError(f"dataset.params.path: there is no .json file below '{self.roots[0] / METADATA}'")
        return units

    def scan(self, unit: Unit) -> UnitScan:
        """As `Source.scan`."""
        folder, problems = Path(unit.location), Problems()
        root, columns = self._root_of(folder), SampleColumns(unit.location, problems)
        taken = self._considered(root)
        records = []
        for path in _json_files(folder):
            if path.relative_to(root).as_posix() in taken:
                record = self._judged(path, columns)
                records += [] if record is None else [(path.relative_to(root).as_posix(), record)]
        infos = measure([str(root / record.path) for _, record in records], self.access)
        pairs = zip(records, infos, strict=True)
        columns.add([s for (key, record), info in pairs if (s := self._sample(key, record, info, columns)) is not None])
        return UnitScan(columns.columns(), problems)

    def _root_of(self, folder: Path) -> Path:
        return next(root for root in self.roots if folder.is_relative_to(root))

    def _considered(self, root: Path) -> set[str]:
        """Every n-th of all files below the root: the whole list decides, so it is read for each unit."""
        names = [path.relative_to(root).as_posix() for folder in _folders(root) for path in _json_files(folder)]
        return set(considered(names, self.rules))

    def _judged(self, path: Path, columns: SampleColumns) -> TagRecord | None:
        try:
            record = read_tag_record(path.read_text(encoding="utf-8", errors="replace"))
            reason = judge(record, self.rules)
        except ValueError as error:
            reason = str(error)
        if reason is None:
            return record
        columns.name(path.name, reason)
        return None

    def _sample(self, key: str, record: TagRecord, info: ImageInfo | None, columns: SampleColumns) -> FileSample | None:
        """Judges by the image itself where the file does not tell the aspect ratio."""
        reason = f"image missing: {record.path}" if info is None else None
        if info is not None and record.aspect_ratio is None and info.height:
            reason = judge_aspect(info.width / info.height, self.rules)
        if reason is not None or info is None:
            columns.name(key, reason or "")
            return None
        tags = write_tags(record)
        score = {"score": float(record.score)}
        return FileSample(
            key, record.path, info, caption=tags, caption_length=len(tags.encode("utf-8", "replace")), metadata=score
        )

    def reader(self, index: DatasetIndex) -> FileReader:
        return FileReader(index, self.access, [str(self._root_of(Path(unit.location))) for unit in index.units])


def _units_below(root: Path) -> Iterator[Unit]:
    for folder in _folders(root):
        if files := _json_files(folder):
            digest, total = hashlib.sha256(), 0
            for path in files:
                status = path.stat()
                total += status.st_size
                digest.update(
                    f"{path.name}\n{status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
                )
            yield Unit(str(folder), total, digest.hexdigest())


def _folders(root: Path) -> list[Path]:
    """All folders at and below `metadata`, sorted."""
    return sorted(Path(folder) for folder, _, _ in os.walk(root / METADATA))


def _json_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))
