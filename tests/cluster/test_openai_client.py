"""The official client against a live cluster; nothing in the path is a mock."""

from __future__ import annotations

import concurrent.futures
import json
import math
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.support.serving import LONG_S, Serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(400)]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
REPEAT = [{"role": "user", "content": "Write the word buffalo again and again, forever."}]
LONG = "The lighthouse keeper wrote down the weather of every single day. " * 40


def distinct(text: str) -> float:
    """Return the share of a text's words that differ."""
    words = text.split()
    return len(set(words)) / len(words)


def model(client: Any) -> str:
    name: str = client.models.list().data[0].id
    return name


def test_models_names_what_is_served(client: Any) -> None:
    listed = client.models.list().data
    assert [one.id for one in listed] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_chat_answers_with_the_models_text(client: Any) -> None:
    answer = client.chat.completions.create(
        model=model(client), messages=FRANCE, temperature=0, max_tokens=24
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_reads_like_the_whole_answer_and_reports_usage_at_its_end(client: Any) -> None:
    arguments = {"model": model(client), "messages": FRANCE, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**arguments)
    events = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert [event.usage is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [event.choices[0].finish_reason for event in events if event.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) <= {None}


def test_completion_takes_text_and_token_ids_and_lists_of_them(client: Any) -> None:
    arguments = {"model": model(client), "temperature": 0, "max_tokens": 6}
    one = client.completions.create(prompt="The capital of France is", **arguments)
    assert "Paris" in one.choices[0].text
    both = client.completions.create(
        prompt=["The capital of France is", "One, two, three,"], **arguments
    )
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == one.choices[0].text
    ids = client.completions.create(prompt=[504, 3575, 282, 4649, 314], **arguments)
    assert ids.usage.prompt_tokens == 5


def test_the_second_request_with_a_prefix_reports_what_was_not_computed(client: Any) -> None:
    messages = [{"role": "system", "content": LONG}, *FRANCE]
    arguments = {"model": model(client), "messages": messages, "temperature": 0, "max_tokens": 8}
    cold = client.chat.completions.create(**arguments)
    warm = client.chat.completions.create(**arguments)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    pages = (warm.usage.prompt_tokens - 1) // 16
    assert warm.usage.prompt_tokens_details.cached_tokens >= pages * 16
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_the_next_turn_hits_the_pages_of_the_answer(client: Any) -> None:
    messages = [{"role": "user", "content": "Name five large rivers and where they flow."}]
    first = client.chat.completions.create(
        model=model(client), messages=messages, temperature=0, max_tokens=64
    )
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And five mountains?"},
    ]
    second = client.chat.completions.create(
        model=model(client), messages=messages, temperature=0, max_tokens=4
    )
    before = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= (before - 1) // 16 * 16


def test_logprobs_are_those_of_a_distribution(client: Any) -> None:
    answer = client.chat.completions.create(
        model=model(client),
        messages=FRANCE,
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=5,
    )
    positions = answer.choices[0].logprobs.content
    assert len(positions) == answer.usage.completion_tokens
    for position in positions:
        assert len(position.top_logprobs) == 5
        ordered = [top.logprob for top in position.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)
        assert position.logprob == pytest.approx(ordered[0])
        assert sum(math.exp(one) for one in ordered) <= 1 + 1e-4
    assert "".join(p.token for p in positions).startswith("The capital")


def test_a_seed_gives_the_same_answer_twice_and_on_any_worker(client: Any) -> None:
    arguments = {
        "model": model(client),
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 7,
        "max_tokens": 12,
    }
    texts = {client.chat.completions.create(**arguments).choices[0].message.content for _ in "123"}
    assert len(texts) == 1
    other = client.chat.completions.create(**(arguments | {"seed": 8}))
    assert other.choices[0].message.content not in texts


def test_n_answers_share_one_prompt(client: Any) -> None:
    answer = client.chat.completions.create(
        model=model(client),
        messages=[{"role": "user", "content": LONG}],
        n=3,
        temperature=1,
        seed=1,
        max_tokens=5,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: Any) -> None:
    answer = client.chat.completions.create(
        model=model(client), messages=FRANCE, temperature=0, max_tokens=24, stop=["France"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "The capital of "


def test_penalties_and_bias_change_the_answer(client: Any) -> None:
    arguments = {"model": model(client), "messages": FRANCE, "temperature": 0, "max_tokens": 8}
    plain = client.chat.completions.create(**arguments, logprobs=True)
    first = plain.choices[0].logprobs.content[0]
    banned = client.chat.completions.create(**arguments, logit_bias={"504": -100})
    assert first.token == "The"
    assert not banned.choices[0].message.content.startswith("The ")

    loop = {**arguments, "messages": REPEAT, "max_tokens": 40}
    free = client.chat.completions.create(**loop).choices[0].message.content
    for penalty in ("frequency_penalty", "presence_penalty"):
        held = client.chat.completions.create(**loop, **{penalty: 2.0})
        assert held.choices[0].message.content != free
        assert distinct(held.choices[0].message.content) > distinct(free)


def test_max_tokens_ends_with_length(client: Any) -> None:
    answer = client.chat.completions.create(
        model=model(client), messages=FRANCE, temperature=0, max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


def test_both_workers_can_be_asked_and_say_the_same(client: Any, cluster: Serving) -> None:
    names = [one["place"] for one in httpx.get(f"{cluster.url}/status").json()["workers"]]
    assert len(names) == 2
    texts = set()
    for name in names:
        raw = client.chat.completions.with_raw_response.create(
            model=model(client),
            messages=FRANCE,
            temperature=0,
            max_tokens=8,
            extra_headers={"x-pie-place": name},
        )
        assert raw.headers["x-pie-worker"] == name
        texts.add(raw.parse().choices[0].message.content)
    assert len(texts) == 1


def test_a_worker_that_has_not_seen_a_prefix_loads_it_from_the_pool(
    client: Any, cluster: Serving
) -> None:
    names = [one["place"] for one in httpx.get(f"{cluster.url}/status").json()["workers"]]
    messages = [{"role": "system", "content": f"Pool. {LONG}"}, *FRANCE]

    def ask(place: str) -> tuple[str, int, int, str]:
        raw = client.chat.completions.with_raw_response.create(
            model=model(client),
            messages=messages,
            temperature=0,
            max_tokens=8,
            extra_headers={"x-pie-place": place},
        )
        answer = raw.parse()
        cached = answer.usage.prompt_tokens_details.cached_tokens
        pages = answer.usage.prompt_tokens // 16 - (cached + 1) // 16
        return answer.choices[0].message.content, cached, pages, raw.headers["x-pie-cached-from"]

    before = cluster.stored()
    text, _, pages, _ = ask(names[0])
    cluster.wait_until_stored(before + pages)
    moved_text, cached, _, source = ask(names[1])
    assert cached > 300
    assert source == f"pool={cached}"
    assert moved_text == text


def test_a_mixed_burst_of_requests_all_finish(client: Any) -> None:
    def ask(number: int) -> int:
        answer = client.chat.completions.create(
            model=model(client),
            messages=[{"role": "user", "content": f"{number}. " + LONG[: 40 * number]}],
            max_tokens=3 + number % 7,
        )
        return int(answer.usage.completion_tokens)

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        counts = list(threads.map(ask, range(24)))
    assert all(1 <= count <= 9 for count in counts)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 9.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"stop": ["x"] * 100}, "stop"),
    ],
)
def test_a_bad_field_is_named_and_the_next_request_works(
    client: Any, change: dict[str, Any], field: str
) -> None:
    body = {"model": model(client), "messages": FRANCE, "max_tokens": 2}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body | change, cast_to=object)
    assert field in (caught.value.param or "")
    assert caught.value.type == "invalid_request_error"
    assert client.chat.completions.create(**body).usage.completion_tokens >= 1


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-17", messages=FRANCE)
    assert caught.value.code == "model_not_found"
    assert "gpt-17" in caught.value.message


@pytest.mark.parametrize(
    "content",
    [b'{"model": "smollm2", "messages": [{"role": "us', b"\xff\xfe{}", b"", b"[]", b"null"],
    ids=["cut off", "invalid UTF-8", "empty", "a list", "null"],
)
def test_a_body_that_is_no_request_is_refused_in_openais_shape(
    cluster: Serving, content: bytes
) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions",
        content=content,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_a_body_of_100_mb_is_refused_before_it_is_read(cluster: Serving) -> None:
    address = urlsplit(cluster.url)
    with socket.create_connection((address.hostname, address.port), timeout=LONG_S) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100000000\r\n\r\n"
        )
        assert b" 413 " in connection.recv(4096).partition(b"\r\n")[0]


def test_a_client_that_hangs_up_frees_its_slots(client: Any, cluster: Serving) -> None:
    stream = client.chat.completions.create(
        model=model(client),
        messages=[{"role": "user", "content": "Count to one thousand."}],
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    deadline_s = time.monotonic() + LONG_S
    while True:
        workers = httpx.get(f"{cluster.url}/status").json()["workers"]
        if all(one["running"] == 0 for one in workers):
            return
        assert time.monotonic() < deadline_s, f"still running: {json.dumps(workers)}"
        time.sleep(0.1)


def test_metrics_health_and_readiness_are_served(cluster: Serving) -> None:
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
    told = httpx.get(f"{cluster.url}/metrics").text
    for name in ("pie_router_workers", "pie_worker_steps_total{place=", "pie_pool_up{place="):
        assert name in told
