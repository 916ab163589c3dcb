"""Imported once by the fork server, before any rank exists: quiets DeepSpeed and sets what its use depends on."""

import logging
import warnings

import deepspeed.ops
import deepspeed.runtime.bf16_optimizer
import deepspeed.runtime.zero.partitioned_param_coordinator
import deepspeed.utils
from deepspeed.accelerator import get_accelerator

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
deepspeed.utils.logger.setLevel(logging.ERROR)
deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None  # it prints on every rank, whatever the level
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an optional CPU operator that takes 72 s to build
# A check of ZeRO 3's that broadcasts over the world: a pipeline's stages come to it at different times and would hang.
deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *_, **__: None
accelerator = get_accelerator()
if accelerator is not None and accelerator.device_name() == "cpu":
    # fp16 on a CPU is slow, not wrong; DeepSpeed refuses it where the processor has no fp16 products.
    accelerator.is_fp16_supported = lambda: True
