"""ReAct (Yao et al. 2022): think, use a tool, look at what came, and go on, until there is an answer.

A grammar holds the model to the form, so that every action can be read. The pages of the conversation are parked in
host memory while the tool works, and are back when it goes on: a slow tool keeps no device memory.
"""

import ast
import operator
import re

from pie.inferlet import Context, Sampler

RULES = """Answer the question. Write one line at a time, either
Action: calculate[an expression, such as 12*(3+4)]
or, once you know it,
Answer: the answer"""
TURN = r"(Action: calculate\[[0-9+*/(). -]{1,40}\]|Answer: [^\n]{1,160})"
ACTION = re.compile(r"Action: calculate\[(.*)\]")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(text: str) -> str:
    """Return what an expression of numbers comes to, or what is wrong with it."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Expression(body):
                return value(body)
            case ast.Constant(int() | float() as number):
                return number
            case ast.UnaryOp(ast.USub(), one):
                return -value(one)
            case ast.BinOp(left, ast.Div(), right):
                return value(left) / value(right)
            case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
                made: float = OPERATORS[type(kind)](value(left), value(right))
                return made
        raise ValueError("only + - * / and numbers")

    try:
        return f"{value(ast.parse(text.strip(), mode='eval')):g}"
    except (SyntaxError, ValueError, ArithmeticError) as error:
        return f"error: {error}"


async def main(
    ctx: Context,
    prompt: str,
    steps: int = 4,
    max_tokens: int = 64,
    temperature: float = 0.0,
    tool_s: float = 0.0,
) -> str:
    """Answer PROMPT with a calculator that takes TOOL_S seconds, in at most STEPS turns."""
    ctx.system(RULES).user(prompt)
    for step in range(steps):
        pattern = TURN if step < steps - 1 else r"Answer: [^\n]{1,160}"
        line = await ctx.generate(Sampler(temperature), max_tokens, regex=pattern)
        await ctx.say(line)
        asked = ACTION.fullmatch(line)
        if asked is None:
            return line.removeprefix("Answer: ")
        await ctx.park()
        await ctx.sleep(tool_s)
        seen = calculate(asked[1])
        await ctx.say(f"Observation: {seen}")
        ctx.user(f"Observation: {seen}")
    return "no answer"
