"""Tokenizers trained on the sources: of bytes, so exact on any text, whatever they learn.

Text is taken as the bytes of its UTF-8, cut before words as GPT-2's tokenizer does. All bytes are in the vocabulary, so
that no text is unknown and tokens give back what they were made of.
"""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, assert_never

from data.config import TokenizerModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BYTES_AND_END = 257  # the smallest vocabulary of a byte-level tokenizer
UNSEEN_PENALTY = 10.0  # of a log-probability
LONGEST_WORD = 64  # bytes, for WordPiece: it looks for the longest piece at each place, which is quadratic in a word


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, model: TokenizerModel = "bpe", special_tokens: Sequence[str] = ()
) -> "PreTrainedTokenizerFast":
    """A tokenizer of at most vocab_size ids (fewer where the text has too little to learn from).

    The end of text is id 0, then come ``special_tokens``, then bytes and what is learned. ``bpe`` merges the most
    frequent pairs (Sennrich et al. 2016); ``wordpiece`` learns the same way and takes the longest piece first, without
    a mark on pieces inside a word, which begins with its space; ``unigram`` keeps the pieces that explain the text best
    (Kudo 2018) and takes the likeliest ones.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": [END_OF_TEXT, *special_tokens],
        "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
        "show_progress": False,
    }
    match model:
        case "bpe":
            tokenizer, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer(**options)
        case "wordpiece":
            pieces = models.WordPiece(vocab={}, max_input_chars_per_word=LONGEST_WORD, continuing_subword_prefix="")
            tokenizer = Tokenizer(pieces)
            trainer = trainers.WordPieceTrainer(**options, continuing_subword_prefix="")
            cut = pre_tokenizers.Split(Regex(f".{{1,{LONGEST_WORD}}}"), "isolated")
            byte_level = pre_tokenizers.Sequence([byte_level, cut])
        case "unigram":
            del options["initial_alphabet"]  # the trainer scores bytes that it has not seen in no fixed order
            tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(**options)
        case _:
            assert_never(model)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainer)
    if model == "unigram":
        tokenizer.model = models.Unigram(complete_pieces(json.loads(tokenizer.to_str())["model"]["vocab"], options))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def complete_pieces(learned: list[tuple[str, float]], options: dict[str, Any]) -> list[tuple[str, float]]:
    """The pieces of a unigram model with all bytes among them, in an order that follows from pieces and scores alone.

    Special tokens come first, then what is learned from the likeliest on. Bytes that were not learned are far less
    likely than any piece; where there is no room for them, the unlikeliest longer pieces go. Scores are rounded, since
    the trainer sums in no fixed order.
    """
    from tokenizers import pre_tokenizers

    special, alphabet = options["special_tokens"], set(pre_tokenizers.ByteLevel.alphabet())
    scores = {piece: round(score, 6) for piece, score in learned if piece not in special}
    least = min(scores.values(), default=0.0) - UNSEEN_PENALTY
    pieces = sorted(scores.items(), key=lambda each: (-each[1], each[0]))
    room = options["vocab_size"] - len(special) - len(alphabet)
    longer = [each for each in pieces if each[0] not in alphabet][: max(0, room)]
    single = [(byte, scores.get(byte, least)) for byte in sorted(alphabet)]
    return [*((name, 0.0) for name in special), *sorted(longer + single, key=lambda each: (-each[1], each[0]))]
