"""Seconds of a step by local processes: each pipeline position's work at the rates of the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.config.tree import RunConfig
from launcher.estimate.order import Passes
from launcher.processor.ops import FAMILY_OF, Amounts, Ask
from launcher.processor.rates import Call, Machine
from launcher.processor.shared import shared_seconds
from parallel.mesh import Degrees
from parallel.pipeline.config import chunks

PRODUCTS, SCORES, BYTES, HOST, WIRES = (
    "products",
    "attention: scores",
    "everything else that is moved",
    "calls on the host",
    "messages",
)
ALONE = frozenset(("send",))  # collectives that count between a pipeline's passes, not within them
PASSES = ("forward", "recompute", "backward")


@dataclass(frozen=True)
class Share:
    """One position's seconds on a core of its own, by (phase, part)."""

    seconds: Mapping[tuple[str, str], float]

    def of(self, *phases: str) -> float:
        """The seconds of these phases; of all phases without arguments."""
        return sum(each for (phase, _), each in self.seconds.items() if not phases or phase in phases)

    def parts(self) -> dict[str, float]:
        """The seconds of all phases by part."""
        found: dict[str, float] = {}
        for (_, part), each in self.seconds.items():
            found[part] = found.get(part, 0.0) + each
        return found


def part_of(ask: Ask) -> str:
    """The part of the step under which this work is listed."""
    named = {"product": PRODUCTS, "experts": PRODUCTS, "attention": SCORES, "call": HOST}
    return named.get(ask.kind.split()[0], WIRES if ask.level == "wire" else BYTES)


def share_of(config: RunConfig, found: Mapping[Ask, Amounts], machine: Machine, per_call: float) -> Share:
    """A position's seconds. Messages were timed while all processes sent, so they are scaled by the share of a core.

    ``per_call`` is the processor time of a call; it includes the latency of messages.
    """
    seconds: dict[tuple[str, str], float] = {}
    for ask, (calls, units) in found.items():
        key = (ask.phase, part_of(ask))
        if ask.kind == "call":
            more = calls * per_call
        elif ask.level == "wire":
            if ask.shape[0] == 1:
                continue  # a group of one sends nothing
            if config.parallel.pp > 1 and ask.kind in ALONE and ask.phase != "update" and config.parallel.cp == 1:
                continue  # hops of the pipeline, which count between its passes
            message = machine.messages[ask.kind, ask.dtype, ask.shape[0]]
            more = units * message.per_byte * machine.share
        else:
            more = units * machine.per_unit[ask._replace(phase="")]  # type: ignore[arg-type]
        seconds[key] = seconds.get(key, 0.0) + more
    return Share(seconds)


def step_seconds(
    config: RunConfig, world_size: int, positions: Sequence[Mapping[Ask, Amounts]], machine: Machine, call: Call
) -> tuple[float, list[Share]]:
    """Seconds of a step, and each pipeline position's seconds on a core of its own."""
    shares = [share_of(config, each, machine, call.processor) for each in positions]
    if config.parallel.pp == 1:
        n_calls = sum(calls for ask, (calls, _) in positions[0].items() if ask.kind == "call")
        waits = n_calls * max(0.0, call.wall - call.processor / machine.share)  # for other ranks and messages' latency
        return shares[0].of() / machine.share + waits, shares
    degrees = Degrees.of(config.parallel, world_size)
    n = config.train.batches.sizes[-1] // (degrees.dp * config.train.micro_batch_size)
    each = n * chunks(config.parallel.pipeline)
    hop = hop_seconds(config, machine)
    passes = [Passes(share.of("forward") / each, share.of("recompute", "backward") / each, hop) for share in shares]

    def rate(busy: int) -> float:
        """Each process's share of a core while ``busy`` positions compute: those that wait leave theirs to others."""
        return machine.share if world_size <= machine.cores else min(1.0, machine.share * config.parallel.pp / busy)

    order = shared_seconds(config.parallel.pipeline, passes, n, rate)
    return order + max(share.of("update") for share in shares) / machine.share, shares


def hop_seconds(config: RunConfig, machine: Machine) -> float:
    """Seconds in which one micro-batch's hidden states are sent to the next position."""
    parallel, train = config.parallel, config.train
    size = 4 if train.stored == "fp32" else 2
    n_bytes = train.micro_batch_size * config.data.seq_len // (parallel.cp * parallel.tp) * config.model.d_model * size
    message = machine.messages["send", "fp32" if size == 4 else "bf16", parallel.pp]
    return message.latency + n_bytes * message.per_byte


assert not ALONE & FAMILY_OF.keys()
