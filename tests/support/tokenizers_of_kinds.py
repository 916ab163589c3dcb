"""Small tokenizers of the kinds that people bring: what differs between them is what a format could lose."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from byte_tokenizer import save_byte_tokenizer

TEXTS = [
    "def f(x): return x",
    " für  Käthe\n\tund <|endoftext|> 日本語 🙂",
    "<s> a <|tool|> b <pad> can't . , stop !",
    "",
]
KINDS = ["bytes", "special", "words"]


def save_tokenizer_of(kind: str, folder: Path) -> None:
    """Saves the tokenizer of this kind as transformers does."""
    match kind:
        case "bytes":
            save_byte_tokenizer(folder)
        case "special":
            special_tokenizer().save_pretrained(folder)
        case "words":
            word_tokenizer().save_pretrained(folder)


def special_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level with a space put before the text, BOS put before it, padding, and special tokens without a name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<|tool|>", "<|image|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["def f(x): return x und der die das"] * 9, trainer)
    tokenizer.add_tokens([AddedToken("return", single_word=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    named = {"image_token": "<|image|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<|tool|>"], add_prefix_space=True, **names, **named
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece over lower-cased words, whose decoder cleans up; no token before the text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"])
    tokenizer.train_from_iterator(["def f(x): return x can't stop . , !"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")
