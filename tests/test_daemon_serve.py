"""The real daemon as a process: the OpenAI client over the socket, errors, cancellation, start and stop."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import stat
import time

import httpx
import openai
import pytest
from helpers.daemon_process import daemon, run_json, sluice, stream_lines

from sluice.daemon.chat.tokenizer import load_tokenizer

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def running(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with daemon(tiny_checkpoint, folder, "--set", "engine.max_sequences=3", "--set", "engine.prefill_chunk=16") as d:
        yield d


@pytest.fixture
def client(running):
    transport = httpx.HTTPTransport(uds=str(running.socket), verify=False)
    with openai.OpenAI(
        api_key="none", base_url="http://sluice/v1", http_client=httpx.Client(transport=transport), max_retries=0
    ) as made:
        yield made


@pytest.fixture
def own_checkpoint(tiny_checkpoint, tmp_path):
    """A copy nobody else holds: a model store is locked by the daemon that serves it."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_the_openai_client_streams_what_it_gets_whole(client):
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stream=True)
        if chunk.choices
    ]
    assert whole.choices[0].text == "".join(pieces)
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


def test_a_large_max_tokens_is_clamped_to_the_context(running):
    body = {"prompt": "a", "max_tokens": 1_000_000, "stream": True}
    with running.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200


def test_daemon_and_run_agree_to_the_bit(client, tiny_checkpoint):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, extra_body={"logits_fingerprint": True}
    )
    alone = run_json(tiny_checkpoint, "--prompt", PROMPT, "--max-tokens", "9")
    assert answer.system_fingerprint == alone["system_fingerprint"]
    assert answer.choices[0].model_extra["logits_fingerprint"] == alone["logits_fingerprint"]


def test_an_answer_cut_by_a_stop_string_has_the_fingerprint_of_what_came_up_to_it(client):
    def ask(**more):
        made = client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0, extra_body={"logits_fingerprint": True}, **more
        )
        return made.choices[0].text, made.choices[0].model_extra["logits_fingerprint"], made.usage.completion_tokens

    text, _, _ = ask(max_tokens=12)
    stop = text[len(text) // 2]
    _, cut, tokens = ask(max_tokens=12, stop=stop)
    _, whole, _ = ask(max_tokens=tokens)
    assert cut == whole


def test_token_ids_are_a_prompt(client, tiny_checkpoint):
    ids = run_json(tiny_checkpoint, "--prompt", PROMPT, "--max-tokens", "1")["prompt_ids"]
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=5, temperature=0)
    by_text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_the_same_seed_draws_the_same_beside_others(client):
    def draw(**more):
        made = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=10, seed=5, temperature=1.5, **more)
        return made.choices[0].text

    alone = draw()
    background = client.completions.create(model="tiny", prompt="x" * 200, max_tokens=200, stream=True)
    next(iter(background))
    beside = draw()
    background.close()
    assert alone == beside


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_stops_its_work(running, streaming, tiny_checkpoint):
    never = {str(i): -100 for i in load_tokenizer(tiny_checkpoint, 512, chat=False).stop_ids}
    body = {"prompt": "once", "max_tokens": 3500, "stream": streaming, "temperature": 0, "logit_bias": never}
    before = running.status()["tokens"]["generated"]
    with running.client() as http:
        if streaming:
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = stream_lines(response)
                while not next(lines).startswith("data:"):
                    pass
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.5)
    assert wait_for(lambda: running.status()["queue"]["running"] == 0), running.status()
    assert running.status()["tokens"]["generated"] - before < 3000


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": [70000000], "max_tokens": 1}, 400, "prompt"),
        ({"prompt": [-1], "max_tokens": 1}, 400, "prompt"),
        ({"prompt": [True], "max_tokens": 1}, 400, "prompt"),
        ({"prompt": [1.5], "max_tokens": 1}, 400, "prompt"),
        ({"prompt": "", "max_tokens": 1}, 400, "prompt"),
        ({"prompt": [], "max_tokens": 1}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**31}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1, "model": "gpt-4"}, 404, "model"),
        ({"max_tokens": 1}, 400, "prompt"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "word " * 5000, "max_tokens": 1}, 400, "prompt"),
    ],
)
def test_bad_requests_get_openais_error(running, body, status, param):
    with running.client() as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"].startswith(param)


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b'{"prompt": "a", "max_tokens": 1e400}', b"null", b""])
def test_malformed_json_is_a_400(running, raw):
    with running.client() as http:
        response = http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "error" in response.json()


def test_a_body_over_the_limit_is_a_413(running):
    with running.client() as http:
        response = http.post("/v1/completions", content=b" " * (9 << 20), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_the_socket_is_for_owner_and_group(running):
    assert stat.S_IMODE(running.socket.stat().st_mode) == 0o660


def test_a_second_daemon_names_the_first(running, tiny_checkpoint, tmp_path):
    other_socket = sluice("serve", "--model", str(tiny_checkpoint), "--socket", str(tmp_path / "other.sock"))
    assert other_socket.returncode == 6
    assert str(running.process.pid) in other_socket.stderr


def test_ask_streams_to_the_terminal(running, tiny_checkpoint):
    done = sluice("ask", "--socket", str(running.socket), "--max-tokens", "6", "Hello")
    assert done.returncode == 0, done.stderr


def test_sigterm_ends_cleanly_and_takes_the_socket_away(own_checkpoint, tmp_path):
    with daemon(own_checkpoint, tmp_path) as running:
        assert running.stop() == 0, running.log
        assert not running.socket.exists()
        assert "Traceback" not in running.log


def test_sigterm_while_loading_ends_it(own_checkpoint, tmp_path):
    with daemon(own_checkpoint, tmp_path, wait=False) as running:
        assert wait_for(running.socket.exists)
        assert running.stop() == 0, running.log
        assert not running.socket.exists()
        assert "Traceback" not in running.log


def test_sigterm_lets_a_running_answer_finish(own_checkpoint, tmp_path):
    with daemon(own_checkpoint, tmp_path) as running, running.client() as http:
        body = {"prompt": "once", "max_tokens": 60, "stream": True, "temperature": 0}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = stream_lines(response)
            while not next(lines).startswith("data:"):
                pass
            running.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert running.process.wait(30) == 0


def test_a_dead_socket_is_replaced_and_a_file_is_not(own_checkpoint, tmp_path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with daemon(own_checkpoint, tmp_path) as running:
        running.stop()
    path.write_text("precious")
    refused = sluice("serve", "--model", str(own_checkpoint), "--socket", str(path))
    assert refused.returncode == 2
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--set", "memory.totl=1GiB"], 2, "memory.total"),
        (["--preset", "lptop"], 2, "laptop"),
        (["--set", "memory.total=64MiB"], 3, "bytes short"),
        (["--set", "compute.isa=neon"], 2, "neon"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(tiny_checkpoint, tmp_path, arguments, code, says):
    done = sluice("serve", "--model", str(tiny_checkpoint), "--socket", str(tmp_path / "s"), *arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_missing_model_is_exit_4(tmp_path):
    done = sluice("serve", "--model", str(tmp_path / "nowhere"), "--socket", str(tmp_path / "s"))
    assert done.returncode == 4
    assert len(done.stderr.strip().splitlines()) == 1


def test_json_errors_are_json(tmp_path):
    done = sluice("run", "--model", str(tmp_path / "nowhere"), "--prompt", "a", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["error"]["exit_code"] == 4


def test_nobody_on_the_socket_is_exit_5(tmp_path):
    done = sluice("ask", "--socket", str(tmp_path / "s"), "hello")
    assert done.returncode == 5
