"""Small tokenizers of different kinds, which differ in properties that an export or import could lose."""

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
    """Saves the tokenizer of this kind (one of KINDS) as transformers does."""
    match kind:
        case "bytes":
            save_byte_tokenizer(folder)
        case "special":
            special_tokenizer().save_pretrained(folder)
        case "words":
            word_tokenizer().save_pretrained(folder)


def special_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that adds a space and BOS before the text, with padding and unnamed special tokens."""
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
    """A WordPiece tokenizer over lower-cased words, with a decoder that cleans up spaces; it adds no BOS."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"])
    tokenizer.train_from_iterator(["def f(x): return x can't stop . , !"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")
