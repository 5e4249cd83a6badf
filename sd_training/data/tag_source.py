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
from sd_training.data.local_listings import entries_of, exists, folders_below
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

    Hidden files and folders are left out, links are followed, and a folder that cannot be read is an error.

    Args:
        folders: roots, each with a folder `metadata`; paths in the JSON files start there.
        access: of the images.
        rules: which samples take part.
    """

    def __init__(self, folders: Sequence[str], access: Access, rules: TagRules) -> None:
        self.roots = [Path(folder) for folder in dict.fromkeys(local_folders(folders))]
        self.access, self.rules = access, rules

    @property
    def identity(self) -> str:
        return json.dumps(["tags", list(map(str, self.roots)), judged_by(self.rules)])

    def units(self) -> list[Unit]:
        """As `Source.units`."""
        units: dict[str, Unit] = {}
        for root in self.roots:
            below = {unit.location: unit for unit in self._units_below(root)}
            if not below:
                raise DataError(f"dataset.params.path: there is no .json file below '{root / METADATA}'")
            units |= below
        return list(units.values())

    def _units_below(self, root: Path) -> Iterator[Unit]:
        """Units whose version tells which of their files are counted, because that depends on the other folders too."""
        step, num_before = self.rules.consider_every_nth or 1, 0
        for folder in folders_below(str(root / METADATA)) if exists(str(root / METADATA)) else ():
            if files := _json_files(folder):
                states = [(path.name, path.stat()) for path in files]
                lines = "".join(f"{name}\n{state.st_size} {state.st_mtime_ns}\n" for name, state in states)
                digest = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
                version = digest if step == 1 else f"{digest} {num_before % step} of {step}"
                yield Unit(folder, sum(state.st_size for _, state in states), version)
                num_before += len(files)

    def scan(self, unit: Unit) -> UnitScan:
        """As `Source.scan`."""
        folder, problems = Path(unit.location), Problems()
        root, columns = self._root_of(folder), SampleColumns(unit.location, problems)
        records = []
        for path in (folder / name for name in self._considered(unit)):
            record = self._judged(path, columns)
            records += [] if record is None else [(path.relative_to(root).as_posix(), record)]
        infos = measure([str(root / record.path) for _, record in records], self.access)
        pairs = zip(records, infos, strict=True)
        columns.add([s for (key, record), info in pairs if (s := self._sample(key, record, info, columns)) is not None])
        return UnitScan(columns.columns(), problems)

    def _considered(self, unit: Unit) -> list[str]:
        num_before = int((unit.version.split(" ")[1:] or ["0"])[0])
        return considered([path.name for path in _json_files(unit.location)], self.rules, num_before)

    def _root_of(self, folder: Path) -> Path:
        return next(root for root in self.roots if folder.is_relative_to(root / METADATA))

    def _judged(self, path: Path, columns: SampleColumns) -> TagRecord | None:
        try:
            record = read_tag_record(path.read_text(encoding="utf-8-sig", errors="replace"))
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
        roots = [str(self._root_of(Path(unit.location))) for unit in index.units]
        return FileReader(index, self.access, roots, named_by="metadata file")


def _json_files(folder: str) -> list[os.DirEntry[str]]:
    return [entry for entry in entries_of(folder) if entry.name.lower().endswith(".json") and entry.is_file()]
