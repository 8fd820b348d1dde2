"""A SLURM of its own on one machine: munged, slurmctld and two slurmd, on free ports, in a folder.

Nothing is installed and nothing outside the folder is written; what was started is ended by its
number. It needs Debian's ``slurm-wlm`` and ``munge``, and root, as slurmd does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

COMMANDS = "munged slurmctld slurmd srun sbatch scontrol squeue scancel sacct".split()
SBIN = "/usr/sbin"

# cred_expire: a job that was put back into the queue waits until its credentials have expired.
SLURM_CONF = """\
ClusterName=penstock
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
KillWait=20
InactiveLimit=0
MinJobAge=300
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=2000
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"


def missing() -> str | None:
    """Why there can be no cluster here."""
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    absent = [name for name in COMMANDS if shutil.which(name, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": f"{os.environ['PATH']}:{SBIN}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def start(self) -> None:
        ports = _free_ports(3)
        (self.folder / "state").mkdir()
        settings = dict(zip(("controller", "first", "second"), ports, strict=True))
        text = SLURM_CONF.format(host=socket.gethostname(), folder=self.folder, **settings)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        own = {name: f"{self.folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._daemon(
            "munged", "--foreground", "--force", "--num-threads=1", f"--key-file={key}",
            f"--socket={own['socket']}", f"--pid-file={own['pid']}",
            f"--log-file={own['log']}", f"--seed-file={own['seed']}",
        )  # fmt: skip
        self.wait("munged", lambda: Path(own["socket"]).exists())
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        self.wait("two idle nodes", lambda: self.idle() == 2)

    def idle(self) -> int:
        return self.say("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split(
        ).count("idle")  # fmt: skip

    def say(self, *command: str) -> str:
        """What a command says, "" where it fails."""
        ended = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return ended.stdout if ended.returncode == 0 else ""

    def wait(self, what: str, done: Callable[[], object], seconds: float = 150.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            for daemon in self._daemons:
                assert daemon.poll() is None, f"{daemon.args!r} ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"no {what} in {seconds} s\n{self.logs()}"
            time.sleep(0.1)

    def stop(self) -> None:
        self.say("scancel", "--user=root")
        deadline = time.monotonic() + 20
        while self.say("squeue", "--noheader").strip() and time.monotonic() < deadline:
            time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self._left():
            os.kill(process, signal.SIGKILL)

    def _left(self) -> Iterable[int]:
        """Steps and their processes that outlived the daemons: all inherit our SLURM_CONF."""
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
            except psutil.Error:
                continue
            if ours and process.pid != os.getpid():
                yield process.pid

    def logs(self) -> str:
        parts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join(parts)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.{len(self._daemons)}.said.log").open("wb") as said:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
