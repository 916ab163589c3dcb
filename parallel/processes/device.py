"""Chooses a rank's own GPU, and the network interface over which ranks on other nodes reach this one.

Slurm can show a task its own GPU alone (``--gpus-per-task`` with binding), which is then device 0 whatever LOCAL_RANK
says; torchrun shows each rank all GPUs of the node. Neither keeps two ranks from taking the same GPU, with which NCCL
fails.
"""

import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import NotRequired, TypedDict

import psutil
import torch

from parallel.processes.environment import number, show
from parallel.processes.rendezvous import address_of, all_ranks_here

INTERFACE = "GLOO_SOCKET_IFNAME"
ELSEWHERE = "192.0.2.1"  # an address that no machine has (RFC 5737): the default route leads to it
PORT = 9  # no packet is sent to it
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES by which a process is to see no GPU


class Held(TypedDict):
    """A rank's description of its GPU, which other ranks can compare."""

    host: str
    gpu: str  # its UUID; empty without CUDA
    problem: str  # why it has none; empty if it has one, or without CUDA
    unseen: NotRequired[str]  # why torch sees none of the GPUs that Slurm has given; empty if Slurm has given none


def device_index(n_devices: int, local_rank: int) -> int:
    """The index of the rank's own device among the ``n_devices`` that it sees: the only one, or ``local_rank``."""
    return 0 if n_devices == 1 else local_rank


def own_device() -> torch.device:
    """This rank's GPU, or the CPU where there is no CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_index(torch.cuda.device_count(), number("LOCAL_RANK")))


def held_device() -> Held:
    """The description of this rank's GPU, which other ranks can compare with theirs."""
    device, host = own_device(), socket.gethostname()
    if device.index is None:
        return Held(host=host, gpu="", problem="", unseen=why_unseen())
    if device.index >= torch.cuda.device_count():
        shown = f" (CUDA_VISIBLE_DEVICES={show(os.environ.get('CUDA_VISIBLE_DEVICES', 'not set'))})"
        return Held(host=host, gpu="", problem=f"{number('LOCAL_RANK')} of {torch.cuda.device_count()}{shown}")
    return Held(host=host, gpu=str(torch.cuda.get_device_properties(device).uuid), problem="")


def why_unseen(environment: Mapping[str, str] = os.environ) -> str:
    """Why torch sees none of the GPUs that Slurm has given this task, in words; empty if Slurm has given it none.

    Call it where torch sees no GPU. Empty, too, if CUDA_VISIBLE_DEVICES hides them on purpose.
    """
    given = environment.get("SLURM_STEP_GPUS", "")
    if given in ("", "NoDevFiles") or environment.get("CUDA_VISIBLE_DEVICES", given) in HIDDEN:
        return ""
    found = f"none of GPUs {given} that Slurm has given it"
    if not torch.backends.cuda.is_built():
        return f"{found}, since torch {torch.__version__} is a build without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{found}: {' '.join(str(error).split())[:300]}"
    return found


def device_problems(held: Sequence[Held]) -> list[str]:
    """A message for each rank without a GPU, and for each GPU that several ranks have; ``held`` is by rank.

    Ranks that see no GPU are named where Slurm has given them some, and where other ranks have one.
    """
    lines = [
        f"LOCAL_RANK on rank {rank} ({each['host']}) must number a GPU that the rank sees, and is {each['problem']}; "
        "start one rank for each GPU"
        for rank, each in enumerate(held)
        if each["problem"]
    ]
    mixed = "none, though others do" if any(each["gpu"] for each in held) else ""
    unseen = {rank: each.get("unseen") or mixed for rank, each in enumerate(held) if not each["gpu"] + each["problem"]}
    for why in dict.fromkeys(filter(None, unseen.values())):
        first, *others = [rank for rank, each in unseen.items() if each == why]
        more = f" and {len(others)} more" if others else ""
        lines.append(
            f"rank {first} ({held[first]['host']}){more} must see a GPU, and sees {why}; install a torch that the "
            "node's driver can run, leave out the node (slurm.exclude), or ask for no GPU (slurm.gpus_per_node=0) to "
            "train on the CPU"
        )
    of_gpu: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(held):
        if each["gpu"]:
            of_gpu.setdefault((each["host"], each["gpu"]), []).append(rank)
    for (host, gpu), ranks in of_gpu.items():
        if len(ranks) > 1:
            lines.append(
                f"ranks {', '.join(map(str, ranks))} ({host}) must each have a GPU of their own, and share {gpu}; "
                "start one rank for each GPU (or set CUDA_VISIBLE_DEVICES= to train on the CPU)"
            )
    return lines


def choose_interface(
    environment: MutableMapping[str, str] = os.environ, source_to: Callable[[str], str | None] | None = None
) -> None:
    """Sets GLOO_SOCKET_IFNAME to the interface that reaches MASTER_ADDR, if it is not set and there are several nodes.

    gloo otherwise binds to the address to which this machine's own name resolves: on Debian and on many clusters
    127.0.1.1, where no other node reaches it. On the node whose own address MASTER_ADDR is, it is the interface with
    that address; where that is a loopback address, the interface of the default route. A set value that is the
    beginning of names, as NCCL takes it, becomes a whole name, which gloo needs. Call it before the first gloo group is
    made.
    """
    if INTERFACE in environment:
        environment[INTERFACE] = whole_name(environment[INTERFACE])
        return
    if all_ranks_here(environment):
        return
    source_of = source_to or source_address
    master = address_of(environment["MASTER_ADDR"])
    for target in ([] if master is None else [str(master)]) + [ELSEWHERE]:
        source = source_of(target)
        name = None if source is None else interface_of(source)
        if name is not None and not is_loopback(name):
            environment[INTERFACE] = name
            return


def whole_name(given: str) -> str:
    """The interface that ``given`` names, or the first with an address whose name begins so; else ``given``."""
    found = {name: {each.family for each in addresses} for name, addresses in psutil.net_if_addrs().items()}
    if given in found or not given:
        return given
    reached = [name for name, families in found.items() if families & {socket.AF_INET, socket.AF_INET6}]
    return min((name for name in reached if name.startswith(given)), default=given)


def source_address(target: str) -> str | None:
    """This machine's address from which it would reach ``target``; None where there is no route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, PORT))  # a datagram socket's connect chooses a route, and sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The name of the interface that has the address; None where no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def is_loopback(name: str) -> bool:
    """Whether an interface has a loopback address, by which no other machine can be reached."""
    return any(each.address in ("127.0.0.1", "::1") for each in psutil.net_if_addrs()[name])
