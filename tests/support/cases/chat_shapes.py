"""Shapes of chat data, as the tools that read them describe them: OpenAI's, TRL's, LLaMA-Factory's,
axolotl's, mistral-finetune's, Unsloth's, ToolACE's and xLAM's. Each has what is right for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# Renders tools, calls, names and reasoning, and marks answers.
MARKED = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% if mood %}<{{ mood }}>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% endgeneration %}{% else %}{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@dataclass(frozen=True)
class Shape:
    """A sample, and what is right. ``said``: its rows with what is learned in brackets, by a
    template that marks answers. ``refused``: the names in the error. Neither: what TRL's
    SFTTrainer makes of it. ``told``: a line about it."""

    row: dict[str, Any]
    said: str = ""
    refused: tuple[str, ...] = ()
    told: str = ""


def _said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def _from(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"from": role, "value": value} for role, value in turns]


def _call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


Q, A = ("user", "1+1?"), ("assistant", "2.")
Q2, A2 = ("user", "2+2?"), ("assistant", "4.")
SYSTEM = ("system", "Be brief.")
BARE = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": BARE}
TOOLS = f"<|tools|>{json.dumps([TOOL])}<|end|>"
CHAT = _said(Q, A)
LONG = _said(Q, A, Q2, A2)
ASKED, ANSWERED = "<|user|>1+1?<|end|>", "<|user|>1+1?<|end|><|assistant|>[2.<|end|>]"
SECOND = "<|user|>2+2?<|end|><|assistant|>[4.<|end|>]"
CALLED = [
    _said(Q)[0],
    {"role": "assistant", "content": "", "tool_calls": [_call("add", {"a": 1})]},
    {"role": "tool", "content": "2"},
    _said(A)[0],
]
MARKED_CALL = '<|assistant|>[<call>add{"a": 1}<|end|>]<|tool|>2<|end|><|assistant|>[2.<|end|>]'
CONTEXT = "<|user|>1+1?<|end|><|assistant|>2.<|end|>"  # an answer that is not learned

A_THOUGHT = {"role": "assistant", "content": "2.", "reasoning_content": "One and one."}
THOUGHT = "<|user|>1+1?<|end|><|assistant|>[<think>One and one.</think>2.<|end|>]"


def _turns_trained() -> list[dict[str, Any]]:
    first, question, last = _from(("gpt", "2."), ("human", "2+2?"), ("gpt", "4."))
    return [{**first, "train_on_turn": False}, question, {**last, "train_on_turn": True}]


def _marked(key: str, value: Any, at: int = 1) -> list[dict[str, Any]]:
    return [{**each, key: value} if here == at else each for here, each in enumerate(LONG)]


SHAPES = {
    # OpenAI
    "openai chat": Shape({"messages": CHAT}),
    "openai system": Shape({"messages": _said(SYSTEM, Q, A)}),
    "openai turns": Shape({"messages": LONG}),
    "openai weight 0": Shape({"messages": _marked("weight", 0)}, said=CONTEXT + SECOND),
    "openai weight 1": Shape({"messages": _marked("weight", 1)}, said=ANSWERED + SECOND),
    "openai tools": Shape({"messages": CALLED, "tools": [TOOL]}),
    "openai parallel tools": Shape(
        {"messages": CALLED, "tools": [TOOL], "parallel_tool_calls": False},
        told="left out: parallel_tool_calls",
    ),
    "openai arguments as text, content null": Shape(
        {
            "messages": [
                CALLED[0],
                {"role": "assistant", "content": None, "tool_calls": [_call("add", '{"a": 1}')]},
                *CALLED[2:],
            ],
            "tools": [TOOL],
        }
    ),
    "openai functions": Shape(
        {
            "messages": [
                CALLED[0],
                {"role": "assistant", "function_call": {"name": "add", "arguments": {"a": 1}}},
                {"role": "function", "name": "add", "content": "2"},
                _said(A)[0],
            ],
            "functions": [BARE],
        },
        said=TOOLS + ASKED + MARKED_CALL.replace("<|tool|>", "<|tool|>add: "),
    ),
    "openai developer": Shape({"messages": _said(("developer", "Be brief."), Q, A)}),
    "openai name": Shape({"messages": [{**CHAT[0], "name": "Ann"}, CHAT[1]]}),
    "openai parts": Shape(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
                CHAT[1],
            ]
        },
        said=ANSWERED,
    ),
    "openai picture": Shape(
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
                CHAT[1],
            ]
        },
        refused=("image_url", "not text", "picture"),
    ),
    "openai preference": Shape(
        {
            "input": {"messages": CHAT[:1]},
            "preferred_output": CHAT[1:],
            "non_preferred_output": CHAT[1:],
        },
        refused=("preferred_output",),
    ),
    "openai legacy": Shape(
        {"prompt": "1+1? ->", "completion": " 2."},
        said="<|user|>1+1? -><|end|><|assistant|>[ 2.<|end|>]",
    ),
    "openai metadata": Shape(
        {"messages": CHAT, "id": 7, "metadata": {"a": "b"}}, told="left out: id, metadata"
    ),
    # TRL
    "trl prompt and completion": Shape({"prompt": CHAT[:1], "completion": CHAT[1:]}),
    "trl texts": Shape({"prompt": "1+1?", "completion": "2."}, said=ANSWERED),
    "trl code": Shape(
        {"prompt": "def one():\n", "completion": "    return 1\n"},
        said="<|user|>def one():\n<|end|><|assistant|>[    return 1\n<|end|>]",
    ),
    "trl text": Shape({"text": "1+1? 2."}),
    "trl tools beside a prompt": Shape(
        {"prompt": CALLED[:1], "completion": CALLED[1:2], "tools": [TOOL]}
    ),
    "trl tools as text": Shape({"messages": CALLED, "tools": json.dumps([TOOL])}),
    "trl variables": Shape({"messages": CHAT, "chat_template_kwargs": {"mood": "glad"}}),
    "trl loop of calls": Shape({"prompt": CALLED[:1], "completion": CALLED[1:], "tools": [TOOL]}),
    "trl reasoning": Shape(
        {"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "One and one."}]}
    ),
    "trl thinking": Shape({"messages": [CHAT[0], {**CHAT[1], "thinking": "One and one."}]}),
    "trl reasoning by its short name": Shape(
        {"prompt": CHAT[:1], "completion": [{**CHAT[1], "reasoning": "One and one."}]}
    ),
    "trl from and value": Shape({"conversations": _from(Q, A)}, said=ANSWERED),
    "trl preference": Shape(
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]}, refused=("chosen", "DPO")
    ),
    "trl implicit prompt": Shape(
        {"chosen": CHAT, "rejected": CHAT}, refused=("chosen", "--method dpo")
    ),
    "trl unpaired": Shape(
        {"prompt": "1+1?", "completion": "3.", "label": False}, refused=("label", "KTO")
    ),
    "trl prompt alone": Shape({"prompt": CHAT[:1]}, refused=("prompt", "Needed is one of")),
    "trl steps": Shape(
        {"prompt": "1+1?", "completions": ["2"], "labels": [True]}, refused=("completions",)
    ),
    "trl pictures": Shape({"messages": CHAT, "images": ["a.png"]}, refused=("images",)),
    # LLaMA-Factory
    "alpaca": Shape({"instruction": "1+1?", "output": "2."}, said=ANSWERED),
    "alpaca input": Shape(
        {"instruction": "Add.", "input": "1+1", "output": "2."},
        said="<|user|>Add.\n1+1<|end|><|assistant|>[2.<|end|>]",
    ),
    "alpaca system": Shape(
        {"instruction": "1+1?", "input": "", "output": "2.", "system": "Be brief."},
        said="<|system|>Be brief.<|end|>" + ANSWERED,
    ),
    "alpaca history": Shape(
        {"instruction": "2+2?", "input": "", "output": "4.", "history": [["1+1?", "2."]]},
        said=ANSWERED + SECOND,
    ),
    "alpaca all": Shape(
        {
            "instruction": "Add.",
            "input": "2+2",
            "output": "4.",
            "system": "Be brief.",
            "history": [["1+1?", "2."]],
        },
        said="<|system|>Be brief.<|end|>"
        + ANSWERED
        + "<|user|>Add.\n2+2<|end|><|assistant|>[4.<|end|>]",
    ),
    "alpaca tools": Shape(
        {"instruction": "1+1?", "output": "2.", "tools": json.dumps([BARE])}, said=TOOLS + ANSWERED
    ),
    "sharegpt": Shape({"conversations": _from(("human", "1+1?"), ("gpt", "2."))}, said=ANSWERED),
    "sharegpt tools": Shape(
        {
            "conversations": _from(
                ("human", "1+1?"),
                ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
                ("observation", "2"),
                ("gpt", "2."),
            ),
            "tools": json.dumps([BARE]),
            "system": "Be brief.",
        },
        said=TOOLS + "<|system|>Be brief.<|end|>" + ASKED + MARKED_CALL,
    ),
    "sharegpt several calls": Shape(
        {
            "conversations": _from(
                ("human", "1+1?"),
                (
                    "function_call",
                    '[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]',
                ),
            ),
            "tools": json.dumps([BARE]),
        },
        said=TOOLS + ASKED + "<|assistant|>[<call>add{}<call>add{}<|end|>]",
    ),
    "sharegpt system turn": Shape(
        {"conversations": _from(SYSTEM, ("human", "1+1?"), ("gpt", "2."))},
        said="<|system|>Be brief.<|end|>" + ANSWERED,
    ),
    "llama factory kto": Shape({"messages": CHAT, "label": False}, refused=("label", "KTO")),
    "llama factory alpaca kto": Shape(
        {"instruction": "1+1?", "input": "", "output": "3.", "kto_tag": False},
        refused=("kto_tag", "KTO"),
    ),
    "llama factory preference": Shape(
        {
            "conversations": _from(("human", "1+1?")),
            "chosen": _from(("gpt", "2."))[0],
            "rejected": _from(("gpt", "3."))[0],
        },
        refused=("chosen", "DPO"),
    ),
    "llama factory alpaca preference": Shape(
        {"instruction": "1+1?", "input": "", "chosen": "2.", "rejected": "3."},
        refused=("chosen", "DPO"),
    ),
    "llama factory images": Shape(
        {"messages": _said(("user", "<image>What?"), A), "images": ["a.png"]}, refused=("images",)
    ),
    "llama factory videos": Shape(
        {"messages": _said(("user", "<video>What?"), A), "videos": ["a.mp4"]}, refused=("videos",)
    ),
    "llama factory audios": Shape(
        {"messages": _said(("user", "<audio>What?"), A), "audios": ["a.wav"]}, refused=("audios",)
    ),
    "llama factory parts": Shape(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "value": "1+1?"}],
                    "loss_weight": 0.0,
                },
                {"role": "assistant", "content": [{"type": "text", "value": "2."}]},
            ]
        },
        said=ANSWERED,
    ),
    "llama factory thought as a part": Shape(
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": [{"type": "reasoning", "value": "One."}]},
            ]
        },
        refused=("type reasoning", "reasoning_content"),
    ),
    # Turns of a question and its answer: Firefly's, ms-swift's, XTuner's
    "firefly": Shape(
        {
            "conversation_id": 1,
            "conversation": [
                {"human": "1+1?", "assistant": "2."},
                {"human": "2+2?", "assistant": "4."},
            ],
        },
        said=ANSWERED + SECOND,
        told="left out: conversation_id",
    ),
    "swift turns after a system message": Shape(
        {"system": "Be brief.", "conversation": [{"human": "1+1?", "assistant": "2."}]},
        said="<|system|>Be brief.<|end|>" + ANSWERED,
    ),
    "xtuner": Shape(
        {
            "conversation": [
                {"system": "Be brief.", "input": "1+1?", "output": "2."},
                {"system": None, "input": "2+2?", "output": "4."},
            ]
        },
        said="<|system|>Be brief.<|end|>" + ANSWERED + SECOND,
    ),
    "a turn that has more than its words": Shape(
        {"conversation": [{"human": "1+1?", "assistant": "2.", "plugin": "add"}]},
        refused=("sample 1", "no role"),
    ),
    # axolotl
    "axolotl training": Shape({"messages": _marked("training", False)}, said=CONTEXT + SECOND),
    "axolotl train in ShareGPT": Shape(
        {
            "conversations": [
                {"from": "human", "value": "1+1?", "train": False},
                {"from": "gpt", "value": "2.", "train": False},
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4.", "train": True},
            ]
        },
        said=CONTEXT + SECOND,
    ),
    "axolotl question that is trained": Shape(
        {"messages": _marked("train", True, at=0)}, refused=("user", "train")
    ),
    "axolotl details": Shape(
        {"messages": _marked("train_detail", [{"begin_offset": 0, "train": False}])},
        refused=("train_detail",),
    ),
    "axolotl segments": Shape(
        {"segments": [{"label": False, "text": "1+1?"}, {"label": True, "text": "2."}]},
        refused=("segments",),
    ),
    "axolotl tokens": Shape(
        {"input_ids": [1, 2], "labels": [-100, 2]}, refused=("input_ids", "labels")
    ),
    "axolotl orca": Shape(
        {"id": "t0", "system_prompt": "Be brief.", "question": "1+1?", "response": "2."},
        said="<|system|>Be brief.<|end|>" + ANSWERED,
        told="left out: id",
    ),
    "axolotl context": Shape(
        {"context": "One is 1.", "question": "1+1?", "answer": "2."},
        said="<|user|>1+1?\nOne is 1.<|end|><|assistant|>[2.<|end|>]",
    ),
    "axolotl choices": Shape(
        {"question": "1+1?", "choices": ["1", "2"], "answer": "B"}, refused=("choices",)
    ),
    # mistral-finetune
    "mistral weight": Shape(
        {"messages": _marked("weight", 0, at=3)},
        said=ANSWERED + SECOND.replace("[", "").replace("]", ""),
    ),
    "mistral calls": Shape(
        {
            "messages": [
                CALLED[0],
                {"role": "assistant", "tool_calls": [_call("add", '{"a": 1}', id="abc123def")]},
                {**CALLED[2], "name": "add", "tool_call_id": "abc123def"},
                CALLED[3],
            ],
            "tools": [TOOL],
        },
        told="keys of messages left out: tool_call_id",
    ),
    "mistral interactions": Shape(
        {
            "interactions": [{"role": "user", "text": "1+1?"}, {"role": "assistant", "text": "2."}],
            "system_prompt": "Be brief.",
        },
        said="<|system|>Be brief.<|end|>" + ANSWERED,
    ),
    "mistral last alone": Shape({"messages": LONG, "only_last": True}, said=CONTEXT + SECOND),
    # Bedrock
    "bedrock": Shape(
        {
            "system": [{"text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"text": "1+1?"}]},
                {"role": "assistant", "content": [{"text": "2."}]},
            ],
        },
        said="<|system|>Be brief.<|end|>" + ANSWERED,
    ),
    # Unsloth
    "unsloth ShareGPT": Shape(
        {"conversations": _from(("human", "1+1?"), ("gpt", "2.")), "source": "x", "score": 5.2},
        said=ANSWERED,
        told="left out: source, score",
    ),
    "unsloth alpaca with its text": Shape(
        {"instruction": "1+1?", "input": "", "output": "2.", "text": "### Instruction: 1+1?"},
        said=ANSWERED,
        told="Read as questions and answers: instruction, output; with input",
    ),
    # Thoughts in a column
    "thoughts of a medical set": Shape(
        {"Question": "1+1?", "Complex_CoT": "One and one.", "Response": "2."}, said=THOUGHT
    ),
    "thoughts beside a conversation": Shape(
        {"messages": CHAT, "reasoning": "One and one."}, THOUGHT
    ),
    "thoughts that are in the answer": Shape(
        {
            "messages": [*LONG[:3], {**A_THOUGHT, "content": "4."}],
            "reasoning_content": "One and one.",
        },
        said=ANSWERED + "<|user|>2+2?<|end|><|assistant|>[<think>One and one.</think>4.<|end|>]",
    ),
    "thoughts of no answer": Shape(
        {"messages": LONG, "thinking": "One and one."}, refused=("thinking", "which answer")
    ),
    "thoughts in a list": Shape(
        {"question": "1+1?", "answer": "2.", "cot": ["One", "and"]}, refused=("cot", "a text")
    ),
    "thoughts as a switch": Shape(
        {"input": CHAT[:1], "output": "2.", "reasoning": "on", "system_prompt": "Be brief."},
        said="<|system|>Be brief.<|end|>" + ANSWERED,
        told="left out: reasoning",
    ),
    # Pictures that are not there
    "llava without a picture": Shape(
        {"conversations": _from(("human", "<image>\nWhat?"), ("gpt", "2."))},
        refused=("<image>", "sample 1"),
    ),
    "a picture by its address": Shape(
        {"query": "Picture 1: <img>https://a.org/1.png</img>\nWhat?", "response": "2."},
        refused=("<img>", "sample 1"),
    ),
    "a tag of HTML that holds nothing": Shape(
        {"query": 'Is <img src="a.png"> right, or <img>?', "response": "2."},
        said='<|user|>Is <img src="a.png"> right, or <img>?<|end|><|assistant|>[2.<|end|>]',
    ),
    "a video at the end": Shape(
        {"instruction": "What is it?\n<video>", "output": "2."}, refused=("<video>",)
    ),
    "a tag of HTML": Shape(
        {"messages": _said(("user", "<video>a</video>"), A)},
        said="<|user|><video>a</video><|end|><|assistant|>[2.<|end|>]",
        told="<video> read as text",
    ),
    "a word in a text": Shape({"text": "It is <image> there."}, told="<image> read as text"),
    # Others
    "open assistant": Shape(
        {"message_id": "b", "parent_id": "a", "role": "assistant", "text": "2."},
        refused=("parent_id", "tree"),
    ),
    "turns that are trained": Shape(
        {"conversations": [{"from": "human", "value": "1+1?"}, *_turns_trained()]},
        said=CONTEXT + SECOND,
    ),
    "trl rows that are made": Shape({"messages": CHAT, "input_ids": [1]}, refused=("input_ids",)),
    "trl marks of rows": Shape(
        {"prompt": "a", "completion": "b", "completion_mask": [0, 1]}, refused=("completion_mask",)
    ),
    "a switch of qwen beside the messages": Shape(
        {"messages": CHAT, "enable_thinking": False},
        refused=("enable_thinking", "chat_template_kwargs"),
    ),
    "answers that are rejected": Shape(
        {"messages": CHAT, "is_rejected": True}, refused=("is_rejected", "KTO")
    ),
    "pictures that are none": Shape(
        {"messages": CHAT, "images": [{"bytes": None, "path": ""}]}, said=ANSWERED
    ),
    "nemo mask": Shape({"conversations": LONG, "mask": "User"}, refused=("mask",)),
    "nemo mask of a turn": Shape({"messages": _marked("mask", True)}, refused=("mask",)),
    "swift loss_scale": Shape({"messages": _marked("loss_scale", 0.0)}, said=CONTEXT + SECOND),
    "swift loss_scale of 2": Shape(
        {"messages": _marked("loss_scale", 2.0)}, refused=("loss_scale",)
    ),
    "mistral prefix": Shape({"messages": _marked("prefix", True, at=3)}, refused=("prefix",)),
    "mistral prefix that is none": Shape({"messages": _marked("prefix", False)}),
    "fill in the middle": Shape(
        {"prompt": "def one():", "completion": "return", "suffix": " 1"}, refused=("suffix",)
    ),
    "responses of OpenAI": Shape(
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "2."}]},
            ]
        },
        said=ANSWERED,
    ),
    "a thought as a part": Shape(
        {"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "thinking"}]}]},
        refused=("type thinking", "reasoning_content"),
    ),
    "a part that is not trained": Shape(
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": [{"type": "text", "text": "2.", "train": False}]},
            ]
        },
        refused=("part of a message has train",),
    ),
    "calls in two ways": Shape(
        {"messages": [CALLED[0], {**CALLED[1], "function_call": {"name": "sub"}}], "tools": [TOOL]},
        refused=("both tool_calls and function_call",),
    ),
    # ToolACE and xLAM
    "toolace": Shape(
        {
            "system": "You have: add(a).",
            "conversations": _from(
                ("user", "1+1?"), ("assistant", "[add(a=1)]"), ("tool", "2"), ("assistant", "2.")
            ),
        },
        said="<|system|>You have: add(a).<|end|>"
        + ASKED
        + "<|assistant|>[[add(a=1)]<|end|>]<|tool|>2<|end|><|assistant|>[2.<|end|>]",
    ),
    "xlam": Shape(
        {
            "id": 0,
            "query": "1+1?",
            "answers": '[{"name": "add", "arguments": {"a": 1}}]',
            "tools": json.dumps([BARE]),
        },
        said=TOOLS + ASKED + '<|assistant|>[<call>add{"a": 1}<|end|>]',
    ),
}

HERMES = [("human", "1+1?"), ("gpt", '<tool_call>{"name": "add"}</tool_call>'), ("tool", "2")]
# Data of public projects on the hub, with the columns that their cards document
PUBLIC = {
    "LDJnr/Capybara": Shape(
        {
            "source": "a",
            "conversation": [
                {"input": "1+1?", "output": "2."},
                {"input": "2+2?", "output": "4."},
            ],
        },
        said=ANSWERED + SECOND,
        told="left out: source",
    ),
    "HuggingFaceTB/smoltalk": Shape({"messages": LONG, "source": "a"}, told="left out: source"),
    "HuggingFaceH4/no_robots": Shape(
        {"prompt": "1+1?", "prompt_id": "a", "messages": CHAT, "category": "Chat"},
        said=ANSWERED,
        told="left out: prompt, prompt_id, category",
    ),
    "allenai/tulu-3-sft-mixture": Shape(
        {"id": "a", "messages": CHAT, "source": "b"}, told="left out: id, source"
    ),
    "teknium/OpenHermes-2.5": Shape(
        {
            "conversations": [{**each, "weight": None} for each in _from(("human", "1+1?"), A)],
            "system_prompt": None,
            "source": "a",
            "skip_prompt_formatting": False,
        },
        said=ANSWERED,
        told="left out: source, skip_prompt_formatting",
    ),
    "Open-Orca/OpenOrca": Shape(
        {"id": "a", "system_prompt": "Be brief.", "question": "1+1?", "response": "2."},
        said="<|system|>Be brief.<|end|>" + ANSWERED,
    ),
    "bespokelabs/Bespoke-Stratos-17k": Shape(
        {
            "system": "Be brief.",
            "conversations": _from(Q, ("assistant", "<think>One and one.</think>2.")),
        },
        said="<|system|>Be brief.<|end|>" + THOUGHT,
    ),
    "open-r1/OpenR1-Math-220k": Shape(
        {
            "problem": "1+1?",
            "solution": "2.",
            "answer": "2",
            "generations": ["<think>One and one.</think>2."],
            "messages": _said(Q, ("assistant", "<think>One and one.</think>2.")),
        },
        said=THOUGHT,
        told="left out: problem, solution, answer, generations",
    ),
    "tatsu-lab/alpaca": Shape(
        {"instruction": "1+1?", "input": "", "output": "2.", "text": "Below is 1+1?"},
        said=ANSWERED,
        told="left out: text",
    ),
    "databricks/databricks-dolly-15k": Shape(
        {"instruction": "1+1?", "context": "One.", "response": "2.", "category": "qa"},
        said=ANSWERED.replace("1+1?", "1+1?\nOne."),
        told="left out: category",
    ),
    "openai/gsm8k": Shape({"question": "1+1?", "answer": "2."}, said=ANSWERED),
    "meta-math/MetaMathQA": Shape(
        {"type": "a", "query": "1+1?", "original_question": "1+?", "response": "2."},
        said=ANSWERED,
        told="left out: type, original_question",
    ),
    "Salesforce/xlam-function-calling-60k": SHAPES["xlam"],
    "Team-ACE/ToolACE": SHAPES["toolace"],
    "NousResearch/hermes-function-calling-v1": Shape(
        {
            "id": "a",
            "conversations": _from(*HERMES, ("gpt", "2.")),
            "tools": json.dumps([TOOL]),
            "category": "b",
        },
        said=TOOLS
        + ASKED
        + '<|assistant|>[<tool_call>{"name": "add"}</tool_call><|end|>]<|tool|>2<|end|>'
        + "<|assistant|>[2.<|end|>]",
    ),
    "roneneldan/TinyStories": Shape({"text": "Once upon a time."}),
    "glaiveai/glaive-function-calling-v2": Shape(
        {"system": "SYSTEM: You have add.", "chat": "USER: 1+1? ASSISTANT: 2. <|endoftext|>"},
        refused=("has the columns system, chat", "Needed is one of"),
    ),
    "simplescaling/s1K": Shape(
        {"solution": "2.", "question": "1+1?", "thinking_trajectories": ["One."], "attempt": "2"},
        refused=("has the columns solution, question", "Needed is one of"),
    ),
    "OpenAssistant/oasst1": SHAPES["open assistant"],
    "cais/mmlu": Shape(
        {"question": "1+1?", "subject": "a", "choices": ["1", "2"], "answer": 1},
        refused=("choices",),
    ),
    "liuhaotian/LLaVA-Instruct-150K": Shape(
        {"id": "a", "image": "a.jpg", "conversations": _from(("human", "<image>\n1+1?"), A)},
        refused=("image",),
    ),
}
