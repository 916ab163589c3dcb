"""Tokenizing a shard of chats: each chat's token ids, and which of them are targets.

A chat is written as text by its template and tokenized whole, as `transformers` does. A token is a target where it
holds a character of the assistant's text. Special tokens that the template writes become these tokens. A message that
spells one out, in any of its fields, is therefore bad: it would end a turn early.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from data.chat import said, strings_of
from data.chat_template import BrokenTemplate, ChatTemplate, Rendered, UnstableTemplate, UnusableChat, template_of
from data.config import ChatConfig
from data.documents import read_documents
from data.errors import DataError, reason_of, refuse
from data.shardtask import Report, ShardTask, StoppedError, hash_text
from data.tally import Tally
from data.tokenizer import load_fast, making_tokens, read_info
from data.tokenizer_files import load_folder

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

CHATS_AT_ONCE = 64  # tokenized together
SHOWN_CHARACTERS = 40  # of a chat, or of a template, in an error message
MARKS = "give data.sources' chat.template one that marks the assistant's text: {% generation %} ... {% endgeneration %}"


def tokenize_chats(
    task: ShardTask, report: Report, stopped: Callable[[], bool], tally: Tally
) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
    """(hash of the text, token ids with the end of text, which of them are targets or None for all) of each chat.

    Raises DataError where the template changes earlier messages once more follow, or where too many chats are bad, and
    StoppedError where ``stopped()`` is true.
    """
    maker = ChatTokens(task)
    documents = read_documents(task.source, task.shard, task.key, tally)
    while batch := list(islice(((*each, tally.n_documents) for each in documents), CHATS_AT_ONCE)):
        if stopped():
            raise StoppedError
        rendered = [(chat, maker.render(chat, number, tally)) for chat, _, number in batch if chat]
        kept = [(chat, each) for chat, each in rendered if each is not None]
        n_tokens = 0
        for (chat, each), encoding in zip(kept, maker.encode([each.text for _, each in kept]), strict=True):
            ids, is_target = maker.targets(each, encoding)
            n_tokens += len(ids)
            yield hash_text(chat)[0], ids, None if maker.chat.targets == "all" else is_target
        report(sum(done for _, done, _ in batch), len(kept), n_tokens)
    tally.check(task.key)


def check_template(task: ShardTask) -> None:
    """Renders the shard's first chat, so that a template that is missing or broken is refused before tokens are made.

    Raises DataError as `tokenize_chats` does of that chat.
    """
    tally = Tally(task.source.max_bad_share)
    for chat, _ in read_documents(task.source, task.shard, task.key, tally):
        if chat:
            ChatTokens(task).render(chat, tally.n_documents, tally)
            return


class ChatTokens:
    """The template and the tokenizer with which a shard's chats are tokenized."""

    def __init__(self, task: ShardTask) -> None:
        """Raises DataError where the tokenizer's folder cannot be loaded."""
        assert task.source.chat is not None
        self.task, self.chat = task, task.source.chat
        text = template_of(self.chat, task.tokenizer)
        names = load_folder(task.tokenizer, f"{task.key}.chat: {task.tokenizer}").special_tokens_map
        self.template = ChatTemplate(text or "", {name: each for name, each in names.items() if isinstance(each, str)})
        self.has_template = text is not None
        self.tokenizer, self.eos = fast_with_offsets(task), read_info(task.tokenizer).eos_id
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}

    def render(self, chat: str, number: int, tally: Tally) -> Rendered | None:
        """The chat as text; None where it is bad, which ``tally`` counts. ``number`` is its record's in the shard.

        Raises DataError where there is no template, or it is broken or unstable.
        """
        fields = json.loads(hash_text(chat)[1])
        if not self.has_template and not isinstance(fields.get("completion"), str):
            raise no_template(self.task.key)
        texts = "\n".join(strings_of(fields))
        spelled = next((token for token in self.special.values() if token in texts), None)
        if spelled is not None:
            why = f"spells out {spelled}, a special token of the tokenizer, in a message or its tools"
            tally.bad("a special token in a message", partial(self._bad, chat, number, why))
            return None
        try:
            return self.template.render(fields, self.chat.targets)
        except UnusableChat as error:
            tally.bad("not rendered", partial(self._bad, chat, number, f"is no chat: {error}"))
            return None
        except BrokenTemplate as error:
            raise broken_template(self.task, self.chat, str(error)) from None
        except UnstableTemplate as error:
            found = f"{self.task.key}.chat: the template {error} ({self._where(chat, number)})"
            raise refuse(found, "so which tokens are targets is not known", MARKS) from None

    def encode(self, texts: list[str]) -> "list[Encoding]":
        """The texts' tokens; special tokens that a text spells out become these tokens."""
        with making_tokens(self.task.name_of_text):
            return self.tokenizer.encode_batch(texts, add_special_tokens=False)

    def targets(self, rendered: Rendered, encoding: "Encoding") -> tuple[np.ndarray, np.ndarray]:
        """(ids, is_target) of a chat; end of text, and BOS by data.add_bos, are added where the template wrote none.

        An added end of text is a target where the token before it is one; an added BOS is none.
        """
        ids = np.array(encoding.ids, np.int64)
        first_T, stop_T = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        is_target = np.zeros(len(ids), bool)
        for start, stop in rendered.spans:
            inside = np.flatnonzero((first_T < stop) & (stop_T > start))
            if not rendered.exact:
                inside = inside[: len(inside) - self._n_after_end(rendered.text, inside, encoding)]
            is_target[inside] = True
        if not len(ids) or ids[-1] != self.eos:
            ids = np.append(ids, self.eos)
            is_target = np.append(is_target, is_target[-1:] if len(is_target) else True)
        if self.task.bos_id is not None and ids[0] != self.task.bos_id:
            ids, is_target = np.append(self.task.bos_id, ids), np.append(False, is_target)
        return ids, is_target

    def _n_after_end(self, text: str, inside: np.ndarray, encoding: "Encoding") -> int:
        """The number of a message's last tokens that are white space after the special token that ends it."""
        for n, token in enumerate(reversed(inside.tolist())):
            if encoding.ids[token] in self.special:
                return n
            first, stop = encoding.offsets[token]
            if text[first:stop].strip():
                break
        return 0

    def _bad(self, chat: str, number: int, why: str) -> DataError:
        return refuse(f"{self.task.key}: {self._where(chat, number)}", why, "mend it, or raise max_bad_share")

    def _where(self, chat: str, number: int) -> str:
        begins = " ".join(said(chat).split())[:SHOWN_CHARACTERS]
        return f"record {number} from {self.task.shard[0].path} on, which begins {begins!r}"


def fast_with_offsets(task: ShardTask) -> "Tokenizer":
    """The task's tokenizer, set to recognize special tokens in texts and to report the offsets of all characters."""
    from tokenizers import processors

    try:
        tokenizer = load_fast(task.tokenizer)
        tokenizer.encode_special_tokens = False
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # others leave out white space
    except Exception as error:  # the library's own kind
        found = str(task.tokenizer)
        raise refuse(found, f"cannot be loaded ({reason_of(error)})", "prepare the data again") from error
    return tokenizer


def broken_template(task: ShardTask, chat: ChatConfig, why: str) -> DataError:
    """The refusal of a template, the config's or the tokenizer's, that cannot be parsed."""
    if chat.template is None:
        found = f"{task.key}.chat.template=null: that of {task.tokenizer}"
        return refuse(found, why, "mend it there, or give the text of another one")
    shown = repr(chat.template[:SHOWN_CHARACTERS]) + ("..." if len(chat.template) > SHOWN_CHARACTERS else "")
    return refuse(f"{task.key}.chat.template={shown}", why, "mend it, or set it to null for the tokenizer's own")


def no_template(key: str) -> DataError:
    """The refusal of chats for which there is no template."""
    rule = "needs a template, and the tokenizer has none"
    return refuse(f"{key}.chat.template=null", rule, "give the text of one, or name a tokenizer with a chat template")
