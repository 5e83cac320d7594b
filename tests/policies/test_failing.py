"""What the log says of policies that fail: in one line, whose they are and why, and not the same again and again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.errors import PolicyStalledError
from pie.policies.failing import Failures, class_name
from pie.policies.loader import load_policies
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView
from tests.policies.pages import view

_LOG = logging.getLogger("pie.test_failing")


class Failing:
    """Raises whenever it is asked."""

    def stored(self, page: PageView, now_s: float) -> None: ...

    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...

    def removed(self, key: PageKey, part: Part) -> None: ...

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        raise ValueError("none\nof\x1b[31m them")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, bool]]:
    """Return what was logged, and whether the calls that led to it were."""
    assert all(one.exc_info is None for one in caplog.records)
    parts = (one.getMessage().partition("\n") for one in caplog.records)
    return [(first, bool(rest)) for first, _, rest in parts]


def test_tiers_of_one_file_tell_a_failure_once_in_full(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # Another edit begins anew.
        caplog.clear()
        policies = load_policies(f"worker: {{retention: '{__name__}:Failing'}}", name="f")
        managers = [
            RetentionManager(policies.new_retention_aside(), name=name) for name in ("a", "b", "c")
        ]
        for manager in managers:
            manager.stored(view(1), 0.0)
            # However long its thread takes to come to it.
            while manager.counts.failures < 3 or not _raised(caplog):
                assert manager.victims(1, 0.0)
        told = [(said, in_full) for said, in_full in lines(caplog) if "ValueError" in said]
        assert [in_full for _, in_full in told] == [True] + [False] * (len(told) - 1)
        assert told[0][0].startswith(
            f"a: {__name__}:Failing failed in victims(): ValueError: none of [31m them ({__file__}:"
        )
        failed = sum(manager.counts.failures for manager in managers)
        assert len(caplog.records) <= failed.bit_length() + 1


def _raised(caplog: pytest.LogCaptureFixture) -> bool:
    return any("ValueError" in said for said, _ in lines(caplog))


def test_a_policy_that_is_late_at_first_is_told_in_full_once_it_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = Failures()
    errors = [PolicyStalledError("it is late")] * 2 + [ValueError("no")] * 2 + [KeyError("x")]
    with pytest.raises(ValueError, match="no") as caught:
        raise errors[2]
    at = f"{__file__}:{caught.value.__traceback__.tb_lineno}"  # type: ignore[union-attr]
    for error in errors:
        failures.tell(_LOG, Failing(), "hit", error, instead="`lru` decides", traces=True)
    name = f"{__name__}:Failing failed in hit()"
    assert lines(caplog) == [
        (f"{name}: it is late; `lru` decides", False),
        (f"{name}: it is late; `lru` decides (2 failures so far)", False),
        (f"{name}: ValueError: no ({at}); `lru` decides (3 failures so far)", True),
        (f"{name}: ValueError: no ({at}); `lru` decides (4 failures so far)", False),
    ]


def test_a_class_beside_the_file_is_called_as_the_file_calls_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "class Mine:\n"
        "    def stored(self, page, now_s): ...\n"
        "    def hit(self, key, part, now_s): ...\n"
        "    def removed(self, key, part): ...\n"
        "    def victims(self, bytes_needed, now_s): return ()\n"
    )
    policies = load_policies("worker: {retention: 'beside:Mine'}", name="f", folder=tmp_path)
    policy = policies.new_retention_aside()
    assert class_name(policy) == "beside:Mine"
