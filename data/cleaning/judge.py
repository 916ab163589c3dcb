"""Judging single documents by the cleaning stages: kept, perhaps with changed text, or dropped for a reason.

datatrove is imported only when a judge is made, not when a config is read.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.cleaning.config import CleaningConfig, DecontaminateConfig, LanguageConfig, MaskConfig
from data.cleaning.filters import filters_of
from data.errors import DataError, reason_of, refuse

INSTALL = "pip install 'roundtable[clean]', or set data.cleaning to null"
# Word tokenizers are quadratic in the length of a run: 15 s for 10,000 brackets, 5 s for 55,000 characters of URLs.
RUNS = (  # each with the largest sum of squared lengths that a document may have, about 3 s
    (re.compile(r"[^\w\s]{50,}"), 2 * 10**7),  # neither letters, digits nor white space
    (re.compile(r"[!-~]{1000,}"), 10**9),  # ASCII without white space
)
MASKED_AT_ONCE = 1000  # characters without white space; the pattern of addresses takes quadratic time in their number
RUN = re.compile(r"\S+")
IP_LIKE = re.compile(r"\d\.\d")
# Exceptions that a stage may raise on unusual text; they drop the document.
RAISED = (ValueError, ArithmeticError, LookupError, RuntimeError, AssertionError, TypeError)

Stage = Callable[[Any], tuple[bool, str | None]]  # of a datatrove Document, which it may change: (kept, why not)


@dataclass(frozen=True)
class Verdict:
    """The outcome of the stages for one document."""

    text: str  # its text after the stages, or before the one that dropped it
    reason: str | None  # STAGE/RULE that drops it; None: it is kept
    changed_by: tuple[str, ...]  # the stages that changed its text


class Judge:
    """The stages of a config, applied in their order. Raises DataError where one is not available on this machine.

    ``index`` is the folder of the evaluation sets' n-grams (``data.cleaning.evaluations``), for decontamination.
    """

    def __init__(self, config: CleaningConfig, index: Path) -> None:
        self.max_chars = config.max_chars
        self.splits_words = config.splits_words
        self.document: Callable[..., Any] | None = None
        self.stages: list[tuple[str, Stage]] = []
        if config.sections:
            check_installed()
            from datatrove.data import Document

            self.document = Document
            self.stages = list(_stages(config, index))
            made = [name for name, _ in self.stages]
            assert made == [name for name in config.sections if name != "near"], f"of {config.sections} {made} are made"

    def __call__(self, text: str) -> Verdict:
        """The verdict on a text."""
        if len(text) > self.max_chars:
            return Verdict(text, "too_long", ())
        if text.isspace():
            return Verdict(text, "blank", ())
        if self.splits_words and _is_unbroken(text):
            return Verdict(text, "unbroken", ())
        if self.document is None:
            return Verdict(text, None, ())
        document = self.document(text=text, id="")
        changed = []
        for name, stage in self.stages:
            before = document.text
            try:
                is_kept, why = stage(document)
            except RAISED as error:
                return Verdict(before, f"{name}/raised_{type(error).__name__}", tuple(changed))
            if not is_kept:
                return Verdict(before, f"{name}/{why}" if why else name, tuple(changed))
            if not document.text or document.text.isspace():
                return Verdict(before, f"{name}/nothing_left", tuple(changed))
            if document.text != before:
                changed.append(name)
        return Verdict(document.text, None, tuple(changed))


def hash_config() -> Any:
    """Datatrove's 64-bit hashes by SHA-1: its other choice passes str to xxhash, which refuses that since 4.0."""
    from datatrove.utils.hashing import HashConfig

    return HashConfig(precision=64, hash_fc="sha1")


def _is_unbroken(text: str) -> bool:
    """Whether splitting the text into words would take too long."""
    return any(sum((run.end() - run.start()) ** 2 for run in pattern.finditer(text)) > most for pattern, most in RUNS)


def check_installed() -> None:
    """Raises DataError where datatrove is not installed; otherwise disables its log, which goes to stderr."""
    missing = [name for name in ("datatrove", "loguru") if importlib.util.find_spec(name) is None]
    if missing:
        raise refuse("data.cleaning", f"needs the package {missing[0]}, which is not installed", INSTALL)
    from loguru import logger

    logger.disable("datatrove")


def load_words(language: str) -> Any:
    """Datatrove's word tokenizer for a language. Raises DataError where it is unknown, or a package is missing."""
    check_installed()
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    found = f"data.cleaning.words={language!r}"
    try:
        tokenizer = load_word_tokenizer(language)
        tokenizer.word_tokenize("one word")
    except ValueError as error:
        raise refuse(
            found, "is no language that datatrove splits into words", "try en, or its code in ISO 639"
        ) from error
    except ImportError as error:
        rule = f"needs another package ({reason_of(error).rstrip('.')})"
        raise refuse(found, rule, "install it, or choose another language") from error
    except Exception as error:  # a tokenizer that would load its model from the network, say
        raise refuse(
            found, f"cannot be split into words here ({reason_of(error)})", "choose another language"
        ) from error
    return tokenizer


def _stages(config: CleaningConfig, index: Path) -> Iterator[tuple[str, Stage]]:
    """(name, stage) of each stage that is on."""
    if config.splits_words:
        load_words(config.words)
    if config.language is not None:
        yield "language", _language_stage(config.language)
    for name, step in filters_of(config):
        yield name, _filter_stage(step)
    if config.decontaminate is not None:
        yield "decontaminate", _decontaminate_stage(config.decontaminate, config.words, index)
    if config.mask is not None:
        yield "mask", _mask_stage(config.mask)


def _filter_stage(step: Any) -> Stage:
    def judge(document: Any) -> tuple[bool, str | None]:
        result = step.filter(document)
        return result if isinstance(result, tuple) else (bool(result), None)

    return judge


def _language_stage(config: LanguageConfig) -> Stage:
    found = f"data.cleaning.language.model={config.model!r}"
    if importlib.util.find_spec("fasttext") is None:
        raise refuse("data.cleaning.language", "needs the package fasttext, which is not installed", INSTALL)
    from datatrove.utils.lid import FastTextLID
    from fasttext.FastText import _FastText

    try:
        model = _FastText(config.model)
    except (ValueError, RuntimeError) as error:
        raise refuse(
            found, f"is no fastText model ({reason_of(error)})", "download one, such as lid.176.bin"
        ) from error
    unknown = sorted(set(config.keep) - {str(label).removeprefix("__label__") for label in model.labels})
    if unknown:
        rule = f"names {unknown[0]!r}, which is no label of {config.model}"
        raise refuse("data.cleaning.language.keep", rule, "take the labels that the model was trained with")

    class Classifier(FastTextLID):
        """Datatrove's classifier with a model from a file instead of a downloaded one."""

        @property
        def model(self) -> Any:
            return model

    classifier = Classifier(list(config.keep))

    def judge(document: Any) -> tuple[bool, str | None]:
        (best, _), scores = classifier.predict(document)
        is_kept = any(score > config.min_score for score in scores.values())
        return is_kept, None if is_kept else ("unsure" if best in config.keep else "other")

    return judge


def _decontaminate_stage(config: DecontaminateConfig, words: str, index: Path) -> Stage:
    from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter

    step = NGramsDecontFilter(
        str(index), NGramsDecontConfig(n_grams=config.n_grams, hash_config=hash_config()), language=words
    )

    def judge(document: Any) -> tuple[bool, str | None]:
        is_kept = step.filter(document) is True
        return is_kept, None if is_kept else document.metadata["contaminated_task"]

    return judge


def _mask_stage(config: MaskConfig) -> Stage:
    from datatrove.pipeline.formatters import PIIFormatter

    def judge(document: Any) -> tuple[bool, str | None]:
        # A new one for each document: it cycles through its replacements, and a document must not depend on others.
        formatter = PIIFormatter(config.emails, config.ips, config.only_public_ips)
        if "@" in document.text or IP_LIKE.search(document.text):
            document.text = RUN.sub(lambda run: _mask_run(formatter, run[0]), document.text)
        return True, None

    return judge


def _mask_run(formatter: Any, run: str) -> str:
    """A run of characters without white space with its addresses masked, MASKED_AT_ONCE characters at a time."""
    if "@" not in run and not IP_LIKE.search(run):
        return run
    parts = (run[start : start + MASKED_AT_ONCE] for start in range(0, len(run), MASKED_AT_ONCE))
    return "".join(formatter.format(part) for part in parts)


def judge_here(config: CleaningConfig, index: Path) -> None:
    """Raises DataError where a stage is not available on this machine; the evaluation sets need not have been read."""
    try:
        Judge(config, index)
    except ImportError as error:
        found = f"needs a package that cannot be imported ({reason_of(error).rstrip('.')})"
        raise DataError(*refuse("data.cleaning", found, INSTALL).problems) from error
