"""How models write tool calls, by the name of SGLang's parser, each with a chat template in the format of its models.

The templates are short ones, written for these tests. They have what makes it hard to continue an answer: checks that
a result follows a call, ends of a turn that are not rendered as sampled or not at all, and results that are merged.
"""
# ruff: noqa: RUF001

from __future__ import annotations

from dataclasses import dataclass, replace

_CALLS = "{% for call in m.tool_calls %}{% set f = call.function %}"
_HEADS = "{% for m in messages %}"
_CHATML = (
    _HEADS + "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n"
    "{% endif %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OPEN_END = _CHATML.replace(
    "CALLS<|im_end|>\n", "CALLS{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}"
)
_GLM = (
    "[gMASK]<sop>" + _HEADS + "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}CALLS{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_MISTRAL = (
    "<s>" + _HEADS + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id|length != 9 %}{{ raise_exception('an ID has 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}CALLS</s>{% endif %}{% endfor %}"
)
_LLAMA = (
    "<|begin_of_text|>" + _HEADS + "{% if m.tool_calls and m.tool_calls|length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}CALLS<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>" + _HEADS + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
    "{% else %}{{ m.content }}CALLS<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
)
_KIMI = (
    _HEADS + "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{% if m.role == 'tool' %}"
    "## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}CALLS<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_MINIMAX = (
    "]~!b[" + _HEADS + "{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' and not loop.previtem.tool_calls %}"
    "{{ raise_exception('no call before this result') }}{% endif %}"
    "{% if loop.previtem.role != 'tool' %}]~b]tool{% endif %}\n<response>{{ m.content }}</response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}[e~[\n{% endif %}"
    "{% else %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content }}CALLS[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)
_HARMONY = (
    "{% set last = namespace(name=none) %}" + _HEADS + "{% if m.role == 'user' %}"
    "<|start|>user<|message|>{{ m.content }}<|end|>{% set last.name = none %}{% elif m.role == 'tool' %}"
    "{% if not last.name %}{{ raise_exception('no call before this result') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}<|start|>assistantCALLS<|call|>{% set last.name = m.tool_calls[0].function.name %}"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% set last.name = none %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_GEMMA = (
    "<bos>" + _HEADS + "{% if m.role == 'user' %}<|turn>user\n{{ m.content }}<turn|>\n<|turn>model\n"
    "{% elif m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>"
    "{% else %}{{ m.content }}CALLS{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Dialect:
    calls: str
    """Jinja text for the calls of a message `m`, as models write them."""
    template: str = _CHATML
    ends: tuple[str, str] = ("<|im_end|>", "<|im_end|>")
    """The tokens that the model samples after calls and after other answers."""
    rendered: tuple[str, str] | None = None
    """What the template renders in place of the sampled ends, where that differs."""
    final: str = "{}"
    """Frame of the text of an answer without calls."""
    leading: str = "Let me see."
    """Text before the calls."""
    parallel: bool = True
    reasoning: str = "none"
    words: tuple[str, ...] = ()
    """Further tokens of the vocabulary, by which a parser recognises its models."""

    @property
    def chat_template(self) -> str:
        calls = "{% if m.tool_calls %}" + self.calls + "{% endif %}"
        return self.template.replace("CALLS", calls)


def _json(begin: str, end: str, *, arguments: str = "arguments", between: str = "") -> str:
    call = '{"name": "{{ f.name }}", "' + arguments + '": {{ f.arguments | tojson }}}'
    gap = "{% if not loop.last %}" + between + "{% endif %}"
    return _CALLS + begin + call + end + gap + "{% endfor %}"


def _xml(begin: str, argument: str, end: str) -> str:
    """`argument` has the variables `k` and `v`."""
    arguments = "{% for k, v in f.arguments.items() %}" + argument + "{% endfor %}"
    return _CALLS + begin + arguments + end + "{% endfor %}"


_KEYS = "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
_QWEN_XML = _xml(
    "\n<tool_call>\n<function={{ f.name }}>\n",
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n",
    "</function>\n</tool_call>",
)
_PYTHON = '{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="{{ v }}"{% endfor %})'
_PYTHON = _CALLS + _PYTHON + "{% if not loop.last %}, {% endif %}{% endfor %}"
_DSML = (
    '<｜DSML｜invoke name="{{ f.name }}">\n',
    '<｜DSML｜parameter name="{{ k }}" string="true">{{ v }}</｜DSML｜parameter>\n',
    "</｜DSML｜invoke>\n",
)
_EOS = ("<｜end▁of▁sentence｜>",) * 2
_QWEN = Dialect(_json("\n<tool_call>\n", "\n</tool_call>"))
_GLM_ENDS = ("<|observation|>", "<|user|>")
DIALECTS: dict[str, Dialect] = {
    "hermes": Dialect(_json("<tool_call>", "</tool_call>")),
    "qwen": _QWEN,
    "qwen25": replace(_QWEN, template=_OPEN_END, ends=("<|im_end|>", "<|endoftext|>"), rendered=("<|im_end|>",) * 2),
    "trinity": _QWEN,
    "qwen3_coder": Dialect(_QWEN_XML),
    "step3p5": Dialect(_QWEN_XML),
    "nanbeige": Dialect(_QWEN_XML),
    "mimo": Dialect(_QWEN_XML.replace(">\n{{ v }}\n<", ">{{ v }}<")),
    "mistral": Dialect(
        "[TOOL_CALLS] [" + _json("", "", between=", ") + "]", _MISTRAL, ("</s>",) * 2, leading=""
    ),
    "llama3": Dialect(
        _json("<|python_tag|>", "", arguments="parameters"), _LLAMA, ("<|eom_id|>", "<|eot_id|>"),
        ("<|eot_id|>",) * 2, leading="", parallel=False,
    ),
    "pythonic": Dialect("[" + _PYTHON + "]", leading=""),
    "lfm2": Dialect("<|tool_call_start|>[" + _PYTHON + "]<|tool_call_end|>"),
    "glm": Dialect(_xml("\n<tool_call>{{ f.name }}\n", _KEYS, "</tool_call>"), _GLM, _GLM_ENDS),
    "glm45": Dialect(_xml("\n<tool_call>{{ f.name }}\n", _KEYS, "</tool_call>"), _GLM, _GLM_ENDS),
    "glm47": Dialect(_xml("<tool_call>{{ f.name }}", _KEYS.replace("\n", ""), "</tool_call>"), _GLM, _GLM_ENDS),
    "ling3": Dialect(_xml("\n<tool_call>{{ f.name }}\n", _KEYS, "</tool_call>")),
    "poolside_v1": Dialect(_xml("\n<tool_call>{{ f.name }}\n", _KEYS, "</tool_call>")),
    "spark25": Dialect(_xml("<tool_call>{{ f.name }}\n", _KEYS.replace(">\n<", "><"), "</tool_call>")),
    "hunyuan": Dialect(
        "<tool_calls>\n" + _xml("<tool_call>{{ f.name }}<tool_sep>\n", _KEYS, "</tool_call>\n") + "</tool_calls>",
        words=("<tool_calls>", "<tool_call>", "<tool_sep>", "<arg_key>", "<arg_value>"),
    ),
    "k2_horizon": Dialect(
        "<ifm|tool_calls>"
        + _xml(
            "<ifm|tool_call>{{ f.name }}",
            "<ifm|arg_key>{{ k }}</ifm|arg_key><ifm|arg_value>{{ v }}</ifm|arg_value>",
            "</ifm|tool_call>",
        )
        + "</ifm|tool_calls>"
    ),
    "deepseekv3": Dialect(
        "<｜tool▁calls▁begin｜>" + _CALLS + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name + '\n```json\n' + "
        "f.arguments + '\n```' }}<｜tool▁call▁end｜>{% if not loop.last %}\n{% endif %}{% endfor %}"
        "<｜tool▁calls▁end｜>",
        _DEEPSEEK, _EOS,
    ),
    "deepseekv31": Dialect(
        "<｜tool▁calls▁begin｜>" + _CALLS + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}"
        "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
        _DEEPSEEK, _EOS,
    ),
    "deepseekv32": Dialect("<｜DSML｜function_calls>\n" + _xml(*_DSML) + "</｜DSML｜function_calls>", _DEEPSEEK, _EOS),
    "deepseekv4": Dialect("<｜DSML｜tool_calls>\n" + _xml(*_DSML) + "</｜DSML｜tool_calls>", _DEEPSEEK, _EOS),
    "kimi_k2": Dialect(
        "<|tool_calls_section_begin|>" + _CALLS + "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ f.arguments }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
        _KIMI,
    ),
    "kimi_k3": Dialect(
        "<|open|>tools<|sep|>" + _CALLS + '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        '{% for k, v in f.arguments.items() %}<|open|>argument key="{{ k }}" type="string"<|sep|>{{ v }}'
        "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>",
        _KIMI,
    ),
    "minimax-m2": Dialect(
        "\n<minimax:tool_call>\n"
        + _xml('<invoke name="{{ f.name }}">\n', '<parameter name="{{ k }}">{{ v }}</parameter>\n', "</invoke>\n")
        + "</minimax:tool_call>",
        _MINIMAX, ("[e~[",) * 2,
    ),
    "minimax-m3": Dialect(
        "]<]minimax[>[<tool_call>"
        + _xml(
            ']<]minimax[>[<invoke name="{{ f.name }}">',
            "]<]minimax[>[<{{ k }}>{{ v }}]<]minimax[>[</{{ k }}>",
            "]<]minimax[>[</invoke>",
        )
        + "]<]minimax[>[</tool_call>",
        _MINIMAX, ("[e~[",) * 2,
    ),
    "dots": Dialect(
        "<dots_function_call>\n"
        + _xml('<invoke name="{{ f.name }}">\n', '<parameter name="{{ k }}">{{ v }}</parameter>\n', "</invoke>\n")
        + "</dots_function_call>"
    ),
    "minicpm5": Dialect(
        _xml('<function name="{{ f.name }}">', '<param name="{{ k }}">{{ v }}</param>', "</function>")
    ),
    "step3": Dialect(
        "<｜tool_calls_begin｜>\n"
        + _xml(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ f.name }}">\n',
            '<steptml:parameter name="{{ k }}">{{ v }}</steptml:parameter>\n',
            "</steptml:invoke><｜tool_call_end｜>\n",
        )
        + "<｜tool_calls_end｜>"
    ),
    "interns1": Dialect(_json("<|action_start|> <|plugin|>\n", "<|action_end|>", arguments="parameters")),
    "gigachat3": Dialect(_json("<|function_call|>", ""), leading="", parallel=False),
    "apertus2509": Dialect(
        "<|tools_prefix|>[" + _CALLS + '{"{{ f.name }}": {{ f.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|tools_suffix|>",
        ends=("<|tools_suffix|>", "<|im_end|>"),
    ),
    "cohere_command4": Dialect(
        "<|START_ACTION|>[" + _CALLS + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
        '"parameters": {{ f.arguments | tojson }}}{% if not loop.last %},\n{% endif %}{% endfor %}]<|END_ACTION|>'
    ),
    "gemma4": Dialect(
        _CALLS + "<|tool_call>call:{{ f.name + '{' }}"
        '{% for k, v in f.arguments | dictsort %}{{ k }}:<|"|>{{ v }}<|"|>{% if not loop.last %},{% endif %}'
        "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}",
        _GEMMA, ("<|tool_response>", "<turn|>"),
    ),
    "inkling": Dialect(
        _CALLS + '<|message_model|>{{ f.name }}<|content_invoke_tool_json|>{"name":"{{ f.name }}","args":'
        "{{ f.arguments | tojson }}}<|end_message|>{% endfor %}"
    ),
    "muse": Dialect(
        "<|start|>assistant to=functions<|message|><atem:function_calls>\n"
        + _xml(
            '<atem:invoke name="{{ f.name }}">\n',
            '<atem:parameter name="{{ k }}">{{ v }}</atem:parameter>\n',
            "</atem:invoke>\n",
        )
        + "</atem:function_calls><|eot|>",
        leading="",
    ),
    "gpt-oss": Dialect(
        "{% set f = m.tool_calls[0].function %}<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json"
        "<|message|>{{ f.arguments | tojson }}",
        _HARMONY, ("<|call|>", "<|return|>"), ("<|call|>", "<|end|>"),
        final="<|channel|>final<|message|>{}", leading="", parallel=False, reasoning="gpt-oss",
    ),
}  # fmt: skip
