from pathlib import Path

import pytest

from sd_training.config.data_schema import RemoteConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.storage.files import file_state, open_bytes
from sd_training.errors import DataError
from tests import makers
from tests.unit.data.making import equal_bits, joined, stream, training_data


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return makers.write_shard(tmp_path / "a.tar", makers.caption_samples(8))


def access(tmp_path: Path, num_retries: int = 0) -> RemoteConfig:
    return RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gib=0.1, num_retries=num_retries, timeout_s=5.0)


def counted(tmp_path: Path, shard: Path) -> str:
    """Writes a line into `runs` each time it runs."""
    return f"pipe:echo run >> {tmp_path}/runs; cat {shard}"


def test_the_output_is_read_like_a_file_and_made_once(tmp_path: Path, shard: Path) -> None:
    command = counted(tmp_path, shard)
    state = file_state(command, access(tmp_path))
    assert state.size == shard.stat().st_size
    file = open_bytes(state, access(tmp_path))
    assert file.pread(1000, 700) == shard.read_bytes()[700:1700]
    file.close()
    assert file_state(command, access(tmp_path)) == state
    assert (tmp_path / "runs").read_text() == "run\n"


def test_what_is_not_kept_any_more_is_made_again_and_compared(tmp_path: Path, shard: Path) -> None:
    state = file_state(counted(tmp_path, shard), access(tmp_path))
    for path in (tmp_path / "cache").glob("*.data"):
        path.unlink()
    open_bytes(state, access(tmp_path)).close()
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
    for path in (tmp_path / "cache").glob("*.data"):
        path.unlink()
    makers.write_shard(shard, makers.caption_samples(9))
    with pytest.raises(DataError, match="has changed since it was indexed"):
        open_bytes(state, access(tmp_path))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("cat {shard}; exit 3", "exit status 3"),
        ("cat {shard} | false | cat {shard}", "exit status 1"),
        ("no-such-program x", "exit status 127: .*no-such-program"),
        ("echo no such thing >&2; exit 1", "no such thing"),
    ],
)
def test_a_failure_is_an_error(tmp_path: Path, shard: Path, command: str, reason: str) -> None:
    location = f"pipe:{command.format(shard=shard)}"
    with pytest.raises(DataError, match=reason):
        file_state(location, access(tmp_path))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_run_on_pipes_is_a_run_on_files(tmp_path: Path, shard: Path) -> None:
    plan = BatchPlan(4, 1, 1, 16)
    remote = RemoteConfig(cache_dir=str(tmp_path / "cache"))
    local = joined(stream(training_data(shard, plan)))
    options = {"remote": remote, "allow_pipe": True}
    piped = joined(stream(training_data(f"pipe:cat {shard}", plan, workers=1, **options)))
    assert equal_bits(local, piped)
    with pytest.raises(DataError, match="allow_pipe"):
        training_data(f"pipe:cat {shard}", plan, remote=remote).report()
