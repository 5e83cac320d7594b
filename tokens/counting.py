"""What is put into a chat template so that its operations count.

Covers the changes to jinja2's syntax tree. Does not cover what the functions put in do
(`pie.tokens.sandbox`).

Most operations pass by a method of the environment anyway: operators, calls, attributes, items,
filters and tests. Loops, comparisons, slices, `~` and lists spelt out do not; jinja2 makes plain
Python of them. The functions are reached as attributes of the environment, which no variable of a
template or a request can stand in for.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


class Counted(NodeTransformer):
    """Puts calls of the environment's `pie_` functions into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """A step in every turn."""
        self.generic_visit(node)
        if node.test is not None:
            # What the test leaves out takes time too.
            step = _call("pie_step", [], node.lineno)
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return _with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        """A step in every call."""
        self.generic_visit(node)
        return _with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        """A step in every call."""
        self.generic_visit(node)
        return _with_step(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """`~` by a function."""
        self.generic_visit(node)
        return _call("pie_joined", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """A look at each side before it is compared."""
        self.generic_visit(node)
        node.expr = _looked("pie_compared", node.expr)
        for operand in node.ops:
            by = "pie_searched" if operand.op in ("in", "notin") else "pie_compared"
            operand.expr = _looked(by, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Slices by a function."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _call("pie_sliced", [node.node, *(end or none for end in ends)], node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        """Memory for a list spelt out."""
        self.generic_visit(node)
        return _call("pie_made", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """Memory for a tuple spelt out, unless Python keeps it ready or it is assigned to."""
        self.generic_visit(node)
        if node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return _call("pie_made", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """Memory for a dictionary spelt out, and a look at its keys."""
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _looked("pie_key", pair.key)
        return _call("pie_made", [node], node.lineno)


def _looked(by: str, node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call(by, [node], node.lineno)


def _with_step(node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
    node.body.insert(0, nodes.ExprStmt(_call("pie_step", [], node.lineno), lineno=node.lineno))
    return node


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    """Return the call of one of the environment's functions."""
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=lineno)
