"""Programs that clients installed: named by what they are, within a cap, each tenant's own."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from pie.router.program_store import ProgramStore, StoredProgram

_NAMES = st.sampled_from(["a.py", "b.py"])
_SOURCES = st.sampled_from([b"1", b"22", b"333", b"4444", b"1234567"])
_TENANTS = st.sampled_from(["", "one", "two"])
_STEPS = st.lists(
    st.tuples(st.sampled_from(["install", "get", "remove"]), _NAMES, _SOURCES, _TENANTS)
)


def leaving(model: list[tuple[str, bytes, str]], tenant: str) -> tuple[str, bytes, str]:
    """Return the oldest of who has most, the last one of all being new."""
    used = {
        owner: sum(len(one[1]) for one in model if one[2] == owner) for owner in ("", "one", "two")
    }
    others = [one for one in model[:-1] if used[one[2]] == max(used[old[2]] for old in model[:-1])]
    return next((one for one in others if one[2] == tenant), others[0])


@given(steps=_STEPS)
@example(
    # Two tenants that take as much: the program that was used last ago goes.
    [
        ("install", "a.py", b"1", ""),
        ("install", "a.py", b"1", "one"),
        ("install", "a.py", b"22", ""),
        ("install", "b.py", b"1", "one"),
        ("install", "a.py", b"333", "two"),
    ]
)
def test_it_keeps_what_each_used_last_and_takes_from_who_has_most(
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
                    model.remove(leaving(model, tenant))
        elif one in named and verb == "get":
            known = store.get(named[one], tenant)
            assert (known is not None) == (one in model)
            if one in model:
                model = [kept for kept in model if kept != one] + [one]
        elif one in named:
            assert store.remove(named[one], tenant) == (one in model)
            model = [kept for kept in model if kept != one]
        for owner in ("", "one", "two"):
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


def test_who_installs_without_end_pushes_out_its_own() -> None:
    store = ProgramStore(100)
    kept = store.install("a.py", b"x" * 40, 0, "one")
    assert kept is not None
    for number in range(50):
        assert store.install("a.py", b"%030d" % number, 0, "two") is not None
    assert store.of("one") == [kept]
    assert [one.source[-2:] for one in store.of("two")] == [b"48", b"49"]
