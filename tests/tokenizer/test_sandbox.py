"""Chat templates are programs from strangers: what they must not do, and what they may not spend."""

from __future__ import annotations

import datetime
import json
import time
import tracemalloc

import pytest

from krafla_cli.errors import FormatError, InputError, MlbError
from krafla_cli.tokenizer import sandbox
from krafla_cli.tokenizer.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello <b>"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].x }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'a': 1}) %}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ('{0.__class__}' | format(1)).x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include 'x' %}",
        "{% import '/etc/passwd' as p %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_must_not_do(source: str) -> None:
    before = json.dumps(MESSAGES)
    try:
        text = render(source)
    except MlbError:
        text = ""
    assert text in ("", "{0.__class__}")
    assert json.dumps(MESSAGES) == before


TEXT = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
LIST = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
DOUBLING = [
    TEXT + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    TEXT + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    TEXT + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    TEXT + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    TEXT + "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    TEXT + "{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    TEXT + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    TEXT + "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}{% endfor %}",
    TEXT + "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}{% endfor %}",
    LIST + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    LIST + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    LIST + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
]
LARGE = [
    "{{ 'a' * 100000000000 }}",
    "{{ 100000000000 * 'a' }}",
    "{{ [0] * 100000000000 }}",
    "{{ 10 ** 100000000 }}",
    "{{ 'a' | center(100000000000) }}",
    "{{ 'a'.ljust(100000000000) }}",
    "{{ 'a'.zfill(100000000000) }}",
    "{{ 'a\\tb'.expandtabs(100000000000) }}",
    "{{ 'a' | indent(100000000000, true) }}",
    "{{ '%100000000000d' % 1 }}",
    "{{ '%*d' % (100000000000, 1) }}",
    "{{ '%100000000000d' | format(1) }}",
    "{{ '{:>100000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 100000000000) }}",
    "{{ '{:{}}'.format(1, '>10000000000') }}",
    "{{ '{0:{1[0]}}'.format(1, ['>10000000000']) }}",
    "{{ '{x:{y}}'.format_map({'x': 1, 'y': '>10000000000'}) }}",
    "{{ messages | tojson(indent=100000000000) }}",
    "{{ [1] | batch(100000000000, 'x') | list }}",
    "{{ [1] | slice(100000000000) | list }}",
    "{{ lipsum(n=100000000000) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) | map('string') %}{% for b in range(99999) | select %}{% endfor %}{% endfor %}",
    "{{ range(99999) | map('center', 9999) | join }}",
]


@pytest.mark.parametrize("source", DOUBLING + LARGE)
def test_what_a_template_may_not_spend(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_MAX_STEPS", 20_000)
    monkeypatch.setattr(sandbox, "_MAX_MADE", 1 << 22)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises((FormatError, InputError), match="the chat template"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 30


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 20_000}] * 100
    source = "{% for m in messages %}{{ '<' + m.role + '>' + (m.content | trim) + '\\n' }}{% endfor %}"
    assert len(ChatTemplate(source).render(messages)) > 9_000_000


@pytest.mark.parametrize("content", ['{"id": 1234567}', "5% 12000 people", "{:>100000}", "%100000d", "{%12341234"])
@pytest.mark.parametrize(
    "source",
    ["{{ m.content | trim }}", "{{ m.content.strip() }}", "{{ m.content.split('|')[0] }}", "{{ '%s' % m.content }}",
     "{{ '{}'.format(m.content) }}", "{{ '%s' | format(m.content) }}", "{{ m.content | replace('a', 'b') }}"],
)  # fmt: skip
def test_what_looks_like_a_format_in_a_message_is_text(source: str, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    assert ChatTemplate("{% for m in messages %}" + source + "{% endfor %}").render(messages) == content


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a\n  {%- if true %}\n b\n{% endif %}\n", "a b\n"),  # trim_blocks and lstrip_blocks
        ("{{ {'a': '<b> é'} | tojson }}", '{"a": "<b> é"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true, separators=(',', ':')) }}", '{\n "a":2,\n "b":1\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}", "aFalse"),
        ("{% for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{% for i in [0, 1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in [1, 2] %}{{ loop.index0 }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "0/2False 1/2True "),
        ("{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ v }}{{ loop.first }}{% endfor %}", "a1True"),
        ("{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.revindex }}{% endfor %}", "1"),
        ("{% for x in nothing %}{% else %}none{% endfor %}{{ nothing }}", "none"),
        ("{{ 1 ~ 'a' ~ none ~ [1] }}", "1aNone[1]"),
        ("{{ ([1] + [2]) | length }}{{ 'a' * 3 }}{{ 2 ** 3 }}{{ '%02d' % 7 }}", "2aaa807"),
        ("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}", "<s>TrueTrue"),
        ("{{ messages[0]['content'] }}{{ messages[-1].role }}", "hello <b>user"),
        ("{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m('x') ~ m(1) }}", "[x][1]"),
        ("{{ '{{\"a\": {}}}{}'.format(1, 2) }}", '{"a": 1}2'),
    ],
)  # fmt: skip
def test_templates_see_what_transformers_shows_them(source: str, text: str) -> None:
    assert render(source) == text


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
