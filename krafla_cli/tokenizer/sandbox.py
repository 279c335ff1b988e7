"""Running a chat template, which is a program from a stranger: jinja2's sandbox, with bounds on what it may spend.

Templates see what transformers shows them (block trimming, `raise_exception`, `strftime_now`, `tojson`, loop controls,
`{% generation %}`), so that they render to the same text. A template that spends more than any real one is stopped: the
loop steps and calls, and the amount of text made, are counted.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 20
_MAX_STEPS = 2_000_000
_MAX_MADE = 1 << 28  # characters and list items, all together
_MAX_NUMBER = 10_000  # widths, indents, repetitions
_LONG_NUMBER = re.compile(r"[0-9]{5,}")
_BUDGET_FILTER = "_loop_steps"
# Filters and methods that can make much out of little; their cost is known before they run.
_GROWING = frozenset({"join", "replace", "tojson", "string", "pprint", "format", "format_map", "indent", "wordwrap"})
# Of these, the ones whose first argument is a format.
_FORMATTING = frozenset({"format", "format_map"})


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.n_steps = _MAX_STEPS
        self.n_made = _MAX_MADE

    def step(self, n: int = 1) -> None:
        """Counts ``n`` loop steps or calls. Raises SecurityError when there were too many."""
        self.n_steps -= n
        if self.n_steps < 0:
            raise SecurityError(f"the template takes more than {_MAX_STEPS} steps")

    def make(self, n: int) -> None:
        """Counts ``n`` characters or items made. Raises SecurityError when there were too many."""
        self.n_made -= n
        if self.n_made < 0:
            raise SecurityError(f"the template makes more than {_MAX_MADE} characters")


class _Bounded(NodeTransformer):
    """Rewrites a template so that loops are counted, and `a ~ b` is a join, which is counted."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _BUDGET_FILTER, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "join", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates. ``budget`` is shared by everything that a rendering does."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters = {name: self._guarded(name, f) for name, f in {**self.filters, "tojson": _tojson}.items()}
        self.filters[_BUDGET_FILTER] = self._loop_steps
        del self.globals["lipsum"]  # makes any amount of text; no chat template needs it
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.finalize = self._finalize

    def concat(self, pieces: Iterable[str]) -> str:
        text = "".join(pieces)
        self.budget.make(len(text))
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        if operator in ("*", "**"):
            self._check_product(operator, left, right)
        elif operator == "%":
            values = right if isinstance(right, tuple) else (right,)
            # "%*d" takes its width from a value; other values may be as large as they like.
            if isinstance(left, str) and "*" in left:
                self._check_numbers(values)
            self._check_format(left)
            self.budget.make(_size(right, self.budget))
        result = super().call_binop(context, operator, left, right)
        self.budget.make(len(result) if isinstance(result, Sized) else 1)
        return result

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(obj, "__name__", "")
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        subject = (owner, *args) if isinstance(owner, str) else args
        if isinstance(owner, str):
            self._check_growth(name, subject, kwargs)
        self.budget.step()
        result = super().call(context, obj, *args, **kwargs)
        self.budget.make(len(result) if isinstance(result, (str, list, tuple)) else 1)
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def _guarded(self, name: str, func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            # Some filters are given the environment or the context first.
            subject = args[1:] if hasattr(func, "jinja_pass_arg") else args
            self._check_growth(name, subject, kwargs)
            result = func(*args, **kwargs)
            self.budget.make(len(result) if isinstance(result, (str, list, tuple)) else 1)
            return result

        return guarded

    def _check_growth(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_numbers((*args[1:], *kwargs.values()))
        if name in _FORMATTING:  # in no other place is a text, which may be a message, read as a format
            self._check_format(args[0] if args else "")
        if name not in _GROWING:
            return
        sizes = [_size(a, self.budget) for a in (*args, *kwargs.values())]
        if name == "replace" and len(args) >= 3 and isinstance(args[0], str) and isinstance(args[1], str):
            self.budget.make((args[0].count(args[1]) if args[1] else len(args[0]) + 1) * sizes[2])
        elif name == "join" and len(sizes) > 1:
            n_items = len(args[1 if isinstance(args[0], str) else 0]) if all(_sized(a) for a in args[:2]) else 0
            self.budget.make(n_items * min(sizes[:2]) + max(sizes[:2]))
        else:
            self.budget.make(sum(sizes))

    def _check_numbers(self, values: Iterable[Any]) -> None:
        """Widths, indents and repetitions are small in any real template."""
        for value in values:
            if isinstance(value, int) and abs(value) > _MAX_NUMBER:
                raise SecurityError(f"the template uses the number {value} where the limit is {_MAX_NUMBER}")

    def _check_format(self, form: Any) -> None:
        """So are widths inside of a format, and none is taken from a value."""
        if not isinstance(form, str):
            return
        if re.search(r"\{[^{}]*\{", form.replace("{{", "").replace("}}", "")):
            raise SecurityError("the template formats with a field inside of a field")
        for spec in re.findall(r"%[-+ #0-9.*]*|\{[^{}]{0,99}\}", form):
            if _LONG_NUMBER.search(spec):
                raise SecurityError("the template formats with a width of more than four digits")

    def _check_product(self, operator: str, left: Any, right: Any) -> None:
        numbers = [v for v in (left, right) if isinstance(v, (int, float))]
        if operator == "**" and (len(numbers) < 2 or abs(right) > 64 or abs(left) > _MAX_NUMBER):
            raise SecurityError("the template computes a power that is too large")
        if any(isinstance(v, int) and v.bit_length() > 64 for v in numbers):
            raise SecurityError("the template multiplies numbers that are too large")
        for text, n in ((left, right), (right, left)):
            if isinstance(text, Sized) and isinstance(n, int):
                self.budget.make(len(text) * max(n, 0))

    def _loop_steps(self, items: Any) -> Any:
        if isinstance(items, Sized):
            self.budget.step(len(items))
            return items
        return self._counted(items) if isinstance(items, Iterable) else items

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.step()
            yield item

    def _finalize(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.budget.make(_size(value, self.budget))
        return value


def _sized(value: Any) -> bool:
    return isinstance(value, Sized)


def _size(value: Any, budget: Budget) -> int:
    """Characters and items in ``value``, nested ones included; each counts as a step."""
    budget.step()
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(k, budget) + _size(v, budget) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) + sum(_size(v, budget) for v in value)
    return 1


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
