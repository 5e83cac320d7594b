"""Expressions as chat templates have them, each filter, test, method and operator among them."""

from __future__ import annotations

MESSAGE: dict[str, object] = {
    "role": "user",
    "lt": "<",
    "content": " It's <b>1</b> & \u201cé\u201d 😀,\n\ttwo  words ",
    "parts": [{"type": "text", "n": 2}, {"type": "image", "n": 1}, {"type": "text", "n": 3}],
    "numbers": [3, 1, 2, 1],
    "map": {"b": 1, "a": [2.5, None, True], "C": {"d": "e"}},
}

EXPRESSIONS: list[str] = [
    "{{ '%5d|%-8s|%05.1f|%r|%%|%x' % (42, 'ab', 3.14159, 'q', 255) }}",
    "{{ '%(a)s and %(b)3d' % {'a': 'x', 'b': 7} }}",
    "{{ '%s' % m.numbers }}{{ '%s' % m.map }}{{ '%*d' % (6, 42) }}",
    (
        "{{ 7 % 3 }}{{ 7.5 % 2 }}{{ 2 ** 100 }}{{ 2 ** -1 }}{{ 0 ** 0 }}{{ (-1) ** 9 }}"
        "{{ 2 ** 0.5 }}"
    ),
    (
        "{{ 7 // 2 }}{{ 7 / 2 }}{{ 7 - 9 }}{{ -m.numbers[0] }}{{ 3 * 'ab' }}{{ 'ab' * 0 }}"
        "{{ 'a' * -1 }}"
    ),
    (
        "{{ [1] + [2] }}{{ (1,) + (2,) }}{{ [1, 'x'] * 2 }}{{ 'a' + 'b' }}{{ 1.5 * 2 }}"
        "{{ true + 1 }}"
    ),
    "{{ 'a' ~ 1 ~ none ~ m.numbers ~ nothing }}{{ (m.map.keys() - ['a']) | sort }}",
    "{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 'a' in 'cat' }}{{ 2 in m.numbers }}{{ 'b' not in m.map }}",
    "{{ m.numbers == [3, 1, 2, 1] }}{{ m.map != {} }}{{ 'a' < 'b' }}{{ none == false }}",
    "{{ m.content[2:9] }}{{ m.numbers[::-1] }}{{ m.numbers[-2:] }}{{ m.content[:-3:2] }}",
    "{{ [m.role, 1] }}{{ (m.role, 1) }}{{ {m.role: [1], 'x': ()} }}{{ [] }}{{ () }}{{ {} }}",
    "{{ 'x' if m.role == 'user' else 'y' }}{{ 'z' if m.role == 'tool' }}{{ m['role'] }}",
    "{% for a, b in m.map | dictsort %}{{ a }}={{ b }}{% endfor %}",
    "{% set a, b = 1, m.role %}{{ a }}{{ b }}{% set c %}{{ b }}{{ 1 }}{% endset %}{{ c }}",
    (
        "{% for n in m.numbers if n > 1 %}{{ loop.index }}{{ loop.last }}{{ loop.changed(n) }}"
        "{% else %}none{% endfor %}"
    ),
    (
        "{{ m.content.strip() }}{{ m.content.lstrip() }}{{ m.content.rstrip() }}"
        "{{ 'xax'.strip('x') }}"
    ),
    (
        "{{ m.content.split() }}{{ 'a,b,c'.split(',') }}{{ 'a,b,c'.split(',', 1) }}"
        "{{ 'a,b,c'.rsplit(',', maxsplit=1) }}{{ 'a\nb\n'.splitlines(true) }}"
    ),
    "{{ 'a-b'.partition('-') }}{{ 'a-b-c'.rpartition('-') }}{{ 'banana'.replace('an', 'x', 1) }}",
    (
        "{{ 'banana'.replace('', '.') }}{{ ', '.join(['a', 'b']) }}{{ '-'.join('abc') }}"
        "{{ '-'.join(m.map) }}{{ '-'.join(m.numbers | map('string')) }}"
    ),
    (
        "{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '.') }}|{{ 'a'.center(4, '*') }}|{{ '7'.zfill(3) }}|"
        "{{ 'a\tb'.expandtabs(4) }}"
    ),
    (
        "{{ 'Straße'.upper() }}{{ 'ÀB'.lower() }}{{ 'aB c'.title() }}{{ 'aB'.swapcase() }}"
        "{{ 'aB'.capitalize() }}{{ 'Straße'.casefold() }}"
    ),
    (
        "{{ 'abcabc'.find('c') }}{{ 'abcabc'.rfind('c') }}{{ 'abc'.index('b') }}"
        "{{ 'aa'.count('a') }}{{ 'abc'.startswith(('x', 'a')) }}{{ 'abc'.endswith('c') }}"
        "{{ 'a1'.isalnum() }}"
    ),
    (
        "{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}{{ 'é'.encode() }}"
        "{{ 'é'.encode('utf-8').decode('UTF_8') }}"
    ),
    (
        "{{ '{0} {a!r} {0:>5} {1[a]} {2.imag} {{}}'.format('x', {'a': 2}, 3, a='é') }}"
        "{{ '{a:{w}.2f}'.format(a=1.234, w=8) }}{{ '{{}}'.format() }}"
        "{{ '{x}'.format_map({'x': 1}) }}"
    ),
    (
        "{{ m.map.get('a') }}{{ m.map.get('zz', 'no') }}{{ m.map.items() | list }}"
        "{{ m.map.keys() | list }}{{ m.map.values() | list }}{{ m.map.copy() }}"
        "{{ m.numbers.index(1) }}{{ m.numbers.count(1) }}"
    ),
    "{{ (5).bit_length() }}{{ (1.5).is_integer() }}{{ (5).real }}{{ range(9).start }}",
    "{{ -1 | abs }}{{ m | attr('items') is callable }}{{ m.numbers | batch(3, 'x') | list }}",
    "{{ 'aB' | capitalize }}{{ 'a' | center(5) }}|{{ m.numbers | count }}{{ nothing | d('x') }}",
    "{{ '' | default('x', true) }}{{ m.map | dictsort(true, 'key', reverse=true) }}",
    (
        "{{ m.content | e }}{{ m.content | escape | forceescape }}"
        "{{ 123456789 | filesizeformat(true) }}"
    ),
    (
        "{{ m.numbers | first }}{{ '1.5' | float }}{{ 'x' | float(2) }}"
        "{{ '%s-%03d' | format('a', 5) }}"
    ),
    (
        "{% for g, of in m.parts | groupby('type') %}{{ g }}{{ of | length }}{% endfor %}"
        "{% for g in m.parts | groupby('type') %}{{ g.grouper }}{{ g.list }}{% endfor %}"
    ),
    (
        "{{ 'a\nb\n\nc' | indent(2) }}{{ 'a\nb' | indent('> ', true) }}{{ '12' | int }}"
        "{{ 'x' | int(3) }}{{ 'ff' | int(base=16) }}{{ 2.9 | int }}"
    ),
    (
        "{{ m.map | items | list }}{{ m.numbers | join('-') }}"
        "{{ m.parts | join(', ', attribute='n') }}{{ ['<', '<' | safe] | join('&') }}"
    ),
    (
        "{{ m.numbers | last }}{{ m.numbers | length }}{{ 'abc' | list }}{{ m.map | list }}"
        "{{ 'ÀB' | lower }}"
    ),
    (
        "{{ m.parts | map(attribute='n') | list }}"
        "{{ m.parts | map(attribute='q', default=0) | list }}"
        "{{ ['a ', 'b'] | map('trim') | map('upper') | list }}{{ [] | map | list }}"
    ),
    "{{ m.numbers | min }}{{ m.numbers | max }}{{ m.parts | max(attribute='n') }}{{ [] | max }}",
    (
        "{{ m.map | pprint }}{{ m.numbers | reject('odd') | list }}"
        "{{ m.parts | rejectattr('n', 'eq', 2) | list }}"
    ),
    (
        "{{ 'banana' | replace('a', 'o', 2) }}{{ '<a>' | e | replace('a', '<') }}"
        "{{ m.numbers | reverse | list }}{{ 'abc' | reverse }}"
    ),
    (
        "{{ 2.567 | round(2) }}{{ 2.1 | round(0, 'ceil') }}{{ 25 | round(-1, 'floor') }}"
        "{{ '<' | safe }}"
    ),
    (
        "{{ m.numbers | select('gt', 1) | list }}"
        "{{ m.parts | selectattr('type', 'equalto', 'text') | list }}"
        "{{ m.parts | selectattr('type', 'in', ['text']) | list }}{{ nothing | select | list }}"
    ),
    (
        "{{ m.numbers | slice(3, 'x') | list }}{{ m.numbers | sort(reverse=true) }}"
        "{{ m.parts | sort(attribute='type,n') }}{{ ['b', 'A'] | sort }}{{ 'ba' | sort }}"
    ),
    (
        "{{ m.map | string }}{{ '<b>x</b>' | striptags }}{{ m.numbers | sum }}"
        "{{ m.parts | sum('n', 1) }}{{ [[1], [2]] | sum(start=[]) }}"
    ),
    (
        "{{ 'it is' | title }}{{ m | tojson }}{{ m | tojson(indent=2) }}"
        "{{ m | tojson(ensure_ascii=true) }}"
        "{{ m.map | tojson(separators=(',', ':'), sort_keys=true) }}{{ 'é\\u0001\"' | tojson }}"
    ),
    (
        "{{ m.content | trim }}{{ 'xax' | trim('x') }}"
        "{{ 'a b c d e f' | truncate(5, leeway=0) }}{{ m.numbers | unique | list }}"
        "{{ 'aB' | upper }}{{ 'a b&é' | urlencode }}{{ {'a': 1} | urlencode }}"
    ),
    (
        "{{ 'see www.a.de now' | urlize }}{{ m.content | wordcount }}"
        "{{ 'aaa bbb ccc' | wordwrap(4) }}{{ {'a': '<', 'b': none} | xmlattr }}"
    ),
    (
        "{{ 3 is odd }}{{ 4 is divisibleby 2 }}{{ 'a' is lower }}{{ 'A' is upper }}"
        "{{ 1 is eq 1 }}{{ 1 is ne 1 }}{{ 1 is gt 0 }}{{ 1 is in [1] }}{{ 'a' is in m.map }}"
        "{{ m.map is mapping }}"
    ),
    (
        "{{ 'trim' is filter }}{{ 'odd' is test }}{{ 'x' is filter }}{{ nothing is undefined }}"
        "{{ none is none }}{{ m.role is string }}{{ m.parts is sequence }}{{ m.map is iterable }}"
    ),
    (
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}"
        "{% set j = joiner('|') %}{{ j() }}{{ j() }}{{ range(3) | list }}{{ dict(q=1, **m.map) }}"
    ),
    (
        "{% set n = namespace(l=[], s='') %}{% for i in range(5) %}{% set n.l = n.l + [i] %}"
        "{% set n.s = n.s ~ i %}{% endfor %}{{ n.l }}{{ n.s }}{{ namespace(m.map).b }}"
    ),
    (
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}"
        "{{ f(1, 3, 4, x=5) }}{{ f.name }}{{ f.arguments }}"
    ),
    (
        "{% filter upper | trim %} a{{ m.role }} {% endfilter %}{% with x = 1 %}{{ x }}"
        "{% endwith %}{% set y | upper %}ab{% endset %}{{ y }}"
        "{% block b %}b{{ m.role is defined }}{% endblock %}{{ self.b() }}"
    ),
    (
        "{% autoescape true %}<{{ '<' }}{{ '<' ~ '>' }}{{ m.lt | safe ~ '&' }}{{ m.numbers }}"
        "{% set z %}<{{ '&' }}{% endset %}{{ z }}{% endautoescape %}"
    ),
    (
        "{{ '%s' | safe % '<' }}{{ ('{}' | safe).format('<') }}{{ ('<' | safe) + '<' }}"
        "{{ '<' + ('<' | safe) }}{{ (', ' | safe).join(['<', 'b']) }}"
        "{{ ('<b>x' | safe).striptags() }}"
    ),
]
