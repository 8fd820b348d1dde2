"""A SLURM of its own on one machine: munged, slurmctld and two slurmd, in a folder.

    munged, slurmctld     198.18.x.254 on a bridge
    n1, n2: slurmd        198.18.x.1 and .2, each with a network, a name and a loopback of its own

The two nodes have the files of this machine, as nodes of a cluster share theirs, and meet by name
over a network as those do: what binds to the wrong address is not heard. Nothing is installed and
nothing outside the folder is written; what was started is ended by its number, and networks end
with the processes that hold them. It needs Debian's ``slurm-wlm``, ``munge`` and ``iproute2``, and
root, as slurmd does.
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
from functools import partial
from pathlib import Path

import psutil

COMMANDS = "munged slurmctld slurmd srun sbatch scontrol squeue scancel sacct ip nsenter".split()
SBIN = "/usr/sbin:/sbin"
NODES = ("n1", "n2")

# cred_expire: a job that was put back into the queue waits until its credentials have expired.
SLURM_CONF = """\
ClusterName=penstock
SlurmctldHost={host}({network}.254)
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
NodeName=n1 NodeAddr={network}.1 Port={slurmd} CPUs=2 RealMemory=2000
NodeName=n2 NodeAddr={network}.2 Port={slurmd} CPUs=2 RealMemory=2000
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"


def missing() -> str | None:
    """Why there can be no cluster here."""
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    absent = [name for name in COMMANDS if shutil.which(name, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge iproute2)"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._bridge = f"pst{os.getpid()}"
        # Of the range that is set aside for tests of networks (RFC 2544).
        self._network = f"198.18.{os.getpid() % 256}"
        self._nodes: dict[str, int] = {}
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": f"{os.environ['PATH']}:{SBIN}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def start(self) -> None:
        (self.folder / "state").mkdir()
        text = SLURM_CONF.format(
            host=socket.gethostname(),
            folder=self.folder,
            network=self._network,
            controller=_free_port(),
            slurmd=_free_port(),
        )
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
        self._connect()
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon(*self.on(node), "slurmd", "-D")
        self.wait("two idle nodes", lambda: self.idle() == 2)

    def on(self, node: str) -> list[str]:
        """The words before a command that runs it on a node."""
        return ["nsenter", f"--target={self._nodes[node]}", "--net", "--uts", "--mount"]

    def _connect(self) -> None:
        """A bridge, and on it each node, which lasts as long as a process that sleeps there."""
        _ip(f"link add name {self._bridge} type bridge")
        _ip(f"address add {self._network}.254/24 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")
        hosts = self.folder / "hosts"
        names = [f"{self._network}.{i} {node}" for i, node in enumerate(NODES, 1)]
        names.append(f"{self._network}.254 {socket.gethostname()}")
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        for i, node in enumerate(NODES, 1):
            named = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec sleep infinity'
            self._daemon(
                "unshare", "--net", "--uts", "--mount", "sh", "-c", named, "sh", node, str(hosts)
            )
            self._nodes[node] = process = self._daemons[-1].pid
            self.wait(node, partial(self._is_named, node))
            link = f"{self._bridge}{node}"
            _ip(f"link add {link} type veth peer name eth0 netns {process}")
            _ip(f"link set {link} master {self._bridge} up")
            for change in ("link set lo up", f"address add {self._network}.{i}/24 dev eth0",
                           "link set eth0 up"):  # fmt: skip
                _ip(change, f"--target={process}")

    def _is_named(self, node: str) -> bool:
        return self.say(*self.on(node), "hostname").strip() == node

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
        self.say("ip", "link", "delete", self._bridge)

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


def _ip(change: str, *node: str) -> None:
    """Change a network: ours, or that of a node."""
    entered = ["nsenter", *node, "--net"] if node else []
    subprocess.run([*entered, "ip", *change.split()], check=True, timeout=60)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port
