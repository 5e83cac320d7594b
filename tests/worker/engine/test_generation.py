"""How an answer ends and what its text is, with a model that says what it is told to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import FinishReason, Sampling
from pie.worker.batch import Batch, StepOutput
from tests.worker.engine.driver import EOS, GREEDY, Answer, Driver

PROMPT = [60, 61, 62]
VOCAB = 256


class Scripted:
    """A model whose likeliest tokens after the prompt are the script's."""

    def __init__(self, script: list[int]) -> None:
        self.script = script

    def run(self, batch: Batch) -> StepOutput:
        logits = torch.zeros(len(batch.passes), VOCAB)
        for at, one in enumerate(batch.passes):
            if one.end >= len(PROMPT):
                logits[at, self.script[one.end - len(PROMPT)]] = 20.0
        rows = [range(i, i + 1) for i in range(len(batch.passes))]
        return StepOutput(logits, rows, [None] * len(rows))


class Speaker:
    """Answers with given bytes; the tokenizer has a token for each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.of_byte = {tokenizer.token_bytes(token): token for token in range(VOCAB)}

    def ids(self, text: bytes) -> list[int]:
        return [self.of_byte[bytes([byte])] for byte in text]

    def say(self, text: bytes, **fields: Any) -> Answer:
        script = self.ids(text)
        driver = Driver(
            Scripted([*script, 0]), self.tokenizer, pages=16, page_tokens=4, eos=self.ids(b"\0")[0]
        )
        return driver.generate(PROMPT, **({"max_tokens": len(script)} | fields))


@pytest.fixture(scope="module")
def speaker(tokenizer: Tokenizer) -> Speaker:
    return Speaker(tokenizer)


def test_an_end_token_ends_and_is_not_shown(speaker: Speaker) -> None:
    answer = speaker.say(b"Hi\0more")
    assert (answer.text, answer.finish_reason) == ("Hi", FinishReason.STOP)
    assert answer.token_ids == speaker.ids(b"Hi\0")


def test_an_end_token_can_be_ignored(speaker: Speaker) -> None:
    answer = speaker.say(b"Hi\0more", ignore_eos=True)
    assert (answer.text, answer.finish_reason) == ("Hi\0more", FinishReason.LENGTH)


def test_a_stop_token_ends_and_is_not_shown(speaker: Speaker) -> None:
    answer = speaker.say(b"one;two", stop_token_ids=tuple(speaker.ids(b";")), ignore_eos=True)
    assert (answer.text, answer.finish_reason) == ("one", FinishReason.STOP)


def test_a_stop_string_across_tokens_ends_and_is_not_shown(speaker: Speaker) -> None:
    answer = speaker.say(b"one END two", stop=("END", "x"))
    assert (answer.text, answer.finish_reason) == ("one ", FinishReason.STOP)
    assert answer.stop_string == "END"
    assert answer.token_ids == speaker.ids(b"one END")


def test_what_only_began_like_a_stop_string_is_shown_at_the_end(speaker: Speaker) -> None:
    answer = speaker.say(b"the EN", stop=("END",))
    assert (answer.text, answer.finish_reason) == ("the EN", FinishReason.LENGTH)


def test_text_never_ends_inside_a_character(speaker: Speaker) -> None:
    text = "né 世界 🎉"
    driver = Driver(
        Scripted([*speaker.ids(text.encode()), 0]),
        speaker.tokenizer,
        pages=16,
        page_tokens=4,
        eos=EOS,
    )
    answer = driver.submit(PROMPT, len(text.encode()), ignore_eos=True)
    shown = []
    while answer.finish_reason is None:
        driver.step()
        shown.append(answer.text)
    assert answer.text == text
    assert all(text.startswith(one) for one in shown)


def test_half_a_character_at_the_end_is_shown_as_a_replacement(speaker: Speaker) -> None:
    answer = speaker.say("a世".encode()[:3])
    assert answer.text == "a\ufffd"


def test_the_length_counts_what_another_worker_made(speaker: Speaker) -> None:
    script = speaker.ids(b"abcdef")
    driver = Driver(Scripted([*script, 0]), speaker.tokenizer, pages=16, page_tokens=4)
    answer = driver.generate([*PROMPT, *script[:4]], 6, output_start=len(PROMPT), ignore_eos=True)
    assert answer.text == "ef"
    assert answer.finish_reason is FinishReason.LENGTH


def test_a_stop_string_that_began_at_another_worker_is_found(speaker: Speaker) -> None:
    script = speaker.ids(b"ab END")
    driver = Driver(Scripted([*script, 0]), speaker.tokenizer, pages=16, page_tokens=4)
    answer = driver.generate(
        [*PROMPT, *script[:4]], 9, output_start=len(PROMPT), stop=("END",), ignore_eos=True
    )
    assert (answer.text, answer.stop_string) == ("", "END")


def test_penalties_count_generated_tokens_only(speaker: Speaker) -> None:
    strong = Sampling(temperature=0, presence_penalty=30.0)
    (prompt_token,) = PROMPT[:1]
    driver = Driver(
        Scripted([prompt_token, prompt_token, 0]), speaker.tokenizer, pages=16, page_tokens=4
    )
    answer = driver.generate(PROMPT, 2, sampling=strong, ignore_eos=True)
    assert answer.token_ids[0] == prompt_token
    assert answer.token_ids[1] != prompt_token


def test_penalties_go_on_from_what_another_worker_made(speaker: Speaker) -> None:
    strong = Sampling(temperature=0, frequency_penalty=30.0)
    token = 77
    driver = Driver(Scripted([token, token, 0]), speaker.tokenizer, pages=16, page_tokens=4)
    answer = driver.generate(
        [*PROMPT, token], 2, output_start=len(PROMPT), sampling=strong, ignore_eos=True
    )
    assert answer.token_ids != [token]


def test_a_seed_gives_the_same_answer_and_can_be_continued(speaker: Speaker) -> None:
    sampling = Sampling(temperature=1.0, seed=11)
    flat = Scripted([0] * 40)

    def say(tokens: list[int]) -> list[int]:
        driver = Driver(flat, speaker.tokenizer, pages=16, page_tokens=4, eos=999)
        sampling_hot = Sampling(temperature=20.0, seed=sampling.seed)
        return driver.generate(
            tokens, 20, output_start=len(PROMPT), sampling=sampling_hot
        ).token_ids

    whole = say(PROMPT)
    assert len(set(whole)) > 10
    assert say(PROMPT) == whole
    assert say([*PROMPT, *whole[:7]]) == whole[7:]


def test_logprobs_come_with_each_token(speaker: Speaker) -> None:
    sampling = Sampling(temperature=0, logprobs=2)
    answer = speaker.say(b"ab", sampling=sampling)
    assert [one.chosen.token for one in answer.logprobs] == [b"a", b"b"]
    assert all(len(one.top) == 2 and one.top[0] == one.chosen for one in answer.logprobs)


def test_no_logprobs_unless_asked(speaker: Speaker) -> None:
    assert not speaker.say(b"ab", sampling=GREEDY).logprobs
