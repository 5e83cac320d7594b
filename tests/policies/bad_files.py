"""Policy files that are not acceptable, with what is to be said of each, for whatever takes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODULES = {
    "broken": "import nothing_of_that_name\n",
    "raising": "raise RuntimeError('not today')\n",
    "leaving": "raise SystemExit(0)\n",
    "wrong": "def (:\n",
    "unruly": """
from typing import Annotated
from pydantic import Field

class Base:
    def stored(self, page, now_s): ...
    def hit(self, key, part, now_s): ...
    def removed(self, key, part): ...
    def victims(self, bytes_needed, now_s): return []

class UntoldError(Exception):
    def __str__(self): return self.told()
    def told(self): raise RuntimeError("no text")

class NoTextError(UntoldError):
    def told(self): return 5

class LongError(UntoldError):
    def told(self): return "x" * 50_000_000

class Untold(Base):
    def __init__(self): raise UntoldError

class NoText(Base):
    def __init__(self): raise NoTextError

class Long(Base):
    def __init__(self): raise LongError

class Surrogate(Base):
    def __init__(self): raise ValueError("half a \\ud800 letter\\nof two lines")

class BadPattern(Base):
    def __init__(self, x: Annotated[str, Field(pattern="[")] = "a"): ...

class BadLimit(Base):
    def __init__(self, x: Annotated[int, Field(ge="a")] = 1): ...

class TwoDefaults(Base):
    def __init__(self, x: Annotated[int, Field(default_factory=int)] = 1): ...

class NoAnnotation(Base):
    def __init__(self, x: "1 / 0" = 1): ...

class Meta(type):
    def __getattr__(cls, name): raise RuntimeError(f"no {name}")

class OfMeta(Base, metaclass=Meta): ...

class Five(Base):
    def __new__(cls): return 5

class Yields(Base):
    async def victims(self, bytes_needed, now_s): yield
""",
    "kinds": "class Helper: ...\n\ndef function(): ...\n",
}


@dataclass(frozen=True, slots=True)
class BadFile:
    """One of them."""

    name: str
    text: str | bytes
    said: Sequence[str]
    """A part of what is said of each problem, in order; there are no more."""


def write_modules(folder: Path) -> None:
    """Write the modules that some of them name."""
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)


def _rule(text: str) -> str:
    return f"worker: {{rules: [{{{text}}}]}}"


def _match(text: str) -> str:
    return _rule(f"match: {{{text}}}, action: pin")


def _routing(text: str) -> str:
    return f"cluster: {{routing: {{{text}}}}}"


def _moves(text: str) -> str:
    return f"cluster: {{migration: [{{{text}}}]}}"


def _bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


def _unruly(name: str, said: str) -> BadFile:
    at = "1:21: worker.retention"
    return BadFile(f"unruly {name}", f"worker: {{retention: 'unruly:{name}'}}", [f"{at}: {said}"])


_TIME = "must be a time such as `30s`, `10m`, `2h` or `1d`"
_SIZE = "must be a size above 0, such as `512MiB` or `2GiB`"
_NUMBER = "should be a finite number"
_ALIAS = "aliases (`*name`) are not allowed in a policy file"
_NEVER = "can never match: the rule in line"

BAD_FILES = [
    _unruly("Untold", "Untold refuses its options: UntoldError at "),
    _unruly("NoText", "NoText refuses its options: NoTextError at "),
    _unruly("Long", f"Long refuses its options: {'x' * 300}…"),
    _unruly("Surrogate", "Surrogate refuses its options: half a   letter of two lines"),
    _unruly(
        "BadPattern",
        "the constructor of BadPattern cannot be read: TypeError: the annotation of `x`",
    ),
    _unruly(
        "BadLimit", "the constructor of BadLimit cannot be read: TypeError: the annotation of `x`"
    ),
    _unruly(
        "TwoDefaults", "the constructor of TwoDefaults cannot be read: TypeError: cannot specify"
    ),
    _unruly("NoAnnotation", "the constructor of NoAnnotation cannot be read: ZeroDivisionError"),
    _unruly("OfMeta", "the constructor of OfMeta cannot be read: RuntimeError: no "),
    _unruly("Five", "Five is of the wrong kind: it makes a int, and no Five"),
    _unruly("Yields", "'unruly:Yields': `victims` must not be async"),
    BadFile("unknown policy", "worker: {retention: lruu}", ["'lruu', did you mean 'lru'?"]),
    BadFile("unknown action", _rule("action: tll"), ["'tll', did you mean 'ttl'?"]),
    BadFile("unknown half", "wroker: {}", ["'wroker', did you mean 'worker'?"]),
    BadFile("unknown option", _routing("policy: cost, miss: 1"), ["no such option"]),
    BadFile("unknown prefix", _match("prefix: desk"), ["there is no prefix 'desk'"]),
    BadFile(
        "unknown prefix of a cluster policy",
        "prefixes: {desk: {text: x}}\ncluster: {replication: {policy: replicate, copies: 2, prefix: desk2}}",
        ["2:63: cluster.replication.prefix: there is no prefix 'desk2', did you mean 'desk'?"],
    ),
    BadFile(
        "half a key",
        _moves("policy: replicate, copies: 2, prefix: '00ff'"),
        [
            "1:54: cluster.migration[0].prefix: Replicate refuses its options: `prefix` must be 64 hexadecimal digits"
        ],
    ),
    BadFile("wrong type", _routing("policy: cost, miss_weight: [1]"), ["valid number, not [1]"]),
    BadFile("a list", "- worker", ["must hold two halves"]),
    BadFile("a word", "worker: lru", ["must hold kinds of policy"]),
    BadFile("negative bytes", _rule("action: pin, max: -5"), [f"{_SIZE}, not -5"]),
    BadFile("negative size", _rule("action: pin, max: -5GiB"), [f"{_SIZE}, not '-5GiB'"]),
    BadFile("no bytes", _rule("action: quota, max: 0"), [f"{_SIZE}, not 0"]),
    BadFile("half a byte", _rule("action: quota, max: 0.5"), [f"{_SIZE}, not 0.5"]),
    BadFile("endless bytes", _rule("action: pin, max: .inf"), [f"{_SIZE}, not inf"]),
    BadFile("ttl for ever", _rule("action: ttl, after: forever"), [f"{_TIME}, not 'forever'"]),
    BadFile("ttl as a word", _rule("ttl: forever"), ["`action` is missing"]),
    BadFile("negative time", _rule("action: ttl, after: -1h"), [f"{_TIME}, not '-1h'"]),
    BadFile(
        "endless time",
        _rule("action: ttl, after: .inf"),
        ["longer than 0 and at most 10000d, not inf"],
    ),
    BadFile("no time", _match("age: .nan"), ["must be longer than 0 and at most 10000d, not nan"]),
    BadFile("not a number", _moves("policy: replicate, copies: 2, uses: .nan"), [_NUMBER]),
    BadFile("infinity", _moves("policy: replicate, copies: 2, uses: .inf"), [_NUMBER]),
    BadFile("infinite weight", "worker: {retention: {policy: lfu, half_life: .inf}}", [_NUMBER]),
    BadFile("true as a number", _match("hits: true"), ["valid integer, not True"]),
    BadFile(
        "true as a share", _moves("policy: drain, share: true"), ["should be a valid number, not"]
    ),
    BadFile("one as true", _moves("policy: spill-to-pool, as_made: 1"), ["valid boolean, not 1"]),
    BadFile("digits as text", _match("tenant: 1234567890123456"), ["must be text, in quotes"]),
    BadFile("hits beyond counting", _match("hits: 65536"), ["less than or equal to 65535"]),
    BadFile(
        "huge count", _moves(f"policy: rebalance, waiting: {10**30}"), ["less than 2147483648"]
    ),
    BadFile("number of 5,000 digits", _match(f"hits: 1{'0' * 5_000}"), ["cannot be read: Exceeds"]),
    BadFile(
        "shadowed rule",
        "worker:\n  rules:\n  - {match: {tier: disk}, action: pin}\n"
        "  - {match: {tier: disk, hits: 3}, action: pin}\n",
        [f"{_NEVER} 3 takes"],
    ),
    BadFile(
        "shadowed by rules together",
        "worker:\n  rules:\n  - {match: {part: [full, window]}, action: pin}\n"
        "  - {match: {part: state, age: 1h}, action: pin}\n"
        "  - {match: {age: 2h}, action: ttl, after: 1d}\n",
        ["can never match: the rules in lines 3 and 4 take all that it is about"],
    ),
    BadFile("no module", "worker: {retention: 'nowhere:X'}", ["there is no module 'nowhere'"]),
    BadFile("broken module", "worker: {retention: 'broken:X'}", ["No module named 'nothing_of"]),
    BadFile("raising module", "worker: {retention: 'raising:X'}", ["RuntimeError: not today"]),
    BadFile("leaving module", "worker: {retention: 'leaving:X'}", ["SystemExit: 0"]),
    BadFile("module that is none", "worker: {retention: 'wrong:X'}", ["SyntaxError"]),
    BadFile("wrong class", "worker: {retention: 'kinds:Helper'}", ["is not a retention policy"]),
    BadFile("no class", "cluster: {routing: 'kinds:function'}", ["is not a class but a function"]),
    BadFile("wrong kind", "cluster: {routing: lru}", ["'lru' is a retention policy"]),
    BadFile("anchor bomb", _bomb(), [_ALIAS]),
    BadFile("anchor of itself", "worker: &w [*w]", [_ALIAS]),
    BadFile("merge by anchor", "worker: &w {}\ncluster: {<<: *w}", [_ALIAS]),
    BadFile("merge", "worker: {<<: {retention: lru}}", ["unknown key '<<'"]),
    BadFile("deep", "[" * 900, ["is nested more than 16 deep"]),
    BadFile("large", "# " + "x" * (1 << 20), ["is larger than 1 MiB"]),
    BadFile("key twice", "worker: {}\nworker: {}", ["'worker' is given twice, first in line 1"]),
    BadFile("action twice", _rule("action: pin, action: pin"), ["'action' is given twice"]),
    BadFile(
        "tab",
        "worker:\n\tretention: lru",
        ["2:1: is not YAML: a tab begins what is to be indented by spaces"],
    ),
    BadFile(
        "tab after Windows newlines",
        "worker:\r\n  rules:\r\n\t- {action: pin}\r\n",
        ["3:1: is not YAML: a tab begins"],
    ),
    BadFile("Windows newlines", "worker:\r\n  retention: lruu\r\n", ["2:14: worker.retention: "]),
    BadFile(
        "no half", "retention: lfu", ["1:1: unknown key 'retention'; it belongs under `worker`"]
    ),
    BadFile("rules of no half", "rules: []", ["'rules'; it belongs under `worker`"]),
    BadFile("key that is a list", "? [a, b]\n: c\n", ["1:3: a key must be a plain word"]),
    BadFile("two documents", "worker: {}\n---\nworker: {}", ["expected a single document"]),
    BadFile("tag", "worker: !!python/object:os.system {}", ["has a tag that is not allowed"]),
    BadFile(
        "control character",
        "worker: {}\n# \x00",
        ["2:3: is not text: it has a control character, 0x00"],
    ),
    BadFile("binary", b"\x89PNG\r\n\x1a\n\x00", ["1:1: is not UTF-8 text"]),
    BadFile("not UTF-8", b"worker: {}\n# \xff", ["is not UTF-8 text"]),
    BadFile("UTF-16", "worker: {}".encode("utf-16"), ["1:1: is not UTF-8 text but UTF-16"]),
    BadFile(
        "UTF-16 without a mark", "worker: {}".encode("utf-16-le"), ["1:2: is not text: it has a"]
    ),
    BadFile(
        "all at once",
        "worker:\n  retention: lruu\n  rules:\n  - {action: ttl, after: forever}\n"
        "  - {action: pin, max: -5}\ncluster:\n  routing: 'broken:X'\n  migration: [rebalanse]\n",
        ["did you mean 'lru'?", _TIME, _NEVER, _SIZE, "cannot be imported", "'rebalance'?"],
    ),
]
