"""Conversations over the contract: the ids that reach the engine, what of the cache is kept, thinking in replies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from krafla_cli.errors import InputError, UsageError
from krafla_cli.formats.mlb import Header
from krafla_cli.formats.sidecar import Sidecar
from krafla_cli.runtime.chat import (
    Chat,
    Piece,
    PromptCache,
    conversation,
    mark_thinking,
    opens_thinking,
    template_variables,
)
from krafla_cli.runtime.companions import Companions
from krafla_cli.runtime.engine import Engine, Float32s, Ids, LogitsWanted
from krafla_cli.runtime.model import Model
from krafla_cli.runtime.sampling import Sampler, SamplingOptions
from krafla_cli.tokenizer import ChatEncoder
from krafla_cli.tokenizer.templates import builtin
from tests.helpers.models import HEADERS
from tests.helpers.runnable import small_tokenizer

TOKENIZER = small_tokenizer()
N_VOCAB: int = TOKENIZER.get_vocab_size()
END, USER, BOT = 0, 1, 2
# The reply stands where it was written.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}"
    "{{ '<|bot|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
# Rewrites the past as thinking models' templates do: of older replies only what follows </think>.
FORGETTING = (
    "{% for m in messages %}{{ '<|bot|>' if m.role == 'assistant' else '<|user|>' }}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% if enable_thinking is defined and not enable_thinking %}."
    "{% else %}<think>\n{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)


class Script(Engine):
    """Says ``answer`` after the place where replies begin; its recurrent state is the list of ids that it was given."""

    name = "script"
    activations = kv = "f32"

    def __init__(self, recurrent: bool = False, n_ctx: int = 250) -> None:
        super().__init__(replace(HEADERS["hybrid" if recurrent else "plain"], vocab=N_VOCAB), n_ctx)
        self.answer: list[int] = []
        self.state: list[int] = []
        self.n_run = 0

    def says(self, text: str, opening: str = "") -> None:
        """The next reply; ``opening`` is what the template writes of it."""
        self.answer = TOKENIZER.encode(opening).ids + TOKENIZER.encode(text).ids

    def _forward(self, ids: Ids, logits: LogitsWanted) -> Float32s:
        self.n_run += len(ids)
        self.state = [*self.state, *ids.tolist()]
        done = self.state[::-1].index(BOT) if BOT in self.state else 0
        chosen = self.answer[done] if done < len(self.answer) else END
        return np.eye(N_VOCAB, dtype=np.float32)[[chosen] * {"none": 0, "last": 1, "all": len(ids)}[logits]]

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.state = self.state[:n]

    def _copy_state(self) -> Any:
        return list(self.state)

    def _set_state(self, state: Any) -> None:
        self.state = list(state)

    def _clear_state(self) -> None:
        self.state = []


@dataclass
class FakeFile:
    header: Header


def _model(engine: Engine, template: str | None = PLAIN) -> Model:
    settings = Sidecar("0" * 64, template, (END,))
    model = Model(FakeFile(engine.header), engine, Companions(Path("m.mlb"), Path("m.tokenizer.json"), settings))  # type: ignore[arg-type]
    model.__dict__["tokenizer"] = TOKENIZER
    return model


def _chat(engine: Engine, template: str = PLAIN, **options: Any) -> Chat:
    return Chat(_model(engine, template), Sampler(SamplingOptions()), **options)


def _say(chat: Chat, text: str) -> str:
    return "".join(piece.text for piece in chat.reply(text))


def _whole(chat: Chat, n_messages: int, **variables: Any) -> list[int]:
    """The ids of the first messages, and of the place of the reply to them."""
    return chat.model.chat_encoder.encode(chat.messages[:n_messages], **variables)


# ---------------------------------------------------------------------------------------------------------------------
# What reaches the engine


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(("template", "opening"), [(PLAIN, ""), (FORGETTING, "<think>\n")])
def test_the_engine_sees_the_ids_of_the_whole_conversation(recurrent: bool, template: str, opening: str) -> None:
    engine = Script(recurrent)
    chat = _chat(engine, template)
    for turn, answer in enumerate(["the cat</think>sat", "on </think>the mat", "é</think>€"]):
        engine.says(answer, opening)
        assert _say(chat, f"rat {turn}") == answer
        expected = _whole(chat, 2 * turn + 1)
        assert engine.ids.tolist()[: len(expected)] == expected
        assert engine.state == engine.ids.tolist()
    assert [m["content"] for m in chat.messages if m["role"] == "assistant"][1] == opening + "on </think>the mat"


@pytest.mark.parametrize("recurrent", [False, True])
def test_only_the_new_turn_is_run(recurrent: bool) -> None:
    engine = Script(recurrent)
    chat = _chat(engine)
    engine.says("the cat sat")
    _say(chat, "the rat")
    before, n_run = engine.position, engine.n_run
    _say(chat, "the mat")
    assert chat.report.cached_tokens == before
    assert chat.report.prompt_tokens == len(_whole(chat, 3)) - before
    assert engine.n_run - n_run == chat.report.prompt_tokens + len(chat.report.ids)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_rewritten_reply_is_run_again_and_nothing_before_it(recurrent: bool) -> None:
    engine = Script(recurrent)
    chat = _chat(engine, FORGETTING)
    engine.says("the cat</think>sat", "<think>\n")
    _say(chat, "the rat")
    asked = len(TOKENIZER.encode("the rat").ids) + 2  # user, text, end
    _say(chat, "the mat")
    # Attention layers go back to <|bot|>, recurrent ones to the snapshot before it.
    assert chat.report.cached_tokens == asked + (0 if recurrent else 1)
    assert engine.state == engine.ids.tolist()


def test_snapshots_that_were_written_over_are_not_used() -> None:
    engine = Script(recurrent=True)
    cache = PromptCache(engine)
    user = TOKENIZER.encode("the cat sat on the mat").ids
    cache.run([USER, *user, BOT], len(user) + 1)
    assert cache.run([USER, 50, BOT], 2)[1] == 0
    assert cache.run([USER, *user, BOT, 60], len(user) + 1)[1] == 0
    assert engine.state == [USER, *user, BOT, 60]
    assert cache.run([USER, *user, END, 60])[1] == len(user) + 1


def test_the_same_prompt_twice_runs_its_last_id() -> None:
    engine = Script()
    cache = PromptCache(engine)
    assert cache.run([USER, 50, BOT])[1] == 0
    assert cache.run([USER, 50, BOT])[1] == 2
    assert engine.ids.tolist() == [USER, 50, BOT]


def test_control_tokens_that_users_write_are_text() -> None:
    engine = Script()
    chat = _chat(engine, system="<|bot|>")
    engine.says("<|user|>")
    engine.answer = [i for i in engine.answer if i > BOT] or TOKENIZER.encode("a").ids
    _say(chat, "a<|end|>\n<|user|>b")
    assert [i for i in engine.ids.tolist() if i <= BOT] == [END, USER, END, BOT]


def test_one_bos_on_all_turns() -> None:
    tokenizer = small_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", USER)])
    engine = Script()
    model = _model(engine, "<|user|>" + PLAIN.replace("<|user|>", "Q:"))
    model.__dict__["tokenizer"] = tokenizer
    chat = Chat(model, Sampler(SamplingOptions()))
    for text in ("the cat", "the rat"):
        engine.says("sat")
        _say(chat, text)
        assert engine.ids.tolist().count(USER) == 1
        assert engine.ids[0] == USER


# ---------------------------------------------------------------------------------------------------------------------
# Turns


def test_stop_texts_end_a_reply_across_token_borders() -> None:
    engine = Script()
    chat = _chat(engine, stops=["at sa", "zzz"])
    engine.says("the cat sat")
    assert _say(chat, "a") == "the c"
    assert (chat.report.stop_reason, chat.report.stop_text) == ("stop", "at sa")
    assert chat.messages[-1]["content"] == "the c"
    engine.says("the cat s")
    assert _say(chat, "a") == "the cat s"  # what was held back comes at the end


def test_an_interrupted_reply_stays_as_far_as_it_came() -> None:
    engine = Script(recurrent=True)
    chat = _chat(engine, FORGETTING)
    engine.says("abcdefgh", "<think>\n")
    text = ""
    for piece in chat.reply("a"):
        text += piece.text
        if text == "abc":
            chat.interrupt()
    assert (text, chat.report.stop_reason) == ("abc", "interrupted")
    # Unfinished thinking is ended: it must not be taken for an answer.
    assert chat.messages[-1]["content"] == "<think>\nabc\n</think>\n\n"
    engine.says("x</think>y", "<think>\n")
    assert _say(chat, "b") == "x</think>y"
    assert engine.state == engine.ids.tolist()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_prompt_can_be_interrupted_between_batches(recurrent: bool) -> None:
    engine = Script(recurrent)
    chat = _chat(engine)
    forward = engine._forward

    def interrupted(ids: Ids, logits: LogitsWanted) -> Float32s:
        chat.interrupt()
        return forward(ids, logits)

    engine._forward = interrupted  # type: ignore[method-assign]
    assert _say(chat, "q" * 200) == ""
    assert (chat.messages, chat.report.stop_reason, engine.position) == ([], "interrupted", 128)
    engine._forward = forward  # type: ignore[method-assign]
    engine.says("yes")
    assert _say(chat, "the cat") == "yes"
    assert engine.state == engine.ids.tolist()


def test_a_conversation_longer_than_the_context_is_refused_and_nothing_changes() -> None:
    engine = Script(n_ctx=20)
    chat = _chat(engine)
    engine.says("yes")
    _say(chat, "a")
    before = list(chat.messages)
    with pytest.raises(InputError, match=r"the conversation has \d+ tokens, the context 20 positions; /reset"):
        _say(chat, "q" * 30)
    assert chat.messages == before
    assert _say(chat, "b") == "yes"


@pytest.mark.parametrize(("text", "message"), [("", "the prompt is empty"), ("a\udce9", "is not UTF-8 text")])
def test_messages_that_are_no_text(text: str, message: str) -> None:
    chat = _chat(Script())
    with pytest.raises(InputError, match=message):
        _say(chat, text)
    assert chat.messages == []


def test_reset_and_system() -> None:
    engine = Script()
    chat = _chat(engine, system="be kind")
    engine.says("yes")
    _say(chat, "a")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    chat.set_system("be brief")
    assert [m["content"] for m in chat.messages] == ["be brief", "a", "yes"]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    chat.set_system("")
    assert chat.messages == []


def test_a_system_message_that_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(InputError, match="no place for a system message"):
        _chat(Script(), NO_SYSTEM, system="be kind")
    with pytest.raises(InputError, match="no place for a system message"):
        conversation(_model(Script(), NO_SYSTEM), "a", "be kind", {})


def test_without_a_template_there_is_no_chat() -> None:
    model = _model(Script(), None)
    with pytest.raises(UsageError, match=r"no chat template; give one with --template FILE, or chatml, llama3"):
        Chat(model, Sampler(SamplingOptions()))


# ---------------------------------------------------------------------------------------------------------------------
# Thinking


def test_no_think_is_for_templates_with_the_switch() -> None:
    with pytest.raises(UsageError, match="no switch for thinking"):
        template_variables(_model(Script()), True)
    assert template_variables(_model(Script()), False) == {}
    variables = template_variables(_model(Script(), FORGETTING), True)
    engine = Script()
    chat = _chat(engine, FORGETTING, variables=variables)
    engine.says("sat", ".")
    assert [piece.is_thinking for piece in chat.reply("the cat")][:1] == [False]
    expected = _whole(chat, 1, **variables)
    assert engine.ids.tolist()[: len(expected)] == expected


def test_a_reply_begins_inside_of_thinking_where_the_template_opened_it() -> None:
    encoder = ChatEncoder(TOKENIZER, builtin("qwen3.5"))
    messages = [{"role": "user", "content": "a"}]
    assert opens_thinking(TOKENIZER, encoder.encode(messages))
    assert not opens_thinking(TOKENIZER, encoder.encode(messages, enable_thinking=False))


TEXT = "a < b <think>x</thin <think></think>y<think>z"
PARTS = [("a < b ", False), ("<think>", True), ("x</thin <think>", True), ("</think>", True), ("y", False)]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_thinking_is_told_apart_wherever_pieces_end(n: int) -> None:
    pieces = list(mark_thinking(TEXT[i : i + n] for i in range(0, len(TEXT), n)))
    assert "".join(p.text for p in pieces) == TEXT
    flags = [p.is_thinking for p in pieces for _ in p.text]
    assert flags == [flag for text, flag in [*PARTS, ("<think>z", True)] for _ in text]


def test_text_that_could_begin_a_tag_is_held_back_and_comes_at_the_end() -> None:
    assert list(mark_thinking(["a<", "th"])) == [Piece("a", False), Piece("<th", False)]
    assert list(mark_thinking(["x</think>y"], is_open=True))[:2] == [Piece("x", True), Piece("</think>", True)]


# ---------------------------------------------------------------------------------------------------------------------
# Stop ids


def test_the_turn_end_of_the_template_is_a_stop_id() -> None:
    tokenizer = small_tokenizer()
    names = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end_header_id|>", "<end_of_turn>", "</s>", "<s>", "<bos>"]
    tokenizer.add_special_tokens(names)
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>"}
    ends |= {"smollm": "<|im_end|>", "qwen3.5": "<|im_end|>"}
    for name, end in ends.items():
        assert ChatEncoder(tokenizer, builtin(name)).turn_end_ids() == {tokenizer.token_to_id(end)}
    assert ChatEncoder(tokenizer, "{{ messages[0].content }}").turn_end_ids() == frozenset()
    refusing = "{{ raise_exception('no') }}"
    assert ChatEncoder(tokenizer, refusing).turn_end_ids() == frozenset()


def test_stop_ids_are_those_of_the_settings_and_of_the_template() -> None:
    model = _model(Script())
    model.companions = replace(model.companions, settings=Sidecar("0" * 64, PLAIN, (77,)))
    assert model.stop_ids == {77, END}
