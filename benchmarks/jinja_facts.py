"""Writes what jinja2, set up as in transformers, makes of templates into lm/tests/suite/lm/jinja.json.

Usage: PYTHON benchmarks/jinja_facts.py, with a Python that has jinja2
"""
import json
from pathlib import Path

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm" / "jinja.json"

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What is 2 + 2?\n'x' \"y\" <b>é</b>"},
    {"role": "assistant", "content": "<think>\nSum.\n</think>\n\nIt's 4."},
    {"role": "user", "content": "Sûr? 你好 🙂"},
]

EXPRESSIONS = r"""
1 + 2 * 3 - 4
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 % -3, 2 ** 10, 2 ** -1
7 / 2, 6 / 2, 7.0 // 2, 7.5 % 2
1e16, 1e15, 0.1 + 0.2, 1.0, 1e-5, 0.0001, 123456789.125
'a' ~ 1 ~ none ~ true ~ 1.5 ~ [1, 'b', "it's"]
'ab' * 3, 3 * 'ab', [1, 2] * 2, 'ab' * -1
[1, 2] + [3], (1, 2) + (3,), (1,), ()
1 < 2 < 3, 1 < 3 < 2, 1 == 1.0, true == 1, none == none, [1, 2] == [1, 2], (1,) == [1]
{'a': 1, 'b': 2} == {'b': 2, 'a': 1}
'a' in 'cat', 'a' in ['a'], 'a' in {'a': 1}, 3 not in [1, 2], 'x' in missing
not true and false or true, 1 and 2, 0 or 'x', '' or none
'yes' if 1 > 2 else 'no', ('x' if false) is defined
'abc'[0], 'abc'[-1], 'abc'[1:], 'abc'[::-1], 'abc'[:-1], 'héllo'[1:3], 'abc'[5:], 'abcdef'[::2], 'abcdef'[4:1:-1]
[1, 2, 3][-1], [1, 2, 3][1:], [1, 2, 3][::-1], [1, 2, 3][-2:], [1][5] is defined
{'a': {'b': 1}}.a.b, {'a': 1}['a'], {'a': 1}.get('x'), {'a': 1}.get('x', 5), {1: 2}[1]
{'a': 1, 'b': [1, none, true]}, {'x': 'it\'s'}, 'a\n"b"\t\\'
missing, missing is defined, missing is undefined, missing == missing, missing or 'x'
messages | length, messages[0].role, messages[-1]['content'], messages[0].missing is defined
messages[0].content | trim, messages[0].content.strip(), messages[0].content.lstrip(), messages[0].content.rstrip()
messages[1].content.split(), messages[1].content.split('2'), messages[1].content.split('2', 1), 'a,b,c'.rsplit(',', 1)
'a  b c d'.split(none, 2), ' a b '.split(' '), ''.split(), ''.split(','), 'a b c'.rsplit(none, 1)
messages[2].content.split('</think>')[-1].lstrip('\n'), messages[2].content.split('<think>')[-1].split('</think>')[0].strip('\n')
'abc'.startswith('ab'), 'abc'.endswith(('x', 'c')), 'abc'.startswith('b'), 'abc'.find('c'), 'abc'.find('x'), 'abcabc'.rfind('b')
'a-b'.replace('-', '+'), 'aaa'.replace('a', 'b', 2), 'abc'.replace('', '.'), 'aaa' | replace('a', 'b', 1)
'hello world'.title(), "it's o'neil x2y".title(), 'hello WORLD'.capitalize(), 'Hello'.upper(), 'Hello'.lower(), 'Hello'.swapcase()
'hello world-foo (bar)' | title, 'HELLO world' | capitalize, 'a' | upper, 'A' | lower
'xxabcxx'.strip('x'), 'abc'.removeprefix('a'), 'abc'.removesuffix('c'), 'a=b=c'.partition('='), 'a=b=c'.rpartition('='), 'abc'.partition('x'), 'abc'.rpartition('x')
'123'.isdigit(), 'abc'.isalpha(), 'a1'.isalnum(), ' '.isspace(), 'ABC'.isupper(), 'abc'.islower(), ''.isdigit()
'{} {}'.format('a', 1), '{0}{0}{1}'.format('a', 'b'), '{x}'.format(x=5), '{{}}'.format(), '%s is %d%%' % ('a', 5), '%s' % 'x'
'a\nb\r\nc\n'.splitlines(), 'ab'.join(['1', '2']), '-'.join('abc'), '7'.zfill(3), '-7'.zfill(4), 'a'.ljust(3) ~ '|', 'a'.rjust(3), 'a'.center(5) ~ '|'
'banana'.count('an'), [1, 2, 1].count(1), [1, 2].index(2)
[1, 2, 3] | join(', '), ['a', 1, none] | join('-'), messages | map(attribute='role') | join(' '), messages | join('/', attribute='role')
messages | selectattr('role', 'equalto', 'user') | list | length, messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | list
messages | selectattr('content') | list | length, [0, 1, 2, none] | select | list, [1, 2, 3, 4] | select('even') | list, [1, 2, 3] | reject('odd') | list
none | selectattr('a', 'equalto', 1) | list, none | reject | list, none | map('upper') | list, 0 | select | list, '' | map | list, missing | selectattr | list
['a', 'B', 'c'] | map('upper') | list, ['b', 'A', 'c'] | sort, ['b', 'A', 'c'] | sort(case_sensitive=true), [3, 1, 2] | sort(reverse=true), messages | sort(attribute='role') | map(attribute='role') | list
[1, 2, 3] | first, [1, 2, 3] | last, [] | first is defined, 'abc' | first, 'abc' | last
[1, 2, 3] | sum, [1, 2] | max, [3, 1] | min, ['b', 'a'] | min, [1, 1, 2] | unique | list, ['a', 'A'] | unique | list
[1, 2, 3] | reverse | list, 'abc' | reverse, 'abc' | list, {'b': 1, 'a': 2} | dictsort, {'b': 1, 'a': 2} | dictsort(by='value'), {'a': 1} | items | list
{'a': 1, 'b': 2}.items() | list, {'a': 1}.keys() | list, {'a': 1}.values() | list
[1, 2, 3, 4, 5] | batch(2) | list, [1, 2, 3, 4, 5] | batch(2, 'x') | list, [1, 2, 3, 4, 5] | slice(3) | list, [1, 2, 3, 4] | slice(3, 'x') | list
'42' | int, '4.7' | int, 'x' | int, 'x' | int(7), 4.9 | int, '1.5' | float, 'x' | float, 'ff' | int(base=16), -3 | abs, 3.7 | round, 2.5 | round, 2.345 | round(2), 2.1 | round(0, 'ceil')
none | default('x'), missing | default('x'), '' | default('x', true), missing | d('y'), 0 | default(1, boolean=true)
'a\nb\n\nc' | indent, 'a\nb' | indent(2, true), 'a\n\nb' | indent(2, blank=true), 'a\nb' | indent('> ')
'hello world foo' | truncate(11), 'hello world foo' | truncate(9, true, '!', 0), 'a b c' | wordcount, 'x' | center(5) ~ '|', ('<a & "b">' | e) ~ '', '<a>' | escape ~ ''
1 | string ~ 'x', [1] | string, 'a' | safe ~ '', '%s-%s' | format('a', 1)
messages | tojson, messages[0] | tojson(indent=2), [1, 1.5, none, true, 'a"é\n\u0001'] | tojson, {} | tojson, [] | tojson(indent=2), {'b': 1, 'a': [1, {}]} | tojson(indent=4)
{'b': 1, 'a': 2} | tojson(sort_keys=true), [1, 2] | tojson(separators=(',', ':')), {'a': [1, 2]} | tojson(separators=(',', ':'), indent=1), {1: 2, none: 3, true: 4} | tojson, 'é' | tojson(ensure_ascii=true)
1 is number, '1' is string, 1.0 is float, 1 is integer, true is boolean, true is integer, none is none, [] is sequence, {} is mapping, 'a' is iterable, 1 is iterable, range is callable
2 is even, 3 is odd, 4 is divisibleby 2, 1 is eq 1, 1 is ne 2, 1 is lt 2, 2 is ge 2, 1 is in [1], 'a' is lower, 'A' is upper, true is true, 1 is true, false is false, 1 is sameas 1, 'a' is not none
range(3) | list, range(1, 7, 2) | list, range(3, 0, -1) | list, dict(a=1, b=2), dict({'a': 1}, b=2)
-1, - 2 + 3, -2 ** 2, not 1 == 2
'a' 'b', 'x' ~ 'y' | upper, ('x' ~ 'y') | upper, 1 + 2 | string | length
[[1, 2], [3]] | map('first') | list, [{'a': {'b': 3}}] | map(attribute='a.b') | list, [{'a': 1}, {}] | map(attribute='a', default=0) | list, [[1, 2]] | map(attribute=1) | list
[{'a': 1, 'b': 2}, {'a': 1, 'b': 3}, {'a': 0, 'b': 4}] | groupby('a') | map('last') | list
"a" < "b", [1, 2] < [1, 3], 1 <= 1.5, true + 1, 'a' != 'b', (1, 'a') == (1, 'a')
'tool' in messages | map(attribute='role'), messages | map(attribute='content') | map('length') | list
"é".upper(), "ß".upper(), "İ".lower() | length, "ﬁ" | upper
(('<a>' | safe) + '<b>') ~ '', ('<b>' + ('<a>' | safe)) ~ '', ('<a>' | safe) ~ '<b>' ~ "it's" ~ 1, (('<a>' | e) + '<b>') ~ '', (('<a>' | safe) + ('<b>' | safe)) ~ '', ('<a>' | e | e) ~ ''
('<a>' | safe | forceescape) ~ '', (('<a>' | safe | string) + '&') ~ '', 'a' + ('<' | safe | length | string) + '<', ['<a>' | safe] | length, (('<a>' | safe) ~ 'x') + '<'
(('<a>' | safe).replace('a', '<') + '&') ~ '', (('&lt;' | safe).replace('<', 'x') + '&') ~ '', ('<a>'.replace('a', '<b>' | safe) + '&') ~ '', (('aaa' | safe).replace('a', '"', 2) + '<') ~ ''
(('<a>' | safe | replace('a', '<')) + '&') ~ '', ('<a>' | replace('a' | safe, '<' | safe) + '&') ~ '', 121 | replace(1, 3), 'aa' | replace('a', 'b', none)
(('<br>' | safe).join(['<a>', '<b>' | safe, 1, none]) + '&') ~ '', (','.join(['<a>' | safe, '<b>' | safe]) + '&') ~ '', ('-' | safe).join('<>') ~ ''
((['<a>' | safe, '<b>'] | join('<')) + '&') ~ '', ((['<a>', '<b>'] | join('<' | safe)) + '&') ~ '', ([['<' | safe], 1] | join) ~ ''
(('<i>%s</i>%s' | safe) % ('<a>', '<b>' | safe) + '&') ~ '', (('%s' | safe) % '<a>' + '&') ~ '', ('%s' % ('<a>' | safe) + '&') ~ '', (('%d%%<' | safe) % 5 + '&') ~ '', (('%s' | safe) % [1, '<'] + '&') ~ '', (('%s' | safe | format('<')) + '&') ~ ''
(('<i>{}{x}</i>' | safe).format('<a>', x=('<b>' | safe)) + '&') ~ '', ('{}'.format('<a>' | safe) + '&') ~ ''
(('<a>' | safe) * 2 + '&') ~ '', (2 * ('<a>' | safe) + '&') ~ '', (('<a>' | safe)[1:] + '&') ~ '', (('<a>' | safe)[0] + '&') ~ '', (('<a>' | safe)[::-1] + '&') ~ '', (('<a>' | safe | reverse) + '&') ~ ''
(('a<' | safe | first) + '&') ~ '', (('a<' | safe | last) + '&') ~ '', (('a<' | safe | list)[0] + '&') ~ '', (('a b' | safe | title) + '&') ~ '', (('a b' | safe).title() + '&') ~ '', (('a b' | safe | capitalize) + '&') ~ ''
(('<a>' | safe).upper() + '&') ~ '', (('<a>' | safe).split('a')[0] + '&') ~ '', (('<a> ' | safe).strip() + '&') ~ '', (('<a> ' | safe | trim) + '&') ~ '', (('a<b' | safe).partition('<')[0] + '&') ~ '', (('<a' | safe).removeprefix('<') + '&') ~ ''
(('<a>\n<b>' | safe | indent('>')) + '&') ~ '', (('<a> <b>' | safe | truncate(5, true, '<', 0)) + '&') ~ '', ('<a> <b>' | truncate(5, true, '<' | safe, 0) + '&') ~ '', (('<a>' | safe | truncate(9)) + '&') ~ ''
(('a' | safe).center(3) + '&') ~ '', (('a' | safe | center(3)) + '&') ~ '', (('a' | safe).ljust(3, '-') + '&') ~ '', (('7' | safe).zfill(3) + '&') ~ ''
['<a>' | safe], ('<a>' | e,), {'a': '<' | safe}, ['<a>' | safe] | string, ['<a>' | safe] | tojson, ('<a>' | safe) | tojson, ('<a>' | safe) == '<a>', ('a' | safe) in ['a']
namespace(a=1).a, namespace(a=1).b is defined, namespace({'a': 2}).a
""".strip().splitlines()

TEMPLATES = [
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ ', ' if not loop.last }}{% else %}none{% endfor %}",
    "{% for i in [] %}x{% else %}none{% endfor %}",
    "{% for i in range(6) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}-{{ b }};{% endfor %}{% for k, v in {'x': 1}.items() %}{{ k }}={{ v }}{% endfor %}",
    "{% for k in {'x': 1, 'y': 2} %}{{ k }}{% endfor %}{% for c in 'abc' %}{{ c }}.{% endfor %}{% for x in missing %}x{% endfor %}",
    "{% for i in range(4) %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.depth }} {% endfor %}",
    "{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=1) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% set c = 3 %}{% endwith %}{{ c is defined }}{{ a is defined }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{% set y | upper %}abc{% endset %}{{ y }}",
    "{% filter upper | replace('A', 'z') %}abc{{ 'a' }}{% endfilter %}",
    "{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) }}|{{ m(1, c=5) }}|{{ m(1, 2, 3, 4, d=6) }}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{{ 1 + 1 }}{% endcall %}",
    "{% macro m() %}{% for i in [1, 2] %}{{ caller(i) }}{% endfor %}{% endmacro %}{% call(x) m() %}<{{ x }}>{% endcall %}",
    "{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% set g = 5 %}{% macro m() %}{{ g }}{% endmacro %}{% set g = 6 %}{{ m() }}",
    "{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is sequence else i }}{{ loop.depth }}{% endfor %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}",
    "  {% if true %}\n  a\n  {% endif %}\n  b {#- c -#}  d\n{%- if true -%}  e  {%- endif +%}\n f",
    "{% raw %}{{ x }}{% endraw %}{{ '{{' }}{# {{ y }} #}",
    "{{ messages[0]['content'] }}\n",
    "{% do messages.count(1) %}{{ 'x' }}",
    "{% set loop_messages = messages[1:] %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}bad{% endif %}{{ message.role }}{% endfor %}",
    "{% for message in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}{{ index }}{{ message.role }}{% endfor %}",
    "{{ raise_exception('No.') }}",
    "{{ missing.x }}",
    "{{ missing + 1 }}",
    "{{ 'a' + 1 }}",
    "{{ messages.append(1) }}",
    "{{ {'a': 1}.update({'b': 2}) }}",
    "{{ 1 // 0 }}",
    "{{ 'a' | nofilter }}",
    "{{ nofunction() }}",
    "{{ 'abc'.nomethod() }}",
    "{{ [1, 'a'] | sort }}",
    "{{ 'a' < 1 }}",
    "{{ [1, 2, 3] | join(missing) }}",
    "{{ none + 'x' }}",
    "{{ messages[0].content.split('') }}",
    "{{ ('a' | safe).ljust(3, '<') }}",
    "{{ 'a'.ljust(3, '--') }}",
    "{{ ','.join([1]) }}",
    "{% set ns = namespace(x='') %}{% for c in '<a' | safe %}{% set ns.x = ns.x ~ (c + '&') %}{% endfor %}{{ ns.x }}",
]


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, jinja2.ext.do]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


def fact(template):
    try:
        return {"template": template, "text": environment().from_string(template).render(messages=MESSAGES)}
    except Exception as error:
        return {"template": template, "error": f"{type(error).__name__}: {error}"}


def main():
    values = [value for line in EXPRESSIONS for value in [f"{{% set x = ({line}) %}}{{{{ x }}}}"]]
    facts = [fact(template) for template in values + TEMPLATES]
    PATH.write_text(json.dumps({"messages": MESSAGES, "facts": facts}, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
