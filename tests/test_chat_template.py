"""Chat templates: the text of transformers, and no template that runs for ever, takes all memory or reads a file."""

import os
import time
from pathlib import Path

import pytest

from zinfer.generation import chat_template, render
from zinfer.generation.chat_template import ChatTemplate
from zinfer.spec.model import ModelError

CHAT = [
    {"role": "system", "content": "Be <brief>. "},
    {"role": "user", "content": 'Say "\u00e9\n"'},
    {"role": "assistant", "content": " Yes"},
    {"role": "user", "content": ""},
]
TEMPLATES = [
    "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}{{ eos_token }}",
    "{%- set ns = namespace(n=0) -%}\n{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %}\n    {% endfor %}\n{% if add_generation_prompt %}<go>{% endif %}",
    "{% macro say(m) %}{{ m.role.upper() ~ ':' ~ m.content.split('\\n')[0] }}{% endmacro %}{{ say(messages[1]) }}",
    "{{ tools is none }} {{ documents is none }} {{ missing is defined }} {{ missing }}|{{ dict(a=1)['a'] }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}",
    "{{ strftime_now('%Y') }} {{ messages[0].content | escape }} {{ messages | length }} {{ range(3) | join('-') }}",
]


@pytest.mark.torch
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(template: str) -> None:
    from zinfer.generation.tokenizer import byte_tokenizer

    hf = byte_tokenizer()
    hf.bos_token, hf.eos_token, hf.chat_template = "<s>", "</s>", template
    ours = chat_template_of(hf)
    assert ours.render(CHAT) == hf.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ours.close()


def chat_template_of(hf: object) -> ChatTemplate:
    from zinfer.generation.tokenizer import chat_template as find

    found = find(hf)
    assert found is not None
    return found


HOSTILE = {
    "steps": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "number": "{{ 10 ** (10 ** 9) }}",
    "at compilation": "{{ (99999 ** 99999) ** 99999 }}",
    "characters": "{{ 'a' * 10 ** 11 }}",
    "format": "{{ '%100000000000d' % 1 }}",
    "list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.getcwd() }}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ 1 / 0 }}",
    "globals": "{{ raise_exception.__globals__['sys'].exit() }}{{ 1 / 0 }}",
    "builtins": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "syntax": "{% for %}",
}


@pytest.mark.ends
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_with_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    monkeypatch.setattr(chat_template, "MEMORY", 1 << 28)
    template = ChatTemplate(HOSTILE[name], {})
    began = time.monotonic()
    for _ in range(2 if name == "steps" else 1):  # another process takes the place of the one that ended
        with pytest.raises(ModelError, match="chat template") as error:
            template.render(CHAT)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500
    assert time.monotonic() - began < 60
    template.close()


def test_a_template_that_failed_once_goes_on() -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}{% if not messages[1:] %}{{ raise_exception('no') }}{% endif %}", {}
    )
    with pytest.raises(ModelError, match="refuses the conversation: no"):
        template.render(CHAT[:1])
    assert template.render(CHAT) == CHAT[0]["content"]
    template.close()


def test_the_process_can_open_no_file_and_ends_with_its_owner() -> None:
    template = ChatTemplate("{{ 1 }}", {})
    assert template.render(CHAT) == "1"
    process = template._running()
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert [line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files")] == [["0", "0"]]
    del template
    assert process.poll() is not None


def test_the_process_ends_with_stdin() -> None:
    template = ChatTemplate("{{ 1 }}", {})
    template.render(CHAT)
    process = template._running()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.ends
def test_a_child_without_a_parent_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit of CPU time is the kernel's."""
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    template = ChatTemplate(HOSTILE["number"], {})
    process = template._running()
    template._send({"messages": CHAT})
    assert process.wait(60) < 0
    template.close()


def test_the_module_of_the_process_needs_nothing_of_zinfer() -> None:
    text = Path(str(render.__file__)).read_text()
    assert "import zinfer" not in text
    assert "from zinfer" not in text
    assert os.path.basename(str(render.__file__)) == "render.py"
