"""What the selectors of a policy file mean in a trace.

Covers named prefixes and keys of pages, which have other keys here than while serving, since tokens are made up;
and selectors that nothing in the trace is like. Does not cover what is in vain for another reason
(`pie.simulator.not_simulated`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pie.page.key import PageKey, RootKey, page_keys
from pie.policies.options import marked
from pie.policies.policy_set import PolicySet, PolicySpec
from pie.policies.prefixes import NamedPrefix, Prefixes, name_or_key
from pie.policies.rules import Rule
from pie.policies.tag_warnings import TagPattern
from pie.policies.units import SelectsBy
from pie.simulator.trace import Trace

MODEL = RootKey(b"simulated".ljust(32, b"\0"))
"""The model where a trace does not say which it was."""
_MOST_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Meant:
    """A policy set as it is simulated with a trace."""

    policies: PolicySet
    unknown: Mapping[str, str]
    """Why the pages of a named prefix are not known, by its name."""
    warnings: tuple[str, ...]
    """Selectors that nothing in the trace is like, a line for each."""


def meant_in(trace: Trace, policies: PolicySet, page_tokens: int) -> Meant:
    """Return what policies mean in a trace whose pages are taken to have so many tokens."""
    keys = _Keys(trace, page_tokens)
    named: dict[str, NamedPrefix] = {}
    unknown: dict[str, str] = {}
    for name, prefix in policies.prefixes.named.items():
        try:
            named[name] = keys.prefix(name, prefix)
        except LookupError as error:
            unknown[name] = str(error.args[0])
    prefixes = Prefixes({**policies.prefixes.named, **named})
    prefixes.resolve(
        keys.root,
        page_tokens,
        lambda prefix: prefix.tokens if any(prefix is one for one in named.values()) else None,
    )
    warnings = list(_unlike(trace, policies.patterns))
    rules = tuple(_rule(one, keys, warnings) for one in policies.rules)
    changed = replace(
        policies,
        prefixes=prefixes,
        rules=rules,
        replication=_spec(policies.replication, keys, warnings),
        migration=tuple(_spec(one, keys, warnings) for one in policies.migration),
        scale=_spec(policies.scale, keys, warnings),
    )
    return Meant(changed, unknown, tuple(dict.fromkeys(warnings)))


class _Keys:
    """Pages of the trace by what they were called while serving."""

    def __init__(self, trace: Trace, page_tokens: int) -> None:
        self.root = trace.model_root or MODEL
        self._trace = trace
        self._page_tokens = page_tokens

    def prefix(self, name: str, prefix: NamedPrefix) -> NamedPrefix:
        """Return a named prefix as it is in the trace.

        Raises:
            LookupError: It is not known there; says why.
        """
        token = self._trace.token_of_name.get(name)
        if token is not None:
            return NamedPrefix(tokens=self._leading(token))
        if prefix.key is not None:
            return NamedPrefix(key=self.key(prefix.key).hex())
        if prefix.tokens is None:
            raise LookupError("a trace has no text, and no prefix of this name")
        root, page_tokens = self._trace.model_root, self._trace.page_tokens
        if root is None or not page_tokens:
            raise LookupError("the trace does not say whose keys its pages have")
        for key in reversed(page_keys(root, prefix.tokens, page_tokens)):
            token = self._trace.token_of_key(key)
            if token is not None:
                return NamedPrefix(tokens=self._leading(token))
        raise LookupError("no request of the trace begins so")

    def key(self, key: PageKey) -> PageKey:
        """Return the key, in the simulation, of the page that ends where a page of the trace does, or before that.

        Raises:
            LookupError: There is none; says why.
        """
        token = self._trace.token_of_key(key)
        if token is None:
            raise LookupError("no request of the trace has the page with this key")
        return page_keys(self.root, self._leading(token), self._page_tokens)[-1]

    def _leading(self, token: int) -> list[int]:
        tokens = self._trace.leading(token)
        if not tokens:
            raise LookupError("no request of the trace begins so")
        if len(tokens) < self._page_tokens:
            raise LookupError(f"it is shorter than a page of {self._page_tokens} tokens here")
        return list(tokens)


def _rule(rule: Rule, keys: _Keys, warnings: list[str]) -> Rule:
    if rule.selector.prefix is None:
        return rule
    try:
        return replace(rule, selector=rule.selector.with_key(keys.key(rule.selector.prefix)))
    except LookupError as error:
        warnings.append(f"{rule.action_name}: prefix {rule.selector.prefix.hex()}: {error.args[0]}")
        return rule


def _spec(spec: PolicySpec, keys: _Keys, warnings: list[str]) -> PolicySpec:
    changed: dict[str, object] = {}
    for option, mark in marked(spec.factory, SelectsBy).items():
        value = spec.options.get(option)
        if mark.what != "prefix" or not isinstance(value, str):
            continue
        _, key = name_or_key(value)
        if key is None:
            continue
        try:
            changed[option] = keys.key(key).hex()
        except LookupError as error:
            warnings.append(f"{spec.name}: {option} {value}: {error.args[0]}")
    return replace(spec, options={**spec.options, **changed}) if changed else spec


def _unlike(trace: Trace, patterns: Iterable[TagPattern]) -> Iterable[str]:
    """Yield a line for each selector of a tenant, conversation or model that no request of the trace is like."""
    there = {
        "tenant": {one.tenant for one in trace.requests},
        "session": {one.session or "" for one in trace.requests},
        "model": {(trace.model_root or MODEL).hex()},
    }
    for one in patterns:
        if any(fnmatch.fnmatchcase(name, one.pattern) for name in there[one.what]):
            continue
        names = sorted(there[one.what] - {""})
        if one.what == "model" and trace.model_root is None:
            why = "the trace does not say which model it is of"
        elif not names:
            why = f"no request of the trace names a {one.what}"
        else:
            told = ", ".join(names[:_MOST_EXAMPLES])
            more = (
                f" and {len(names) - _MOST_EXAMPLES:,} more" if len(names) > _MOST_EXAMPLES else ""
            )
            why = f"no {one.what} of the trace is like it; there are {told}{more}"
        yield f"line {one.line}, {one.path}: {one.pattern!r} selects nothing: {why}"
