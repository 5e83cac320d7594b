"""Chat templates that would fill the memory or never end."""

from __future__ import annotations

_BIG = "{% set x = 'x' * 4000000 %}"
_LONG_LIST = "{% set l = [1] * 200000 %}"
# Small in memory, and 20 ** 12 strings when written out.
_DEEP = (
    "{% set n = namespace(d=['x']) %}"
    "{% for i in range(12) %}{% set n.d = [n.d, n.d, n.d, n.d, n.d] * 4 %}{% endfor %}"
    "{% set m = namespace(d=['x']) %}"
    "{% for i in range(12) %}{% set m.d = [m.d, m.d, m.d, m.d, m.d] * 4 %}{% endfor %}"
)
_DEEP_TUPLE = (
    "{% set n = namespace(t=()) %}{% for i in range(90000) %}{% set n.t = (n.t, i) %}{% endfor %}"
)


def _blocks(count: int) -> str:
    calls = "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}"
        for i in range(count)
    )
    return f"{calls}{{% block b{count} %}}x{{% endblock %}}"


TEMPLATES: dict[str, str] = {
    # operators
    "percent_width": "{{ '%60000000d' % 1 }}",
    "percent_precision": "{{ '%.60000000f' % 1 }}",
    "percent_star": "{{ '%*d' % (60000000, 1) }}",
    "percent_names": _BIG + "{{ ('%(a)s' * 1000) % {'a': x} }}",
    "percent_nested_name": _BIG + "{{ ('%(a(b))s' * 1000) % {'a(b)': x} }}",
    "percent_many": "{{ ('%s' * 9000000) % (1, 2) }}",
    "percent_repr": "{{ '%a' % ('\\U0001f600' * 9000000) }}",
    "percent_markup": "{{ ('%s'|safe) % ('<' * 16000000) }}",
    "times_text": "{{ 'x' * 60000000 }}",
    "times_list": "{{ [1] * 60000000 }}",
    "times_tuple": "{{ 60000000 * (1, 2) }}",
    "times_escaped": "{{ ('x'|safe) * 60000000 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "power_again": "{{ (9 ** 4000) ** 4000 }}",
    "numbers_grow": "{% set n = namespace(i=3) %}"
    "{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "sums_grow": "{% set n = namespace(s='x') %}"
    "{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tildes_grow": "{% set n = namespace(s='x') %}"
    "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "lists_grow": "{% set n = namespace(l=[1]) %}"
    "{% for i in range(99) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "list_of_texts": _BIG + "{% set n = namespace(l=[]) %}"
    "{% for i in range(1000) %}{% set n.l = n.l + [x ~ i] %}{% endfor %}",
    "literals_grow": "{% set n = namespace(l=[]) %}{% for i in range(90000) %}"
    "{% set n.l = [n.l, [i" + ", i" * 2000 + "]] %}{% endfor %}",
    "dictionaries_grow": "{% set n = namespace(l=()) %}{% for i in range(90000) %}"
    "{% set n.l = (n.l, dict.fromkeys(range(100)), dict(messages[0], a=i, b=i, c=i, d=i, e=i, f=i)) %}{% endfor %}",
    "slices": _BIG + "{% set n = namespace(l=()) %}"
    "{% for i in range(90000) %}{% set n.l = (n.l, x[i:]) %}{% endfor %}",
    # methods
    "ljust": "{{ 'a'.ljust(60000000) }}",
    "center": "{{ 'a'.center(60000000) }}",
    "zfill": "{{ 'a'.zfill(60000000) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(60000) }}",
    "replace": "{{ ('a' * 8000).replace('a', 'b' * 8000) }}",
    "replace_nothing": "{{ ('a' * 8000).replace('', 'b' * 8000) }}",
    "join": "{{ ('a' * 8000).join('b' * 8000) }}",
    "join_made": "{{ ('a' * 8000).join(range(9000)|map('string')) }}",
    "split": "{{ ('a,' * 8000000).split(',') }}",
    "split_words": "{{ ('ab ' * 5000000).split() }}",
    "splitlines": "{{ ('ab\n' * 5000000).splitlines() }}",
    "format_width": "{{ '{:>60000000}'.format('a') }}",
    "format_nested": "{{ '{:{w}}'.format('a', w=60000000) }}",
    "format_precision": "{{ '{:.60000000f}'.format(1.5) }}",
    "format_map": "{{ '{a:60000000}'.format_map({'a': 1}) }}",
    "format_many": "{{ ('{}' * 8000000).format(1) }}",
    "format_repeated": _BIG + "{{ ('{0}' * 1000).format(x) }}",
    "format_braces": "{{ ('{{' * 8000000).format(1) }}",
    "format_repr": "{{ '{!a}'.format('\\U0001f600' * 9000000) }}",
    "format_filter": "{{ '%60000000d'|format(1) }}",
    "format_as_item": "{{ 'a{0:60000000}'['format'](1) }}",
    "format_mapped": "{{ ['%60000000d']|map('format', 1)|list }}",
    "translate": "{{ 'aaa'.translate({97: 'x' * 60000}) }}",
    "to_bytes": "{{ (5).to_bytes(600000000, 'big') }}",
    "fromkeys": "{{ {}.fromkeys(range(100000), 1) }}",
    "codec": "{{ ('\\u00e9' * 1000000).encode('punycode') }}",
    "rfind": "{{ ('a' * 8000000).rfind('b' + 'a' * 4000000) }}",
    "strip": "{{ ('a' * 8000000).strip('b' * 4000000 + 'a') }}",
    # filters
    "center_filter": "{{ 'a'|center(60000000) }}",
    "indent_filter": "{{ ('a\n' * 1000)|indent(60000) }}",
    "indent_text": "{{ ('a\n' * 8000)|indent('b' * 8000) }}",
    "replace_filter": "{{ ('a' * 8000)|replace('a', 'b' * 8000) }}",
    "join_filter": "{{ range(9000)|join('b' * 8000) }}",
    "json_indent": "{{ [1, 2, [3]]|tojson(indent=60000000) }}",
    "json_indent_text": "{{ ([1] * 8000)|tojson(indent='b' * 8000) }}",
    "json_separators": "{{ ([1] * 8000)|tojson(separators=('b' * 8000, ':')) }}",
    "json_controls": "{{ ('\\x00' * 16000000)|tojson }}",
    "json_ascii": "{{ ('\\U0001f600' * 9000000)|tojson(ensure_ascii=true) }}",
    "json_deep": _DEEP + "{{ n.d|tojson }}",
    "batch": "{{ [1]|batch(600000000, 'x')|list }}",
    "batch_each": "{{ range(100000)|batch(1)|map('batch', 9000, 'x')|map('list')|list }}",
    "slice": "{{ [1]|slice(600000000)|list }}",
    "slice_long": "{{ ('x' * 9000000)|slice(2)|list }}",
    "list_of_text": "{{ ('\\U0001f600' * 9000000)|list|length }}",
    "round_up": "{{ 1|round(1000000000, 'ceil') }}",
    "round_down": "{{ 1|round(-1000000000) }}",
    "int_base": "{{ ('f' * 16000000)|int(base=16) }}",
    "sum_lists": _LONG_LIST + "{{ ([l] * 2000)|sum(start=[])|length }}",
    "escape": "{{ ('<' * 16000000)|e }}",
    "url": "{{ ('\\U0001f600' * 9000000)|urlencode }}",
    "urlize": "{{ ('www.a.de ' * 900000)|urlize }}",
    "wordwrap": "{{ ('x' * 9000000)|wordwrap(1) }}",
    "wordwrap_with": "{{ ('x' * 9000)|wordwrap(1, wrapstring='x' * 9000) }}",
    "trim_characters": "{{ ('a' * 8000000)|trim('b' * 4000000 ~ 'a') }}",
    "urlize_rel": "{{ ('www.a.de ' * 9000)|urlize(rel='x' * 9000) }}",
    "striptags": "{{ ('<!---->' * 900000)|striptags }}",
    "pprint": _LONG_LIST + "{{ l|pprint }}",
    "title": "{{ ('a b ' * 4000000)|title }}",
    "sort": _BIG + "{{ ([x ~ 1, x ~ 2] * 9000)|sort }}",
    "unique": _BIG + "{{ ([x ~ 1, x ~ 2] * 9000)|unique|list }}",
    "maps": _BIG + "{{ range(90000)|map('center', 4000000)|list|length }}",
    "map_replace": _BIG + "{{ ([x] * 90000)|map('replace', 'x', 'y')|list|length }}",
    "filter_set": "{% filter center(60000000) %}a{% endfilter %}",
    # what is small in memory and endless when gone through
    "deep_text": _DEEP + "{{ n.d }}",
    "deep_string": _DEEP + "{{ n.d|string|length }}",
    "deep_tilde": _DEEP + "{{ 'x' ~ n.d }}",
    "deep_percent": _DEEP + "{{ '%s' % (n.d,) }}",
    "deep_format": _DEEP + "{{ '{}'.format(n.d) }}",
    "deep_equal": _DEEP + "{{ n.d == m.d }}",
    "deep_equal_test": _DEEP + "{{ n.d is eq m.d }}",
    "deep_in": _DEEP + "{{ n.d in [m.d] }}",
    "deep_less": _DEEP + "{{ [n.d, m.d]|min|length }}",
    "deep_index": _DEEP + "{{ [m.d].index(n.d) }}",
    "deep_namespace": _DEEP + "{{ namespace(a=n.d) }}",
    "deep_refusal": _DEEP + "{{ raise_exception(n.d) }}",
    "deep_key": _DEEP + "{{ messages[n.d].x }}",
    "deep_tuple_key": _DEEP_TUPLE + "{{ {n.t: 1}|length }}",
    "deep_tuple_item": _DEEP_TUPLE + "{{ messages[0][n.t] }}",
    "deep_tuple_get": _DEEP_TUPLE + "{{ messages[0].get(n.t) }}",
    "deep_tuple_in": _DEEP_TUPLE + "{{ n.t in messages[0] }}",
    "deep_tuple_unique": _DEEP_TUPLE + "{{ [n.t]|unique|list }}",
    "deep_tuple_dict": _DEEP_TUPLE + "{{ dict([(n.t, 1)]) }}",
    "endless_namespace": "{% set n = namespace() %}{% set n.n = n %}{{ n }}{{ [n, n] == [n] }}",
    "deep_tuple_filter": _DEEP_TUPLE + "{{ n.t is filter }}",
    "deep_tuple_map": _DEEP_TUPLE + "{{ [1]|map(n.t)|list }}",
    "deep_tuple_select": _DEEP_TUPLE + "{{ [1]|select(n.t)|list }}",
    "deep_tuple_round": _DEEP_TUPLE + "{{ 1|round(1, n.t) }}",
    "deep_tuple_attribute": _DEEP_TUPLE + "{{ messages|map(attribute=n.t)|list }}",
    "deep_tuple_codec": _DEEP_TUPLE + "{{ 'x'.encode('utf-8', n.t) }}",
    "deep_changed": _DEEP + "{% for i in [n.d, m.d] %}{{ loop.changed(i) }}{% endfor %}",
    # what never ends
    "loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "loop_tests": "{% for i in range(9999) %}"
    "{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "macro_itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "callers": "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{{ caller() }}{% endcall %}"
    "{{ caller() }}{% endif %}{% endmacro %}{% call f(500) %}x{% endcall %}"
    "{% for i in range(90000) %}{% call f(9) %}x{% endcall %}{% endfor %}",
    "blocks": _blocks(60),
    "filters_of_nothing": "{% for i in range(9999) %}"
    "{{ range(99999)|select('none')|list }}{% endfor %}",
    "recursive_loop": "{% for m in messages * 9999 recursive %}{{ loop(messages * 99) }}{% endfor %}",
    "text_comparisons": _BIG + "{% set y = x[:-1] ~ 'y' %}{% for i in range(90000) %}"
    "{{ 'x' if y == x }}{{ 'x' if y < x }}{{ 'x' if 'z' in x }}{% endfor %}",
    "text_methods": _BIG + "{% for i in range(90000) %}{% if x.upper() %}{% endif %}{% endfor %}",
    "text_filters": _BIG + "{% for i in range(90000) %}{% if x|lower %}{% endif %}{% endfor %}",
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "lipsum": "{{ lipsum(1000000) }}",
    # what is put out
    "output": _BIG + "{% for i in range(90000) %}{{ x }}{% endfor %}",
    "set_block": _BIG + "{% set y %}{% for i in range(90000) %}{{ x }}{% endfor %}{% endset %}",
    "set_block_literal": "{% set y %}{% for i in range(90000) %}"
    + "x" * 9000
    + "{% endfor %}{% endset %}",
    "macro_output": _BIG
    + "{% macro f() %}{% for i in range(90000) %}{{ x }}{% endfor %}{% endmacro %}{{ f() }}",
    "different_outputs": _BIG
    + "{% set y %}{% for i in range(90000) %}{{ x ~ i }}{% endfor %}{% endset %}",
    "autoescape": "{% autoescape true %}{{ '<' * 16000000 }}{% endautoescape %}",
    "autoescape_tilde": "{% autoescape true %}{{ '<' * 16000000 ~ '' }}{% endautoescape %}",
    "date": "{{ strftime_now('%c' * 8000000) }}",
    "date_odd": "{{ raise_exception(strftime_now('%999999999d%Q%')) }}",
    # guards that a template would replace
    "replaced_guard": "{% set pie_step = 1 %}{% macro pie_joined() %}{% endmacro %}"
    "{% for pie_made in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
}

BROKEN: dict[str, str] = {
    "parentheses": "{{ " + "(" * 100_000 + " }}",
    "lists": "{{ " + "[" * 100_000 + " }}",
    "nots": "{{ " + "not " * 100_000 + "x }}",
    "sums": "{{ 1" + "+ 1" * 50_000 + " }}",
    "attributes": "{{ x" + ".x" * 50_000 + " }}",
    "loops": "{% for i in x %}" * 200 + "{% endfor %}" * 200,
    "ifs": "{% if x %}" * 5000 + "{% endif %}" * 5000,
    "number": "{{ " + "9" * 10_000 + " }}",
    "unclosed": "{{ " * 100_000,
    "length": "x" * 300_000,
}
"""Templates that do not compile."""
