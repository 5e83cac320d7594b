"""The policy file: what it may say, and every problem with its place."""

import textwrap
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies, load_policy_file
from pie.policies.lru import LruRetention
from pie.policies.policy_set import PolicySet
from pie.policies.registry import BUILTIN, PolicyKind, resolve
from pie.policies.routing_cost import CostRouting

MINE = """
from dataclasses import dataclass

from pie.policies.lru import LruRetention

@dataclass
class Helper:
    pages: int

class Mine(LruRetention):
    def __init__(self, keep: int, *, names: tuple[str, ...] = (), share: float = 0.5) -> None:
        super().__init__()
        self.keep, self.names, self.share = keep, names, share
        if keep > 100:
            raise ValueError("keep is too much")

class Open(LruRetention):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

class Short(LruRetention):
    def victims(self, bytes_needed):
        return []

class Seeing(LruRetention):
    def pinned(self, key, part): ...
    def unpinned(self, key): ...

class Later(LruRetention):
    async def victims(self, bytes_needed, now_s):
        return []

NOT_A_CLASS = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "bad.py").write_text("x = 1\nraise RuntimeError('not today')\n")
    (tmp_path / "wrong.py").write_text("def (:\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "quitting.py").write_text(
        "from pie.policies.lru import LruRetention\n"
        "class Quitting(LruRetention):\n"
        "    def __init__(self):\n"
        "        raise SystemExit(3)\n"
    )
    return tmp_path


def problems(text: str | bytes, folder: Path | None = None) -> list[str]:
    text = textwrap.dedent(text).lstrip("\n") if isinstance(text, str) else text
    with pytest.raises(PolicyFileError) as caught:
        load_policies(text, name="p.yaml", folder=folder)
    assert str(caught.value) == "\n".join(
        f"p.yaml:{'' if p.line else ' '}{p}" for p in caught.value.problems
    )
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "worker:\ncluster:\n", "worker: {}\n", "\ufeffworker: {}\n"]
)
def test_a_file_that_names_nothing_is_lru_and_cost(text: str) -> None:
    assert load_policies(text, name="p.yaml") == PolicySet()


def test_no_file_is_lru_and_cost() -> None:
    policies = load_policy_file(None)
    assert isinstance(policies.new_retention(), LruRetention)
    assert isinstance(policies.new_routing(), CostRouting)
    assert policies.new_retention() is not policies.new_retention()


def test_names_and_options_are_taken(folder: Path) -> None:
    file = folder / "policies.yaml"
    file.write_text(
        "worker:\n  retention: {policy: 'mine:Mine', keep: 3, names: [a, b]}\n"
        "cluster:\n  routing:\n    policy: cost\n    miss_weight: 2\n"
    )
    policies = load_policy_file(file)
    mine = policies.new_retention()
    assert vars(mine)["keep"] == 3
    assert vars(mine)["names"] == ("a", "b")
    assert vars(mine)["share"] == 0.5
    assert policies.routing.options == {"miss_weight": 2.0}


def test_a_class_may_take_any_option(folder: Path) -> None:
    text = "worker: {retention: {policy: 'mine:Open', a: 1, b: [x]}}"
    policies = load_policies(text, name="p.yaml", folder=folder)
    assert vars(policies.new_retention())["options"] == {"a": 1, "b": ["x"]}


def test_a_module_on_pythons_path_is_found_without_a_folder() -> None:
    policies = load_policies("worker: {retention: 'pie.policies.lru:LruRetention'}", name="p.yaml")
    assert isinstance(policies.new_retention(), LruRetention)


def test_every_problem_is_told_with_its_place() -> None:
    text = """
        worker:
          retension: lru
          routing: cost
        clustr: 3
        cluster:
          routing:
            policy: cosst
        """
    assert problems(text) == [
        (
            "2:3: worker: unknown key 'retension', did you mean 'retention'?; "
            "allowed here: `retention`, `rules`"
        ),
        "3:3: worker: unknown key 'routing'; it belongs under `cluster`; allowed here: `retention`, `rules`",
        "4:1: unknown key 'clustr', did you mean 'cluster'?; allowed here: `worker`, `cluster`, `prefixes`",
        (
            "7:13: cluster.routing.policy: there is no routing policy 'cosst', did you mean 'cost'?; "
            "allowed are `cost`, `round-robin`, `least-loaded`, `power-of-two`, `prefix-affinity`, "
            "`consistent-hash`, `weighted` and your own `module:Class`"
        ),
    ]


def test_wrong_options_are_told_with_their_place() -> None:
    text = """
        cluster:
          routing:
            policy: cost
            miss_wieght: 3
            miss_weight: "5"
            decode_share: [1]
        """
    assert problems(text) == [
        (
            "4:5: cluster.routing.miss_wieght: no such option, did you mean 'miss_weight'?; "
            "allowed are `miss_weight`, `decode_share`, `session_share`"
        ),
        "5:5: cluster.routing.miss_weight: input should be a valid number, not '5'",
        "6:5: cluster.routing.decode_share: input should be a valid number, not [1]",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a", "1:1: must hold two halves"),
        ("7", "1:1: must hold two halves"),
        ("worker: lru", "1:9: worker: must hold kinds of policy, such as `retention`"),
        ("worker: {retention: }", "1:21: worker.retention: must be a policy's name"),
        ("worker: {retention: 3}", "must be a policy's name, such as `lru`"),
        ("worker: {retention: [lru]}", "must be a policy's name"),
        ("worker: {retention: {keep: 3}}", "1:21: worker.retention: `policy` is missing"),
        ("worker: {retention: {policy: [a]}}", "1:30: worker.retention.policy: must be"),
        ("cluster: {routing: lfu}", "'lfu' is a retention policy, not a routing policy"),
        ("worker: {retention: ''}", "there is no retention policy ''"),
        ("worker: {retention: 'a b:C'}", "is not written as `module:Class`"),
        ("worker: {retention: 'a:b:c'}", "is not written as `module:Class`"),
        ("worker: {retention: 'nowhere:X'}", "there is no module 'nowhere' in"),
        ("worker: {retention: 'nowhere.at.all:X'}", "there is no module 'nowhere.at.all'"),
        ("worker: {retention: 'broken:X'}", "cannot be imported: No module named 'nothing_of"),
        ("worker: {retention: 'bad:X'}", "RuntimeError: not today (bad.py, line 2)"),
        ("worker: {retention: 'wrong:X'}", "cannot be imported: SyntaxError"),
        ("worker: {retention: 'leaving:X'}", "cannot be imported: SystemExit"),
        ("worker: {retention: 'quitting:Quitting'}", "refuses its options: SystemExit: 3"),
        ("worker: {retention: 'mine:Mime'}", "has no 'Mime', did you mean 'Mine'?"),
        ("worker: {retention: 'mine:NOT_A_CLASS'}", "is not a class but a int"),
        ("worker: {retention: 'mine:Helper'}", "is not a retention policy: it has no `stored`"),
        ("worker: {retention: 'mine:Short'}", "`victims` does not take the 2 arguments"),
        ("worker: {retention: 'mine:Seeing'}", "`unpinned` does not take the 2 arguments"),
        ("worker: {retention: 'mine:Later'}", "`victims` must not be async"),
        ("cluster: {routing: 'mine:Mine'}", "is not a routing policy: it has no `choose`"),
        ("worker: {retention: 'mine:Mine'}", "worker.retention: option `keep` is needed"),
        ("worker: {retention: {policy: 'mine:Mine', keep: a}}", "1:43: worker.retention.keep:"),
        (
            "worker: {retention: {policy: 'mine:Mine', keep: 101}}",
            "1:43: worker.retention.keep: Mine refuses its options: keep is too much",
        ),
        (
            "cluster: {routing: {policy: cost, miss_weight: .inf}}",
            "1:35: cluster.routing.miss_weight: input should be",
        ),
        ("cluster: {routing: {policy: cost, miss_weight: 2001-01-01}}", "a valid number"),
        ("cluster: {routing: {policy: lru}}", "'lru' is a retention policy"),
        ("cluster: {routing: {policy: cost, ? [a, b] : 3}}", "1:37: cluster.routing: a key must"),
        ("worker: {}\nworker: {}", "2:1: key 'worker' is given twice, first in line 1"),
        ("worker: !!python/object:os.system {}", "has a tag that is not allowed"),
        ("worker: {retention: !!python/name:os.system x}", "cannot be read: could not determine"),
        ("worker: {retention: !!int x}", "cannot be read"),
        ("worker: &a {b: *a}", "1:16: aliases (`*name`) are not allowed"),
        ("worker: {<<: {retention: lru}}", "unknown key '<<'"),
        ("a: b: c", "1:5: is not YAML: mapping values are not allowed"),
        ("worker:\n\tretention: x", "2:1: is not YAML"),
        ("a: 1\n---\nb: 1", "2:1: is not YAML: expected a single document"),
        ("[" * 1_000, "1:17: is nested more than 16 deep"),
        ("a: 'x", "is not YAML"),
        ("\x00", "1:1: is not text: it has a control character"),
        (b"a: 1\nb: \xff", "2:4: is not UTF-8 text"),
        ("x" * ((1 << 20) + 1), "is larger than 1 MiB"),
    ],
)
def test_a_bad_file_is_told(text: str | bytes, told: str, folder: Path) -> None:
    assert any(told in problem for problem in problems(text, folder))


def test_an_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "aliases" in problems("\n".join(lines))[0]


def test_a_file_of_nothing_but_problems_is_told_in_part() -> None:
    keys = "\n".join(f"? [k{number}]\n: 1" for number in range(1_000))
    assert len(problems(keys)) <= 51


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError, match="cannot be read: No such file"):
        load_policy_file(tmp_path / "none.yaml")
    with pytest.raises(PolicyFileError, match="cannot be read: Is a directory"):
        load_policy_file(tmp_path)


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(PolicyFileError, match="larger than 1 MiB"):
        load_policy_file(file)


def test_a_users_module_shadows_no_other(folder: Path) -> None:
    (folder / "json.py").write_text(MINE)
    policies = load_policies(
        "worker: {retention: {policy: 'json:Mine', keep: 1}}", name="p.yaml", folder=folder
    )
    assert vars(policies.new_retention())["keep"] == 1
    import json  # noqa: PLC0415

    assert json.loads("1") == 1


@pytest.mark.parametrize("kind", PolicyKind)
def test_every_built_in_is_of_its_kind_and_most_need_no_options(kind: PolicyKind) -> None:
    # Nobody could guess how many copies, or how old.
    needed: dict[str, dict[str, float]] = {"replicate": {"copies": 2}, "expire": {"after": 60.0}}
    for name, policy in BUILTIN[kind].items():
        assert resolve(kind, name) is policy
        policy(**needed.get(name, {}))


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_text_is_taken_or_refused_in_one_way(text: str | bytes) -> None:
    try:
        load_policies(text, name="p.yaml")
    except PolicyFileError as error:
        assert error.problems  # noqa: PT017


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain, plain)
def test_any_value_in_any_place_is_taken_or_refused_in_one_way(one: object, two: object) -> None:
    import yaml  # noqa: PLC0415

    text = yaml.safe_dump(
        {
            "worker": {"retention": one},
            "cluster": {"routing": {"policy": "cost", "miss_weight": two}},
        }
    )
    try:
        load_policies(text, name="p.yaml")
    except PolicyFileError as error:
        assert error.problems  # noqa: PT017
