"""Cases for tests of the config's rules: a small model of each family, and a violation of each rule."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from launcher.config import families
from launcher.config.load import load_config
from launcher.config.schema import hint_at, item_hint, members
from launcher.config.tree import RunConfig
from launcher.config.words import join_or
from launcher.slurm.rules import FURTHER_OPTIONS
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.families.family import family_of, field_defaults
from modeling.schedules import lr_factor


def base(name: FamilyName) -> list[str]:
    """The fewest overrides that make a small model of the family; its router has the selection bias of its class."""
    family, defaults = family_of(name), field_defaults()
    least = {key: (number,) for key, number in family.at_least.items() if defaults[key] is not None}
    overrides = [f"model.family={name}", *(["model.moe.n_experts=4"] if family.has("moe") else [])]
    overrides += ["model.mla.kv_lora_rank=512"] if family.has("mla") else []
    overrides += ["model.linear_attention.n_k_heads=16"] if family.has("linear_attention") else []
    for key, allowed in {**family.allowed, **least}.items():
        default = defaults.get(key, allowed[0])
        if default < allowed[0] if key in least else default not in allowed:
            overrides.append(f"model.{key}={json.dumps(allowed[0])}")
    overrides += [f"model.{key}={families.usual_number(key)}" for key in family.needs]
    overrides += ["model.rope_scaling={name: yarn}"] if family.scales_queries else []
    overrides += [f"model.{key}={json.dumps(value(ModelConfig()))}" for key, value in family.derived.items()]
    return overrides + (["model.moe.balance.name=bias"] if family.has_selection_bias else [])


BASES = {name: base(name) for name in FAMILIES}


def names(section: str, *, have: bool) -> str:
    """The families whose class has (or lacks) the part ``section`` of a model, listed as in messages."""
    return join_or([name for name in FAMILIES if family_of(name).has(section) == have])


HAVE_EXPERTS, HAVE_NONE = names("moe", have=True), names("moe", have=False)
HAVE_MLA, HAVE_NO_MLA = names("mla", have=True), names("mla", have=False)
HAVE_MTP = names("mtp", have=True)

TIED = "(a head that is the embedding's weight can neither be smaller than that nor learn more slowly)"

# Base, overrides, number of processes, the expected message, and an override that its remedy names.
CASES = [
    ("llama", "model.family=none model.max_positions=2048", 1, "model.max_positions=2048 changes nothing where model.positions=rope; try model.max_positions=null", "model.max_positions=null"),
    ("llama", "model.family=none model.positions=learned data.seq_len=32", 1, "model.max_positions=null is not possible where model.positions=learned (it needs rows); try 1024", "model.max_positions=1024"),
    ("llama", "model.tie_embeddings=true model.init.name=mup", 1, f"model.tie_embeddings=true needs model.logit_divisor=1.0 to be model.d_model=512 over model.init.base_d_model=256, 2.0, where model.init.name=mup {TIED}; try model.tie_embeddings=false, or model.logit_divisor=2.0", "model.tie_embeddings=false"),
    ("granitemoe", "model.tie_embeddings=true model.logit_divisor=6 model.init.name=mup", 1, f"model.tie_embeddings=true needs model.logit_divisor=6.0 to be model.d_model=512 over model.init.base_d_model=256, 2.0, where model.init.name=mup {TIED}; try model.tie_embeddings=false, or model.logit_divisor=2.0", "model.logit_divisor=2"),
    ("qwen3_moe", "model.init={name: mup, base_d_ff: 64}", 1, "model.init.base_d_ff=64 changes nothing where no layer is dense; try null", "model.init.base_d_ff=null"),
    ("llama", "model.init={name: mup, base_expert_d_ff: 64}", 1, "model.init.base_expert_d_ff=64 changes nothing where model.moe=null; try null", "model.init.base_expert_d_ff=null"),
    ("gemma3_text", "model.init.name=mup", 1, "model.init.name=mup is not possible with model.family=gemma3_text, whose `transformers` class derives model.embedding_scale from model.d_model (muP needs a number that stays as the width grows); try model.init.name=depth_scaled", "model.init.name=depth_scaled"),
    ("llama", "seed=-1", 1, "seed=-1 must be at least 0; try 0", "seed=0"),
    ("llama", "train.steps=0", 1, "train.steps=0 must be at least 1; try 1000", "train.steps=1000"),
    ("llama", "data.seq_len=0", 1, "data.seq_len=0 must be at least 1; try 1024", "data.seq_len=1024"),
    ("llama", "checkpoint.every_steps=0", 1, "checkpoint.every_steps=0 must be at least 1; try 100 or null", "checkpoint.every_steps=null"),
    ("llama", "optimizer.lr=-0.1", 1, "optimizer.lr=-0.1 must be at least 0; try 0.0003", "optimizer.lr=0.0003"),
    ("llama", "optimizer.eps=0", 1, "optimizer.eps=0.0 must be at least 1e-30; try 1e-08", "optimizer.eps=1e-08"),
    ("llama", "optimizer.clip_norm=0", 1, "optimizer.clip_norm=0.0 must be at least 1e-12; try 1.0 or null", "optimizer.clip_norm=null"),
    ("llama", "optimizer.beta2=1", 1, "optimizer.beta2=1.0 must be at most 0.999999; try 0.95", "optimizer.beta2=0.95"),
    ("llama", "optimizer={name: sgd, momentum: -1}", 1, "optimizer.momentum=-1.0 must be at least 0; try 0.9", "optimizer.momentum=0.9"),
    ("llama", "schedule.min_ratio=2", 1, "schedule.min_ratio=2.0 must be at most 1; try 0.1", "schedule.min_ratio=0.1"),
    ("llama", "parallel.zero=4", 1, "parallel.zero=4 must be at most 3; try 1", "parallel.zero=1"),
    ("llama", "parallel.tp=0", 1, "parallel.tp=0 must be at least 1; try 1", "parallel.tp=1"),
    ("llama", "parallel.tp=2 train.global_batch_size=9", 3, "parallel.tp=2 must divide the number of processes=3; try parallel.tp=1", "parallel.tp=1"),
    ("llama", "parallel.tp=4 model.n_kv_heads=2", 4, "parallel.tp=4 must divide model.n_kv_heads=2; try 1 or 2", "parallel.tp=2"),
    ("llama", "parallel.tp=4 model.d_ff=1402", 4, "parallel.tp=4 must divide model.d_ff=1402; try 1 or 2", "parallel.tp=2"),
    ("gpt2", "parallel.tp=2 model.vocab_size=50257", 2, "parallel.tp=2 must divide model.vocab_size=50257; try 1, or model.vocab_size=50258 (rows that no token has)", "model.vocab_size=50258"),
    ("glm4_moe", "parallel.tp=8 model.n_heads=8 model.n_kv_heads=8 data.seq_len=12", 8, "parallel.tp=8 must divide data.seq_len=12; try 1, 2 or 4", "parallel.tp=4"),
    ("llama", "parallel.ep=2", 2, "parallel.ep=2 must be 1 where model.moe=null (there are no experts to cut); try parallel.ep=1", "parallel.ep=1"),
    ("glm4_moe", "parallel.ep=3 train.global_batch_size=12", 6, "parallel.ep=3 must divide model.moe.n_experts=4; try 1 or 2", "parallel.ep=2"),
    ("glm4_moe", "parallel.ep=4", 2, "parallel.ep=4 must divide the number of processes=2 / parallel.pp=1 = 2; try 1 or 2", "parallel.ep=2"),
    ("glm4_moe", "parallel.ep=2 parallel.ep_chunks=3", 2, "parallel.ep_chunks=3 must be at most model.moe.n_experts=4 / parallel.ep=2 = 2, the experts of a rank; try parallel.ep_chunks=2", "parallel.ep_chunks=2"),
    ("glm4_moe", "parallel.ep_chunks=2", 2, "parallel.ep_chunks=2 must be 1 where parallel.ep=1 (no tokens travel to experts); try parallel.ep_chunks=1", "parallel.ep_chunks=1"),
    ("glm4_moe", "parallel.ep=2 parallel.ep_chunks=2 parallel.ep_overlap=false", 2, "parallel.ep_chunks=2 needs parallel.ep_overlap=true, without which each message is waited for at once; try parallel.ep_overlap=true, or parallel.ep_chunks=1", "parallel.ep_overlap=true"),
    ("glm4_moe", "parallel.ep_chunks=0", 1, "parallel.ep_chunks=0 must be at least 1; try 1", "parallel.ep_chunks=1"),
    ("llama", "parallel.cp=4", 2, "parallel.cp=4 must divide the number of processes=2; try parallel.cp=2", "parallel.cp=2"),
    ("llama", "parallel.cp=2 data.seq_len=1022", 2, "data.seq_len=1022 must be a multiple of 4 where parallel.cp=2 (2 cp chunks a sequence) and parallel.tp=1; try 1020", "data.seq_len=1020"),
    ("llama", "parallel.cp=3 model.n_heads=4 model.n_kv_heads=4 data.seq_len=12 train.global_batch_size=9", 9, "parallel.cp=3 with parallel.cp_attention=ulysses must divide model.n_heads=4 / parallel.tp=1 = 4, and divide or be a multiple of model.n_kv_heads=4 / parallel.tp=1 = 4; try parallel.cp_attention=ring", "parallel.cp_attention=ring"),
    ("llama", "parallel.pp=2 parallel.tp=2 train.global_batch_size=12", 6, "parallel.pp=2 x parallel.tp=2 must divide the number of processes=6; try parallel.pp=1", "parallel.pp=1"),
    ("llama", "parallel.pp=2 model.n_layers=1", 2, "parallel.pp=2 with parallel.pipeline.name=1f1b makes 2 stages, which model.n_layers=1 must cover with at least one layer each; try parallel.pp=1", "parallel.pp=1"),
    ("llama", "model.d_model=1048576 model.n_layers=10000", 1, "model.d_model=1048576 with model.n_layers=10000 and the other widths makes 4.4e+16 parameters, and must make at most 1e+14; try 2368", "model.d_model=2368"),
    ("llama", "train.steps=10000000000 train.global_batch_size=16777216 data.seq_len=16777216", 1, "train.steps=10000000000 x train.global_batch_size=16777216 x data.seq_len=16777216 = 2.81e+24 tokens must be at most 9.22e+18; try train.steps=32767", "train.steps=32767"),
    ("llama", "name=a/b", 1, "name='a/b' must be one folder's name, without path separators; try 'a-b'", "name=a-b"),
    ("llama", "name=..", 1, "name='..' must be one folder's name, without path separators; try 'run'", "name=run"),
    ("llama", "run_dir=''", 1, "run_dir='' must be a path; try null (runs/NAME)", "run_dir=null"),
    ("llama", f"run_dir=x/{'a' * 256}/y", 1, f"run_dir='x/{'a' * 54}... must have names of at most 255 bytes, and one has 256; try null (runs/NAME)", "run_dir=null"),
    ("llama", f"name={'é' * 128}", 1, f"name='{'é' * 56}... must have names of at most 255 bytes, and one has 256; try '{'é' * 40}'", f"name={'é' * 40}"),
    ("llama", "run_dir=$SCRATCH/runs", 1, "run_dir='$SCRATCH/runs' must be written out, since variables are not expanded in a config; try null (runs/NAME)", "run_dir=null"),
    ("llama", "run_dir=s3://bucket/run", 1, "run_dir='s3://bucket/run' must be a path on this machine, and is a URL (checkpoint.dir may be one); try null (runs/NAME)", "run_dir=null"),
    ("llama", "run_dir=file:/x", 1, "run_dir='file:/x' must not begin like a URL that lacks a slash (file:// begins a URL, ./file: a folder's name); try null (runs/NAME)", "run_dir=null"),
    ("llama", "checkpoint.dir=simplecache::file:///x", 1, "checkpoint.dir='simplecache::file:///x' must be the URL of one place, and :: chains several, which cannot be written to in parts; try 'file:///x'", "checkpoint.dir=file:///x"),
    ("llama", 'checkpoint.dir="a\\0b"', 1, "checkpoint.dir='a\\x00b' must be a path; try null (RUN_DIR/checkpoints)", "checkpoint.dir=null"),
    ("llama", "train={global_batch_size: 10, micro_batch_size: 2}", 4, "train.global_batch_size=10 must be a multiple of dp=4 x train.micro_batch_size=2 = 8; try 8 or 16", "train.global_batch_size=16"),
    ("llama", "train.batch_ramp.start=8", 1, "train.batch_ramp.start=8 must be less than train.global_batch_size=8; try 7", "train.batch_ramp.start=7"),
    ("llama", "train.batch_ramp.start=8", 8, "train.batch_ramp.start=8 must be less than train.global_batch_size=8; try train.batch_ramp=null", "train.batch_ramp=null"),
    ("llama", "train.global_batch_size=32 train.batch_ramp.start=6 train.batch_ramp.increment=8", 4, "train.batch_ramp.start=6 must be a multiple of dp=4 x train.micro_batch_size=1 = 4; try 8", "train.batch_ramp.start=8"),
    ("llama", "train.global_batch_size=32 train.batch_ramp.start=14 train.batch_ramp.increment=8", 4, "train.batch_ramp.start=14 must be a multiple of dp=4 x train.micro_batch_size=1 = 4; try 8 or 16", "train.batch_ramp.start=16"),
    ("llama", "train.global_batch_size=32 train.batch_ramp.start=8 train.batch_ramp.increment=10", 2, "train.batch_ramp.increment=10 must be a multiple of dp=2 x train.micro_batch_size=1 = 2 and divide train.global_batch_size=32 - train.batch_ramp.start=8 = 24; try 8 or 12", "train.batch_ramp.increment=12"),
    ("llama", "train.global_batch_size=4002 train.batch_ramp.start=2", 1, "train.batch_ramp.increment=1 makes 4000 sizes from train.batch_ramp.start=2 to train.global_batch_size=4002, and must make at most 1000; try 4", "train.batch_ramp.increment=4"),
    ("llama", "parallel.pp=4 model.n_layers=8 train.global_batch_size=16 train.batch_ramp.start=2 train.batch_ramp.increment=2", 4, "train.batch_ramp.start=2 and train.batch_ramp.increment=2 make a batch of 2, whose 2 micro-batches a rank parallel.pipeline.name=1f1b cannot run with parallel.pp=4; try train.batch_ramp.start=4", "train.batch_ramp.start=4"),
    ("llama", "parallel.pp=2 model.n_layers=8 parallel.pipeline.name=dualpipev train.global_batch_size=4 train.batch_ramp.start=2 train.batch_ramp.increment=1", 2, "train.batch_ramp.start=2 and train.batch_ramp.increment=1 make a batch of 2, whose 2 micro-batches a rank parallel.pipeline.name=dualpipev cannot run with parallel.pp=2; try train.batch_ramp=null", "train.batch_ramp=null"),
    ("llama", "train.global_batch_size=3", 4, "train.global_batch_size=3 must be a multiple of dp=4 x train.micro_batch_size=1 = 4; try 4", "train.global_batch_size=4"),
    ("llama", "train.global_batch_size=0", 2, "train.global_batch_size=0 must be at least 1; try 8", "train.global_batch_size=8"),
    ("llama", "train.micro_batch_size=0", 2, "train.micro_batch_size=0 must be at least 1; try 1", "train.micro_batch_size=1"),
    ("llama", "model.n_kv_heads=3", 1, "model.n_kv_heads=3 must divide model.n_heads=8; try 2 or 4", "model.n_kv_heads=2"),
    ("llama", "model.n_kv_heads=16", 1, "model.n_kv_heads=16 must divide model.n_heads=8; try 8", "model.n_kv_heads=8"),
    ("llama", "model.n_kv_heads=0", 1, "model.n_kv_heads=0 must be at least 1; try 1", "model.n_kv_heads=1"),
    ("llama", "model.d_head=63", 1, "model.d_head=63 must be even (rotary embedding turns channels in pairs); try 64", "model.d_head=64"),
    ("llama", "model.d_model=500", 1, "model.d_model=500 must be a multiple of 2 x model.n_heads=8 = 16 where model.d_head=null (rotary embedding turns channels in pairs); try 496, or set model.d_head", "model.d_model=496"),
    ("llama", "model.d_model=8", 1, "model.d_model=8 must be a multiple of 2 x model.n_heads=8 = 16 where model.d_head=null (rotary embedding turns channels in pairs); try 16, or set model.d_head", "model.d_model=16"),
    ("llama", "schedule.warmup_steps=1001", 1, "schedule.warmup_steps=1001 must be at most train.steps=1000; try 100", "schedule.warmup_steps=100"),
    ("llama", "schedule={name: wsd, warmup_steps: 600, decay_steps: 500}", 1, "schedule.decay_steps=500 + schedule.warmup_steps=600 must be at most train.steps=1000; try schedule.decay_steps=400", "schedule.decay_steps=400"),
    ("llama", "slurm.partition=a%b", 1, "slurm.partition='a%b' must be one word, as Slurm knows it; try null, or look it up with sinfo", "slurm.partition=null"),
    ("llama", "slurm.scratch=''", 1, "slurm.scratch='' must be a path or a name; try null", "slurm.scratch=null"),
    ("llama", "slurm.modules=[a;b]", 1, "slurm.modules[0]='a;b' must be a module's name; try one that `module avail` lists", "slurm.modules=[a]"),
    ("llama", "slurm.environment=[NCCL-DEBUG]", 1, "slurm.environment[0]='NCCL-DEBUG' must be NAME=value, or NAME; try NCCL_DEBUG=INFO", "slurm.environment=[NCCL_DEBUG=INFO]"),
    ("llama", "slurm.environment=[RANK=3]", 1, "slurm.environment[0]='RANK=3' must not set RANK, which Slurm, bash or the job script sets; choose another name, or leave it out", "slurm.environment=[]"),
    ("llama", "slurm.options=[reservation=a%b]", 1, "slurm.options[0]='reservation=a%b' must be NAME, or NAME=value of one word, as sbatch knows it; try reservation=week", "slurm.options=[reservation=week]"),
    ("llama", "slurm.options=[output=log]", 1, f"slurm.options[0]='output=log' must be one of sbatch's options {', '.join(FURTHER_OPTIONS)}; leave it out", "slurm.options=[]"),
    ("llama", "slurm.options=[resevation=week]", 1, f"slurm.options[0]='resevation=week' must be one of sbatch's options {', '.join(FURTHER_OPTIONS)}; did you mean reservation?", "slurm.options=[reservation=week]"),
    ("llama", "slurm.options=[nice,nice=5]", 1, "slurm.options[1]='nice=5' must not give nice a second time; leave it out", "slurm.options=[nice]"),
    ("llama", "slurm.container_mounts=[data]", 1, "slurm.container_mounts[0]='data' must be PATH, FROM:TO or FROM:TO:ro, of absolute paths; try /scratch:/scratch", "slurm.container_mounts=[]"),
    ("llama", "slurm.container_mounts=[/data]", 1, "slurm.container_mounts[0]='/data' needs slurm.container, which would see it; try slurm.container_mounts=[]", "slurm.container_mounts=[]"),
    ("llama", "slurm.spare_nodes=1 slurm.preflight=false", 1, "slurm.spare_nodes=1 needs slurm.preflight=true, which says whose place they take; try slurm.spare_nodes=0", "slurm.spare_nodes=0"),
    ("llama", "slurm.spare_nodes=-1", 1, "slurm.spare_nodes=-1 must be at least 0; try 1", "slurm.spare_nodes=1"),
    ("llama", "slurm.time_minutes=5", 1, "slurm.time_minutes=5 must be longer than slurm.notice_seconds=300, the time to save at its end; try 65", "slurm.time_minutes=65"),
    ("llama", "parallel.grad_reduce=micro_batch parallel.zero=2", 1, "parallel.grad_reduce=micro_batch needs parallel.zero=1, not parallel.zero=2, whose gradients are reduced at times of its own; try parallel.zero=1, or parallel.grad_reduce=step", "parallel.grad_reduce=step"),
    ("llama", "optimizer={name: muon, iteration_dtype: bf16} train.precision=fp32", 1, "optimizer.iteration_dtype=bf16 needs a train.precision of 16 bits or less, not train.precision=fp32, whose updates it would round; try optimizer.iteration_dtype=fp32", "optimizer.iteration_dtype=fp32"),
    ("llama", "parallel.grad_reduce_dtype=bf16", 1, "parallel.grad_reduce_dtype=bf16 needs parallel.grad_reduce=micro_batch, not parallel.grad_reduce=step, which would round sums; try parallel.grad_reduce=micro_batch", "parallel.grad_reduce=micro_batch"),
    ("llama", "parallel.grad_reduce=micro_batch parallel.grad_reduce_dtype=bf16 train.precision=fp16", 1, "parallel.grad_reduce_dtype=bf16 would round the gradients of train.precision=fp16; try parallel.grad_reduce_dtype=fp32", "parallel.grad_reduce_dtype=fp32"),
    ("llama", "train.fp8_keep_weights=true", 1, "train.fp8_keep_weights=true needs train.precision=fp8, not train.precision=bf16, whose weights are not cut; try train.fp8_keep_weights=false", "train.fp8_keep_weights=false"),
    ("llama", "train.precision=fp8 train.fp8_keep_weights=true parallel.zero=3", 1, "train.fp8_keep_weights=true does not work with parallel.zero=3, whose weights are there during the passes of their modules alone; try train.fp8_keep_weights=false, or parallel.zero=2", "parallel.zero=2"),
    ("llama", "parallel.zero=0", 1, "parallel.zero=0 works with train.precision=fp32 only, not train.precision=bf16; try parallel.zero=1", "parallel.zero=1"),
    ("llama", "train.activation_gib=8 train.recompute=full", 1, "train.recompute=full must be none where train.activation_gib=8 (which chooses what each layer recomputes); try train.recompute=none, or train.activation_gib=null", "train.recompute=none"),
    ("llama", "parallel.tp_overlap=true parallel.tp=2 parallel.zero=3", 2, "parallel.tp_overlap=true does not work with parallel.zero=3, whose weights are there during the passes of their modules alone; try parallel.tp_overlap=false, or parallel.zero=2", "parallel.zero=2"),
    ("llama", "parallel.tp_overlap=true parallel.tp=2 parallel.pp=2 parallel.pipeline.name=zbv", 4, "parallel.tp_overlap=true does not work with parallel.pipeline.name=zbv, which computes weights' gradients in a part of its own of the backward pass; try parallel.tp_overlap=false, or parallel.pipeline.name=interleaved", "parallel.tp_overlap=false"),
    ("llama", "parallel.offload_optimizer=true parallel.zero=1", 1, "parallel.offload_optimizer=true works with parallel.zero=2 only, not parallel.zero=1; try parallel.zero=2, or parallel.offload_optimizer=false", "parallel.zero=2"),
    ("llama", "parallel.offload_optimizer=true parallel.zero=2 parallel.grad_reduce=micro_batch", 1, "parallel.grad_reduce=micro_batch needs parallel.zero=1, not parallel.zero=2, whose gradients are reduced at times of its own; try parallel.grad_reduce=step", "parallel.grad_reduce=step"),
    ("llama", "parallel.offload_optimizer=true parallel.zero=2 parallel.grad_reduce_dtype=bf16", 1, "parallel.grad_reduce_dtype=bf16 needs parallel.grad_reduce=micro_batch, not parallel.grad_reduce=step, which would round sums; try parallel.grad_reduce_dtype=fp32", "parallel.grad_reduce_dtype=fp32"),
    ("llama", "parallel.offload_optimizer=true parallel.zero=2 optimizer={name: muon}", 1, "parallel.offload_optimizer=true does not work with optimizer.name=muon, whose matrices are made whole on the device; try optimizer.name=adamw, or parallel.offload_optimizer=false", "parallel.offload_optimizer=false"),
    ("llama", "train.activation_gib=8 train.offload_activations=true", 1, "train.activation_gib=8 must be null where train.offload_activations=true (a budget is of activations that stay on the device); try train.activation_gib=null, or train.offload_activations=false", "train.activation_gib=null"),
    ("llama", "train.activation_gib=0.001", 1, "train.activation_gib=0.001 must be at least 0.0317 with full recomputation at train.micro_batch_size=1 (what each layer is given, for the micro-batches in flight, and one layer computed again); try 0.0317", "train.activation_gib=0.0317"),
    ("llama", "train.precision=fp8 model.d_ff=40 parallel.tp=2", 2, "train.precision=fp8 needs d_ff=40 / parallel.tp=2 (of layers.0.feed_forward.gate.weight) to be a multiple of 16 (products of 8 bits take rows of 16 bytes); try train.precision=bf16", "train.precision=bf16"),
    ("llama", "train.eval_every_steps=5 data.heldout_fraction=0", 1, "train.eval_every_steps=5 needs held-out data, but data.heldout_fraction=0.0 and data.heldout_path=null; try data.heldout_fraction=0.01, or train.eval_every_steps=null", "data.heldout_fraction=0.01"),
    ("llama", "checkpoint.every_steps=40 checkpoint.keep_every_steps=100", 1, "checkpoint.keep_every_steps=100 must be a multiple of checkpoint.every_steps=40, since no other step is saved; try 80", "checkpoint.keep_every_steps=80"),
    ("llama", "checkpoint.every_steps=40 checkpoint.keep_every_steps=10", 1, "checkpoint.keep_every_steps=10 must be a multiple of checkpoint.every_steps=40, since no other step is saved; try 400", "checkpoint.keep_every_steps=400"),
    ("llama", "checkpoint.keep_every_steps=100", 1, "checkpoint.keep_every_steps=100 must be a multiple of checkpoint.every_steps=null, since no other step is saved; try checkpoint.every_steps=10", "checkpoint.every_steps=10"),
    ("llama", "checkpoint.every_steps=40 checkpoint.keep_best=2", 1, "checkpoint.keep_best=2 needs held-out losses, but train.eval_every_steps=null; try train.eval_every_steps=40", "train.eval_every_steps=40"),
    ("llama", "train.eval_every_steps=30 checkpoint.every_steps=40 checkpoint.keep_best=1", 1, "checkpoint.keep_best=1 needs a held-out loss at each checkpoint: checkpoint.every_steps=40 must be a multiple of train.eval_every_steps=30; try checkpoint.every_steps=30", "checkpoint.every_steps=30"),
    ("llama", "model.qk_norm=true", 1, "model.qk_norm=true is not possible with model.family=llama, whose `transformers` class cannot express it; try false", "model.qk_norm=false"),
    ("llama", "model.qk_norm_after_rope=true", 1, "model.qk_norm_after_rope=true is not possible with model.family=llama, whose `transformers` class cannot express it; try false", "model.qk_norm_after_rope=false"),
    ("llama", "model.sliding_window=8", 1, "model.sliding_window=8 is not possible with model.family=llama, whose `transformers` class cannot express it; try null", "model.sliding_window=null"),
    ("llama", "model.qkv_bias=true", 1, "model.o_bias=false must be model.qkv_bias=true with model.family=llama, whose `transformers` class has one key for both; try true", "model.o_bias=true"),
    ("llama", "model.residual_dropout=1e-6", 1, "model.residual_dropout=1e-06 must be 0 or at least 0.001 (masks are drawn in steps of 1/65536); try 0.001", "model.residual_dropout=0.001"),
    ("gpt_neox", "model.residual_dropout=0.1", 1, "model.embedding_dropout=0.0 must be model.residual_dropout=0.1 with model.family=gpt_neox, whose `transformers` class has one key for both; try 0.1", "model.embedding_dropout=0.1"),
    ("qwen2", "model.full_attention_layers=[0]", 1, "model.full_attention_layers=[0] must be [] where model.sliding_window=null (no layer has a window); remove it", "model.full_attention_layers=[]"),
    ("qwen2", "model.sliding_window=8 model.full_attention_layers=[3,1]", 1, "model.full_attention_layers=[3, 1] must name each layer once, ascending; try [1, 3]", "model.full_attention_layers=[1,3]"),
    ("qwen2", "model.sliding_window=8 model.full_attention_layers=[3,9]", 1, "model.full_attention_layers=[3, 9] must name layers below model.n_layers=8 (the first is 0); try [3]", "model.full_attention_layers=[3]"),
    ("smollm3", "model.nope_layers=[3,1]", 1, "model.nope_layers=[3, 1] must name each layer once, ascending; try [1, 3]", "model.nope_layers=[1,3]"),
    ("smollm3", "model.nope_layers=[3,9]", 1, "model.nope_layers=[3, 9] must name layers below model.n_layers=8 (the first is 0); try [3]", "model.nope_layers=[3]"),
    ("llama", "model.rope_scaling={name: llama3, high_freq_factor: 1.0}", 1, "model.rope_scaling.high_freq_factor=1.0 must be above model.rope_scaling.low_freq_factor=1.0; try 4.0", "model.rope_scaling.high_freq_factor=4.0"),
    ("llama", "model.rope_scaling={name: yarn, beta_fast: 0.5}", 1, "model.rope_scaling.beta_fast=0.5 must be at least model.rope_scaling.beta_slow=1.0; try 32.0", "model.rope_scaling.beta_fast=32.0"),
    ("llama", "model.rope_scaling={name: dynamic, original_seq_len: 512}", 1, "data.seq_len=1024 must be at most model.rope_scaling.original_seq_len=512 where model.rope_scaling.name=dynamic (it is for generating beyond the length of training); try 512", "data.seq_len=512"),
    ("llama", "model.rope_scaling={name: dynamic} model.d_head=2", 1, "model.rope_scaling.name=dynamic is not possible where 2 channels of a head turn (its exponent is the channels over two less); try model.rope_scaling=null", "model.rope_scaling=null"),
    ("phi3", "model.rope_scaling={name: longrope, short_factor: [1.0], long_factor: [1.0], original_seq_len: 512} model.d_model=16", 1, "data.seq_len=1024 must be at most model.rope_scaling.original_seq_len=512 where model.rope_scaling.name=longrope (it is for generating beyond the length of training); try 512", "data.seq_len=512"),
    ("phi3", "model.rope_scaling={name: longrope, short_factor: [1.0], long_factor: [1.0, 2.0]} model.d_model=16", 1, "model.rope_scaling.long_factor has 2 numbers, and must have one for each of the 1 pairs of channels that turn; try model.rope_scaling=null", "model.rope_scaling=null"),
    ("phi3", "model.rope_scaling={name: longrope, short_factor: [1.0], long_factor: [1.0], original_seq_len: 1} model.d_model=16 data.seq_len=1", 1, "model.rope_scaling.original_seq_len=1 must be at least 2 where model.rope_scaling.name=longrope (attention's factor is by its logarithm); try 2", "model.rope_scaling.original_seq_len=2"),
    ("phi3", "model.rope_scaling={name: linear}", 1, "model.rope_scaling.name=linear is not possible with model.family=phi3, whose `transformers` class cannot express it; try longrope", "model.rope_scaling=null"),
    ("llama", "model.rope_scaling={name: yarn, query_growth: 0.1}", 1, "model.rope_scaling.query_growth=0.1 is not possible with model.family=llama, whose `transformers` class cannot express it; try 0.0", "model.rope_scaling.query_growth=0.0"),
    ("ministral3", "model.rope_scaling=null", 1, "model.rope_scaling=null is not possible with model.family=ministral3, whose `transformers` class scales queries by its original_seq_len; try model.rope_scaling={name: yarn}", "model.rope_scaling={name: yarn}"),
    ("ministral3", "model.rope_scaling={name: llama3}", 1, "model.rope_scaling.name=llama3 is not possible with model.family=ministral3, whose `transformers` class cannot express it; try yarn", "model.rope_scaling.name=yarn"),
    ("llama", "model.rope_theta=1 model.rope_scaling={name: yarn}", 1, "model.rope_theta=1.0 must be above 1 where model.rope_scaling.name=yarn (its frequencies must differ); try 10000.0", "model.rope_theta=10000.0"),
    ("gpt_oss", "model.moe.swiglu_limit=null", 1, "model.moe.swiglu_limit=null is not possible with model.family=gpt_oss, whose `transformers` class needs a number; try 7.0", "model.moe.swiglu_limit=7.0"),
    ("gemma3_text", "model.local_rope_theta=null", 1, "model.local_rope_theta=null is not possible with model.family=gemma3_text, whose `transformers` class needs a number; try 10000.0", "model.local_rope_theta=10000.0"),
    ("gemma3_text", "model.score_channels=100.5", 1, "model.score_channels=100.5 is not possible with model.family=gemma3_text, whose `transformers` class needs a whole number; try 101.0", "model.score_channels=101.0"),
    ("gemma3_text", "model.embedding_scale=1", 1, "model.embedding_scale=1.0 is not possible with model.family=gemma3_text, whose `transformers` class derives it from other keys; try 22.627416997969522", "model.embedding_scale=22.627416997969522"),
    ("deepseek_v2", "model.mla.d_nope=3 model.mla.d_v=8", 1, "model.mla.d_nope=3 is not possible with model.family=deepseek_v2, whose `transformers` class needs an even number; try 4", "model.mla.d_nope=4"),
    ("glm4_moe", "model.rope_fraction=0.3", 1, "model.rope_fraction=0.3 of a head's 64 channels is 19, and must be an even number, at least 2 (rotary embedding turns channels in pairs); try 0.28125", "model.rope_fraction=0.28125"),
    ("llama", "model.moe.n_experts=8", 1, f"model.moe.n_experts=8 is not possible with model.family=llama, whose `transformers` class has no experts; try model.moe=null, or model.family={HAVE_EXPERTS}", "model.family=mixtral"),
    ("llama", "model.d_head=64 model.d_model=250", 1, "model.d_model=250 must be a multiple of model.n_heads=8 with model.family=llama, whose `transformers` class demands it even where model.d_head=64 is given; try 256", "model.d_model=256"),
    ("mixtral", "model.moe=null", 1, f"model.moe=null is not possible with model.family=mixtral, whose `transformers` class has experts; try model.moe.n_experts=8, or model.family={HAVE_NONE}", "model.moe.n_experts=8"),
    ("mixtral", "model.qk_norm=true", 1, "model.qk_norm=true is not possible with model.family=mixtral, whose `transformers` class cannot express it; try false", "model.qk_norm=false"),
    ("mixtral", "model.moe.top_k=5", 1, "model.moe.top_k=5 must be at most model.moe.n_experts=4; try 4, or more experts", "model.moe.top_k=4"),
    ("mixtral", "model.moe.top_k=0", 1, "model.moe.top_k=0 must be at least 1; try 1", "model.moe.top_k=1"),
    ("mixtral", "model.moe.d_ff=20", 1, "model.moe.d_ff=20 must be a multiple of 8 where model.moe.n_experts=4 and train.precision=bf16 (grouped matrix products need rows of 16 bytes); try 16", "model.moe.d_ff=16"),
    ("mixtral", "model.moe.d_ff=2 train.precision=fp32", 1, "model.moe.d_ff=2 must be a multiple of 4 where model.moe.n_experts=4 and train.precision=fp32 (grouped matrix products need rows of 16 bytes); try 4", "model.moe.d_ff=4"),
    ("mixtral", "model.moe.n_dense_layers=1", 1, "model.moe.n_dense_layers=1 is not possible with model.family=mixtral, whose `transformers` class cannot express it; try 0", "model.moe.n_dense_layers=0"),
    ("mixtral", "model.moe.normalize_top_k=false", 1, "model.moe.normalize_top_k=false is not possible with model.family=mixtral, whose `transformers` class cannot express it; try true", "model.moe.normalize_top_k=true"),
    ("mixtral", "model.sliding_window=1", 1, "model.sliding_window=1 is not possible with model.family=mixtral, whose `transformers` class needs at least 2; try 2", "model.sliding_window=2"),
    ("qwen3_moe", "model.qk_norm=false", 1, "model.qk_norm=false is not possible with model.family=qwen3_moe, whose `transformers` class cannot express it; try true", "model.qk_norm=true"),
    ("qwen3_moe", "model.moe.n_dense_layers=9", 1, "model.moe.n_dense_layers=9 must be at most model.n_layers=8; try 8", "model.moe.n_dense_layers=8"),
    ("qwen3_moe", "model.moe.every_n_layers=9", 1, "model.moe.every_n_layers=9 must be at most model.n_layers=8 (no layer would have experts); try 8", "model.moe.every_n_layers=8"),
    ("qwen3_moe", "model.moe.every_n_layers=2 model.moe.n_dense_layers=3", 1, "model.moe.n_dense_layers=3 must be a multiple of model.moe.every_n_layers=2 (the layers between have no experts anyway); try 2", "model.moe.n_dense_layers=2"),
    ("qwen3_moe", "model.moe.every_n_layers=2 model.moe.dense_layers=[2,3]", 1, "model.moe.dense_layers=[2, 3] must name layers that have experts otherwise, which model.moe.n_dense_layers=0 and model.moe.every_n_layers=2 leave; try [3]", "model.moe.dense_layers=[3]"),
    ("qwen3_moe", "model.moe.dense_layers=[3,1]", 1, "model.moe.dense_layers=[3, 1] must name each layer once, ascending; try [1, 3]", "model.moe.dense_layers=[1,3]"),
    ("glm4_moe", "model.moe.every_n_layers=2", 1, "model.moe.every_n_layers=2 is not possible with model.family=glm4_moe, whose `transformers` class cannot express it; try 1", "model.moe.every_n_layers=1"),
    ("qwen3_moe", "model.moe.score=sigmoid", 1, "model.moe.score=sigmoid is not possible with model.family=qwen3_moe, whose `transformers` class cannot express it; try softmax", "model.moe.score=softmax"),
    ("qwen3_moe", "model.moe.routed_scale=2", 1, "model.moe.routed_scale=2.0 is not possible with model.family=qwen3_moe, whose `transformers` class cannot express it; try 1.0", "model.moe.routed_scale=1.0"),
    ("qwen3_moe", "model.moe.n_shared_experts=1", 1, "model.moe.n_shared_experts=1 is not possible with model.family=qwen3_moe, whose `transformers` class cannot express it; try 0", "model.moe.n_shared_experts=0"),
    ("qwen3_moe", "model.moe.balance.name=bias", 1, "model.moe.balance.name=bias is not possible with model.family=qwen3_moe, whose `transformers` class cannot express it; try sequence_aux or none", "model.moe.balance.name=none"),
    ("qwen3_moe", "model.moe.balance.coefficient=-1", 1, "model.moe.balance.coefficient=-1.0 must be at least 0; try 0.001", "model.moe.balance.coefficient=0.001"),
    ("ernie4_5_moe", "model.moe.dense_layers=[5]", 1, "model.moe.dense_layers=[5] is not possible with model.family=ernie4_5_moe, whose `transformers` class knows one last layer with experts; try [5, 6, 7]", "model.moe.dense_layers=[5,6,7]"),
    ("granitemoeshared", "model.moe.shared_d_ff=64", 1, "model.moe.shared_d_ff=64 changes nothing where no expert is shared; try model.moe.shared_d_ff=null", "model.moe.shared_d_ff=null"),
    ("olmo3", "model.rope_scaling={name: yarn, truncate: false}", 1, "model.rope_scaling.truncate=false is not possible with model.family=olmo3, whose `transformers` class cannot express it; try true", "model.rope_scaling.truncate=true"),
    ("glm4_moe", "model.moe.score=softmax", 1, "model.moe.score=softmax is not possible with model.family=glm4_moe, whose `transformers` class cannot express it; try sigmoid", "model.moe.score=sigmoid"),
    ("glm4_moe", "model.moe.n_shared_experts=0", 1, "model.moe.n_shared_experts=0 is not possible with model.family=glm4_moe, whose `transformers` class needs at least 1; try 1", "model.moe.n_shared_experts=1"),
    ("glm4_moe", "model.moe={n_experts: 1, top_k: 1, score: sigmoid, n_shared_experts: 1}", 1, "model.moe.n_experts=1 is not possible with model.family=glm4_moe, whose `transformers` class needs at least 2; try 2", "model.moe.n_experts=2"),
    ("glm4_moe", "model.sliding_window=8", 1, "model.sliding_window=8 is not possible with model.family=glm4_moe, whose `transformers` class cannot express it; try null", "model.sliding_window=null"),
    ("glm4_moe", "model.moe.n_groups=2", 1, "model.moe.n_groups=2 is not possible with model.family=glm4_moe, whose `transformers` class cannot express it; try 1", "model.moe.n_groups=1"),
    ("qwen3_5_text", "model.linear_attention.n_v_heads=24", 1, "model.linear_attention.n_v_heads=24 must be a multiple of model.linear_attention.n_k_heads=16 (as many values share each key); try 32", "model.linear_attention.n_v_heads=32"),
    ("qwen3_5_text", "model.n_layers=2 model.full_attention_layers=[0,1]", 1, "model.full_attention_layers=[0, 1] must leave out a layer where model.linear_attention is given (no layer's attention is linear); try [0]", "model.full_attention_layers=[0]"),
    ("qwen3_5_text", "model.linear_attention.n_k_heads=2 model.linear_attention.n_v_heads=6 parallel.cp=4", 4, "parallel.cp=4 must divide model.linear_attention.n_v_heads=6 / parallel.tp=1 = 6, and divide or be a multiple of model.linear_attention.n_k_heads=2 / parallel.tp=1 = 2 (linear attention goes by all-to-all over heads); try 1, 2 or 6", "parallel.cp=2"),
    ("llama", "model.family=none model.linear_attention.n_k_heads=16 model.sliding_window=8", 1, "model.sliding_window=8 is not possible where model.linear_attention is given (layers but for full_attention_layers are linear, and have no window); try null", "model.sliding_window=null"),
    ("glm4_moe", "model.mla.kv_lora_rank=64", 1, f"model.mla.kv_lora_rank=64 is not possible with model.family=glm4_moe, whose `transformers` class has no latent attention; try model.mla=null, or model.family={HAVE_MLA}", "model.mla=null"),
    ("mixtral", "model.mtp.depth=2", 1, f"model.mtp.depth=2 is not possible with model.family=mixtral, whose `transformers` class has no modules that predict further tokens; try model.mtp=null, or model.family={HAVE_MTP}", "model.mtp=null"),
    ("glm4_moe", "data.seq_len=2 model.mtp.depth=2", 1, "data.seq_len=2 must be above model.mtp.depth=2 (no sample has a token so far ahead); try 3", "data.seq_len=3"),
    ("glm4_moe", "model.mtp.depth=2 parallel.pp=2 parallel.pipeline.name=zbv", 2, "model.mtp.depth=2 must be 1 with parallel.pipeline.name=zbv, whose backward pass in two parts takes the embedding's gradient once; try 1, or parallel.pipeline.name=interleaved", "model.mtp.depth=1"),
    ("glm4_moe", "model.mtp.depth=1 model.tie_embeddings=true parallel.pp=2 parallel.pipeline.name=dualpipev", 2, "model.tie_embeddings=true must be false where model.mtp is given with parallel.pipeline.name=dualpipev, whose backward pass in two parts takes the embedding's gradient once; try false, or parallel.pipeline.name=interleaved", "model.tie_embeddings=false"),
    ("deepseek_v3", "model.mla=null", 1, f"model.mla=null is not possible with model.family=deepseek_v3, whose `transformers` class has latent attention; try model.mla.kv_lora_rank=512, or model.family={HAVE_NO_MLA}", "model.mla.kv_lora_rank=512"),
    ("deepseek_v3", "model.d_head=64", 1, "model.d_head=64 is not possible with model.family=deepseek_v3, whose `transformers` class cannot express it; try null", "model.d_head=null"),
    ("deepseek_v3", "model.n_kv_heads=4", 1, "model.n_kv_heads=4 must be model.n_heads=8 where model.mla is given (every head has keys and values of its own); try 8", "model.n_kv_heads=8"),
    ("deepseek_v3", "model.mla.d_rope=63", 1, "model.mla.d_rope=63 must be even (rotary embedding turns channels in pairs); try 64", "model.mla.d_rope=64"),
    ("deepseek_v3", "model.mla.d_v=256", 1, "model.mla.d_v=256 must be at most model.mla.d_nope=128 + model.mla.d_rope=64 (attention's kernels take no wider values); try 192", "model.mla.d_v=192"),
    ("deepseek_v3", "model.moe.n_groups=3", 1, "model.moe.n_groups=3 must cut model.moe.n_experts=4 into equal groups of two or more; try 2", "model.moe.n_groups=2"),
    ("deepseek_v3", "model.moe.n_groups=4", 1, "model.moe.n_groups=4 must cut model.moe.n_experts=4 into equal groups of two or more; try 2", "model.moe.n_groups=2"),
    ("deepseek_v3", "model.moe.top_k_groups=2", 1, "model.moe.top_k_groups=2 must be at most model.moe.n_groups=1; try 1", "model.moe.top_k_groups=1"),
    ("deepseek_v3", "model.moe.n_groups=2 model.moe.top_k=3", 1, "model.moe.top_k=3 must be at most the 2 experts of model.moe.top_k_groups=1 of model.moe.n_groups=2 groups; try 2", "model.moe.top_k=2"),
    ("gpt2", "model.max_positions=null", 1, "model.max_positions=null is not possible with model.family=gpt2, whose `transformers` class needs a number; try 1024", "model.max_positions=1024"),
    ("gpt2", "data.seq_len=2048", 1, "data.seq_len=2048 must be at most model.max_positions=1024 (a position beyond has no row in the table); try 1024", "data.seq_len=1024"),
    ("gpt2", "model.d_model=500", 1, "model.d_model=500 must be a multiple of model.n_heads=8 where model.d_head=null (all heads have as many channels); try 496, or set model.d_head", "model.d_model=496"),
    ("gpt2", "model.positions=rope", 1, "model.positions=rope is not possible with model.family=gpt2, whose `transformers` class cannot express it; try learned", "model.positions=learned"),
    ("gpt2", "model.n_kv_heads=4", 1, "model.n_kv_heads=4 is not possible with model.family=gpt2, whose `transformers` class derives it from other keys; try 8", "model.n_kv_heads=8"),
    ("llama", "model.norm=layer", 1, "model.norm=layer is not possible with model.family=llama, whose `transformers` class cannot express it; try rms", "model.norm=rms"),
    ("deepseek_v3", "parallel.tp=16", 16, "parallel.tp=16 must divide model.n_heads=8; try 1, 2, 4 or 8", "parallel.tp=8"),
]  # fmt: skip


def split_overrides(text: str) -> list[str]:
    """The overrides of a case, split at spaces that are not within braces."""
    return re.split(r" (?![^{]*})", text)


def is_integer(key: str) -> bool:
    """Whether a key, or each item of its list, takes only integers."""
    hint = hint_at(RunConfig, key.split("."))
    return float not in members(item_hint(hint) or hint)


def assert_sound(config: RunConfig, world_size: int) -> None:
    """Asserts the properties of a valid config that later code relies on."""
    train, model = config.train, config.model
    assert train.global_batch_size % (world_size * train.micro_batch_size) == 0
    assert train.global_batch_size > 0
    assert all(size % (world_size * train.micro_batch_size) == 0 for size in train.batches.sizes)
    assert train.batches.sizes[-1] == train.global_batch_size == train.batches.size_at(10**15)
    assert model.n_heads % model.n_kv_heads == 0
    assert model.head_dim > 0
    assert model.head_dim % 2 == 0 or model.positions != "rope"
    assert model.rope_dim >= 2 * (model.positions == "rope") and model.rope_dim % 2 == 0
    if model.moe is not None:
        assert 1 <= model.moe.top_k <= model.moe.n_experts
        assert model.moe.n_dense_layers <= model.n_layers
        assert model.d_model * (4 if train.precision == "fp32" else 2) % 16 == 0
        assert model.moe.d_ff * (4 if train.precision == "fp32" else 2) % 16 == 0
    for step in {1, train.steps // 2 or 1, train.steps}:
        assert 0 <= lr_factor(config.schedule, step, train.steps) <= 1


def loader(folder: Path) -> Callable[..., RunConfig]:
    """A function that makes a config of overrides alone; the empty config file that it loads lies in ``folder``."""
    path = folder / "empty.yaml"
    path.write_text("")
    return lambda *overrides: load_config(path, overrides)
