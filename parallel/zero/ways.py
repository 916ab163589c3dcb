"""Chooses the class that holds a run's state under ZeRO, from its layout and precision."""

from parallel.config import ParallelConfig
from parallel.zero.replicated import Replicated
from parallel.zero.scattered import Zero1Exchanged, Zero1OfLastPass, Zero1Scattered
from parallel.zero.sharding import Precision, Sharding
from parallel.zero.zero1_bf16 import Zero1Bf16
from parallel.zero.zero2_on_host import Zero2OnHost
from parallel.zero.zero3 import Zero3
from parallel.zero.zero12 import Zero1, Zero2


def sharding_for(parallel: ParallelConfig, precision: Precision) -> type[Sharding]:
    """The subclass of Sharding for this layout and this dtype of the weights."""
    if parallel.offload_optimizer:
        assert parallel.zero == 2, "refused by launcher.config.layout_rules"
        return Zero2OnHost
    match parallel.zero, precision:
        case 0, _:
            return Replicated
        case 1, _ if parallel.grad_reduce == "micro_batch":
            return Zero1Scattered if parallel.grad_reduce_dtype == "fp32" else Zero1Exchanged
        case 1, _ if parallel.grad_reduce == "last_micro_batch":
            return Zero1OfLastPass
        case 1, "bf16":
            return Zero1Bf16
        case 1, _:
            return Zero1
        case 2, _:
            return Zero2
        case _:
            return Zero3
