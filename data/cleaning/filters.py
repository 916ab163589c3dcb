"""The filters of datatrove with the thresholds of the config, in the order in which documents pass them."""

from collections.abc import Iterator
from typing import Any

from data.cleaning.config import (
    C4Config,
    CleaningConfig,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
)


def filters_of(config: CleaningConfig) -> Iterator[tuple[str, Any]]:
    """(name, filter) of each filter that is on, in FineWeb's order: repetition, lines, quality, FineWeb's own."""
    if config.gopher_repetition is not None:
        yield "gopher_repetition", _gopher_repetition(config.gopher_repetition, config.words)
    if config.c4 is not None:
        yield "c4", _c4(config.c4, config.words)
    if config.gopher_quality is not None:
        yield "gopher_quality", _gopher_quality(config.gopher_quality, config.words)
    if config.fineweb is not None:
        yield "fineweb", _fineweb(config.fineweb, config.words)


def _gopher_repetition(config: GopherRepetitionConfig, words: str) -> Any:
    """Datatrove's filter for Gopher's repetition rules; the shares of repeated n-grams are the paper's (table A1)."""
    from datatrove.pipeline.filters import GopherRepetitionFilter

    return GopherRepetitionFilter(
        dup_line_frac=config.dup_line_frac,
        dup_para_frac=config.dup_para_frac,
        dup_line_char_frac=config.dup_line_char_frac,
        dup_para_char_frac=config.dup_para_char_frac,
        language=words,
    )


def _c4(config: C4Config, words: str) -> Any:
    """Datatrove's filter for C4's rules, without the paper's list of bad words, which would have to be downloaded."""
    from datatrove.pipeline.filters import C4QualityFilter

    return C4QualityFilter(
        remove_citations=config.remove_citations,
        filter_no_terminal_punct=config.filter_no_terminal_punct,
        min_num_sentences=config.min_num_sentences,
        min_words_per_line=config.min_words_per_line,
        max_word_length=config.max_word_length,
        filter_lorem_ipsum=config.filter_lorem_ipsum,
        filter_javascript=config.filter_javascript,
        filter_curly_bracket=config.filter_curly_bracket,
        filter_policy=config.filter_policy,
        language=words,
    )


def _gopher_quality(config: GopherQualityConfig, words: str) -> Any:
    """Datatrove's filter with every quality rule of the Gopher paper."""
    from datatrove.pipeline.filters import GopherQualityFilter

    return GopherQualityFilter(
        min_doc_words=config.min_doc_words,
        max_doc_words=config.max_doc_words,
        min_avg_word_length=config.min_avg_word_length,
        max_avg_word_length=config.max_avg_word_length,
        max_symbol_word_ratio=config.max_symbol_word_ratio,
        max_bullet_lines_ratio=config.max_bullet_lines_ratio,
        max_ellipsis_lines_ratio=config.max_ellipsis_lines_ratio,
        max_non_alpha_words_ratio=config.max_non_alpha_words_ratio,
        min_stop_words=config.min_stop_words,
        stop_words=list(config.stop_words) if config.stop_words is not None else None,
        language=words,
    )


def _fineweb(config: FineWebConfig, words: str) -> Any:
    """Datatrove's filter for FineWeb's rules; punctuation marks are those of all scripts."""
    from datatrove.pipeline.filters import FineWebQualityFilter

    return FineWebQualityFilter(
        line_punct_thr=config.line_punct_thr,
        short_line_thr=config.short_line_thr,
        short_line_length=config.short_line_length,
        char_duplicates_ratio=config.char_duplicates_ratio,
        new_line_ratio=config.new_line_ratio,
        language=words,
    )
