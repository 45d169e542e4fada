"""castor serve and castor chat: OpenAI's client, several clients at once, limits, keys."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from castor import cli
from castor.errors import UsageError
from castor.recipes.chat import converse
from castor.recipes.generation import Sampling, encode_chat, encode_text, generate
from castor.recipes.models import InferenceModel, load_for_inference
from castor.recipes.serve import checked_keys, listening
from castor.recipes.turns import QueueFullError, Turn, Turns
from serving import POSITIONS, Served, Slow, save_model, served, wait_for

BUDGET = 128 * 1024
"""Bytes, of 276 KiB that the model's parameters take."""
HELLO: list[Any] = [{"role": "user", "content": "What is a chunk?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> InferenceModel:
    settings = {"device": "cpu", "device_memory": BUDGET, "host_memory": "64MiB"}
    return load_for_inference(folder, settings=settings)


@pytest.fixture(scope="module")
def server(model: InferenceModel) -> Iterator[Served]:
    with served(model) as running:
        yield running


def client(server: Served, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0, timeout=60, **options)


@pytest.fixture
def ask(server: Served) -> Iterator[openai.OpenAI]:
    with client(server) as one:
        yield one


def test_models_are_listed(ask: openai.OpenAI) -> None:
    assert [one.id for one in ask.models.list()] == ["tiny"]
    assert ask.models.retrieve("tiny").owned_by == "castor"
    with pytest.raises(openai.NotFoundError, match=r"there is no model 'gpt'.*has 'tiny'"):
        ask.models.retrieve("gpt")


def test_answers_are_those_of_generate(ask: openai.OpenAI, model: InferenceModel) -> None:
    prompt = encode_chat(model, HELLO)
    [expected] = generate(model, prompt, Sampling(max_new_tokens=24, temperature=0.0))
    for most in ("max_tokens", "max_completion_tokens"):
        chat = ask.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, **{most: 24}
        )
        assert chat.choices[0].message.content == expected.text
        assert chat.choices[0].message.role == "assistant"
        assert chat.choices[0].finish_reason == expected.finish
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len(prompt)
        assert chat.usage.completion_tokens == len(expected.token_ids)
        assert chat.usage.total_tokens == len(prompt) + len(expected.token_ids)
    ids = encode_text(model, "Memory")
    [expected] = generate(model, ids, Sampling(max_new_tokens=16, temperature=0.0))
    for given in ("Memory", ["Memory"], ids, [ids]):
        text = ask.completions.create(model="tiny", prompt=given, temperature=0)
        assert text.choices[0].text == expected.text


def test_an_answer_goes_into_the_next_request(ask: openai.OpenAI) -> None:
    first = ask.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=1)
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        first.choices[0].message,
        {"role": "user", "content": parts},
    ]
    more = ask.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=1)
    joined = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    same = ask.chat.completions.create(model="tiny", messages=joined, max_tokens=8, seed=1)
    assert more.choices[0].message.content == same.choices[0].message.content


def test_streams_make_the_same_text(ask: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "seed": 3, "n": 2}
    whole = ask.chat.completions.create(messages=HELLO, **asked)
    texts, ends, usage = ["", ""], [None, None], None
    stream = ask.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **asked
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    text = ask.completions.create(prompt="Memory", **asked)
    texts = ["", ""]
    for piece in ask.completions.create(prompt="Memory", stream=True, **asked):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [choice.text for choice in text.choices]


def test_the_studio_shows_an_answer_while_it_comes(
    model: InferenceModel,
) -> None:
    from castor.recipes.studio_page import answers

    with served(model, max_new_tokens=9) as short:
        tries = (list(answers(short.url, HELLO)) for _ in range(20))
        pieces = next(found for found in tries if "".join(found))  # one in 400 ends at once
        assert all(longer.startswith(piece) for piece, longer in pairwise(pieces))
        long = [{"role": "user", "content": "a " * POSITIONS}]
        with pytest.raises(
            UsageError, match=r"^the prompt has \d+ tokens and .*shorten the prompt"
        ):
            list(answers(short.url, long))
    with pytest.raises(UsageError, match=r"^the server at http://127.* does not answer"):
        list(answers(short.url, HELLO))


def test_events_end_with_done(server: Served) -> None:
    body = json.dumps({"model": "tiny", "prompt": "A", "max_tokens": 3, "stream": True})
    status, headers, text = posted(server, "/v1/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_a_seed_gives_the_same_answers(ask: openai.OpenAI) -> None:
    def answers(**more: Any) -> list[str]:
        found = ask.completions.create(model="tiny", prompt="Memory", max_tokens=20, n=2, **more)
        return [choice.text for choice in found.choices]

    assert answers(seed=5) == answers(seed=5)
    assert len(set(answers(seed=5))) == 2
    assert answers(seed=5) != answers(seed=6)
    assert answers() != answers()
    assert len(set(answers(temperature=0))) == 1


def test_stop_strings_cut_exactly(ask: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "A stop", "max_tokens": 40, "seed": 4}
    whole = ask.completions.create(**asked).choices[0].text
    stop = whole[15:19]
    expected = whole[: whole.index(stop)]
    for given in (stop, [stop], ["never there", "nor this", stop]):
        found = ask.completions.create(stop=given, **asked).choices[0]
        assert (found.text, found.finish_reason) == (expected, "stop")
        pieces = ask.completions.create(stop=given, stream=True, **asked)
        assert "".join(piece.choices[0].text for piece in pieces) == expected


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"logprobs": True}, "castor serve does not support 'logprobs'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "not support 'tools'"),
        ({"response_format": {"type": "json_object"}}, "not support 'response_format'"),
        ({"presence_penalty": 0.5}, "not support 'presence_penalty'"),
        ({"extra_body": {"best": 1}}, "best: there is no such argument"),
        ({"stop": list("abcde")}, "stop has 5 texts; give at most 4"),
        ({"stop": ""}, "stop has an empty text"),
        ({"temperature": 2.5}, r"temperature is 2.5; it must lie in \[0, 2\]"),
        ({"top_p": 0}, "top_p is 0"),
        ({"n": 17}, "n: Input should be less than or equal to 16"),
        ({"n": "two"}, "n: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": 250}, r"together 2\d\d; tiny takes 256"),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "are the same: give one"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    ask: openai.OpenAI, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        ask.chat.completions.create(**{"model": "tiny", "messages": HELLO} | more)
    assert refused.value.type == "invalid_request_error"


def test_values_that_ask_for_nothing_are_taken(ask: openai.OpenAI) -> None:
    found = ask.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, logprobs=False, presence_penalty=0,
        frequency_penalty=0.0, response_format={"type": "text"}, tools=[],
    )  # fmt: skip
    assert found.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="not support 'logprobs'"):
        ask.completions.create(model="tiny", prompt="A", logprobs=0)


def posted(
    server: Served, path: str, body: str | bytes, **headers: str
) -> tuple[int, dict[str, str], str]:
    host = server.url.removeprefix("http://").removesuffix("/v1")
    with closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        given = {"Content-Type": "application/json"} | headers
        connection.request("POST", path, body, given)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, found, response.read().decode()


def test_requests_that_are_none_are_refused(server: Served) -> None:
    def refused(body: str, path: str = "/v1/completions", **headers: str) -> tuple[int, str]:
        status, _, text = posted(server, path, body, **headers)
        return status, json.loads(text)["error"]["message"]

    assert refused('{"model": ')[0] == 400
    assert refused("[" * 100_000)[0] == 400
    assert refused("[]") == (400, "the request is a list; give arguments by name")
    assert refused("{}") == (400, "model: Field required")
    assert refused('{"model": "tiny", "prompt": ""}') == (
        400, "the prompt has no tokens; give some text")  # fmt: skip
    assert refused('{"model": "tiny", "prompt": [400]}') == (
        400, "token 400 is not one of the model's 400")  # fmt: skip
    assert refused('{"model": "tiny", "prompt": ["A", "B"]}')[1].startswith("2 prompts are given")
    assert refused("{}", "/v1/embeddings")[0] == 404
    assert "it has GET /v1/models" in refused("{}", "/v1/models")[1]
    # Pages of other sites, in a browser of this machine: a plain form, and a name that means it.
    assert refused("{}", **{"Content-Type": "text/plain"})[0] == 415
    assert refused("{}", Host="evil.example:8000")[0] == 403


def test_requests_have_a_size(model: InferenceModel) -> None:
    with served(model, max_body_bytes=1000, max_new_tokens=5) as server:
        body = json.dumps({"model": "tiny", "prompt": "A" * 2000})
        status, _, text = posted(server, "/v1/completions", body)
        assert status == 413
        assert "may have 1,000" in text
        chunked = (part.encode() for part in (body[:500], body[500:]))
        status, _, text = posted(server, "/v1/completions", chunked)  # type: ignore[arg-type]
        assert status == 413
        assert "more than 1,000 bytes" in text
        with client(server) as ask:
            with pytest.raises(openai.BadRequestError, match=r"6 new tokens .* gives at most 5"):
                ask.completions.create(model="tiny", prompt="A", max_tokens=6)
            found = ask.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
            assert found.usage is not None
            assert found.usage.completion_tokens <= 5


def test_requests_have_a_time(model: InferenceModel) -> None:
    # Without a seed, one request in a hundred ends by itself before its time is over.
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "seed": 0}
    with served(model, max_seconds=0.05) as server, client(server) as ask, Slow(model, 0.02):
        with pytest.raises(openai.InternalServerError, match=r"longer than 0\.05 s") as refused:
            ask.completions.create(prompt="A", **asked)
        assert refused.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"longer than 0\.05 s"):
            list(ask.completions.create(prompt="A", stream=True, **asked))


def test_a_request_that_does_not_fit_in_memory_leaves_the_server_well(
    model: InferenceModel, ask: openai.OpenAI
) -> None:
    prompt = [5] * (POSITIONS - 2)
    with pytest.raises(openai.BadRequestError, match="does not fit in memory: out of device"):
        ask.completions.create(model="tiny", prompt=prompt, max_tokens=2, n=16)
    ask.completions.create(model="tiny", prompt="A", max_tokens=2)


def test_keys(model: InferenceModel) -> None:
    with served(model, keys=("one", "two")) as server:
        for key in ("one", "two"):
            with client(server, key) as ask:
                assert [found.id for found in ask.models.list()] == ["tiny"]
        with client(server, "three") as ask:
            with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
                ask.models.list()
            with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
                ask.chat.completions.create(model="tiny", messages=HELLO)
        status, _, text = posted(server, "/v1/completions", "{}")
        assert status == 401
        assert json.loads(text)["error"]["code"] == "invalid_api_key"


def test_twenty_clients_of_which_two_break_off(model: InferenceModel) -> None:
    prompts = [f"Client {i}" for i in range(20)]
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    expected = [generate(model, encode_text(model, prompt), sampling)[0].text for prompt in prompts]
    with served(model, max_waiting=20) as server, Slow(model, 0.001) as slow:

        def one(i: int) -> str | None:
            with client(server) as ask:
                asked: dict[str, Any] = {
                    "model": "tiny", "prompt": prompts[i], "temperature": 0.0, "stream": i % 2 == 0,
                }  # fmt: skip
                if i in (4, 8):  # break off in the middle of a long answer
                    stream = ask.completions.create(max_tokens=200, **asked)
                    next(iter(stream))
                    stream.close()
                    return None
                found = ask.completions.create(max_tokens=12, **asked)
                if i % 2 == 0:
                    return "".join(piece.choices[0].text for piece in found)
                return found.choices[0].text

        with ThreadPoolExecutor(20) as threads:
            found = list(threads.map(one, range(20)))
        wait_for(lambda: server.api.turns._current is None)
        assert [text for text in found if text is not None] == [
            text for i, text in enumerate(expected) if i not in (4, 8)
        ]
        assert slow.tokens < 18 * 12 + 2 * 200  # that the two would have taken


def test_generation_stops_for_a_client_that_is_gone(model: InferenceModel) -> None:
    for stream in (False, True):
        with served(model) as server, Slow(model, before_held=3) as slow:
            body = {"model": "tiny", "prompt": "A", "max_tokens": 200, "seed": 0, "stream": stream}
            text = json.dumps(body)
            host, _, port = server.url.removeprefix("http://").removesuffix("/v1").partition(":")
            with socket.create_connection((host, int(port))) as connection:
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
                )
                connection.sendall((head + text).encode())
                wait_for(lambda: slow.tokens == 4)
                turn = server.api.turns._current
                assert turn is not None
            wait_for(turn.gone.is_set)
            slow.goes_on.set()
            wait_for(lambda: server.api.turns._current is None)
            assert slow.tokens <= 5


def test_a_full_queue_says_when_to_come_again(model: InferenceModel) -> None:
    with (
        served(model, max_waiting=1) as server,
        Slow(model, before_held=0) as slow,
        client(server) as ask,
        ThreadPoolExecutor(2) as threads,
    ):

        def create() -> Any:
            return ask.completions.create(model="tiny", prompt="A", max_tokens=20, seed=0)

        first = threads.submit(create)
        wait_for(lambda: slow.tokens >= 1)
        second = threads.submit(create)
        wait_for(lambda: server.api.turns._waiting)
        with pytest.raises(openai.RateLimitError, match="1 requests are waiting") as refused:
            create()
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "queue_full"
        slow.goes_on.set()
        assert first.result().choices[0].text == second.result().choices[0].text
        create()


def held_turns(enter: list[Turn[str]]) -> tuple[Turns[str], threading.Event, list[str]]:
    """Returns turns that `enter` waits for, the event that lets them go, and the work done."""
    done: list[str] = []
    go = threading.Event()

    def compute(turn: Turn[str]) -> None:
        go.wait(30)
        done.append(turn.work)

    turns = Turns(compute, max_waiting=9)
    turns.enter(enter[0])
    wait_for(lambda: turns._current is enter[0])
    for turn in enter[1:]:
        turns.enter(turn)
    return turns, go, done


def test_clients_take_turns_and_each_comes_in_its_order() -> None:
    enter = [Turn(client=one[0], work=one) for one in
             ("a0", "a1", "a2", "a3", "a4", "b0", "b1", "c0", "a5", "c1")]  # fmt: skip
    turns, go, done = held_turns(enter)
    with pytest.raises(QueueFullError, match="9 requests are waiting"):
        turns.enter(Turn(client="d", work="d0"))
    turns.leave(enter[3])
    assert enter[3].gone.is_set()
    go.set()
    wait_for(lambda: len(done) == 9)
    assert done == ["a0", "a1", "b0", "c0", "a2", "b1", "c1", "a4", "a5"]
    turns.close()
    with pytest.raises(QueueFullError):
        turns.enter(Turn(client="a", work="a6"))


def test_users_of_a_client_take_turns_within_its_turns() -> None:
    enter = [Turn(client=one[0], user=one[1], work=one) for one in
             ("gx0", "gx1", "gx2", "gy0", "gz0", "gy1", "h-0", "h-1", "gw0")]  # fmt: skip
    turns, go, done = held_turns(enter)
    turns.leave(enter[-1])
    go.set()
    wait_for(lambda: len(done) == 8)
    assert done == ["gx0", "gx1", "h-0", "gy0", "h-1", "gz0", "gx2", "gy1"]
    turns.close()


def test_a_request_comes_in_the_turns_of_its_user(
    ask: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Turn[Any]] = []
    enter = Turns.enter

    def seen(turns: Turns[Any], turn: Turn[Any]) -> None:
        entered.append(turn)
        enter(turns, turn)

    monkeypatch.setattr(Turns, "enter", seen)
    ask.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, user="ann")
    ask.completions.create(model="tiny", prompt="A", max_tokens=1, user="bob")
    ask.completions.create(model="tiny", prompt="A", max_tokens=1)
    assert [turn.user for turn in entered] == ["ann", "bob", ""]
    assert len({turn.client for turn in entered}) == 1


def test_turns_that_close_give_up_all_that_wait() -> None:
    done: list[str] = []

    def compute(turn: Turn[str]) -> None:
        turn.gone.wait(30)
        done.append(turn.work)

    turns = Turns(compute, max_waiting=5)
    for work in ("one", "two", "three"):
        turns.enter(Turn(client=work, work=work))
    turns.close()
    assert done == ["one", "two", "three"]


def test_others_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "some.host"):
        with pytest.raises(UsageError, match=f"--host {host}: other machines could use the model"):
            checked_keys(host, [])
        assert checked_keys(host, ["key"]) == ["key"]
    for host in ("127.0.0.1", "::1", "localhost"):
        assert checked_keys(host, []) == []
    for key in ("", "a key", "schlüssel"):
        with pytest.raises(UsageError, match="--api-key: give a text of ASCII"):
            checked_keys("127.0.0.1", [key])


def test_an_address_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--host no\.such\.invalid: there is no such address"):
        listening("no.such.invalid", 0)
    with pytest.raises(UsageError, match=r"port 0 of 192\.0\.2\.1 is not to be had"):
        listening("192.0.2.1", 0)


COMMAND = """
import sys, typer
from castor import cli
from castor.recipes import {0}
cli.app = typer.Typer(pretty_exceptions_enable=False)
cli.app.command()({0}.{0})
"""
"""Makes castor's main, which makes errors sentences, run a sub-command alone."""


def run_command(
    monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str, stdin: str = ""
) -> int:
    """Runs a sub-command in this process; returns its exit status."""
    monkeypatch.setattr(cli, "app", cli.app)  # to put it back
    exec(COMMAND.format(name))
    monkeypatch.setattr(sys, "argv", ["castor", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_port_in_use_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run_command(monkeypatch, "serve", str(folder), "--port", port) == 1
    assert capsys.readouterr().err == (
        f"castor: error: port {port} of 127.0.0.1 is in use by another program; give another one "
        "with --port, or --port 0\n"
    )


def test_serve_runs_until_it_is_told_to_end(folder: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", COMMAND.format("serve") + "cli.main()", str(folder)),
            *("--port", "0", "--device", "cpu", "--device-memory", "128KiB"),
            *("--host-memory", "64MiB", "--name", "mine"),
        ],
        text=True,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    said = ""
    while "castor serve: mine at " not in said and process.poll() is None:
        said = process.stderr.readline()
    url = said.split(" at ")[1].split(",")[0]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as ask:
        stream = ask.completions.create(
            model="mine", prompt="A", max_tokens=200, stream=True, seed=0
        )
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="castor serve ends"):
            list(stream)
    _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")


def test_chat_answers_what_is_piped_in(
    folder: Path,
    model: InferenceModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory = ("--device", "cpu", "--device-memory", "128KiB", "--host-memory", "64MiB")
    asked = ("--temperature", "0", "--max-new-tokens", "12", "--system", "Be brief.")
    turns = "Hello\n\nAgain\n/reset\nHello\n/exit\nnot asked\n"
    assert run_command(monkeypatch, "chat", str(folder), *memory, *asked, stdin=turns) == 0
    shown = capsys.readouterr().out
    messages = [{"role": "system", "content": "Be brief."}]
    texts = []
    for turn in ("Hello", "Again"):
        messages.append({"role": "user", "content": turn})
        sampling = Sampling(max_new_tokens=12, temperature=0.0)
        [answer] = generate(model, encode_chat(model, messages), sampling)
        messages.append({"role": "assistant", "content": answer.text})
        texts.append(answer.text)
    hidden = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
    assert shown == "\n".join([*texts, texts[0], ""]).translate(hidden)

    too_long = "word " * 400
    assert run_command(monkeypatch, "chat", str(folder), *memory, stdin=too_long) == 1
    said = capsys.readouterr().err
    assert "tiny takes 256" in said
    assert said.endswith("/reset begins anew\n")


def test_ctrl_c_ends_an_answer_and_not_the_chat(
    model: InferenceModel, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter(["Hello", "Again", None])
    sampling = Sampling(max_new_tokens=100, seed=0)
    with Slow(model, before_held=4) as slow:

        def press() -> None:
            wait_for(lambda: slow.tokens == 5)
            os.kill(os.getpid(), signal.SIGINT)
            slow.goes_on.set()

        pressing = threading.Thread(target=press)
        pressing.start()
        converse(model, sampling, system=None, fits=True, ask=lambda: next(turns))
        pressing.join()
        # The second answer may end before 100 tokens, the first one has not got to its end.
        assert 10 < slow.tokens < 195
    assert capsys.readouterr().out.count("\n") >= 2
