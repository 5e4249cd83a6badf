"""`incidents.jsonl` in the run folder: a line for each thing that went wrong and that the run survived."""

import json
import time
from pathlib import Path

from sd_training.log import get_logger
from sd_training.redaction import redacted_values

log = get_logger(__name__)

FILE_NAME = "incidents.jsonl"


def note_incident(run_dir: Path, kind: str, step: int, **facts: object) -> None:
    """Appends a line, if there is space for a line.

    Args:
        run_dir: the run folder.
        kind: what happened, in words.
        step: optimizer steps completed.
        facts: further entries; JSON.
    """
    incident = {"kind": kind, "optimizer_step": step, "time_unix_s": int(time.time()), **facts}
    try:
        with (run_dir / FILE_NAME).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(redacted_values(incident)) + "\n")
    except OSError as error:
        log.error(f"an incident ({kind}) could not be written to {run_dir / FILE_NAME}: {error.strerror}")
