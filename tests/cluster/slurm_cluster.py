"""A SLURM of its own on one machine: munged, slurmctld and two slurmd, in a folder.

    munged, slurmctld, the tests    198.18.0.254 on a bridge
    n1, n2: slurmd                  198.18.0.1 and .2, each with a name and a loopback of its own

The two nodes have the files of this machine, as nodes of a cluster share theirs, and meet by name
over a network as those do: what binds to the wrong address is not heard. All of that network is the
test's own, and none of this machine's: it ends with the processes in it. Nothing is installed and
nothing outside the folder is written; what was started is ended by its number. It needs Debian's
``slurm-wlm``, ``munge`` and ``iproute2``, and root, as slurmd does.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

import penstock

COMMANDS = "munged slurmctld slurmd srun sbatch scontrol squeue scancel sacct ip nsenter".split()
SBIN = "/usr/sbin:/sbin"
NODES = ("n1", "n2")
NETWORK = "198.18.0"
"""Of the range that is set aside for tests of networks (RFC 2544)."""
CLONE_NEWNET = 0x40000000

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
SLOW_NET = """
import time, torch

class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return x * 2

def slow():
    return Slow()
"""
"""The file of a model of which each forward takes a moment."""
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"


def words(out: str, *more: str) -> list[str]:
    """A job of the model of `SLOW_NET`."""
    asked = ("infer --in-spec in.npy --model-type net.py:slow --patch 16 --overlap 4 --block 16 "
             "--chunks 16 --devices cpu --threads 1 --batch 1 --seam-mode blend "
             "--head-kind intensity --normalize global")  # fmt: skip
    return [*asked.split(), "--out-spec", out, *more]


def values(path: str) -> Any:
    source = penstock.open_source(path)
    return source.read(source.domain)


@cache
def missing() -> str | None:
    """Why there can be no cluster here."""
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    absent = [name for name in COMMANDS if shutil.which(name, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge iproute2)"
    if os.geteuid() != 0:
        return "slurmd needs root"
    bridge = "unshare --net --uts --mount ip link add name br0 type bridge"
    made = subprocess.run(bridge.split(), capture_output=True, text=True, env=_environment())
    return f"no network of its own: {made.stderr.strip()}" if made.returncode else None


def _environment() -> dict[str, str]:
    variables = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    return variables | {"PATH": f"{os.environ['PATH']}:{SBIN}"}


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, int] = {}
        self._outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.environment = _environment() | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        (self.folder / "state").mkdir()
        text = SLURM_CONF.format(
            host=socket.gethostname(),
            folder=self.folder,
            network=NETWORK,
            controller=_free_port(),
            slurmd=_free_port(),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        paths = {name: f"{self.folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._daemon(
            "munged", "--foreground", "--force", "--num-threads=1", f"--key-file={key}",
            f"--socket={paths['socket']}", f"--pid-file={paths['pid']}",
            f"--log-file={paths['log']}", f"--seed-file={paths['seed']}",
        )  # fmt: skip
        self.wait("munged", lambda: Path(paths["socket"]).exists())
        self._connect()
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon(*self.on(node), "slurmd", "-D")
        self.wait("two idle nodes", lambda: self.idle() == 2)

    def on(self, node: str) -> list[str]:
        """The words before a command that runs it on a node."""
        return ["nsenter", f"--target={self._nodes[node]}", "--net", "--uts", "--mount"]

    def _connect(self) -> None:
        """A network for this thread and what it starts: a bridge, and on it each node, which lasts
        as long as a process that sleeps there."""
        _libc("unshare", CLONE_NEWNET)
        self._ip("link set lo up")
        self._ip("link add name br0 type bridge")
        self._ip(f"address add {NETWORK}.254/24 dev br0")
        self._ip("link set br0 up")
        hosts = self.folder / "hosts"
        names = [f"{NETWORK}.{i} {node}" for i, node in enumerate(NODES, 1)]
        names.append(f"{NETWORK}.254 {socket.gethostname()}")
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        for i, node in enumerate(NODES, 1):
            ready = self.folder / f"{node}.ready"
            named = 'hostname "$1" && mount --bind "$2" /etc/hosts && touch "$3" && exec sleep inf'
            asked = ("sh", "-c", named, "sh", node, str(hosts), str(ready))
            self._daemon("unshare", "--net", "--uts", "--mount", *asked)
            self._nodes[node] = process = self._daemons[-1].pid
            self.wait(node, ready.exists)
            self._ip(f"link add {node} type veth peer name eth0 netns {process}")
            self._ip(f"link set {node} master br0 up")
            self._ip("link set lo up", node)
            self._ip(f"address add {NETWORK}.{i}/24 dev eth0", node)
            self._ip("link set eth0 up", node)

    def _ip(self, change: str, node: str | None = None) -> None:
        """Change the network: this side's, or a node's."""
        entered = self.on(node) if node else []
        subprocess.run([*entered, "ip", *change.split()], check=True, env=self.environment)

    def idle(self) -> int:
        return self.say("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split(
        ).count("idle")  # fmt: skip

    def say(self, *command: str) -> str:
        """What a command says, "" where it fails."""
        try:
            ended = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=60
            )
        except subprocess.TimeoutExpired:
            return ""
        return ended.stdout if ended.returncode == 0 else ""

    def wait(self, what: str, done: Callable[[], object], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            for daemon in self._daemons:
                assert daemon.poll() is None, f"{daemon.args!r} ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"no {what} in {seconds} s\n{self.logs()}"
            time.sleep(0.25)  # each look starts a program of SLURM

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
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _libc("setns", self._outside, CLONE_NEWNET)  # or later tests would have no network
        os.close(self._outside)

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


def _libc(call: str, *numbers: int) -> None:
    """``unshare`` or ``setns``, which Python has from 3.12."""
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*numbers) != 0:
        raise OSError(ctypes.get_errno(), call)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
