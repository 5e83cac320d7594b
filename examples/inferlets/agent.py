"""ReAct (Yao et al. 2022): think, use a tool, look at what came, and go on, until there is an answer.

A grammar holds the model to the form, so that every action can be read. The pages of the conversation are parked in
host memory while the tool works, and are back when it goes on: a slow tool keeps no device memory. Tools are those that
are granted (`pie run --tool agent.py:calculate agent.py`), which the host runs; without any it has a calculator of its own.
"""

import ast
import operator
import re

from pie.inferlet import Context, InferletError, Sampler, Tool

RULES = """Answer the question. Write one line at a time, either
Action: TOOL[what to give it]
or, once you know it,
Answer: the answer
The tools:"""
ANSWER = r"Answer: [^\n]{1,160}"
ACTION = re.compile(r"Action: (\w+)\[(.*)\]")
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


def parameter_of(tool: Tool) -> str | None:
    """Return the name of what a tool takes, where that is one thing."""
    match tool.schema.get("properties"):
        case dict(names) if len(names) == 1:
            return str(next(iter(names)))
    return None


async def main(
    ctx: Context, prompt: str, steps: int = 4, max_tokens: int = 64, temperature: float = 0.0
) -> str:
    """Answer PROMPT with the tools that are granted, or a calculator of its own, in at most STEPS turns."""
    told = {tool.name: tool.description for tool in ctx.tools if parameter_of(tool)}
    takes = {tool.name: parameter_of(tool) or "" for tool in ctx.tools if parameter_of(tool)}
    if not told:
        told = {"calculate": calculate.__doc__ or ""}
    listed = "\n".join(f"{name}: {what.splitlines()[0]}" for name, what in told.items() if what)
    ctx.system(f"{RULES}\n{listed}").user(prompt)
    action = rf"Action: ({'|'.join(map(re.escape, told))})\[[0-9A-Za-z+*/(). -]{{1,60}}\]"
    for step in range(steps):
        pattern = f"({action}|{ANSWER})" if step < steps - 1 else ANSWER
        line = await ctx.generate(Sampler(temperature), max_tokens, regex=pattern)
        await ctx.say(line)
        asked = ACTION.fullmatch(line)
        if asked is None:
            return line.removeprefix("Answer: ")
        await ctx.park()
        try:
            name, text = asked[1], asked[2]
            seen = await ctx.tool(name, **{takes[name]: text}) if takes else calculate(text)
        except InferletError as error:
            seen = f"error: {error}"
        await ctx.say(f"Observation: {seen}")
        ctx.user(f"Observation: {seen}")
    return "no answer"
