"""Training byte-level tokenizers on the sources: they represent any text exactly, whatever they learn.

Text is the bytes of its UTF-8, split before words as GPT-2's tokenizer does. All bytes are in the vocabulary, so that
no text is unknown, and decoding gives back the text that was tokenized.
"""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, assert_never

from data.config import TokenizerModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BYTES_AND_END = 257  # the smallest vocabulary of a byte-level tokenizer
UNSEEN_PENALTY = 10.0  # by how much a byte's log-probability is below the least likely piece's
LONGEST_WORD = 64  # bytes, for WordPiece: searching the longest piece at each place is quadratic in a word's length


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, model: TokenizerModel = "bpe", special_tokens: Sequence[str] = ()
) -> "PreTrainedTokenizerFast":
    """A tokenizer of at most vocab_size ids, trained on the texts; it has fewer ids where they are too short.

    The end of text is id 0, then come ``special_tokens``, then bytes and learned pieces. ``bpe`` merges the most
    frequent pairs (Sennrich et al. 2016). ``wordpiece`` learns in the same way and tokenizes with the longest piece
    first, without a mark on pieces inside a word, since words begin with their space. ``unigram`` keeps the pieces that
    explain the text best, and tokenizes with the most likely ones (Kudo 2018).
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
    """A unigram model's (piece, score) pairs with all bytes added, in an order that depends on pieces and scores alone.

    Special tokens come first, then pieces from the most likely on. Bytes that were not learned get a far lower score
    than any piece; where there is no room for them, the least likely longer pieces are dropped. Scores are rounded,
    since the trainer sums them in no fixed order.
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
