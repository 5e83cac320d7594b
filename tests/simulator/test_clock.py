"""Virtual time: from event to event, in order."""

from pie.simulator.clock import VirtualClock


def test_events_happen_at_their_time_and_equals_in_the_order_they_were_set() -> None:
    clock, seen = VirtualClock(), list[tuple[str, float]]()
    for name, at in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.5)):
        clock.at(at, lambda name=name: seen.append((name, clock.now_s())))  # type: ignore[misc]
    clock.run()
    assert seen == [("a", 1.0), ("b", 1.5), ("c", 2.0), ("d", 2.0)]


def test_what_is_cancelled_does_not_happen() -> None:
    clock, seen = VirtualClock(), list[str]()
    timer = clock.at(1.0, lambda: seen.append("never"))
    clock.at(0.5, timer.cancel)
    clock.run()
    assert seen == []


def test_what_is_set_for_the_past_happens_now() -> None:
    clock, seen = VirtualClock(), list[float]()

    def late() -> None:
        clock.at(1.0, lambda: seen.append(clock.now_s()))

    clock.at(3.0, late)
    clock.run()
    assert seen == [3.0]
