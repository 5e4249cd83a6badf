"""A real SLURM of two nodes on this machine, from Debian's packages; everything it writes is in one folder.

munged, slurmctld and two slurmd, each on a port of its own. Nothing of a SLURM that may run here already is touched.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.free_port import free_port

PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
"""Program → the Debian package that brings it."""
NODES = ("n1", "n2")
_SBIN = "/usr/sbin:/sbin"  # not on the path of every user

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credentials of its last start have expired; the default is two minutes.
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
SlurmctldDebug=verbose
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
# A save on a busy machine may outlast the minute that is the shortest time limit.
OverTimeLimit=3
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=8 RealMemory=1000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=8 RealMemory=1000 Gres=gpu:1
# A node that says nothing for so long is down, and its job goes back into the queue.
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# The signal that a job asks for before its time limit is also sent when its seconds of grace begin.
SlurmctldParameters=preempt_send_user_signal
PartitionName=short Nodes=n1,n2 Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 State=UP PriorityTier=10
"""


def missing_packages() -> list[str]:
    """Debian packages that are not installed, and root's rights for a user who may not start SLURM's daemons."""
    absent = [package for program, package in PACKAGES.items() if _program(program) is None]
    return absent if os.geteuid() == 0 else [*absent, "the rights of root"]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


def _free_ports(count: int) -> list[int]:
    """Different ones."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


class Cluster:
    """Two nodes and their controller.

    Args:
        root: folder of everything; made here, and short enough for a socket in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, *words: object, **environment: str) -> str:
        """Output of sbatch, squeue, scontrol …; fails with what it said."""
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by name."""
        words = self.command("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start(self) -> None:
        """Everything up, both nodes idle.

        Raises:
            AssertionError: not within two minutes; names the logs.
        """
        for folder in ("state", *(f"spool-{node}" for node in NODES)):
            (self.root / folder).mkdir(parents=True)
        self._write_config()
        self._run_munge()
        self._run("slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        self._wait_until_idle()

    def start_node(self, node: str) -> None:
        """Its daemon."""
        self._nodes[node] = self._run("slurmd", "-D", "-N", node)

    def fail_node(self, node: str) -> None:
        """kill −9 of its daemon: to the controller the machine is gone, but what runs on it goes on."""
        self._nodes[node].kill()
        self._nodes[node].wait()

    def stop(self) -> None:
        """Ends the jobs, then the daemons in the opposite order."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, capture_output=True, timeout=120)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _write_config(self) -> None:
        ctld, n1, n2 = _free_ports(3)
        host = socket.gethostname().split(".")[0]
        text = _CONFIG.format(root=self.root, host=host, ctld=ctld, n1=n1, n2=n2)
        (self.root / "slurm.conf").write_text(text)
        # Nothing here uses cgroups, but slurmd loads the plugin; the one of cgroup v1 is content with an empty folder.
        (self.root / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.root}/cgroup\n")
        (self.root / "gres.conf").write_text("NodeName=n1,n2 Name=gpu File=/dev/null\n")

    def _run_munge(self) -> None:
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.root}/munge.{suffix}" for option, suffix in files.items()]
        self._run("munged", "--foreground", "--force", *options)
        _wait(lambda: (self.root / "munge.socket").exists(), "munged did not start", self.root)

    def _run(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        path = _program(program)
        assert path is not None
        with (self.root / f"{program}.out").open("ab") as out:
            daemon = subprocess.Popen([path, *options], env=self.environment, stdout=out, stderr=subprocess.STDOUT)
        self._daemons.append(daemon)
        return daemon

    def _wait_until_idle(self) -> None:
        def is_up() -> bool:
            done = subprocess.run(
                ["sinfo", "-h", "-N", "-p", "short", "-o", "%T"],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            return done.stdout.split() == ["idle"] * len(NODES)

        _wait(is_up, "the nodes did not come up", self.root)


def _wait(is_done: Callable[[], bool], problem: str, root: Path, limit_s: float = 120) -> None:
    end_s = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > end_s:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(root.glob("*.log")))
            raise AssertionError(f"{problem}; {root}\n{logs}")
        time.sleep(0.1)


@contextmanager
def slurm_cluster(root: Path) -> Iterator[Cluster]:
    """A cluster that lives as long as the block."""
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
