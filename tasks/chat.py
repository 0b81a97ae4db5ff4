"""Conversations: checked, and written out by the chat template of a tokenizer."""

from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
DATE = datetime(2024, 7, 26)  # what a template that prints today's date is given: the text must not depend on the day
DATE_CODES = ("%Y", "%y", "%m", "%d", "%B", "%b", "%A", "%a", "%H", "%M", "%S")


def checked_messages(value: Any, field: str, place: str) -> list[Message]:
    """Returns the messages of one conversation, each with ``role`` and ``content``, without keys that hold None.

    Errors: ``ValueError`` naming ``place`` if ``value`` is no list of messages.
    """
    if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
        raise ValueError(
            f"{place}: there is no list of messages in field {field!r}: format=chat reads a list of "
            '{"role": text, "content": text}'
        )
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def rendered(messages: list[Message], tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    """Returns the conversation as the chat template of ``tokenizer`` writes it; a date in it is ``DATE``.

    Errors: ``ValueError`` naming ``place`` if there is no chat template, or if it refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"{place}: the tokenizer {tokenizer.name_or_path} has no chat template: add its chat_template.jinja, or "
            "read text in which the conversations are written out"
        )
    try:
        template = tokenizer.get_chat_template()
        if "strftime_now" in template:
            template = _fixed_date() + template
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{place}: the chat template refuses the conversation ({reason}): mend or drop it") from None
    assert isinstance(text, str)
    return text


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _fixed_date() -> str:
    """Returns what goes before a template to replace transformers' ``strftime_now``; it writes nothing itself."""
    filters = "".join(f'|replace("{code}", "{DATE.strftime(code)}")' for code in DATE_CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"
