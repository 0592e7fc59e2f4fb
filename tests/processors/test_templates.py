"""Chat templates of strangers: rendered within a budget, and the plain ones in this process.

Oracles: transformers' own rendering of the same template, and the budget itself.
"""

import os

import pytest
from checkpoint_factory import GLM_TEMPLATE, STEP3_TEMPLATE
from checkpoint_factory_minicpmv import TEMPLATES
from transformers import AutoTokenizer

from refvl import families
from refvl.paths import DATA
from refvl.processors import templates
from refvl.processors.templates import is_plain

SHIPPED = sorted((DATA / "checkpoints").iterdir())
QWEN = DATA / "checkpoints" / "tiny-qwen2_5_vl"
MESSAGES = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "\\'\"<b> ü"}]
USUAL = {  # what templates of released text models do, each in a few lines of its own
    "numbers": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{{ n.i }}{% endfor %}",
    "backwards": "{% set n = namespace(last=messages|length - 1) %}{% for m in messages[::-1] %}"
    "{% set i = (messages|length - 1) - loop.index0 %}"
    "{% if m.role == 'user' %}{% set n.last = i %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{{ m.role if loop.index0 < n.last else m.content }}{% endfor %}",
    "thoughts": "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\\n') %}{{ text }}"
    "{% endfor %}",
    "header": "{% for m in messages %}{% set text = '<' + m.role + '>' + m.content|trim %}{% if loop.first %}"
    "{% set text = eos_token + text %}{% endif %}{{ text }}{% endfor %}",
    "tools": "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{{ messages[0].content }}",
    "neighbours": "{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != 'user' %}"
    "{{ m.content }}{% endif %}{% endfor %}",
    "rest": "{% set rest = messages[1:] %}{% for m in rest %}{{ m.content }}{% endfor %}",
}
GREEDY = {
    "product": "{{ 'a' * 10**10 }}",
    "width": "{{ 'a'.ljust(10**10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "range": "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
    "sum": "{% set x = messages[0].content %}" + "{% set x = x + x %}" * 40 + "{{ x }}",
    "joined": "{% set x = messages[0].content %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}",
    "two": "{% set x = 'a' %}{% set y = 'b' %}" + "{% set x = x + y %}{% set y = y + x %}" * 40 + "{{ x }}",
    "lists": "{% set x = messages %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
    "namespaces": "{% set n = namespace(a=1) %}"
    + "".join(f"{{% set {'n' * (i + 1)} = namespace(a={'n' * i}, b={'n' * i}) %}}" for i in range(1, 40))
    + "{{ " + "n" * 40 + " }}",
    "quotes": "{{ messages" + "|tojson" * 60 + " }}",
    "block": "{% set x %}aaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40 + "{{ x }}",
    "replaced": "{% set x = 'aa' %}" + "{% set x = x.replace('a', x) %}" * 12 + "{{ x }}",
}  # fmt: skip
QUADRATIC = [
    "{% for c in messages[0].content %}{% if 'x' in messages[0].content %}{% endif %}{% endfor %}",
    "{% for c in messages[0].content %}{% if messages|tojson %}{% endif %}{% endfor %}",
    "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}",
    "{% for c in messages[0].content %}{{ messages[0].content }}{% endfor %}",
    "{% set x = messages[0].content %}{% for c in x %}{{ x }}{% endfor %}",
    "{% for m in messages %}{% for c in m.content %}{{ m.content }}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m.content %}{{ n.x }}{% endfor %}",
]
FAILING = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 2.0 ** 100000 }}": "OverflowError",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}": "RecursionError",
    "{{ messages[99].content.x }}": "no element 99",
    "{{ '%z' % 1 }}": "ValueError",
    "{{ raise_exception('no system prompt') }}": "no system prompt",
    "{% for %}": "Expected an expression",
}


@pytest.fixture
def processor(tmp_path):
    """A processor of a folder with another chat template."""

    def make(template):
        for file in QWEN.iterdir():
            if file.name != "chat_template.jinja":
                (tmp_path / file.name).symlink_to(file)
        (tmp_path / "chat_template.jinja").write_text(template)
        return families.load_processor(tmp_path, families.read_config(tmp_path))

    return make


@pytest.mark.parametrize("template", [GLM_TEMPLATE, STEP3_TEMPLATE, *filter(None, TEMPLATES.values()), *USUAL.values()])
def test_usual_templates_start_no_process(processor, monkeypatch, template):
    """Oracle: transformers alone, on the same template; and no way to start a child."""
    assert is_plain(template)
    monkeypatch.setattr(os, "fork", None)
    made = processor(template)
    plain = AutoTokenizer.from_pretrained(QWEN)
    wanted = plain.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert made.apply_template(MESSAGES) == wanted


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_templates_are_plain(folder):
    assert is_plain((folder / "chat_template.jinja").read_text())


@pytest.mark.parametrize("template", [*GREEDY.values(), *QUADRATIC])
def test_what_grows_faster_than_the_request_is_not_plain(template):
    assert not is_plain(template)


@pytest.mark.thorough
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_templates_end_in_one_sentence(processor, monkeypatch, name):
    """Oracle: the budget; each would otherwise take gigabytes, or hours. This process stays as it is."""
    monkeypatch.setattr(templates, "SECONDS", 1)
    made = processor(GREEDY[name])
    with pytest.raises(
        ValueError, match=r"prompt: the chat template of this checkpoint rejects the messages \(rendering takes more"
    ):
        made.apply_template(MESSAGES)


@pytest.mark.thorough
@pytest.mark.parametrize("template", FAILING)
def test_failing_templates_say_why(processor, template):
    with pytest.raises(ValueError, match=f"prompt: the chat template of this checkpoint .*{FAILING[template]}"):
        processor(template).apply_template(MESSAGES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "template", ["{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[1].content) }}", QUADRATIC[0]]
)
def test_a_child_writes_what_transformers_writes(processor, template):
    plain = AutoTokenizer.from_pretrained(QWEN)
    wanted = plain.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert processor(template).apply_template(MESSAGES) == wanted


@pytest.mark.parametrize(
    "prompt", ["x" * (2**21 + 1), [{"role": "user", "content": "x" * 2**20}] * 3], ids=["one", "three"]
)
def test_requests_have_a_limit_of_characters(processor, prompt):
    """Refused before a file is opened or a token made."""
    made = processor(GLM_TEMPLATE)

    with pytest.raises(ValueError, match=r"prompt: expected at most 2,097,152 characters.*, got (2,097,153|3,145,740)"):
        made.messages(prompt, ["nowhere.png"] if isinstance(prompt, str) else ())
    assert made.messages("x" * 2**21)
