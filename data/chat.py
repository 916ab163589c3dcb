"""Records that hold a chat, or a prompt with its completion, turned into the text of one document.

That text is JSON of the template's arguments, so that preparation can treat chats like other documents (assign them to
splits, count them). ``said`` extracts the messages' contents from it.
"""

import json
from collections.abc import Iterator
from typing import Any

from data.config import ChatConfig, SourceConfig
from data.errors import DataError, refuse
from data.lines import MEND
from data.tally import Tally

ASSISTANT = "assistant"
Messages = list[dict[str, Any]]


def chat_of(record: Any, source: SourceConfig, path: str, key: str, tally: Tally) -> str | None:
    """The record's chat as JSON; "" where it holds no message, None where it is bad, which ``tally`` counts.

    ``path`` is the record's file and ``key`` names the source, both for errors.
    """
    assert source.chat is not None
    fields = _fields(record, source.chat)
    if fields is None:
        names = list(record) if isinstance(record, dict) else [type(record).__name__]
        tally.bad("no chat", lambda: no_chat(source.chat, names, path, key))
        return None
    if not any(fields.get(name) for name in ("messages", "completion")):
        return ""
    wrong = _what_is_wrong(fields, source.chat)
    if wrong is not None:
        tally.bad("not a chat", lambda: refuse(f"{key}: a record of {path}", wrong, MEND))
        return None
    return json.dumps(fields, ensure_ascii=False)


def record_of_columns(record: dict[str, Any]) -> dict[str, Any]:
    """A record read from columns, without the null fields within its values, at any depth.

    A columnar format adds to each tool call, as nulls, the arguments of all other records' calls, and likewise for
    tools' parameters. The record's own fields stay, null or not.
    """

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_nulls(each) for name, each in value.items() if each is not None}
        return [without_nulls(each) for each in value] if isinstance(value, list) else value

    return {name: without_nulls(each) for name, each in record.items()}


def said(chat: str) -> str:
    """The contents of the messages of a chat that ``chat_of`` made, joined by line ends, to train a tokenizer on."""
    fields = json.loads(chat)
    parts = [fields.get(name) or [] for name in ("messages", "prompt", "completion")]
    return "\n".join(
        part if isinstance(part, str) else "\n".join(message.get("content") or "" for message in part)
        for part in parts
        if part
    )


def strings_of(value: Any) -> Iterator[str]:
    """Every string within ``value``, a chat's fields or a part of them, names included: what a template may write."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings_of(list(value))
        yield from strings_of(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from strings_of(each)


def no_chat(chat: ChatConfig | None, names: list[str], path: str, key: str) -> DataError:
    """The refusal of a record or columns with these ``names``, which lack both the messages and the completion."""
    there = ", ".join(map(str, names[:20])) or "no named fields"
    assert chat is not None
    found = f"{key}.chat.messages_key={chat.messages_key!r} and .completion_key={chat.completion_key!r}"
    remedy = "set them to the fields with the messages, or with the prompt and its completion"
    return refuse(found, f"are not in a record of {path}, which holds {there}", remedy)


def _fields(record: Any, chat: ChatConfig) -> dict[str, Any] | None:
    """The fields of a record that the template is given; None where it has neither messages nor a completion."""
    if not isinstance(record, dict):
        return None
    tools = {"tools": record["tools"]} if record.get("tools") else {}
    if record.get(chat.messages_key) is not None:
        return {"messages": _without_nulls(record[chat.messages_key]), **tools}
    if record.get(chat.completion_key) is None:
        return None
    prompt = record.get(chat.prompt_key)
    completion = _without_nulls(record[chat.completion_key])
    return {"prompt": "" if prompt is None else _without_nulls(prompt), "completion": completion, **tools}


def _without_nulls(messages: Any) -> Any:
    """The messages without their null fields: templates differ in how they treat null, but not in a missing field."""
    if not isinstance(messages, list):
        return messages
    return [
        {name: value for name, value in each.items() if value is not None} if isinstance(each, dict) else each
        for each in messages
    ]


def _what_is_wrong(fields: dict[str, Any], chat: ChatConfig) -> str | None:
    """The rule on chats that a record breaks; None where it breaks none."""
    try:
        json.dumps(fields)
    except (TypeError, ValueError):
        return "holds values in its messages that JSON does not have"
    if "messages" in fields:
        rule = _why_no_messages(fields["messages"])
        is_said = chat.targets == "all" or rule or any(each["role"] == ASSISTANT for each in fields["messages"])
        return rule or (None if is_said else f"holds no message of role {ASSISTANT}, so nothing is learned from it")
    prompt, completion = fields["prompt"] or type(fields["completion"])(), fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return None
    if isinstance(prompt, str) or isinstance(completion, str):
        return "must hold prompt and completion both as text, or both as messages"
    return _why_no_messages([*prompt, *completion]) if isinstance(prompt, list) else "must hold text, or messages"


def _why_no_messages(messages: Any) -> str | None:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return "must hold messages as a list of {role, content}"
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            return f"must give each message a role, and message {number} has none"
        if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
            return f"must give each message text as content, and message {number} has none"
    return None
