"""Chat templates: messages to token ids, as transformers renders them, with user text that stays text.

A template writes control tokens ("<|im_start|>") around what users wrote. Rendering gives one string, and encoding it
would take a control token inside of a message for a real one. So messages are rendered a second time with a mark behind
each character that could begin a control token: in that rendering only the template's own control tokens are whole. If
the plain rendering has no others, it is encoded as it is, and the ids are those of transformers. Otherwise the tokens
of the template are spelled in a way that no text has (an "alias"), and a copy of the tokenizer that knows only these
spellings encodes the whole: a control token in a message is text like any other, and all around it is unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError, UndefinedError
from tokenizers import AddedToken, Tokenizer

from krafla_cli.errors import FormatError, InputError, UnsupportedError
from krafla_cli.formats.text import printable
from krafla_cli.tokenizer.pieces import is_blank, is_reply_tag
from krafla_cli.tokenizer.sandbox import MAX_TEMPLATE_CHARS, ChatEnvironment

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
# Strings of a message that say what it is, not what someone wrote.
_STRUCTURE = frozenset({"role", "type"})
_SPECIAL_NAMES = frozenset({"bos_token", "eos_token", "unk_token", "pad_token"})
_BARRED = re.compile(r"<\|.*\|>", re.DOTALL)
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What a template may run into with messages that it does not expect.
_TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled chat template. Raises FormatError when it is none.

    ``special_tokens``: bos_token, eos_token, ... as text, which templates refer to. ``variables``: the names that the
    template reads ("enable_thinking" where thinking can be switched off); ``literals``: all text that it can write
    itself, NUL between the parts.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise FormatError(f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are read")
        self.special_tokens = dict(special_tokens or {})
        self._environment = ChatEnvironment()
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
            self.literals = _literals(tree)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
        except TemplateSyntaxError as error:
            raise FormatError(f"the chat template, line {error.lineno}: {printable(str(error.message))}") from error
        except (RecursionError, SyntaxError, MemoryError, *_TEMPLATE_FAILURES) as error:
            raise FormatError(f"the chat template cannot be compiled: {printable(str(error))}") from error

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text that the template makes of ``messages``, as `apply_chat_template(tokenize=False)` does.

        Raises InputError: the template refuses the messages, or fails on them.
        """
        arguments = {"tools": tools, "documents": None, **self.special_tokens, **variables}
        self._environment.budget.reset()
        try:
            return self._template.render(
                messages=[_normal(m) for m in messages], add_generation_prompt=add_generation_prompt, **arguments
            )
        except SecurityError as error:
            raise FormatError(f"the chat template does what it must not: {printable(str(error))}") from error
        except UndefinedError as error:
            raise InputError(f"the chat template needs what the messages lack: {printable(str(error))}") from error
        except _TEMPLATE_FAILURES as error:
            raise InputError(f"the chat template refuses the messages: {printable(str(error))}") from error


def _literals(tree: nodes.Template) -> str:
    data = [n.data for n in tree.find_all(nodes.TemplateData)]
    return "\0".join(data + [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)])


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without empty keys, its reasoning under the name that templates read; as transformers prepares it."""
    kept = {k: v for k, v in message.items() if v is not None}
    reasoning = next((kept[k] for k in _REASONING if k in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


class ChatEncoder:
    """Encodes conversations for ``tokenizer`` through a chat template; make one and keep it for a whole chat.

    Raises FormatError when ``template`` is none.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(template, special_tokens)
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._control = {t.content: i for i, t in added.items() if self._is_control(t)}
        special = [t.content for t in added.values() if t.special and t.content in self._control]
        self._alias: _Alias | None = None
        # A model's own replies hold the tags that it wrote (<think>); templates look for them there.
        self._rules = {"assistant": _Rule(special, self._control), "": _Rule(self._control, self._control)}

    def _is_control(self, token: AddedToken) -> bool:
        """Special tokens, those that the template writes, and what looks like one; blanks and "<b>" are just text."""
        content = token.content
        looks = _BARRED.fullmatch(content) is not None or is_reply_tag(content)
        return not is_blank(content) and bool(token.special or looks or content in self.template.literals)

    def encode(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The ids of ``messages``: those of transformers' apply_chat_template, where no message holds a control token.

        A control token inside of a message is encoded as text. The BOS that the tokenizer puts first is there once,
        whether or not the template writes it. Raises InputError, FormatError (see ChatTemplate.render).
        """
        inputs = {"messages": messages, "tools": tools, "variables": variables}
        text, of_template = self._rendered(inputs, add_generation_prompt)
        return self._one_bos(self._ids(text, of_template))

    def turn_end_ids(self) -> frozenset[int]:
        """The control token with which the template ends a reply; none where there is none, or it cannot be told."""
        messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            ids = self.encode(messages, add_generation_prompt=False)
        except InputError:
            return frozenset()
        control = set(self._control.values())
        end = len(ids)
        while end and (ids[end - 1] in control or is_blank(self.tokenizer.decode([ids[end - 1]]))):
            end -= 1
        return frozenset([i for i in ids[end:] if i in control][:1])

    def _rendered(self, inputs: dict[str, Any], add_generation_prompt: bool) -> tuple[str, list[Span]]:
        """The text of the conversation, and where the template itself wrote control tokens in it."""

        def render(values: dict[str, Any]) -> str:
            return self.template.render(
                values["messages"], add_generation_prompt, values["tools"], **values["variables"]
            )

        text = render(inputs)
        mark = _Mark(_unused_char("\0".join([text, self.template.literals, *_strings(inputs)])))
        marked = text
        # Marks that a template cannot fail to notice (it looks for "<" in a message) are kept to whole tokens.
        for whole in (False, True):
            values = self._marked(inputs, mark, whole)
            marked = text if values == inputs else render(values)
            if mark.removed(marked) == text:
                break
        return mark.removed(marked), mark.unmarked_spans(self._control, marked)

    def _marked(self, value: Any, mark: _Mark, whole: bool, rule: str = "") -> Any:
        """``value`` with a mark in each control token that starts in one of its strings."""
        if isinstance(value, str):
            return mark.put(value, self._rules[rule], whole)
        if isinstance(value, Mapping):
            rule = "assistant" if value.get("role") == "assistant" else rule
            return {
                self._marked(k, mark, True, rule): v
                if k in _SPECIAL_NAMES
                else self._marked(v, mark, whole or k in _STRUCTURE, rule)
                for k, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return type(value)(self._marked(v, mark, whole, rule) for v in value)
        return value

    def _ids(self, text: str, of_template: list[Span]) -> list[int]:
        """The ids of ``text``, in which only the spans ``of_template`` are control tokens."""
        try:
            plain: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError("a message holds a lone surrogate, which is no character") from error
        control_ids = set(self._control.values())
        n_control = sum(i in control_ids for i in plain)
        if n_control == len(of_template) and _spans(_pattern(self._control), text) == of_template:
            return plain
        return self._alias_ids(text, of_template)

    def _alias_ids(self, text: str, of_template: list[Span]) -> list[int]:
        if self._alias is None or self._alias.mark in text:
            self._alias = _alias(self.tokenizer, self._control, text)
        pieces, at = [], 0
        for start, end in of_template:
            pieces += [text[at:start], self._alias.mark, text[start:end]]
            at = end
        ids: list[int] = self._alias.tokenizer.encode("".join([*pieces, text[at:]]), add_special_tokens=False).ids
        return ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        before: list[int] = self.tokenizer.encode("", add_special_tokens=True).ids
        if len(before) != 1:
            return ids
        while ids[:1] == before:
            ids = ids[1:]
        return before + ids


class _Alias(NamedTuple):
    """A copy of a tokenizer in which every control token is spelled with ``mark`` in front."""

    mark: str
    tokenizer: Tokenizer


def _alias(tokenizer: Tokenizer, control: Collection[str], text: str) -> _Alias:
    """The alias for encoding ``text``, which has not its mark. Raises UnsupportedError for a model other than BPE."""
    document = json.loads(tokenizer.to_str())
    model = document["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(
            f"a message holds a control token; as text it needs a BPE tokenizer, not {model['type']}"
        )
    mark = _unused_char("\0".join([text, *model["vocab"], *control]))
    alias = {content: mark + content for content in control}
    model["merges"] = [m for m in model["merges"] if alias.keys().isdisjoint((*m, "".join(m)))]
    model["vocab"] = {alias.get(piece, piece): i for piece, i in model["vocab"].items()}
    for token in document["added_tokens"]:
        token["content"] = alias.get(token["content"], token["content"])
        model["vocab"].setdefault(token["content"], token["id"])  # without this the library chooses an id
    model["unk_token"] = alias.get(model["unk_token"], model["unk_token"])
    document["post_processor"] = None
    return _Alias(mark, Tokenizer.from_str(json.dumps(document)))


class _Rule:
    """Which control tokens are marked in a string: ``protected``; those of ``known`` that are not stay as they are."""

    def __init__(self, protected: Collection[str], known: Collection[str]) -> None:
        exempt = [content for content in known if content not in protected]
        starts = "".join(sorted({content[0] for content in protected}))
        before = f"(?!{_alternation(exempt)})" if exempt else ""
        self.start = re.compile(f"{before}[{re.escape(starts)}]" if starts else "(?!)", re.DOTALL)
        self.token = _pattern(protected)


class _Mark:
    """A character that no text here has, put behind the first character of what could be a control token."""

    def __init__(self, char: str) -> None:
        self.char = char
        # A template may write the character as JSON escapes it.
        self._any = re.compile(f"{char}|{re.escape(json.dumps(char)[1:-1])}")

    def put(self, text: str, rule: _Rule, whole: bool) -> str:
        pattern = rule.token if whole else rule.start
        return pattern.sub(lambda m: m[0][0] + self.char + m[0][1:], text)

    def removed(self, text: str) -> str:
        return self._any.sub("", text)

    def unmarked_spans(self, contents: Collection[str], text: str) -> list[Span]:
        """Where the tokens ``contents`` stand whole in the marked ``text``, as positions in the text without marks."""
        marks = [m.span() for m in self._any.finditer(text)]
        spans, n_removed, at = [], 0, 0
        for start, end in _spans(_pattern(contents, f"(?!{self._any.pattern})"), text):
            while at < len(marks) and marks[at][0] < start:
                n_removed += marks[at][1] - marks[at][0]
                at += 1
            spans.append((start - n_removed, end - n_removed))
        return spans


def _alternation(contents: Collection[str]) -> str:
    return "|".join(re.escape(c) for c in sorted(contents, key=len, reverse=True))


def _pattern(contents: Collection[str], after_first: str = "") -> re.Pattern[str]:
    """Any of ``contents``, the longest first, which is how the library matches added tokens."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(re.escape(c[0]) + after_first + re.escape(c[1:]) for c in longest_first) or "(?!)")


def _spans(pattern: re.Pattern[str], text: str) -> list[Span]:
    return [m.span() for m in pattern.finditer(text)]


def _strings(value: Any) -> Iterator[str]:
    """All strings in ``value``, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in (*value.keys(), *value.values()):
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _unused_char(text: str) -> str:
    """A noncharacter (Unicode, section 23.7) that ``text`` has neither as such nor escaped. Raises InputError."""
    for code in range(0xFDD0, 0xFDF0):
        if chr(code) not in text and f"\\u{code:04x}" not in text:
            return chr(code)
    raise InputError("the messages hold all of Unicode's noncharacters; one must be free")


def encode_chat(
    tokenizer: Tokenizer,
    template: str,
    messages: Messages,
    special_tokens: Mapping[str, str] | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """One conversation as ids; see :class:`ChatEncoder`, which is for more than one."""
    encoder = ChatEncoder(tokenizer, template, special_tokens)
    return encoder.encode(messages, add_generation_prompt, tools, **variables)
