"""Chats written as text by a template, with the characters that are the assistant's.

Templates are jinja and may be untrusted: `transformers` renders them in jinja's sandbox. Where a template marks the
assistant's text ({% generation %}), its marks count. Otherwise a chat is rendered message by message: the rendering
of n + 1 messages must begin with that of the first n, and what an assistant's message adds, after the generation
prompt, is its text. A template that renders earlier messages otherwise once more follow is refused, since it would not
be known which tokens are targets.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.chat import ASSISTANT, Messages
from data.config import ChatConfig
from data.errors import reason_of

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write today's date, but a document must not depend on the day of its preparation. They use date_string
# where it is given; strftime_now is no function here, so a template that reads the clock all the same is refused.
NO_CLOCK = {"date_string": "26 Jul 2024", "strftime_now": ""}
Span = tuple[int, int]  # characters, half-open


class UnstableTemplate(Exception):
    """Raised where the template renders some messages otherwise when more follow; the message is one line."""


class UnusableChat(Exception):
    """Raised where the template does not render this chat; the message is one line."""


class BrokenTemplate(Exception):
    """Raised where the template cannot be parsed; the message is one line."""


@dataclass(frozen=True)
class Rendered:
    """A chat as text, and the ranges of its characters that are targets.

    ``exact`` is false where the ranges were found by rendering the chat message by message.
    """

    text: str
    spans: list[Span]
    exact: bool


def template_of(chat: ChatConfig, tokenizer: Path) -> str | None:
    """The template's text: the config's own, or that in the tokenizer's folder; None where neither has one."""
    if chat.template is not None:
        return chat.template
    try:
        return (tokenizer / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    try:
        named = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        if isinstance(named, list):  # several, each with a name
            named = next((each["template"] for each in named if each["name"] == "default"), None)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return named if isinstance(named, str) else None


class ChatTemplate:
    """A template with the tokens that it may name (bos_token and the like)."""

    def __init__(self, text: str, special_tokens: dict[str, str]) -> None:
        self.text, self._names = text, special_tokens
        self.is_marked = MARKED.search(text) is not None

    def render(self, fields: dict[str, Any], targets: str) -> Rendered:
        """The chat with the fields that ``data.chat.chat_of`` made, as text; ``targets`` is "assistant" or "all".

        Raises UnstableTemplate, BrokenTemplate or UnusableChat.
        """
        if isinstance(fields.get("completion"), str):
            prompt, completion = fields["prompt"], fields["completion"]
            text = prompt + completion
            return Rendered(text, [(0 if targets == "all" else len(prompt), len(text))], exact=True)
        messages: Messages = fields.get("messages") or [*(fields["prompt"] or []), *fields["completion"]]
        n_given = 0 if "messages" in fields else len(fields["prompt"] or [])
        tools = fields.get("tools")
        if targets == "all":
            text, _ = self._write(messages, tools)
            return Rendered(text, [(0, len(text))], exact=True)
        if self.is_marked:
            text, spans = self._write(messages, tools, marked=True)
            if not spans:
                raise UnusableChat("the template marks nothing of it as the assistant's ({% generation %})")
            after = self._after(messages, n_given, tools, text) if n_given else 0
            return Rendered(text, [span for span in spans if span[0] >= after], exact=True)
        return self._render_by_message(messages, n_given, tools)

    def _render_by_message(self, messages: Messages, n_given: int, tools: Any) -> Rendered:
        text, _ = self._write(messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if number < n_given or message["role"] != ASSISTANT:
                continue
            before = self._after(messages, number, tools, text) if number else 0
            prompted = self._write(messages[:number], tools, prompts=True)[0] if number else ""
            stop = self._after(messages, number + 1, tools, text)
            if number and len(prompted) > before:
                if not text.startswith(prompted):
                    raise _unstable(number, "and the prompt for an answer")
                start = len(prompted)
            else:  # no prompt for an answer: what is said begins with its content
                content = message.get("content", "").strip()
                start = text.find(content, before, stop)
                if start < 0:
                    raise UnusableChat(f"the template does not write the content of message {number + 1} as it is")
            spans.append((start, max(start, stop)))
        return Rendered(text, spans, exact=False)

    def _after(self, messages: Messages, n: int, tools: Any, text: str) -> int:
        """Where the first ``n`` messages end in the rendering of all."""
        if n == len(messages):
            return len(text)
        first, _ = self._write(messages[:n], tools)
        if not text.startswith(first):
            raise _unstable(n, "")
        return len(first)

    def _write(
        self, messages: Messages, tools: Any, *, prompts: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {"add_generation_prompt": prompts, "return_assistant_tokens_mask": marked, **NO_CLOCK, **self._names}
        try:
            texts, spans = render_jinja_template([messages], tools=tools, chat_template=self.text, **options)
        except TemplateSyntaxError as error:
            raise BrokenTemplate(f"is no jinja template: line {error.lineno}: {reason_of(error)}") from error
        except Exception as error:  # of jinja, and whatever a template makes Python raise
            raise UnusableChat(f"the template cannot render it ({reason_of(error)})") from error
        return texts[0], [(int(start), int(stop)) for start, stop in spans[0]] if marked else []


def _unstable(n: int, more: str) -> UnstableTemplate:
    of = "the first message" if n == 1 else f"the first {n} messages"
    return UnstableTemplate(f"renders {of}{' ' if more else ''}{more} otherwise when more follow")
