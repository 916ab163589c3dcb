"""Bytes that ZeRO sends in one training step: gradients and sharded weights. docs/traffic.md has the table."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from launcher.traffic.gathers import LOOKED_UP, gathers_by_weight
from launcher.traffic.step import FP32_BYTES, Collective, Step, Traffic, around_ring
from modeling.logical import is_entry
from modeling.optimizers.rule import Group
from parallel.pipeline.schedule import action_orders
from parallel.pipeline.stages import Part

PARTITION_UNIT = (
    2  # DeepSpeed's own number: ZeRO 1 and 2 pad each optimizer group to a multiple of so many elements a rank
)


def zero_traffic(step: Step) -> list[Traffic]:
    """Terms of gradients and weights over the ranks that replicate them: dp x cp for dense weights, edp for experts."""
    terms = []
    for axis, n, names in replicated(step):
        terms += [*_gradient_traffic(step, axis, n, names), *_weight_traffic(step, axis, n, names)]
    return terms


def replicated(step: Step) -> list[tuple[str, int, list[str]]]:
    """(axis, degree, weights) for each of the two axes over which ZeRO shards the rank's weights.

    Where dense weights and experts are replicated over the same ranks (ep = tp), experts count as dense.
    """
    degrees = step.degrees
    is_separate = degrees.ep != degrees.tp
    experts = [name for name in step.weights if step.layout[name].is_expert and is_separate]
    dense = [name for name in step.weights if name not in experts]
    return [("replicas", degrees.dp * degrees.cp, dense), ("edp", degrees.edp, experts)]


def _gradient_traffic(step: Step, axis: str, n: int, names: Sequence[str]) -> list[Traffic]:
    """The reduction of fp32 gradients, once a step, or under ZeRO 2 and 3 without a pipeline for each micro-batch."""
    if step.in_buckets:
        return [_bucket_traffic(step, axis, n, names)]
    zero = step.parallel.zero
    times = step.n_micro_batches if zero >= 2 and step.parallel.pp == 1 else 1
    collective: Collective = "reduce-scatter" if zero == 3 else "all-reduce"
    if zero == 1 and step.precision == "bf16":  # DeepSpeed's BF16_Optimizer reduces its flat accumulators as they are
        n_elements = flat_elements(step, n, names)
    else:
        n_elements = sum(padded(step.weights[name], n if zero == 3 else 1) for name in names)
    return [Traffic(axis, "gradients", collective, around_ring(collective, times * FP32_BYTES * n_elements, n))]


def _bucket_traffic(step: Step, axis: str, n: int, names: Sequence[str]) -> Traffic:
    """ZeRO 1's reduction of gradients in buckets: once a step, or for each micro-batch and stage that uses a bucket."""
    if not step.scatters:
        whole = FP32_BYTES * flat_elements(step, n, names)
        return Traffic(axis, "gradients", "reduce-scatter", around_ring("reduce-scatter", whole, n))
    n_elements = sum(
        padded(sum(step.weights[name] for name in bucket), PARTITION_UNIT * n) * len(stages_of(step, bucket[0]))
        for bucket in optimizer_groups(step, names)
    )
    exchanges = step.parallel.grad_reduce_dtype != "fp32"  # then they travel in the weights' dtype
    collective: Collective = "all-to-all" if exchanges else "reduce-scatter"
    n_bytes = step.n_micro_batches * n_elements * (step.element_bytes if exchanges else FP32_BYTES)
    return Traffic(axis, "gradients", collective, around_ring(collective, n_bytes, n))


def flat_elements(step: Step, n: int, names: Sequence[str]) -> int:
    """The elements of all flat tensors of ZeRO 1 and 2, one for each optimizer group, padded to equal parts."""
    groups = optimizer_groups(step, names)
    return sum(padded(sum(step.weights[name] for name in group), PARTITION_UNIT * n) for group in groups)


def elements_summed_over_tp(step: Step) -> int:
    """The gradient elements that this rank sums over tp: its ZeRO share of the weights that tp does not cut."""
    whole = {name for name in step.weights if step.layout[name].is_summed_over_tp}
    (_, n, names), _ = replicated(step)  # weights that are summed over tp are all dense
    zero = step.parallel.zero
    if zero == 0 or (zero == 1 and step.precision == "bf16" and not step.in_buckets):
        return sum(step.weights[name] for name in whole)
    if zero == 3:
        return sum(padded(step.weights[name], n) // n for name in whole)
    return sum(
        max(0, min(end, stop) - max(begin, start))
        for group in optimizer_groups(step, names)
        for start, stop in [flat_share(step, n, group, step.replica_rank)]
        for name, begin, end in places_in_flat(step, group)
        if name in whole
    )


def optimizer_groups(step: Step, names: Sequence[str]) -> list[list[str]]:
    """The weights of each flat tensor of ZeRO 1 and 2 (an optimizer group or a bucket of one), in the model's order."""
    by_group: dict[Group, list[str]] = {}
    for name in names:
        by_group.setdefault(step.group(name), []).append(name)
    groups = [by_group[key] for key in sorted(by_group, reverse=True)]
    return [bucket for group in groups for bucket in _buckets(step, group)] if step.in_buckets else groups


def _buckets(step: Step, group: Sequence[str]) -> list[list[str]]:
    """A group's weights in order, cut into buckets of at most ``step.sizes.reduced`` elements, or of one weight.

    A new bucket also begins where the weights' stages change, and before and after an embedding of which another rank
    has a copy.
    """
    rows: list[list[str]] = []
    for name in group:
        fits = bool(rows) and sum(step.weights[each] for each in [*rows[-1], name]) <= step.sizes.reduced
        if fits and _kind(step, rows[-1][-1]) == _kind(step, name):
            rows[-1].append(name)
        else:
            rows.append([name])
    return rows


def _kind(step: Step, name: str) -> tuple[tuple[int, ...], bool]:
    """The stages of this rank that compute with a weight, and whether another rank has a copy of it."""
    is_copied = name == "embed.weight" and step.model.embeds_at_end and step.has_embedding != step.has_head
    return stages_of(step, name), is_copied


def stages_of(step: Step, name: str) -> tuple[int, ...]:
    """The stages of this rank that compute with a weight; two for an embedding used on the first and the last stage."""
    layer = step.tensors[name].layer
    if layer is not None:
        return tuple(part.stage for part in step.parts if is_within(step, part, layer, name))
    at_end = not is_entry(name) or (name == "embed.weight" and step.model.embeds_at_end)
    return tuple(
        part.stage for part in step.parts if (is_entry(name) and part.has_embedding) or (at_end and part.has_head)
    )


def places_in_flat(step: Step, group: Sequence[str]) -> list[tuple[str, int, int]]:
    """(weight, start, stop) for each weight of a group: its range of elements in the group's flat tensor."""
    ends = list(accumulate(step.weights[name] for name in group))
    return [(name, end - step.weights[name], end) for name, end in zip(group, ends, strict=True)]


def flat_share(step: Step, n: int, group: Sequence[str], rank: int) -> tuple[int, int]:
    """The elements [start, stop) of a group's flat tensor that ``rank`` of ``n`` updates."""
    size = padded(sum(step.weights[name] for name in group), PARTITION_UNIT * n) // n
    return rank * size, (rank + 1) * size


def _weight_traffic(step: Step, axis: str, n: int, names: Sequence[str]) -> list[Traffic]:
    """The all-gather of weights: after the update under ZeRO 1 and 2, for each use under ZeRO 3."""
    match step.parallel.zero:
        case 0:
            return []
        case 1 | 2:
            n_elements = flat_elements(step, n, names)
        case _:
            counts = gathers_of(step, names)
            n_elements = sum(padded(step.weights[name], n) * counts[name] for name in names)
    sent = around_ring("all-gather", step.element_bytes * n_elements, n)
    return [Traffic(axis, "weights", "all-gather", sent)]


def padded(n_elements: int, unit: int) -> int:
    """``n_elements`` rounded up to a multiple of ``unit``."""
    return -(-n_elements // unit) * unit


def gathers_of(step: Step, names: Sequence[str]) -> Mapping[str, int]:
    """Weight -> the number of times that a step gathers it under ZeRO 3.

    Without a pipeline, a small weight stays whole and is gathered once, after the update. If the rank computes with no
    more elements than DeepSpeed keeps, any other weight is gathered once for each micro-batch and kept from its forward
    to its backward pass; else ``gathers_by_weight`` replays DeepSpeed's decisions. Under a pipeline DeepSpeed does not
    know the order of the layers, and drops every weight after each use, small ones too.
    """
    small = {name for name in names if step.weights[name] <= step.sizes.persistent}
    if step.parallel.pp > 1:
        return {name: _gathers_under_pipeline(step, name, name in small) for name in names}
    if sum(step.weights.values()) > step.sizes.reused:
        counts = gathers_by_weight(step)
        return {name: 1 if name in small else counts[name] for name in names}
    # An embedding's input takes no gradient, so DeepSpeed's hook after its backward pass never drops it; nor does it
    # drop a head that several passes of one micro-batch have gone through.
    kept = {*LOOKED_UP, *(["head.weight"] if step.n_further > 0 else [])}
    return {name: 1 if name in small or name in kept else step.n_micro_batches for name in names}


def _gathers_under_pipeline(step: Step, name: str, is_small: bool) -> int:
    """The number of gathers of one weight in a step with a pipeline, found by replaying the schedule of its stage.

    A forward pass gathers the weight and drops it. So does a backward pass, but of two in a row the second drops
    nothing, because DeepSpeed's hook counts forward passes. Recomputation is a forward pass within a backward pass.
    """
    layer = step.tensors[name].layer
    stage = next(part.stage for part in step.parts if is_within(step, part, layer, name))
    is_embedding = name in LOOKED_UP and (step.has_embedding or not step.model.tie_embeddings)
    passes = passes_of(step, name)
    backwards = 1 if is_embedding else min(2, passes)  # the second of several in a row drops nothing
    half = step.tensors[name].half
    is_recomputed = layer is not None and half is not None and step.forwards(half, layer) > 1
    is_recomputed = is_recomputed and not is_beyond_last(step, layer, name)
    repeats = int(is_recomputed and not is_last_of_layer(step, layer, name))
    is_whole, follows_backward = is_small, False
    count = int(is_small)  # after the update
    for action in action_orders(step.parallel.pipeline, step.parallel.pp, step.n_micro_batches)[step.pp_rank]:
        if action.stage != stage:
            continue
        count += (backwards + repeats if action.kind == "B" else passes) - is_whole
        stays = is_embedding or passes > 1 or (follows_backward and not is_recomputed)
        is_whole = action.kind == "B" and stays
        follows_backward = action.kind == "B"
    return count


def passes_of(step: Step, name: str) -> int:
    """The number of times that one micro-batch's forward pass runs a weight's module on this rank.

    Raises ValueError for a tied embedding with multi-token prediction, which has no closed form.
    """
    if name == "embed.weight" and step.n_further and step.model.tie_embeddings:
        raise ValueError("ZeRO 3 with a pipeline, model.mtp and tied embeddings has no closed form")
    if name == "head.weight":
        return 1 + step.n_further
    # Beside the head the embedding looks further tokens up, or, where there are none, is the head itself.
    return max(1, step.n_further) if name == "embed.weight" and step.has_head else 1


def is_within(step: Step, part: Part, layer: int | None, name: str) -> bool:
    """Whether a weight of this layer (None: of none) belongs to this stage."""
    if layer is None:
        return is_end(part, name)
    return layer in part.layers or (part.has_head and layer in step.model.mtp_layers)


def is_end(part: Part, name: str) -> bool:
    """Whether a weight outside the layers belongs to this stage; a tied one belongs to the first of the rank's two."""
    return part.has_embedding if is_entry(name) and part.has_embedding else part.has_head


def is_beyond_last(step: Step, layer: int | None, name: str) -> bool:
    """Whether the weight comes after a dense layer's last matrix (its bias), where recomputation has already ended."""
    within = [each for each, tensor in step.tensors.items() if tensor.layer == layer]
    for number, each in enumerate(within):
        if step.tensors[each].weight.dims == ("d_model", "d_ff"):
            module = each.rsplit(".", 2)[0]  # the feed-forward layer
            return name in within[number + 1 :] and name.startswith(f"{module}.")
    return False


def is_last_of_layer(step: Step, layer: int | None, name: str) -> bool:
    """Whether the weight is the last that its layer uses, so that it is whole already when recomputation begins.

    The backward pass begins with that weight. Experts never count: putting their output back among the padding
    saves a tensor (under ZeRO 3 even where there is no padding), and recomputation begins there, before the experts'
    backward pass.
    """
    width = "shared_d_ff" if layer in step.moe_layers else "d_ff"
    return step.tensors[name].weight.dims == ("d_model", width)
