"""Rendering: a template's errors are told with their place, and no question is learned by a
template that renders it otherwise once an answer follows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

import pyarrow.json
import transformers
import trl
from chat_shapes import CALLED, CHAT, LONG, MARKED, PLAIN, TOOL
from chatty import chat_of, save_base

from infinity.errors import ConfigError
from infinity.tools.train.example_files import find_examples
from infinity.tools.train.examples import NOT_LEARNED, read_examples


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("chatty") / "base", template=PLAIN)


@pytest.fixture
def reading(base, tmp_path):
    """Reads rows with a template. Returns the examples, and each row's text with what is learned
    in brackets."""

    def read(rows: list[dict], template: str, **given):
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = template
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = read_examples(find_examples(path), tokenizer, **({"sequence_length": 999} | given))
        texts = []
        for row in found.rows:
            text, learned = "", False
            for token, label in zip(row["input_ids"], row["labels"]):
                if learned != (label != NOT_LEARNED):
                    text, learned = text + ("]" if learned else "["), not learned
                text += tokenizer.decode([token])
            texts.append(text + "]" * learned)
        return found, texts

    return read


TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ERRORS = {  # what a template does -> template, its line, what is told
    "loops over no tools": (
        "{# tools #}\n{% for t in tools %}{{ t.name }}{% endfor %}" + TURN,
        2,
        ("TypeError", "no tools", "for t in tools"),
    ),
    "adds to an undefined key": (
        TURN + "\n\n{% for m in messages %}{{ m.name + ':' }}{% endfor %}",
        3,
        ("UndefinedError", "no name of message 1 (user)"),
    ),
    "raises by itself": (
        "{{ raise_exception('Roles must alternate') if messages[0].role == 'user' }}" + TURN,
        1,
        ("TemplateError", "Roles must alternate"),
    ),
    "is no template": (TURN + "\n{% if %}", 2, ("TemplateSyntaxError",)),
    "loops in a line of its own length": (
        TURN * 3 + "{% if documents %}{% endif %}{% for t in tools %}{{ t }}{% endfor %}",
        1,
        ("TypeError", "({% for t in tools %})", "The sample has no tools."),
    ),
    "raises in a line of its own length": (
        TURN * 2 + "{% if messages %}{{ raise_exception('No system role') }}{% endif %}",
        1,
        ("TemplateError", "({{ raise_exception('No system role') }})"),
    ),
    "divides by zero": (TURN + "{{ 1 / 0 }}", 1, ("ZeroDivisionError",)),
}


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_of_a_template_is_told_with_line_and_sample_and_what_is_missing(what, reading):
    """The first sample has no answer, and is rendered by none. Twin: a template without it."""
    template, line, said = ERRORS[what]
    rows = [{"messages": [CHAT[0]]}, {"messages": CHAT}, {"messages": CHAT}]
    with pytest.raises(ConfigError) as refusal:
        reading(rows, template)
    words = str(refusal.value)
    assert "sample 2:" in words and f"at line {line} (" in words, words
    assert all(word in words for word in said), words
    assert len(reading(rows, TURN)[1]) == 2


MOVED = (  # the system message stands in the last turn, if a user's
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% if loop.last and messages[0].role"
    " == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTED = (  # says how many messages there are
    "({{ messages | length }})" + TURN + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAST = (  # another end of the last turn
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '!' if loop.last else '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("template", [MOVED, COUNTED, LAST], ids=["moved", "counted", "last"])
@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_a_question_that_is_rendered_otherwise_is_refused_not_learned(form, template, reading):
    """Twin: the same template with marks around the answer learns the answer alone."""
    said = [SYSTEM, *CHAT]
    row = {"messages": said} if form == "messages" else {"prompt": said[:2], "completion": said[2:]}
    with pytest.raises(ConfigError, match="sample 1: .* once the answer follows .*generation"):
        reading([row] * 2, template)
    marked = template.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
    )
    marked = marked.replace(
        "{% generation %}", "{% if m.role == 'assistant' %}{% generation %}"
    ).replace("{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}{% endif %}")
    _, texts = reading([{"messages": said}] * 2, marked)
    assert all(text.count("[") == 1 and "[2." in text for text in texts), texts


def test_a_prefix_is_enough_for_a_template_that_moves_nothing_here(reading):
    """Without a system message the moving template is as any other."""
    _, texts = reading([{"messages": LONG}], MOVED)
    assert texts == [
        "<|user|>1+1?<|end|><|assistant|>[2.<|end|>]",
        "<|user|>1+1?<|end|><|assistant|>2.<|end|><|user|>2+2?<|end|><|assistant|>[4.<|end|>]",
    ]


def test_words_that_ask_for_an_answer_and_go_are_told(reading):
    """A template that opens a thought for the answer, and drops it from turns that are said."""
    template = TURN + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    found, texts = reading([{"messages": CHAT}] * 2, template)
    assert texts[0] == "<|user|>1+1?<|end|><|assistant|>[2.<|end|>]"
    assert any("asks for an answer with '<think>'" in line for line in found.told)


def test_an_answer_of_no_weight_has_no_row_where_each_answer_has_one(reading):
    """By a template without marks. Twin: with weight 1 it has one."""
    for weight, count in ((0, 1), (1, 2)):
        said = [LONG[0], {**LONG[1], "weight": weight}, *LONG[2:]]
        _, texts = reading([{"messages": said}] * 2, PLAIN)
        assert len(texts) == 2 * count
        assert texts[count - 1].endswith("<|assistant|>[4.<|end|>]")


def test_answers_that_cannot_be_told_apart_in_a_row_get_rows_of_their_own(reading):
    """A template with two marked parts in each answer. Twin: all are learned, in one row."""
    twice = MARKED.replace(
        "<|end|>{% endgeneration %}",
        "{% endgeneration %}|{% generation %}<|end|>{% endgeneration %}",
    )
    said = [LONG[0], {**LONG[1], "weight": 0}, *LONG[2:]]
    _, texts = reading([{"messages": said}] * 2, twice)
    assert texts[0].startswith("<|user|>1+1?<|end|><|assistant|>2.|<|end|>")
    assert "[4." in texts[0] and "[2." not in texts[0] and len(texts) == 2
    _, texts = reading([{"messages": LONG}] * 2, twice)
    assert "[2.]|[<|end|>]" in texts[0] and "[4.]|[<|end|>]" in texts[0]


def test_tools_that_a_template_does_not_render_are_refused(reading):
    """Their calls too. Twin: the template that renders them."""
    rows = [{"messages": CHAT, "tools": [TOOL]}] * 2
    with pytest.raises(ConfigError, match="sample 1: .*does not render the column tools"):
        reading(rows, TURN)
    with pytest.raises(ConfigError, match="does not render tool_calls"):
        reading([{"messages": CALLED}] * 2, TURN)
    assert "<|tools|>" in reading(rows, PLAIN)[1][0]


def test_a_call_stands_as_its_text_in_a_template_without_calls(reading):
    """A turn `function_call` is an answer that is learned, whatever the template."""
    call = '{"name": "add", "arguments": {}}'
    said = [{"from": "human", "value": "1+1?"}, {"from": "function_call", "value": call}]
    template = TURN + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert reading([{"conversations": said}] * 2, template)[1][0].endswith(f"[{call}<|end|>]")
    assert reading([{"conversations": said}] * 2, PLAIN)[1][0].endswith("[<call>add{}<|end|>]")


def test_samples_are_counted_not_rows(reading):
    """Eight conversations of two answers, the second of which begins beyond the length: each has
    a row. Twin: with less length none has, and eight are left out."""
    said = [*chat_of("1+1?", "2."), *chat_of("a" * 80, "b")]
    found, texts = reading([{"messages": said}] * 8, PLAIN, sequence_length=40)
    assert len(texts) == 8 and found.skipped == {}
    assert any("answers beyond 40 tokens are not learned, in 8" in line for line in found.told)
    with pytest.raises(ConfigError, match="leaves 0; 8 nothing to learn within 5 tokens"):
        reading([{"messages": said}] * 8, PLAIN, sequence_length=5)


@pytest.mark.parametrize("kind", ["marked", "unmarked", "completion", "text"])
def test_what_is_cut_within_a_row_is_counted(kind, reading):
    """Method: of four samples three end beyond the length, each in its only row. Twin: a length
    that holds them all, of which nothing is told."""
    texts = ["b", *["b" * 60] * 3]
    rows = {
        "completion": [{"prompt": "1+1?", "completion": text} for text in texts],
        "text": [{"text": text} for text in texts],
    }.get(kind, [{"messages": chat_of("1+1?", text)} for text in texts])
    template = MARKED if kind == "marked" else PLAIN
    said = f"{'text' if kind == 'text' else 'answers'} beyond 40 tokens"
    for length, told in ((40, True), (999, False)):
        found, made = reading(rows, template, sequence_length=length)
        assert len(made) == 4
        assert (
            any(
                line.startswith(said) and "not learned, in 3 of the samples" in line
                for line in found.told
            )
            == told
        )
        assert any("beyond" in line for line in found.told) == told


def test_a_role_that_neither_side_knows_is_refused(reading):
    """Twin: one that the template names is rendered by it."""
    said = [{"role": "critic", "content": "Bad."}, *CHAT]
    with pytest.raises(ConfigError, match="sample 1: the role critic is unknown"):
        reading([{"messages": said}] * 2, PLAIN)
    knows = PLAIN.replace(
        "{% if m.role == 'assistant' %}",
        "{% if m.role == 'critic' %}?{% endif %}{% if m.role == 'assistant' %}",
    )
    assert reading([{"messages": said}] * 2, knows)[1][0].startswith("<|critic|>?Bad.<|end|>")


def test_texts_that_look_like_other_values_stay_texts(reading):
    """Numbers beside parts in other messages, and dates alone, of which `datasets` makes values of
    other types. Twin: it does."""
    parts = [{"type": "text", "text": "1+1?"}]
    for saids in (("2.0", "007", "null"), ("2024-01-02", "2025-01-02")):
        chats = [[{"role": "user", "content": parts}, chat_of("", said)[1]] for said in saids]
        pairs = [{"prompt": "When?", "completion": said} for said in saids]
        for rows in ([{"messages": chat} for chat in chats], pairs):
            _, texts = reading(rows, MARKED)
            assert [text.split("[")[1] for text in texts] == [f"{said}<|end|>]" for said in saids]
    guessed = pyarrow.json.read_json(io.BytesIO(json.dumps(pairs[0]).encode()))
    assert guessed.to_pylist()[0]["completion"] != "2024-01-02"


PARTS = TURN.replace(
    "{{ m.content }}",
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
)


def test_a_template_that_reads_parts_alone_gets_parts(reading):
    """As those of image-text models, which render nothing of a text. Twin: one that takes both
    gets the text."""
    ask = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    both = "{% if messages[0].content is string %}" + TURN + "{% else %}no{% endif %}"
    for template in (PARTS + ask, both + ask):
        _, texts = reading([{"messages": CHAT}] * 2, template)
        assert texts[0] == "<|user|>1+1?<|end|><|assistant|>[2.<|end|>]"


def test_an_answer_that_a_template_marks_nowhere_is_counted(reading):
    """A template that marks the answers of calls alone. Twin: the sample with a call is learned."""
    template = MARKED.replace(
        "{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and m.tool_calls %}"
    )
    found, texts = reading([{"messages": CALLED}] * 2 + [{"messages": CHAT}], template)
    assert found.skipped == {"no answer in it that the chat template marks": 1}
    assert len(texts) == 2 and "[<call>add" in texts[0]


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gptoss", "deepseekv3"])
def test_an_answer_of_no_weight_is_context_in_a_known_template(name, reading):
    """A template of TRL's, for which it has one that marks answers. Twin: with its weight the
    answer is learned, in the same row of tokens."""
    folder = Path(trl.__file__).parent / "chat_templates"
    template = (folder / f"{name}.jinja").read_text()
    said = chat_of("q-one", "a-one") + chat_of("q-two", "a-two")
    weighted = [said[0], {**said[1], "weight": 0}, *said[2:]]
    whole, texts = reading([{"messages": said}] * 2, template)
    found, (text, _) = reading([{"messages": weighted}] * 2, template)
    learned = "".join(part.split("]")[0] for part in text.split("[")[1:])
    assert "a-two" in learned and "a-one" not in learned and "q-" not in learned
    assert found.rows["input_ids"] == whole.rows["input_ids"]
    assert "a-one" in "".join(part.split("]")[0] for part in texts[0].split("[")[1:])


def test_thoughts_that_a_template_forgets_are_told(reading):
    """In what is said, and by a key of their own, in the first of two turns. Twin: a template that
    keeps them."""
    last = "{% if m.role == 'user' or loop.last %}"
    for said in ("<think>hm</think>2.", "2."):
        answer = {"role": "assistant", "content": said}
        if said == "2.":
            answer["reasoning_content"] = "hm"
        rows = [{"messages": [LONG[0], answer, *LONG[2:]]}] * 2
        forgets = MARKED.replace("{{ m.content or '' }}", last + "{{ m.content }}{% endif %}")
        forgets = forgets.replace(
            "{% if m.reasoning_content %}", "{% if m.thinking and loop.last %}"
        )
        for template, lost in ((forgets, True), (MARKED, False)):
            found, _ = reading(rows, template)
            assert any("what answers think is left out" in line for line in found.told) == lost


def test_thoughts_that_a_template_does_not_render_are_told_by_their_name(reading):
    """As a key of a message, by each of its names, and as a column. Twin: a template that renders
    them, by either name that templates know."""
    silent = MARKED.replace("m.reasoning_content", "m.nothing")
    older = MARKED.replace("m.reasoning_content", "m.thinking")
    rows = {
        "reasoning": {"messages": [CHAT[0], {**CHAT[1], "reasoning": "One and one."}]},
        "thinking": {"messages": [CHAT[0], {**CHAT[1], "thinking": "One and one."}]},
        "cot": {"question": "1+1?", "answer": "2.", "cot": "One and one."},
    }
    for name, row in rows.items():
        found, (text, _) = reading([row] * 2, silent)
        assert "One" not in text and any(name in line and "left" in line for line in found.told[1:])
        for template in (MARKED, older):
            found, (text, _) = reading([row] * 2, template)
            assert "<think>One and one.</think>2." in text
            assert not any("left out" in line for line in found.told), found.told


def test_a_tokenizers_token_for_pictures_is_refused_in_samples(base, tmp_path):
    """Anywhere in a conversation or a text. Twin: a tokenizer without it, which reads the word."""
    path = tmp_path / "data.jsonl"
    for row in ({"messages": chat_of("a <image> here", "b")}, {"text": "a <image> here"}):
        path.write_text((json.dumps(row) + "\n") * 2)
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        found = read_examples(find_examples(path), tokenizer, sequence_length=99)
        assert any("<image> read as text" in line for line in found.told)
        tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
        with pytest.raises(ConfigError, match="sample 1: it has <image>, the tokenizer's token"):
            read_examples(find_examples(path), tokenizer, sequence_length=99)


def test_answers_that_end_without_a_token_are_told(reading):
    """By a template that ends no last turn, and by one whose marks leave the end out. Twins: the
    end is learned."""
    ask = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    open_end = TURN.replace("<|end|>", "{{ '' if loop.last else '<|end|>' }}") + ask
    inside = MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    for template, lost in ((open_end, True), (TURN + ask, False), (inside, True), (MARKED, False)):
        row = (
            {"messages": CHAT} if "generation %}" in template else {"prompt": "a", "response": "b"}
        )
        found, _ = reading([row] * 2, template)
        assert any("No token that ends an answer" in line for line in found.told) == lost, template
