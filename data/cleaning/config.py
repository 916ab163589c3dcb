"""The configuration of cleaning: a section for each stage; a stage without one is off. The rules are datatrove's.

Thresholds have the names and defaults of datatrove 0.10, so that its documentation and published recipes apply.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated

from annotated_types import Interval

Share = Annotated[float, Interval(ge=0, le=1)]
Number = Annotated[int, Interval(ge=0, le=10**9)]


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Keeps documents that fastText's classifier takes for one of some languages (datatrove's ``LanguageFilter``)."""

    model: str  # path of a fastText model whose labels are __label__LANGUAGE, such as lid.176.bin
    keep: tuple[str, ...] = ("en",)  # labels of the languages that are kept
    min_score: Share = 0.65  # a document is kept where the score of one of these is above this


@dataclass(frozen=True, kw_only=True)
class GopherRepetitionConfig:
    """Drops documents that repeat themselves (Gopher, arXiv:2112.11446, table A1). 0: not looked at."""

    dup_line_frac: Share = 0.3  # duplicate lines, of all lines
    dup_para_frac: Share = 0.3  # duplicate paragraphs, of all paragraphs
    dup_line_char_frac: Share = 0.2  # characters in duplicate lines
    dup_para_char_frac: Share = 0.2  # characters in duplicate paragraphs


@dataclass(frozen=True, kw_only=True)
class C4Config:
    """Drops lines, and documents of which too little is left (C4, arXiv:1910.10683, section 2.2)."""

    remove_citations: bool = True  # takes [1], [edit] and [citation needed] out of lines
    filter_no_terminal_punct: bool = True  # drops lines that do not end in a mark of punctuation
    min_num_sentences: Annotated[int, Interval(ge=-1, le=10**6)] = 5  # that must be left; -1: any number
    min_words_per_line: Annotated[int, Interval(ge=-1, le=10**6)] = 3  # drops shorter lines; -1: none
    max_word_length: Annotated[int, Interval(ge=-1, le=10**6)] = 1000  # drops lines with a longer word; -1: none
    filter_lorem_ipsum: bool = True  # drops documents with these words
    filter_javascript: bool = True  # drops lines with this word
    filter_curly_bracket: bool = True  # drops documents with one
    filter_policy: bool = True  # drops lines on cookies and terms of use


@dataclass(frozen=True, kw_only=True)
class GopherQualityConfig:
    """Drops documents that are unlike prose (Gopher, arXiv:2112.11446, section A.1.1). 0: not looked at."""

    min_doc_words: Annotated[int, Interval(ge=1, le=10**9)] = 50  # words of a document
    max_doc_words: Number = 100_000  # words of a document
    min_avg_word_length: Annotated[int, Interval(ge=0, le=1000)] = 3  # characters
    max_avg_word_length: Annotated[int, Interval(ge=0, le=1000)] = 10  # characters
    max_symbol_word_ratio: Share = 0.1  # # signs, or ellipses, for each word
    max_bullet_lines_ratio: Share = 0.9  # lines that begin with a bullet point
    max_ellipsis_lines_ratio: Share = 0.3  # lines that end with an ellipsis
    max_non_alpha_words_ratio: Share = 0.8  # words with a letter, at least (the name is datatrove's)
    min_stop_words: Annotated[int, Interval(ge=0, le=1000)] = 2  # different stop words, at least
    stop_words: tuple[str, ...] | None = None  # which these are; None: eight English ones


@dataclass(frozen=True, kw_only=True)
class FineWebConfig:
    """Drops documents with lines unlike prose (FineWeb, arXiv:2406.17557, section 3.6)."""

    line_punct_thr: Share = 0.12  # lines that end in a mark of punctuation, at least
    short_line_thr: Share = 0.67  # short lines, at most
    short_line_length: Annotated[int, Interval(ge=0, le=10**6)] = 30  # characters that a short line has, at most
    char_duplicates_ratio: Share = 0.01  # characters in duplicate lines, at most
    new_line_ratio: Annotated[float, Interval(ge=0, le=1000)] = 0.3  # line ends for each word, at most


@dataclass(frozen=True, kw_only=True)
class DecontaminateConfig:
    """Drops documents that share an n-gram of words with an evaluation set (datatrove's ``NGramsDecontFilter``)."""

    files: tuple[str, ...] = ()  # jsonl files with the evaluation sets' texts, a record each
    text_keys: tuple[str, ...] = ("text",)  # a record's fields, which are read one behind the other
    n_grams: Annotated[int, Interval(ge=1, le=1000)] = 12  # words in a row


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Replaces personal data in documents by made-up data (datatrove's ``PIIFormatter``)."""

    emails: bool = True  # addresses of e-mail
    ips: bool = True  # addresses of IPv4
    only_public_ips: bool = True  # leaves addresses of private networks as they are


@dataclass(frozen=True, kw_only=True)
class NearConfig:
    """Drops near-duplicates over all sources by MinHash (datatrove's signatures and buckets)."""

    n_grams: Annotated[int, Interval(ge=1, le=1000)] = 5  # words of a shingle
    # a pair whose shingles have the similarity s (Jaccard's) is found with probability 1 - (1 - s^hashes)^buckets
    buckets: Annotated[int, Interval(ge=1, le=1000)] = 14
    hashes_per_bucket: Annotated[int, Interval(ge=1, le=256)] = 8  # that must all be the same
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = 1  # of the hash functions


@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """The stages, in their order. Another setting makes other files."""

    # the language whose rules split words and sentences; en needs no more than the extra `clean`
    words: str = "en"
    # a longer document is dropped
    max_chars: Annotated[int, Interval(ge=1, le=10**9)] = 1_000_000
    language: LanguageConfig | None = None  # keeps the documents of some languages
    gopher_repetition: GopherRepetitionConfig | None = None  # Gopher's rules on repetition
    c4: C4Config | None = None  # C4's rules on lines
    gopher_quality: GopherQualityConfig | None = None  # Gopher's rules on quality
    fineweb: FineWebConfig | None = None  # FineWeb's rules on lines
    decontaminate: DecontaminateConfig | None = None  # drops what is in evaluation sets
    mask: MaskConfig | None = None  # replaces personal data
    exact: bool = False  # drops every copy of a text but the first, over all sources
    near: NearConfig | None = None  # drops near-duplicates, over all sources

    @property
    def is_global(self) -> bool:
        """Whether what is kept of a source depends on the other sources, too."""
        return self.exact or self.near is not None

    @property
    def sections(self) -> list[str]:
        """The stages that are on and have a section, in their order: all but ``exact``. They are datatrove's."""
        return [each.name for each in fields(self) if is_dataclass(getattr(self, each.name))]

    @property
    def splits_words(self) -> bool:
        """Whether a stage splits documents into words."""
        return bool({*self.sections} - {"language", "mask"})
