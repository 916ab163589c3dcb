"""The rendezvous of a job's ranks: torch's store at MASTER_ADDR:MASTER_PORT, opened on one interface and signed.

The store itself has no password. What the ranks write there is signed with a token that only the job has, and lies
under a name that follows from it, so that neither another job at the same port nor a stranger is taken for a rank.
Under ``--ranks`` the launcher draws the token, under Slurm the job script; elsewhere ROUNDTABLE_TOKEN sets it.
"""

import datetime
import hashlib
import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping

from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage] -- documented, but not in torch's __all__
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from parallel.processes.environment import TOKEN, number

NAMES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")  # without a token, these variables tell jobs apart
OWNER = "roundtable/owner"
BACKLOG = 4096
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_store: TCPStore | None = None  # this process's connection
_groups_opened = 0


class ForeignStore(Exception):
    """Something in the store was not written by a rank of this job."""


def rendezvous_store(limit_seconds: float) -> PrefixStore:
    """This job's part of the store, which rank 0 hosts (under torchrun: its agent); opened once in each process.

    All ranks call it. Raises OSError where rank 0 cannot listen, torch's DistNetworkError or DistStoreError where the
    store cannot be reached within the limit, and ForeignStore where it is another job's.
    """
    global _store
    if _store is None:
        _store = _open(limit_seconds)
    # torchrun's store outlives a restart of the ranks, so each start has a part of its own.
    start = number("TORCHELASTIC_RESTART_COUNT", default=0)
    return PrefixStore(f"{signature('part')}/start-{start}", _store)


def store_of_next_group(limit_seconds: float) -> PrefixStore:
    """The part of the store for the next default process group. All ranks call it, equally often."""
    global _groups_opened
    _groups_opened += 1
    return PrefixStore(f"group-{_groups_opened}", rendezvous_store(limit_seconds))


def _open(limit_seconds: float) -> TCPStore:
    host, port, rank = os.environ["MASTER_ADDR"], number("MASTER_PORT"), number("RANK")
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = listen_for_ranks(host, port) if hosts else None
    store = TCPStore(
        host,
        port,
        number("WORLD_SIZE"),
        is_master=hosts,
        timeout=datetime.timedelta(seconds=limit_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    if rank == 0:
        store.set(OWNER, signature(OWNER))
    if not hmac.compare_digest(store.get(OWNER), signature(OWNER).encode()):
        raise ForeignStore(f"the store at {host}:{port} is that of another job")
    return store


def listen_for_ranks(host: str, port: int = 0) -> socket.socket:
    """Rank 0's listening socket, on the one interface at which the other ranks reach it; port 0 takes any free port.

    It listens on all interfaces where that one is not known: where ``host`` is no address of this machine (but, for
    example, a service's), or is a loopback address though ranks are on other nodes (Debian maps a machine's own name to
    one). Raises OSError, for example for a port that is taken.
    """
    place = address_of(host)
    if place is not None and is_mine(place) and (all_ranks_here() or not place.is_loopback):
        return socket.create_server((str(place), port), family=family_of(place), backlog=BACKLOG)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=BACKLOG)


def address_of(host: str) -> Address | None:
    """The first IP address of a host; None where its name does not resolve (yet)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return None
    address = ipaddress.ip_address(str(found).partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def family_of(address: Address) -> socket.AddressFamily:
    """The socket family (IPv4 or IPv6) of an address."""
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def is_mine(address: Address) -> bool:
    """Whether an interface of this machine has the address."""
    try:
        socket.create_server((str(address), 0), family=family_of(address)).close()
    except OSError:
        return False
    return True


def all_ranks_here(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are on this machine, as far as the environment variables of Slurm and torchrun say."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return True
    return environment.get("LOCAL_WORLD_SIZE", "1") == environment.get("WORLD_SIZE", "1")


def signature(*words: str, environment: Mapping[str, str] = os.environ) -> str:
    """An HMAC-SHA256 of the words with the job's token as key, as hexadecimal digits."""
    token = environment.get(TOKEN) or "/".join(environment.get(name, "") for name in NAMES)
    return hmac.digest(token.encode(), "\0".join(words).encode(), hashlib.sha256).hex()


def signed(key: str, text: str) -> str:
    """The text preceded by the job's signature of it, which also covers ``key`` and the number of this start."""
    return f"{signature(key, os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'), text)} {text}"


def verified(key: str, value: bytes) -> str:
    """The text of a ``value`` that ``signed`` made. Raises ForeignStore where this job did not sign it for this key."""
    text = value.decode(errors="replace").partition(" ")[2]
    if not hmac.compare_digest(value, signed(key, text).encode()):
        raise ForeignStore(f"'{key}' in the store was not written by a rank of this job")
    return text
