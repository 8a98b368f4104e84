"""Templates from strangers: nothing of Python in reach, and a bound on time and memory."""

import pathlib
import time

import pytest

from jdecode.text import chat
from jdecode.text import template_sandbox as sandbox

MESSAGES = [{"role": "user", "content": "a"}]

# abetlen/llama-cpp-python#1462 (CVE-2024-34359): a template in a model file ran code.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ [1] | map(attribute='__class__') | list }}",
    "{{ [1] | groupby('__class__') | list }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ (messages | list).__len__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0].pop('role') }}",
]

BOMBS = [
    "{% for i in range(99999999) %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{{ range(100000) | sum }}{% endfor %}",
    "{% set s = 'x' * 4000000 %}{% set t = s ~ '' %}{% for i in range(100000) %}{{ s == t }}{% endfor %}",
    "{% set s = 'x' * 4000000 %}{% for i in range(100000) %}{{ 'y' in s }}{% endfor %}",
    "{% set s = 'x' * 4000000 %}{% for i in range(100000) %}{% set t = s[1:] %}{% endfor %}",
    "{% for i in range(100000) if i is none %}{% endfor %}" * 30,
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{% set ns = namespace(s='b') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('b', 'bb') %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% set ns = namespace(n=2) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(9) }}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% for a in messages recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% for i in range(90000) %}{{ 'x' * 9000 }}{% endfor %}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 10 ** 9 * 'x' }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "{{ ['x' * 100000] * 100000 | join }}",
    "{{ (['x' * 100000] * 100000) | join }}",
    "{{ ''.join(['x' * 100000] * 100000) }}",
    "{{ ('\n' * 4000000) | indent(99999) }}",
    "{{ ('\t' * 100000).expandtabs(99999) }}",
    "{{ messages | tojson(indent=99999) }}",
    "{{ lipsum(n=99999) }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_internals_are_out_of_reach(template: str) -> None:
    with pytest.raises(chat.TemplateError, match="expected public, read-only attributes, got"):
        chat.render(template, MESSAGES)
    assert MESSAGES == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("template", BOMBS, ids=[str(i) for i in range(len(BOMBS))])
def test_time_and_memory_are_bounded(template: str) -> None:
    start = time.process_time()
    with pytest.raises(chat.TemplateError) as caught:
        chat.render(template, MESSAGES)
    assert time.process_time() - start < 20  # a second or two; without a bound, hours
    assert "\n" not in str(caught.value) and str(caught.value).startswith("chat template: ")


@pytest.mark.parametrize("template", ["{% include 'a' %}", "{% import 'a' as b %}", "{% extends 'a' %}"])
def test_no_other_files(template: str) -> None:
    with pytest.raises(chat.TemplateError, match="no loader"):
        chat.render(template, MESSAGES)


def test_a_rendering_has_its_own_budget() -> None:
    template = "{% for i in range(90000) %}{% endfor %}" * 10
    for _ in range(4):  # 900000 steps each, of 2000000
        assert chat.render(template, MESSAGES) == ""


def test_long_honest_chats_fit() -> None:
    turns = [{"role": "user", "content": f"{i} " + "word " * 200} for i in range(2000)]
    template = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim }}\n{% endfor %}"
    assert len(chat.render(template, turns)) > 2_000_000


def test_there_is_one_place_that_compiles_templates() -> None:
    package = pathlib.Path(sandbox.__file__).parents[1]
    users = [file.name for file in package.rglob("*.py") if "import jinja2" in file.read_text(encoding="utf-8")]
    assert sorted(users) == ["chat.py", "template_sandbox.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
    assert "from_string(" not in text and " Template(" not in text and ".Template(" not in text
