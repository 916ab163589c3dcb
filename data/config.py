"""The configuration of the data: plain values. Each number's type says where it may lie."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from data.cleaning.config import CleaningConfig

TokenizerModel = Literal["bpe", "wordpiece", "unigram"]
PackedBy = Literal["best_fit", "one_document"]  # data.packing.pack has each one's way


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Records that hold a chat, or a prompt and its completion, instead of text."""

    messages_key: str = "messages"  # the field with a chat's messages, each with role and content
    # in records without messages, the field with what is given: text, or messages
    prompt_key: str = "prompt"
    completion_key: str = "completion"  # and the field with what is to be learned
    template: str | None = None  # a chat template (jinja) that writes messages as text; None: the tokenizer's own
    # which tokens count in the loss: those of the assistant's messages and of completions, or all of them
    targets: Literal["assistant", "all"] = "assistant"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One part of the mixture.

    ``path`` is raw text (a file, a folder, a glob; .txt or any text, .jsonl[.gz|.zst], .parquet, .arrow, .wet[.gz]),
    ``hf://NAME`` for a Hugging Face dataset, or the prefix of existing Megatron token files (PREFIX.bin and
    PREFIX.idx), by path or by the URL of an object store.
    """

    path: str  # text, a folder, a glob, jsonl, parquet, hf://NAME, or a prefix of token files, by path or URL
    # share of the samples, relative to the other sources' weights
    weight: Annotated[float, Interval(ge=1e-6, le=1e6)] = 1.0
    # passes over it in a run, at most: then the others take its share; None: any number
    max_epochs: Annotated[float, Interval(ge=1e-6, le=1e6)] | None = field(default=None, metadata={"usual": 4})
    exclude: tuple[str, ...] = ()  # globs; matching files are left out
    text_key: str = "text"  # the field or column that holds a document, in jsonl, parquet and Hugging Face data
    chat: ChatConfig | None = None  # records hold chats or prompts with completions; None: text
    # share of a shard's records that are left out and counted where they cannot be read; above it, preparation ends
    max_bad_share: Annotated[float, Interval(ge=0, le=0.5)] = 0.0
    subset: str | None = None  # a Hugging Face dataset's configuration
    split: str = "train"  # a Hugging Face dataset's split


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A part of the run with weights of its own, up to the next stage."""

    # where it begins: tokens of the training order, whole sequences, padding and what a rollback left out included
    from_tokens: Annotated[int, Interval(ge=0, le=2**62)] = 0
    # one for each source, instead of its `weight`; 0: none of it
    weights: tuple[Annotated[float, Interval(ge=0, le=1e6)], ...] = field(default=(), metadata={"usual": 1.0})


# Of DataConfig: where token files lie, how they are made and how far they are read ahead, not which tokens come next.
FREE_FIELDS = ("token_dir", "workers", "read_ahead", "cache_dir", "cache_gib")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens come next. Token files do not depend on seq_len or on the run's seed."""

    seq_len: Annotated[int, Interval(ge=1, le=2**24)] = 1024  # tokens of a training sequence
    # how documents fill samples: laid end to end and cut at every seq_len; or put together so that only longer ones are
    # cut; or each a sample of its own
    packing: Literal["sequential", PackedBy] = "sequential"
    sources: tuple[SourceConfig, ...] = ()
    # what weights say: each source's share of the samples, or (size) how often it is read against the others
    weighting: Literal["share", "size"] = "share"
    stages: tuple[StageConfig, ...] = ()  # weights that change within the run, ascending by from_tokens
    cleaning: CleaningConfig | None = (
        None  # stages that raw text passes before it is tokenized; None: it is taken as it is
    )
    tokenizer: str | None = None  # a tokenizer's folder or hub name; None: train one of model.vocab_size ids, of bytes
    # whether the tokenizer's bos_token begins each document that is prepared, and each text that a command is given
    add_bos: bool = False
    tokenizer_model: TokenizerModel = "bpe"  # what is trained where tokenizer is null
    # special tokens of the one that is trained, besides the end of text: "<tool>", "[PAD]"
    special_tokens: tuple[str, ...] = ()
    token_dir: str = "tokens"  # where token files and trained tokenizers live
    # share of each raw source's documents that is held out
    heldout_fraction: Annotated[float, Interval(ge=0, le=0.999)] = 0.01
    heldout_path: str | None = None  # PREFIX of token files to evaluate on, instead of a split of the raw sources
    # a file that lists documents which are never trained on, as `roundtable blame --leave-out` writes it
    without: str | None = None
    # share of the documents' parts in training samples whose middle comes last (fill in the middle); none in evaluation
    fim_rate: Annotated[float, Interval(ge=0, le=1)] = 0.0
    # share of these that begin with their suffix (SPM) instead of their prefix (PSM)
    fim_spm_share: Annotated[float, Interval(ge=0, le=1)] = 0.5
    # the tokenizer's tokens that go before prefix, suffix and middle
    fim_tokens: tuple[str, ...] = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    # where blocks of token files at URLs (s3://, say) are kept, for all processes of a machine
    cache_dir: str = "token-cache"
    cache_gib: Annotated[float, Interval(ge=0.01, le=2**20)] = 16.0  # GiB that these blocks take, at most
    # raw text in one shard; fixes the order of documents, whatever the workers
    shard_bytes: Annotated[int, Interval(ge=1, le=2**40)] = 64_000_000
    # steps whose samples a thread of each rank reads ahead; 0: none, each step reads its own
    read_ahead: Annotated[int, Interval(ge=0, le=1000)] = 2
    # processes that tokenize; None: one for each core
    workers: Annotated[int, Interval(ge=1, le=4096)] | None = field(default=None, metadata={"usual": 8})
