"""A real Slurm cluster on one machine: every node has its own network, hostname, processes and /dev/shm.

    python tests/support/slurm_cluster.py up 4 /tmp/rt-slurm   prints the line that points sbatch, squeue, ... at it
    python tests/support/slurm_cluster.py down /tmp/rt-slurm
    python tests/support/slurm_cluster.py power-off n2 /tmp/rt-slurm   or power-on, cut, slow, heal, kill-slurmd,
                                                                       start-slurmd
    python tests/support/slurm_cluster.py kill-slurmctld /tmp/rt-slurm   or start-slurmctld

A node is a process in namespaces of its own whose pid 1 starts slurmd; slurmctld is a node as well (`ctl`). Cables are
veth pairs into a bridge, which lives in a namespace of its own, so that nothing of the host's network is touched but
one interface. Files are shared by all nodes, as on a cluster's parallel file system. Needs Linux, root with
CAP_SYS_ADMIN and CAP_NET_ADMIN, and Debian's packages (`why_not` says what is missing). `stop` leaves nothing behind.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
GPUS, CPUS, MEMORY_MIB = 8, 64, 500_000  # that each node claims to have; the GPUs are /dev/null under other names
NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"

SLURM_CONF = """\
ClusterName=roundtable
SlurmctldHost=ctl({network}.2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job must wait (120 s by default)
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
StateSaveLocation={folder}/ctl
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldPort=26000
SlurmdPort=26001
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
# nodes may claim more than the machine has
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{preemption}
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=15
BatchStartTimeout=10
InactiveLimit=0
UnkillableStepTimeout=30
MinJobAge=3600
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SlurmctldDebug=info
SlurmdDebug=info
# the file changes while slurmd runs, see reconfigure
DebugFlags=NO_CONF_HASH
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=1 GraceTime=60 State=UP
PartitionName=short Nodes=ALL MaxTime=30 DefaultTime=10 PriorityTier=1 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF State=UP
"""

# The script of a node's pid 1, which never ends by itself: with it the node ends. Arguments: name, address, folder.
INIT = """\
name=$1 address=$2 folder=$3
hostname "$name"
ip link set lo up
for try in {1..500}; do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.02; done
ip addr add "$address/24" dev eth0 && ip link set eth0 up
mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs -o mode=1777 shm /dev/shm
mkdir -p "$folder/node/$name" "$folder/local" && mount --bind "$folder/node/$name" "$folder/local"
export SLURM_CONF=$folder/etc/slurm.conf
cd /
if [[ $name == ctl ]]; then slurmctld -D; else slurmd -D; fi >"$folder/log/$name.out" 2>&1 &
sleep infinity &
keeper=$!
while kill -0 $keeper; do wait -n || true; done
"""


def why_not() -> str | None:
    """Why no cluster can be started on this machine, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm cluster of namespaces needs Linux and root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"no {', '.join(missing)}; `make slurm-packages` installs Debian's {PACKAGES}"
    probe = "ip link add rtp0 type veth peer name rtp1 && ip link add rtpb type bridge && hostname x"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "bash", "-c", probe],
        env={"PATH": SYSTEM_PATH},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return f"no namespaces or veth here: {' '.join(tried.stderr.split())}" if tried.returncode else None


def login_link(subnet: int) -> str:
    """The name of the network interface by which the host reaches a cluster."""
    return f"rt{subnet}-login"


def free_subnet(first: int) -> int:
    """The first subnet number of 1 to 250, from ``first`` on, that no other cluster on this machine uses."""
    numbers = [*range(first, 251), *range(1, first)]
    return next(n for n in numbers if not Path("/sys/class/net", login_link(n)).exists())


class Cluster:
    """A cluster, running or to be started, in ``folder``, whose path must be short: unix sockets lie in it."""

    def __init__(self, folder: Path, subnet: int = 77) -> None:
        self.folder = folder
        self.network = f"10.77.{subnet}"
        self.login = login_link(subnet)  # the only thing that the host's own network sees
        self.children: list[subprocess.Popen[bytes]] = []  # the switch and the nodes' outermost processes

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which Slurm's commands talk to this cluster."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return clean | {"SLURM_CONF": str(self.folder / "etc/slurm.conf"), "PATH": f"{SYSTEM_PATH}:{clean['PATH']}"}

    def start(self, n_nodes: int, *, warn_batch_of_preemption: bool = True) -> None:
        """Starts slurmctld and n1 to nN; raises RuntimeError with the logs where they are not idle in time.

        ``warn_batch_of_preemption``: preemption sends the signal of sbatch's --signal, as some sites configure it;
        otherwise the job's steps get SIGTERM, which is Slurm's default.
        """
        assert len(str(self.folder)) <= 60, "unix sockets allow 107 bytes"
        for name in ("etc", "run", "log", "ctl", "spool", "node", "local", "dev"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "etc/nodes").write_text(str(n_nodes))
        self._write_files(n_nodes, warn_batch_of_preemption)
        self._start_munge()
        self._start_switch()
        for name in ("ctl", *self.nodes):
            self.power_on(name)
        wait_until(lambda: self.idle_nodes() == set(self.nodes), 60, lambda: f"nodes are not idle:\n{self.logs()}")

    def reconfigure(self, *, warn_batch_of_preemption: bool) -> None:
        """Changes the signal on preemption (see ``start``) while the cluster runs, by restarting slurmctld."""
        conf = self.folder / "etc/slurm.conf"
        before = conf.read_text()
        self._write_conf(len(self.nodes), warn_batch_of_preemption)
        if conf.read_text() == before:
            return
        self._signal_daemon("ctl", "slurmctld.pid", "TERM")  # `scontrol reconfigure` does not apply this setting
        wait_until(lambda: not self._is_running("ctl", "slurmctld"), 30, lambda: "slurmctld does not end")
        self.start_slurmctld()
        wait_until(lambda: self.idle_nodes() == set(self.nodes), 60, lambda: f"nodes are not idle:\n{self.logs()}")

    def stop(self) -> None:
        """Ends every process of the cluster, by its id, and removes the folder."""
        for name in ("ctl", *self.nodes):
            self.power_off(name, cable_first=False)
        for name in ("switch", "munged"):
            self._kill(name)
        subprocess.run(["ip", "link", "del", self.login], capture_output=True, check=False)
        for child in self.children:
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes: n1 to nN."""
        path = self.folder / "etc/nodes"
        return [f"n{number}" for number in range(1, int(path.read_text()) + 1)] if path.exists() else []

    def command(self, *arguments: str, timeout: float = 60, check: bool = True) -> str:
        """Runs a Slurm command on the login host; returns its stdout. With ``check`` a failure raises RuntimeError."""
        done = subprocess.run(
            arguments, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def idle_nodes(self) -> set[str]:
        """The nodes that sinfo reports as idle."""
        return set(self.command("sinfo", "-h", "-p", "main", "-N", "-t", "idle", "-o", "%N", check=False).split())

    def job(self, job_id: str) -> dict[str, str]:
        """The fields that `scontrol show job` prints of a job; empty while slurmctld does not answer."""
        text = self.command("scontrol", "-o", "show", "job", job_id, check=False)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def on_node(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command inside a node."""
        return subprocess.run(
            ["nsenter", "-t", str(self._pid(name)), "--all", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def power_on(self, name: str) -> None:
        """Boots a node."""
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        with (self.folder / f"log/init.{name}.log").open("ab") as log:
            outer = subprocess.Popen(
                ["unshare", *NAMESPACES, "bash", "-c", INIT, "init", name, self.address(name), str(self.folder)],
                env={"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.children.append(outer)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        wait_until(lambda: children.read_text().split(), 20, lambda: f"{name} did not start")
        inner = children.read_text().split()[0]
        wait_until(lambda: _network(inner) != _network("self"), 20, lambda: f"{name} has no network")
        (self.folder / f"run/{name}.outer").write_text(str(outer.pid))
        (self.folder / f"run/{name}.pid").write_text(inner)
        self._in_switch("ip", "link", "del", f"v-{name}", check=False)
        self._in_switch("ip", "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", inner)
        self.heal(name)

    def power_off(self, name: str, *, cable_first: bool = True) -> None:
        """Simulates a power cut: all the node's processes die at once, and their peers get no FIN or RST."""
        if cable_first:
            self.cut(name)
        self._kill(name)

    def cut(self, name: str) -> None:
        """Pulls the node's network cable: processes live on, and packets are lost."""
        self._in_switch("ip", "link", "set", f"v-{name}", "nomaster", check=False)

    def slow(self, name: str, megabits: int = 50) -> None:
        """Limits the cable to ``megabits`` a second towards the node; the other direction stays as it is."""
        limit = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms"]
        self._in_switch("tc", "qdisc", "add", "dev", f"v-{name}", "root", "tbf", *limit)

    def heal(self, name: str) -> None:
        """Reconnects the node's cable and removes any limit on it."""
        self._in_switch("tc", "qdisc", "del", "dev", f"v-{name}", "root", check=False)
        self._in_switch("ip", "link", "set", f"v-{name}", "master", "br0")
        self._in_switch("ip", "link", "set", f"v-{name}", "up")

    def kill_slurmd(self, name: str) -> None:
        """Kills the node's slurmd alone; job steps that it started live on."""
        self._signal_daemon(name, f"slurmd.{name}.pid", "KILL")

    def start_slurmd(self, name: str) -> None:
        """Starts the node's slurmd again, which takes over the steps that live on."""
        self.on_node(name, "slurmd")

    def kill_slurmctld(self) -> None:
        """Kills the controller: jobs run on, Slurm's commands fail, and its last seconds of state are lost."""
        self._signal_daemon("ctl", "slurmctld.pid", "KILL")

    def start_slurmctld(self) -> None:
        """Starts the controller again from its saved state."""
        self.on_node("ctl", "slurmctld")

    def mend(self) -> None:
        """Cancels all jobs and makes every node idle again, undoing power cuts, cut cables and killed daemons."""
        if not self._is_up("ctl"):
            self.power_on("ctl")
        if not self._is_running("ctl", "slurmctld"):
            self.start_slurmctld()
        for name in self.nodes:
            if not self._is_up(name):
                self.power_on(name)
                continue
            self.heal(name)
            if not self._is_running(name, "slurmd"):
                self.start_slurmd(name)
        self.command("scancel", "--user=root", check=False)
        wait_until(self._is_mended, 120, lambda: f"nodes are not idle:\n{self.logs()}")

    def _is_mended(self) -> bool:
        over = not self.command("squeue", "-h", check=False).strip() and not self._has_steps()
        if over and self.idle_nodes() == set(self.nodes):
            return True
        down = self.command("sinfo", "-h", "-p", "main", "-N", "-t", "down,drain", "-o", "%N", check=False).split()
        for name in down:  # without this a healed node takes half a minute to come back
            self.command("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        time.sleep(0.5)
        return False

    def _has_steps(self) -> bool:
        """Whether slurmstepd still runs for a job that Slurm gave up; it may drain the node when it ends."""
        return any(self.on_node(name, "pgrep", "-x", "slurmstepd").stdout for name in self.nodes)

    def _is_up(self, name: str) -> bool:
        path = self.folder / f"run/{name}.pid"
        return path.exists() and is_alive(int(path.read_text()))

    def _is_running(self, name: str, program: str) -> bool:
        """Whether ``program`` runs directly below the node's first process, or adopted by it."""
        first = self._pid(name)
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return any(Path(f"/proc/{pid}/comm").read_text().strip() == program and is_alive(int(pid)) for pid in children)

    def address(self, name: str) -> str:
        """The IP address of a node."""
        return f"{self.network}.{2 if name == 'ctl' else 10 + int(name[1:])}"

    def logs(self) -> str:
        """The last lines of every log, for messages."""
        paths = sorted((self.folder / "log").glob("*"))
        return "\n".join(f"{path.name}: {line}" for path in paths for line in path.read_text().splitlines()[-3:])

    def _write_conf(self, n_nodes: int, warn_batch_of_preemption: bool) -> None:
        names = [f"n{number}" for number in range(1, n_nodes + 1)]
        claims = f"Sockets=2 CoresPerSocket={CPUS // 2} ThreadsPerCore=1 RealMemory={MEMORY_MIB} Gres=gpu:{GPUS}"
        nodes = [f"NodeName={n} NodeHostname={n} NodeAddr={self.address(n)} {claims} State=UNKNOWN" for n in names]
        preemption = "SlurmctldParameters=preempt_send_user_signal" if warn_batch_of_preemption else ""
        text = SLURM_CONF.format(
            network=self.network, folder=self.folder, nodes="\n".join(nodes), preemption=preemption
        )
        (self.folder / "etc/slurm.conf").write_text(text)

    def _write_files(self, n_nodes: int, warn_batch_of_preemption: bool) -> None:
        etc, names = self.folder / "etc", [f"n{number}" for number in range(1, n_nodes + 1)]
        self._write_conf(n_nodes, warn_batch_of_preemption)
        for number in range(GPUS):  # Slurm sets CUDA_VISIBLE_DEVICES for character devices only; these are /dev/null
            subprocess.run(["mknod", "-m", "666", self.folder / f"dev/nvidia{number}", "c", "1", "3"], check=True)
        gpus = f"Name=gpu File={self.folder}/dev/nvidia[0-{GPUS - 1}] Flags=nvidia_gpu_env\n"
        (etc / "gres.conf").write_text(gpus)
        (etc / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")  # is read, though nothing here uses cgroups
        hosts = ["127.0.0.1 localhost", f"{self.network}.1 login", f"{self.network}.2 ctl"]
        hosts += [line for n in names for line in (f"{self.address(n)} {n}", f"::ffff:{self.address(n)} {n}")]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")  # nodes have no DNS

    def _start_munge(self) -> None:
        key = self.folder / "etc/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        files = {"key-file": "etc/munge.key", "socket": "run/munge.sock", "pid-file": "run/munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "run/munge.seed"}
        command = ["munged", *(f"--{option}={self.folder / path}" for option, path in files.items())]
        subprocess.run(command, env={"PATH": SYSTEM_PATH}, check=True, timeout=60)

    def _start_switch(self) -> None:
        """Starts the bridge, in a network namespace of its own, and connects the host to it."""
        switch = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.children.append(switch)
        wait_until(lambda: _network(str(switch.pid)) != _network("self"), 20, lambda: "no network for the switch")
        (self.folder / "run/switch.pid").write_text(str(switch.pid))
        self._in_switch("ip", "link", "add", "br0", "type", "bridge")
        self._in_switch("ip", "link", "set", "br0", "up")
        for command in (
            f"link add {self.login} type veth peer name v-login netns {switch.pid}",
            f"addr add {self.network}.1/24 dev {self.login}",
            f"link set {self.login} up",
        ):
            subprocess.run(["ip", *command.split()], env={"PATH": SYSTEM_PATH}, check=True)
        self.heal("login")

    def _in_switch(self, *arguments: str, check: bool = True) -> None:
        command = ["nsenter", "-t", str(self._pid("switch")), "-n", *arguments]
        subprocess.run(command, env={"PATH": SYSTEM_PATH}, check=check, capture_output=not check)

    def _pid(self, name: str) -> int:
        return int((self.folder / f"run/{name}.pid").read_text())

    def _kill(self, name: str) -> None:
        """Kills the first process of a pid namespace, whereupon the kernel kills all others in it."""
        for path in (self.folder / f"run/{name}.pid", self.folder / f"run/{name}.outer"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pid = int(path.read_text())
                path.unlink()
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: not is_alive(pid), 20, lambda name=name: f"{name} does not end")

    def _signal_daemon(self, name: str, pid_file: str, signal_name: str) -> None:
        script = f"kill -{signal_name} $(cat {self.folder}/run/{pid_file})"
        command = ["nsenter", "-t", str(self._pid(name)), "-p", "-m", "bash", "-c", script]
        subprocess.run(command, env={"PATH": SYSTEM_PATH}, check=True, timeout=60)


def is_alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _network(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def wait_until(holds: Callable[[], object], seconds: float, otherwise: Callable[[], str]) -> float:
    """Waits until ``holds()`` is true; returns the seconds waited. Raises RuntimeError(otherwise()) on timeout."""
    started = time.monotonic()
    while not holds():
        if time.monotonic() - started > seconds:
            raise RuntimeError(otherwise())
        time.sleep(0.05)
    return time.monotonic() - started


def main(arguments: Sequence[str]) -> int:
    """The command line of the module's docstring."""
    match arguments:
        case ("up", n_nodes, folder):
            reason = why_not()
            if reason:
                print(reason, file=sys.stderr)
                return 1
            Cluster(Path(folder)).start(int(n_nodes))
            print(f"export SLURM_CONF={folder}/etc/slurm.conf PATH={SYSTEM_PATH}:$PATH")
        case ("down", folder):
            Cluster(Path(folder)).stop()
        case (("kill-slurmctld" | "start-slurmctld") as act, folder):
            getattr(Cluster(Path(folder)), act.replace("-", "_"))()
        case (
            ("power-off" | "power-on" | "cut" | "slow" | "heal" | "kill-slurmd" | "start-slurmd") as act,
            name,
            folder,
        ):
            getattr(Cluster(Path(folder)), act.replace("-", "_"))(name)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
