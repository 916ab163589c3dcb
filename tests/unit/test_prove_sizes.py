"""Every number written into modeling/ and parallel/ is one that a proof crosses, or stands here with its reason."""

from dataclasses import fields
from pathlib import Path

import pytest

from launcher.prove.shrink import SMALL_SIZES
from numeric_constants import numbers_in
from parallel.sizes import DEFAULT_SIZES, Sizes

ROOT = Path(__file__).parents[2]
# The names begin so. Work is cut into pieces, or takes another way, by none of these; or a proof cannot reach it.
CHECKPOINT = "how bytes that are hashed travel; tests/unit/test_checkpoint_*.py cross it with small ones"
BEFORE_TRAINING = "runs before training, on numbers of its own"
WAITING = "seconds, ports, signals and exit codes"
REFUSAL = "a bound beyond which input is refused, or the length of a message; within it nothing changes"
REASONS = {
    "modeling.kernels.direct.MOST_ROUTES": "beyond it what is known of sizes is learnt anew (test_direct.py)",
    "modeling.attention.LATENT_NORM_EPS": "the formula's, as in transformers' class",
    "modeling.config.": "the model's own, which the user sets and launcher.prove.shrink makes small",
    "modeling.context.PADDING": "a mark, not a size",
    "modeling.decoder.WAVELENGTHS_BASE": "the formula's",
    "modeling.dropout.": "the formula's: no draw depends on how much is drawn",
    "modeling.families.values.MOST_SHOWN": REFUSAL,
    "modeling.families.": "published sizes, and the defaults of transformers' classes",
    "modeling.init.BLOCK_NUMEL": "what is dropped of a draw; tests/unit/test_model_init.py crosses it with small ones",
    "modeling.init.M": "from where and up to where first numbers of linear attention's heads lie",
    "modeling.init.VECTOR": "what torch draws together",
    "modeling.init.generator_of": "bits of a seed",
    "modeling.linear_attention_config.": "the model's own, which launcher.prove.shrink makes small",
    "modeling.kernels.delta_chunks.LENGTH_EPS": "the formula's",
    "modeling.kernels.fused_delta.": "what a package's kernels take and do on CUDA; the default of Sizes.delta_chunk",
    "modeling.kernels.fuse.MEETING_": "what plans count; it decides nothing",
    "modeling.moe_config.": "the model's own, which the user sets and launcher.prove.shrink makes small",
    "modeling.init_config.": "the model's own, which the user sets and launcher.prove.shrink makes small",
    "modeling.kernels.widths.FLASH_": "what flash attention takes; the kernel that takes other heads is proven",
    "modeling.kernels.attention.ROW_SCORES": "pieces of rows on CUDA; test_model_attention.py cuts rows anyhow",
    "modeling.kernels.attention.ROW_UNIT": "likewise",
    "modeling.kernels.attention.ROW_": "what cuDNN's kernel is given; the one that takes all others is proven",
    "modeling.kernels.varlen.NO_LIMIT": "a mark, not a size",
    "modeling.kernels.slope_channels.": "how 16 bits hold slopes on CUDA; test_model_slopes.py crosses each",
    "parallel.pipeline.rules.SPLITS_RIGHTLY": "a version of torch",
    "modeling.kernels.experts.LEAST_ROW_MULTIPLE": "the least default of Sizes.row_multiple on CPUs",
    "modeling.kernels.experts.ROW_UNITS": "how that default follows from the rows; proofs set Sizes.row_multiple",
    "modeling.kernels.row_counts.UNITS": "padding as below it, only more; test_model_experts.py crosses it",
    "modeling.kernels.row_counts.DOUBLINGS": "no machine holds so many rows",
    "modeling.rope_scaling.": "the model's own, which the user sets and a proof keeps",
    "modeling.kernels.by_rows.PIECE_BYTES": "the default of Sizes.row_piece_bytes",
    "modeling.kernels.by_rows.SUMMED_ROWS": "pieces of one sum; tests/unit/test_model_by_rows.py crosses it",
    "modeling.kernels.top_k.": "how a number's bits lie, not a size; each choice of a proof is made by them",
    "modeling.kernels.scratch.ROOM": "what is kept beside what is asked for; nothing is read there",
    "modeling.kernels.built.": "the length of names and of messages",
    "modeling.kernels.tiles.": "Linux's names of a call and of a feature",
    "modeling.kernels.row_passes.BLOCK": "blocks of one sum; tests/unit/test_model_by_rows.py crosses it",
    "modeling.kernels.threads.LEAST_NUMBERS": "shares of threads; tests/unit/test_model_by_rows.py crosses it",
    "modeling.kernels.expert_passes.": "a library or C++; tests/unit/test_model_expert_passes.py crosses each",
    "modeling.kernels.experts.order_by_expert": "what 16 bits hold; test_model_experts.py crosses it",
    "modeling.kernels.experts.narrow_dtype": "what a byte holds; test_model_experts.py crosses it",
    "modeling.kernels.experts.ONES": "what the matrix product wants; one of them counts",
    "modeling.kernels.experts.GATE_SLOPE": "the formula's",
    "modeling.score_terms.STEEPEST": "the formula's",
    "modeling.loss.CPU_CACHED": "rows of one chunk, each made of itself alone; test_model_loss cuts them anyhow",
    "modeling.loss.CPU_CHUNK_": "the default of Sizes.chunk_logits on CPUs",
    "modeling.loss.CUDA_CHUNK_LOGITS": "the default of Sizes.chunk_logits on CUDA",
    "modeling.loss.IGNORE": "a mark, not a size",
    "modeling.optimizers.matrices.AT_ONCE": "the default of Sizes.matrices",
    "modeling.pieces.QUERY_BLOCK": "the default of Sizes.query_block",
    "modeling.optimizers.orthogonal.": "the formula's: each matrix goes through all iterations, whatever its size",
    "parallel.recompute.KEPT_SHARE": "a share: of a proof's few experts, too, some are kept and some multiplied again",
    "parallel.checkpoint.local.BLOCK_BYTES": CHECKPOINT,
    "parallel.checkpoint.local.SMALLEST_DIRECT": CHECKPOINT,
    "modeling.kernels.cuts.": "how 8 and 32 bits hold numbers; every number of a proof in 8 bits goes through them",
    "modeling.kernels.fuse.ROW_BYTES": "of an estimate, not of what is computed",
    "modeling.kernels.fuse.LEAST_ROWS": "rows of 0 and 1 occur in test_model_fuse.py, and are computed plainly",
    "parallel.checkpoint.local.AHEAD_BYTES": "a hint to the disk",
    "parallel.checkpoint.saver.host_buffer": "bytes in a message",
    "parallel.checkpoint.local.LocalOutput.__init__: 438": "permissions",
    "parallel.processes.device.why_unseen: 300": "how much of an error is quoted",
    "parallel.checkpoint.local.AT_FDCWD": "the system call's",
    "parallel.checkpoint.local.RENAME_EXCHANGE": "the system call's",
    "parallel.checkpoint.store.MOST_DIGITS": REFUSAL,
    "parallel.checkpoint.store.MOST_OWNER": REFUSAL,
    "parallel.checkpoint.manifest.ELEMENT_BYTES": "bytes of an element",
    "parallel.checkpoint.manifest.MOST_PROBLEMS": REFUSAL,
    "parallel.checkpoint.manifest.MOST_RANGES": REFUSAL,
    "parallel.checkpoint.manifest.HASH_CHUNK": CHECKPOINT,
    "parallel.checkpoint.objects.PART_BYTES": "the object store's library cuts and joins parts; every file is hashed",
    "parallel.checkpoint.safetensors_stream.LENGTH_BYTES": "the file format",
    "parallel.checkpoint.safetensors_stream.ELEMENT_BYTES": "the file format",
    "parallel.checkpoint.read.LARGEST_SMALL_BYTES": REFUSAL,
    "parallel.checkpoint.schema.": REFUSAL,
    "parallel.checkpoint.safetensors_stream.CHUNK_BYTES": CHECKPOINT,
    "parallel.checkpoint.safetensors_stream.WRITE_BYTES": CHECKPOINT,
    "parallel.checkpoint.saver.SECONDS_AFTER_FAILURE": WAITING,
    "parallel.checkpoint.saver.DEFAULT_TIMEOUT_SECONDS": WAITING,
    "parallel.checkpoint.scatter.SMALLEST_RUN": CHECKPOINT,
    "parallel.checkpoint.scatter.LARGEST_GAP": CHECKPOINT,
    "parallel.context_parallel.plan.TILE": "the default of Sizes.ring_tile",
    "parallel.zero.scattered.MOST_FLIGHTS": "buckets on their way at once; a proof has many more",
    "parallel.zero.accumulation.MOST": "where a kernel gives way to another, as below",
    "parallel.zero.norm.CPU_PIECE": "pieces of one sum; tests/unit/test_norm.py crosses it",
    "parallel.zero.norm.ROW": "pieces of one sum on a GPU; tests/unit/test_norm.py crosses it",
    "parallel.zero.norm.MOST": "pieces of one sum on a GPU; tests/unit/test_norm.py crosses it",
    "parallel.zero.norm.WORTH_IT": "where a kernel gives way to another; test_accumulation.py takes all by one",
    "parallel.zero.norm.ALIGNED": "where a GPU's vectors may begin; test_accumulation.py begins elsewhere, too",
    "parallel.zero.zero12.Zero2.stage": "DeepSpeed's number for it",
    "parallel.zero.zero3.Zero3.stage": "DeepSpeed's number for it",
    "parallel.zero.settings.INITIAL_LOSS_SCALE_POWER": "the loss scale that fp16 begins at; a proof overflows at it",
    "parallel.zero.settings.LOSS_SCALE_WINDOW": "steps until the loss scale doubles; no proof has as many yet",
    "parallel.zero.settings.deepspeed_config: 1e+09": "steps between DeepSpeed's prints",
    "parallel.processes.connections.": "when connections are made; test_connections.py trains both ways",
    "parallel.processes.device.PORT": "of an address that nothing is sent to",
    "parallel.processes.environment.": REFUSAL,
    "parallel.processes.heartbeat.": WAITING,
    "parallel.processes.lifeline.": WAITING,
    "parallel.pipeline.config.Interleaved.n_chunks": "stages a rank, which the user sets and a proof keeps",
    "parallel.pipeline.rules.micro_batch_problems": "how far a remedy is looked for",
    "parallel.pipeline.stages.EMBEDDING_SHARE": "where stages begin: any cut is proven alike",
    "parallel.pipeline.volume.FP32_BYTES": "bytes of an element",
    "parallel.preflight.": BEFORE_TRAINING,
    "parallel.processes.start.": WAITING,
    "parallel.processes.rendezvous.BACKLOG": "connections that may wait",
    "parallel.processes.roll_call.": WAITING,
    "parallel.processes.stop.": WAITING,
    "parallel.processes.waits.REMEMBERED": "how many waits are timed",
    "parallel.processes.world.": WAITING,
}


def problems(numbers: dict[str, float], reasons: dict[str, str]) -> list[str]:
    """What is neither a size that proofs cross nor on the list, and reasons for nothing."""
    crossed = {f"parallel.sizes.Sizes.{field.name}" for field in fields(Sizes)}
    found = [
        f"{name} = {number:g}: a proof does not cross it. Make it a field of parallel.sizes.Sizes and lower it in "
        "launcher.prove.shrink.SMALL_SIZES, or write here why it needs none"
        for name, number in numbers.items()
        if name not in crossed and not any(name.startswith(begin) for begin in reasons)
    ]
    idle = [begin for begin in reasons if not any(name.startswith(begin) for name in numbers)]
    return found + [f"{begin}: no such number any more" for begin in idle]


@pytest.fixture(scope="module")
def numbers() -> dict[str, float]:
    return numbers_in(ROOT / "modeling") | numbers_in(ROOT / "parallel")


def test_every_number_is_crossed_by_a_proof_or_has_its_reason(numbers):
    assert not problems(numbers, REASONS)


def test_a_proof_lowers_every_size():
    for field in fields(Sizes):
        small, usual = getattr(SMALL_SIZES, field.name), getattr(DEFAULT_SIZES, field.name)
        assert small is not None and (usual is None or small < usual), field.name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("BLOCK = 1 << 20", "BLOCK"),
        ("BLOCK: int = 4_096", "BLOCK"),
        ("def cut(rows, most=512):\n    return rows[:most]", "cut(most)"),
        ("def cut(rows, *, most=512):\n    return rows[:most]", "cut(most)"),
        ("def cut(rows):\n    return [rows[i : i + 256] for i in range(0, len(rows), 256)]", "cut: 256"),
        ("def cut(rows):\n    return slow(rows) if len(rows) > 64 else fast(rows)", "cut: 64"),
        ("class Cut:\n    most: int = 100\n    def cut(self, rows):\n        return rows", "Cut.most"),
        ("class Cut:\n    def cut(self, rows):\n        return rows.split(2**10)", "Cut.cut: 1024"),
        ("cut = lambda rows: rows[:99]", "cut: 99"),
    ],
)
def test_planted_number_is_found(tmp_path, line, name):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "cut.py").write_text(line + "\n")
    assert any(f"parallel.cut.{name} " in problem for problem in problems(numbers_in(tmp_path / "parallel"), {})), (
        problems(numbers_in(tmp_path / "parallel"), {})
    )
