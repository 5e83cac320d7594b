"""What `docs/policies.md` and `docs/own-policies.md` show works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import get_args

from pie.cluster.config import load_config
from pie.policies.loader import load_policies, load_policy_file
from pie.policies.options import options_schema
from pie.policies.policy_set import WorkerMoves
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.retention import PageView
from pie.policies.rules import PartName, Selector, TierName
from pie.policies.scored import PageUse
from pie.worker.settings import ModelSettings
from tests.support.serving import environment

ROOT = Path(__file__).parents[2]
DOCUMENT, OWN = ROOT / "docs" / "policies.md", ROOT / "docs" / "own-policies.md"
EXAMPLES = ROOT / "examples" / "policies"


def blocks(language: str, document: Path = DOCUMENT) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), flags=re.DOTALL)


def test_the_built_ins_are_named_with_their_options(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[0])
    policies = load_policy_file(file)
    assert policies.routing.options == {"miss_weight": 5, "decode_share": 0.02}
    assert policies.retention.name == "lru"


def test_a_routing_policy_of_many_options_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[4])
    assert load_policy_file(file).routing.name == "weighted"


def test_rules_come_before_the_policy(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[1])
    policies = load_policy_file(file)
    assert policies.retention.name == "adaptive"
    assert [rule.action_name for rule in policies.rules] == ["quota", "pin", "ttl"]


def test_conversations_are_kept_by_rules_as_they_stand_there(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[2])
    assert [str(rule.action) for rule in load_policy_file(file).rules] == [
        "KeepSession(keep=120.0, max=4294967296)",
        "KeepSession(keep=3600.0, max=68719476736)",
    ]


def test_prefixes_are_named_as_they_stand_there(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[3])
    policies = load_policy_file(file)
    assert len(policies.prefixes) == 3
    for prefix in policies.prefixes.named.values():
        # No word has less than a token.
        words = prefix.tokens or (prefix.text or prefix.system or "").split()
        assert len(words) >= ModelSettings.model_fields["page_tokens"].default
    assert [rule.action_name for rule in policies.rules] == [
        "persist-prefix",
        "pin",
        "persist-prefix",
    ]


def test_hot_pages_get_copies_as_it_stands_there(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[5])
    assert load_policy_file(file).replication.options == {"uses": 20, "copies": 4}


def test_pages_and_conversations_move_as_it_stands_there(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[6])
    found = load_policy_file(file)
    assert [spec.name for spec in found.migration] == [
        "rebalance",
        "follow-session",
        "prefetch",
        "drain",
        "expire",
        "replicate",
        "spill-to-pool",
    ]
    assert found.migration[0].options == {"idle": 30.0, "rate": 128 << 20}
    assert found.worker_moves() == WorkerMoves(looks_ahead=16, drain_share=0.8)


def test_workers_are_hinted_as_it_stands_there(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(blocks("yaml")[7])
    found = load_policy_file(file)
    assert found.scale.options == {"min": 2, "max": 12, "waiting": 4.0, "fall_after": 600.0}
    assert [name for name, _ in found.new_cluster()][-1] == "by-load"


def made(kind: PolicyKind, name: str, options: Iterable[str]) -> dict[str, object]:
    """Return all that a policy goes by, with options as a file has them."""
    named = ", ".join([f"policy: {name}", *options])
    said = f"[{{{named}}}]" if kind is PolicyKind.MIGRATION else f"{{{named}}}"
    file = load_policies(f"cluster: {{{kind.value}: {said}}}", name="policies.yaml")
    policy = file.routing.build() if kind is PolicyKind.ROUTING else dict(file.new_cluster())[name]
    return vars(policy)


def test_every_cluster_policy_is_documented_with_all_its_options_and_their_defaults() -> None:
    found = dict[str, dict[str, str]]()
    for name, option, default in re.findall(
        r"^\| `([\w-]+)` \| `(\w+)` \| (.*?) \| .* \|$", DOCUMENT.read_text(), re.MULTILINE
    ):
        found.setdefault(name, {})[option] = default.strip("`")
    required = {"replicate": ["copies: 2"], "expire": ["after: 1h"]}
    for kind in PolicyKind:
        if kind is PolicyKind.RETENTION:
            continue
        for name, policy in BUILTIN[kind].items():
            told, must = found.get(name, {}), required.get(name, [])
            properties = options_schema(policy).get("properties", {})
            assert told.keys() == properties.keys(), name  # type: ignore[attr-defined]
            said = [
                f"{option}: {default}"
                for option, default in told.items()
                if default not in ("any", "none", "required", "unset")
            ]
            assert made(kind, name, [*must, *said]) == made(kind, name, must), name


def test_every_selector_is_documented_with_all_tiers_and_parts() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE))
    assert set(options_schema(Selector)["properties"]) <= rows.keys()  # type: ignore[call-overload]
    for option, names in (("tier", get_args(TierName)), ("part", get_args(PartName))):
        for name in names:
            assert f"`{name}`" in rows[option]


def ten_minutes() -> list[tuple[str, str, str]]:
    """Return each block of that section: its language, the file that the text before it names last, and what it says."""
    section = re.search(r"^## In ten minutes$(.*?)^## ", OWN.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    found, named = [], ""
    for before, language, block in re.findall(
        r"(.*?)^```(\w+)\n(.*?)^```$", section[1], flags=re.MULTILINE | re.DOTALL
    ):
        named = (re.findall(r"`(\w+\.(?:py|yaml|toml))`", before) or [named])[-1]
        found.append((language, named, block))
    return found


def test_a_policy_of_ones_own_is_made_in_an_empty_folder_to_the_letter(tmp_path: Path) -> None:
    programs, folder = tmp_path / "programs", tmp_path / "empty"
    programs.mkdir()
    folder.mkdir()
    for name, called in (("python", ""), ("pie", " -m pie.cluster")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{called} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    told = []
    for language, named, block in ten_minutes():
        if language != "sh":
            (folder / named).write_text(block)
            continue
        done = subprocess.run(
            ["sh", "-euc", block],
            cwd=folder,
            env={**environment(folder), "PATH": path, "PYTEST_ADDOPTS": "-p no:cacheprovider"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told.append(done.stdout)
    checked, _, retained, routed, tested = told
    assert "good; retention `mine:NewestFirst`" in checked
    rates = dict(re.findall(r"^(\w+) +(0\.\d+)", retained + routed, re.MULTILINE))
    assert {name: f"{float(rates[name]):.2f}" for name in ("before", "policies")} == {
        "before": "0.40",
        "policies": "0.66",
    }
    assert float(rates["routed"]) > 2 * float(rates["even"])
    assert "2 passed" in tested
    configured = load_config(folder / "pie.toml", {}).config.policies
    assert (str(configured.file), configured.watch) == ("policies.yaml", True)


def test_what_is_documented_is_the_example(tmp_path: Path) -> None:
    example = (EXAMPLES / "newest_first.py").read_text()
    for line in blocks("python", OWN)[0].splitlines():
        if "yield" in line or "self._held" in line:
            assert line.strip() in example


def test_all_that_a_score_goes_by_is_documented_in_its_order() -> None:
    told = re.findall(r"^\| `(page|use)\.(\w+)` \|", OWN.read_text(), re.MULTILINE)
    assert told == [
        *(("page", one.name) for one in fields(PageView)),
        *(("use", one.name) for one in fields(PageUse)),
    ]
