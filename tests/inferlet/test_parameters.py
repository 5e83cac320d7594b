"""What a program takes is read from its text."""

from __future__ import annotations

import pytest

from pie.inferlet.parameters import Parameter, ProgramTextError, read_program

GOOD = '''
"""A file."""

async def main(ctx, prompt: str, keep: float = 1, *, most: int = 3, loud: bool = False):
    """What it does."""
'''


def test_parameters_come_from_annotations_and_the_doc_from_the_docstring() -> None:
    text = read_program(GOOD)
    assert text.doc == "What it does."
    assert text.parameters == (
        Parameter("prompt", "str", None),
        Parameter("keep", "float", 1.0),
        Parameter("most", "int", 3),
        Parameter("loud", "bool", False),
    )


def test_text_becomes_values_and_what_is_left_out_keeps_its_default() -> None:
    given = {"prompt": "5", "keep": "0.5", "loud": "yes"}
    assert read_program(GOOD).convert(given) == {"prompt": "5", "keep": 0.5, "loud": True}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, r"the parameter prompt \(str\) is missing"),
        (
            {"prompt": "a", "size": "3"},
            "there is no parameter size: the program takes prompt, keep",
        ),
        ({"prompt": "a", "most": "3.5"}, "most is of type int, not '3.5'"),
        ({"prompt": "a", "loud": "maybe"}, "loud is true or false, not 'maybe'"),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(given: dict[str, str], told: str) -> None:
    with pytest.raises(ProgramTextError, match=told):
        read_program(GOOD).convert(given)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def main(ctx): pass", "has no `async def main"),
        ("async def main(): pass", "takes the context"),
        ("async def main(ctx, *more): pass", "takes the context"),
        ("async def main(ctx, a): pass", "the parameter a of p.py needs a type"),
        ("async def main(ctx, a: list): pass", "str, int, float, bool"),
        ("async def main(ctx, a: int = f()): pass", "the default of a"),
        ("async def main(ctx:", "is not Python in line 1"),
        ("\0", "is not Python"),
    ],
)
def test_a_program_without_a_fitting_main_is_refused(source: str, told: str) -> None:
    with pytest.raises(ProgramTextError, match=told):
        read_program(source, "p.py")
