"""The batch files, run by bash with stand-ins for SLURM's programs that write down how they were called."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import make_sbatch
from sd_training.build.plan import balanced_encoders
from sd_training.config.load import load_config
from sd_training.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BATCH_FILES = sorted((ROOT / "batch_files").glob("multinode-*.sbatch"))
TEMPLATE = ROOT / "batch_files/multinode-template.sbatch"
CONFIG = ["config=configs/finetune_config.yaml", "model.pretrained=m", "experiment.num_examples_to_see=6400"]
CONFIG += ["dataset.params.path=d"]

STAND_INS = {
    "scontrol": r"""case "$2" in
hostnames) echo "$3" | tr , '\n' ;;
node) echo "NodeName=$3 NodeAddr=127.0.0.2 NodeHostName=x" ;;
*) echo "$*" >> "$CALLS/scontrol" ;;
esac""",
    "srun": r"""printf '%s\0' "$@" > "$CALLS/srun"
env > "$CALLS/environment"
[ -z "$STEP" ] || echo "$STEP" > "$SD_TRAINING_STEP_FILE"
[ -z "$TOLD" ] || echo "$TOLD" > "$SD_TRAINING_STATUS_FILE"
[ -z "$LEFT" ] || echo 75 > "$LEFT"
exit "$STATUS" """,
}


class Job:
    """A job that is started again and again."""

    def __init__(self, folder: Path, job_id: int = 100) -> None:
        self.folder, self.job_id, self.num_starts = folder, job_id, 0
        (folder / "bin").mkdir()
        for name, body in STAND_INS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / "bin" / name).chmod(0o755)

    def start(
        self, batch: Path, status: int = 0, step: int | None = None, told: object = "", **environment: str
    ) -> str:
        """Runs the file with an srun that ends with `status` and leaves `step` and the status `told`; its output."""
        slurm = {"JOB_ID": str(self.job_id), "JOB_NODELIST": "n7,n8", "NTASKS": "16", "JOB_NUM_NODES": "2"}
        slurm |= {"RESTART_COUNT": str(self.num_starts)} if self.num_starts else {}
        self.num_starts += 1
        slurm |= {"CPUS_PER_TASK": "6", "SUBMIT_DIR": str(self.folder)}
        variables = {f"SLURM_{name}": value for name, value in slurm.items()} | environment
        variables |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(self.folder)}
        variables |= {"STATUS": str(status), "STEP": "" if step is None else str(step), "TOLD": str(told)}
        variables = {"LEFT": ""} | variables
        done = subprocess.run(["bash", batch], cwd=self.folder, env=variables, capture_output=True, text=True)
        self.status = done.returncode
        return done.stdout + done.stderr

    def srun(self) -> list[str]:
        """The words after srun."""
        return (self.folder / "srun").read_text().split("\0")[:-1]

    def variable(self, name: str) -> str:
        """What the processes of the run would see."""
        lines = (self.folder / "environment").read_text().splitlines()
        return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}="))

    def requeued(self) -> int:
        path = self.folder / "scontrol"
        return path.read_text().splitlines().count(f"requeue {self.job_id}") if path.exists() else 0


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def sections(path: Path) -> dict[str, str]:
    first, *others = path.read_text(encoding="utf-8").split("\n# ---- ")
    return {text.partition(" -")[0]: text for text in others} | {"directives": first[first.index("#SBATCH") :]}


def test_what_the_files_share_is_the_same_in_all() -> None:
    assert len(BATCH_FILES) == 3
    template = sections(TEMPLATE)
    for path in BATCH_FILES:
        theirs = sections(path)
        for name in set(template) - {"edit these"}:
            assert theirs[name] == template[name], f"{path.name}: {name}"


@pytest.mark.parametrize("batch", BATCH_FILES, ids=lambda path: path.stem)
def test_every_file_works_alone(batch: Path, job: Job) -> None:
    job.start(batch, status=7, RUN_CONFIG="a b.yaml", RUN_CONTAINER="i.sif")
    assert job.status == 7 and job.requeued() == 0  # the job fails when the run fails
    words = job.srun()
    assert words[:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=6"]
    assert words[-3:] == ["-u", "train.py", "config=a b.yaml"]
    assert job.variable("MASTER_ADDR") == "127.0.0.2" and job.variable("OMP_NUM_THREADS") == "1"
    if "efa" in batch.name:
        assert job.variable("FI_PROVIDER") == "efa" and words[2:4] == ["--cpu-bind=verbose", "--accel-bind=n"]


def test_the_job_beside_a_run(job: Job) -> None:
    """`scripts/evaluate.py --watch` on all GPUs of the job; without a run the job says what is missing."""
    batch = ROOT / "batch_files/evaluate.sbatch"
    assert "RUN_DIR: the folder of the run" in job.start(batch) and job.status == 1
    job.start(batch, status=3, RUN_DIR="/runs/a b", SLURM_GPUS_ON_NODE="4", RUN_PYTHON="python")
    assert job.status == 3
    words = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    assert job.srun() == [*words, "scripts/evaluate.py", "/runs/a b", "--watch"]


def test_a_stopped_job_goes_back_into_the_queue_while_it_makes_progress(job: Job) -> None:
    for start, (status, step) in enumerate(((75, 40), (87, 80), (75, 81)), start=1):
        assert f"status {status}, saved after {step} optimizer steps" in job.start(TEMPLATE, status, step)
        assert (job.status, job.requeued()) == (status, start)
    for status in (0, 1, 2, 69, 74, 86, 88, 89, 130, 137, 143):
        job.start(TEMPLATE, status, 81)
        assert (job.status, job.requeued()) == (status, 3)
    job.num_starts = 0  # another job, long after, with the same number
    job.start(TEMPLATE, 75, 10)
    assert job.requeued() == 4


def test_a_job_that_makes_no_progress_is_started_again_three_times(job: Job) -> None:
    job.start(TEMPLATE, 75, 10)
    for start, (status, step) in enumerate(((87, None), (75, 10), (87, 9)), start=2):
        job.start(TEMPLATE, status, step)
        assert job.requeued() == start
    job.start(TEMPLATE, 75, 11)  # progress: three more
    for _ in range(3):
        job.start(TEMPLATE, 87, None)
    assert job.requeued() == 8
    for status in (75, 87):
        assert "no progress beyond 11 saved optimizer steps" in job.start(TEMPLATE, status, None)
        assert (job.status, job.requeued()) == (status, 8)


@pytest.mark.parametrize("batch", BATCH_FILES, ids=lambda path: path.stem)
def test_the_status_of_the_run_counts_where_srun_gives_that_of_a_killed_process(batch: Path, job: Job) -> None:
    started = {"RUN_CONTAINER": "i.sif"}
    for step, (status, told) in enumerate(((137, 87), (143, 75), (87, 87), (1, 75)), start=1):
        said = job.start(batch, status, step, told, **started)
        assert f"status {told}, saved after {step} optimizer steps" in said
        assert (job.status, job.requeued()) == (told, step)
        assert ("srun gives" in said) == (status != told)
    for status, told in ((137, 86), (143, 2), (137, 130), (87, 88)):
        job.start(batch, status, 9, told, **started)
        assert (job.status, job.requeued()) == (told, 4)
    for status in (137, 143):  # nothing was written, or nothing that is a status
        for told in ("", "0", "x", "87 x"):
            job.start(batch, status, 9, told, **started)
            assert (job.status, job.requeued()) == (status, 4)
    job.start(batch, 0, 9, 75, **started)
    assert (job.status, job.requeued()) == (0, 4)


def test_the_status_of_an_earlier_start_does_not_count(job: Job) -> None:
    job.start(TEMPLATE, 75, 10, 75)
    job.start(TEMPLATE, 137)
    assert (job.status, job.requeued()) == (137, 1)
    # A process of the first start may live on, on a node that was given up.
    job.start(TEMPLATE, 137, LEFT=str(job.folder / "slurm-100.step.status-0"))
    assert (job.status, job.requeued()) == (137, 1)
    job.num_starts = 0  # another job, long after, with the same number
    job.start(TEMPLATE, 137)
    assert (job.status, job.requeued()) == (137, 1)
    assert [path.name for path in job.folder.glob("slurm-*")] == []


def test_two_jobs_on_a_node_and_a_port_that_is_still_taken(job: Job, tmp_path: Path) -> None:
    def port() -> int:
        job.start(TEMPLATE)
        return int(job.variable("MASTER_PORT"))

    first = port()
    assert 1024 < first < 32768 and port() == first
    listeners = [socket.create_server(address) for address in (("127.0.0.1", first), ("127.0.0.2", first + 1))]
    with open(f"/tmp/sd_training_port_{first + 2}.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another job of this kind holds it
        assert port() == first + 3
    for listener in listeners:
        listener.close()
    job.job_id = 101
    assert port() not in range(first, first + 4)


def test_containers(job: Job) -> None:
    batch = ROOT / "batch_files/multinode-container.sbatch"
    job.start(batch, RUN_CONTAINER="my image.sif", RUN_MOUNTS="/data,/runs")
    launch = ["apptainer", "exec", "--nv", "--pwd", str(job.folder), "--bind", f"{job.folder},/data,/runs"]
    assert job.srun()[2:] == [*launch, "my image.sif", "python", "-u", "train.py", job.srun()[-1]]
    job.start(batch, RUN_CONTAINER="/images/a.sqsh")
    assert job.srun()[2:5] == [
        "--container-image=/images/a.sqsh",
        f"--container-workdir={job.folder}",
        f"--container-mounts={job.folder}:{job.folder}",
    ]
    assert "name an image" in job.start(batch) and job.status == 2


NASTY = [
    "plain",
    "two words",
    "it's",
    'say "x"',
    "$HOME $(touch gone)",
    "`touch gone`",
    "a\\b",
    "*",
    "{000..999}.tar",
    "&;|",
]


@pytest.mark.parametrize("more", [[], ["efa=true"], ["container=$(touch gone) i.sif"]], ids=str)
def test_written_values_reach_the_trainer_as_they_were_given(more: list[str], job: Job) -> None:
    overrides = [*CONFIG[1:], *(f"dataset.params.path={value}" for value in NASTY)]
    given, taken = make_sbatch.read_options([CONFIG[0], *overrides, "nodes=16", "gpus_per_node=4", *more])
    batch = job.folder / "job.sbatch"
    batch.write_text(make_sbatch.batch_file(given, taken, load_config(CONFIG)))
    said = job.start(batch)
    assert job.srun()[-len(overrides) - 1 :] == [CONFIG[0], *overrides], said
    assert not list(job.folder.glob("gone"))
    if "efa=true" not in more and more:
        assert "$(touch gone) i.sif" in job.srun()


def test_directives_are_written_once_each() -> None:
    options = (
        "nodes=16 gpus_per_node=4 cpus_per_gpu=12 time=2-00:00:00 partition=gpu account=me qos=high save_s=90 name=a.b"
    )
    text = make_sbatch.batch_file(
        *make_sbatch.read_options([CONFIG[0], *options.split(), "efa=true", "container=i.sif"]), load_config(CONFIG)
    )
    lines = [line for line in text.splitlines() if line.startswith(("#SBATCH --", "##SBATCH"))]
    expected = (
        "nodes=16 ntasks-per-node=4 gpus-per-node=4 cpus-per-task=12 time=2-00:00:00 partition=gpu account=me qos=high"
    )
    for directive in [*expected.split(), "signal=USR1@90", "job-name=a.b"]:
        assert lines.count(f"#SBATCH --{directive}") == 1, directive
    assert len({line.partition("=")[0] for line in lines}) == len(lines) == 14
    assert "FI_PROVIDER=efa" in text and "apptainer" in text


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("node=16", "did you mean nodes?"),
        ("partitoin=gpu", "did you mean partition?"),
        ("--efa", "did you mean efa?"),
        ("frobnicate=1", "options are config, name, nodes"),
        ("nodes=0", "nodes: '0' is no whole number"),
        ("nodes=２", "is no whole number"),
        ("time=tomorrow", "is no time of SLURM"),
        ("time=0:5:00", "time: 0:5:00 is no longer than save_s, the 300 s"),
        ("time=5", "time: 5 is no longer"),
        ("time=0-0:4", "time: 0-0:4 is no longer"),
        ("partition=a b", "may hold letters"),
        ("account=$(x)", "may hold letters"),
        ("name=a\n#SBATCH --nodes=99", "may hold letters"),
        ("efa=yes", "neither true nor false"),
        ("container=", "container: is empty"),
        ("mounts=/data", "mounts: is for a container"),
        ("config=b.yaml", "config: is given twice"),
    ],
)
def test_wrong_options(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        make_sbatch.read_options([CONFIG[0], option])


def test_encoder_processes_have_no_task(capsys: pytest.CaptureFixture[str]) -> None:
    """The first task of a node starts them."""
    make_sbatch.main([*CONFIG, "distributed.encoders=2"])
    text = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=8\n" in text and "#SBATCH --ntasks-per-node=6\n" in text
    make_sbatch.main([*CONFIG, "distributed.encoders=2", "distributed.encoder_devices=[6,7]", "cpus_per_gpu=9"])
    text = capsys.readouterr().out
    assert "#SBATCH --ntasks-per-node=6\n" in text and "#SBATCH --cpus-per-task=12\n" in text


def test_as_many_encoder_processes_as_keep_up(pipeline_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CONFIG, f"model.pretrained={pipeline_dir}", "dataset.params.resolution=64", "distributed.encoders=auto"]
    number = balanced_encoders(load_config(words), 8)
    assert 0 < number < 7
    make_sbatch.main(words)
    assert f"#SBATCH --ntasks-per-node={8 - number}\n" in capsys.readouterr().out


def test_the_script_checks_the_run_as_well() -> None:
    command = [sys.executable, "scripts/make_sbatch.py", *CONFIG]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "config=" not in done.stdout.split("RUN_CONFIG=")[1].splitlines()[0]
    done = subprocess.run([*command, "dataset.params.resolutoin=3"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "dataset.params.resolution" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpus_per_node=8 distributed.mesh.fsdp=3", "distributed.mesh"),
        ("distributed.strategy=single", "distributed.strategy: single, but 16 processes"),
        ("trainer.devices=4", "trainer.devices: is 4, but 8 GPUs of a node train"),
        ("gpus_per_node=2 distributed.encoders=2", "distributed.encoders: 2 of the GPUs of a node leave none to train"),
        ("nodes=3 trainer.num_nodes=4", "trainer.num_nodes: is 4, but nodes is 3"),
        ("experiment.num_examples_to_see=10", "experiment: a run of 10 images is less than one optimizer step"),
        ("cpus_per_gpu=4 system.workers=4", "system.workers: 4 loader processes .* give at most 3"),
        ("wandb.api_key=abcdefgh12345678", "wandb.api_key: would stand in the batch file"),
    ],
)
def test_a_run_that_does_not_fit_its_batch_file(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_sbatch.main([*CONFIG, *words.split()])
