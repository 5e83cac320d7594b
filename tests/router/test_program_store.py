"""Programs that clients installed: named by what they are, within a cap, each tenant's own."""

from __future__ import annotations

from hypothesis import given, strategies as st

from pie.router.program_store import ProgramStore, StoredProgram

_NAMES = st.sampled_from(["a.py", "b.py"])
_SOURCES = st.sampled_from([b"1", b"22", b"333", b"4444", b"1234567"])
_TENANTS = st.sampled_from(["", "one"])
_STEPS = st.lists(
    st.tuples(st.sampled_from(["install", "get", "remove"]), _NAMES, _SOURCES, _TENANTS)
)


@given(steps=_STEPS)
def test_it_keeps_what_was_used_last_within_its_budget(
    steps: list[tuple[str, str, bytes, str]],
) -> None:
    store = ProgramStore(6)
    model: list[tuple[str, bytes, str]] = []
    named: dict[tuple[str, bytes, str], str] = {}
    for verb, *rest in steps:
        name, source, tenant = one = (str(rest[0]), bytes(rest[1]), str(rest[2]))  # type: ignore[arg-type]
        known: StoredProgram | None
        if verb == "install":
            known = store.install(name, source, 0, tenant)
            assert (known is None) == (len(source) > 6)
            if known is not None:
                named[one] = known.id
                model = [kept for kept in model if kept != one] + [one]
                while sum(len(kept) for _, kept, _ in model) > 6:
                    model.pop(0)
        elif one in named and verb == "get":
            known = store.get(named[one], tenant)
            assert (known is not None) == (one in model)
            if one in model:
                model = [kept for kept in model if kept != one] + [one]
        elif one in named:
            assert store.remove(named[one], tenant) == (one in model)
            model = [kept for kept in model if kept != one]
        for owner in ("", "one"):
            held = [(kept.name, kept.source, kept.tenant) for kept in store.of(owner)]
            assert held == [kept for kept in model if kept[2] == owner]
    assert len(set(named.values())) == len(named)


def test_a_program_of_another_tenant_is_not_there() -> None:
    store = ProgramStore(100)
    kept = store.install("a.py", b"x", 0, "one")
    assert kept is not None
    assert store.get(kept.id, "two") is None
    assert not store.remove(kept.id, "two")
    assert store.of("two") == []
