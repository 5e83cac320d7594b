"""Pages are packed where that saves a tenth, and hardly tried where it does not."""

from hypothesis import given, strategies as st

from pie.page.codec import Codec
from pie.pool.codec_choice import CodecChoice

RAW = 1000


def learn(choice: CodecChoice, lz4: int, bshuf: int) -> tuple[int, Codec]:
    """Take in a page of such packed sizes; return how many codecs were tried and which was kept."""
    sizes = {Codec.LZ4: lz4, Codec.BSHUF_LZ4: bshuf}
    tried = {codec: sizes[codec] for codec in choice.to_try()}
    return len(tried), choice.learn(RAW, tried)


def test_what_saves_most_is_used_after_four_samples() -> None:
    choice = CodecChoice()
    assert [learn(choice, 800, 600) for _ in range(4)] == [(2, Codec.BSHUF_LZ4)] * 4
    assert [learn(choice, 800, 600) for _ in range(100)] == [(1, Codec.BSHUF_LZ4)] * 100


def test_a_page_that_saves_less_than_a_tenth_is_kept_as_it_is() -> None:
    choice = CodecChoice()
    for _ in range(4):
        learn(choice, 700, 900)
    assert learn(choice, 901, 0) == (1, Codec.NONE)
    assert learn(choice, 900, 0) == (1, Codec.LZ4)


def test_pages_that_cannot_be_packed_are_tried_in_less_than_one_of_a_hundred_cases() -> None:
    choice = CodecChoice()
    tried = sum(bool(learn(choice, 1004, 990)[0]) for _ in range(10_000))
    assert tried < 100


def test_pages_that_can_be_packed_again_are_found_within_a_thousand() -> None:
    choice = CodecChoice()
    for _ in range(600):
        learn(choice, 1004, 990)
    kept = [learn(choice, 500, 400)[1] for _ in range(1_000)]
    assert kept[-1] is Codec.BSHUF_LZ4


def test_pages_that_cannot_be_packed_any_more_are_left_alone_after_a_dozen() -> None:
    choice = CodecChoice()
    for _ in range(10):
        learn(choice, 500, 400)
    assert sum(learn(choice, 1000, 1000)[0] for _ in range(500)) <= 8 + 2 * 4


@given(st.lists(st.tuples(st.integers(1, 1100), st.integers(1, 1100)), max_size=700))
def test_whatever_comes_a_codec_that_is_kept_saves_a_tenth(sizes: list[tuple[int, int]]) -> None:
    choice = CodecChoice()
    for lz4, bshuf in sizes:
        _, kept = learn(choice, lz4, bshuf)
        assert kept is Codec.NONE or {Codec.LZ4: lz4, Codec.BSHUF_LZ4: bshuf}[kept] <= 900
