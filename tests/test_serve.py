"""The example server: the tokens of `generate`, bad requests, limits and disconnected clients."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import load_test
import pytest
import serve
import torch

from onescan.models.causal_lm import Sampling
from onescan.training.loading import load_language_model

CHECKPOINT = "zoo/shakespeare_lightnet"
REQUESTS = [
    {"prompt": "ROMEO:", "max_new_tokens": 20, "temperature": 0},
    {"prompt": "", "max_new_tokens": 12, "seed": 3},
    {"prompt": "Enter the King, with", "max_new_tokens": 25, "temperature": 1, "top_k": 4},
    {"prompt": "ROMEO:", "max_new_tokens": 1},
]


@pytest.fixture(scope="module")
def server():
    model, tokenizer = load_language_model(CHECKPOINT)
    with serve.Server(("127.0.0.1", 0), model, tokenizer, max_requests=4) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    monkeypatch.setattr(serve.Handler, "log_message", lambda *_: None)


def send(server, body):
    connection = http.client.HTTPConnection(*server.server_address, timeout=300)
    body = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", "/generate", body)
    return connection.getresponse()


def generate(server, request):
    with send(server, request) as response:
        assert response.status == 200
        lines = response.read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    text = "".join(event["text"] for event in events)
    tokens = [token for event in events for token in event["tokens"]]
    return tokens, text, events[-1]["finish_reason"]


def expected(server, request):
    options = {"temperature": 0.8, "top_p": 0.95, "top_k": None, "seed": 0} | request
    sampling = {name: options[name] for name in ("temperature", "top_p", "top_k")}
    sampling["temperature"] = float(sampling["temperature"])
    tokens = server.worker.batch.model.generate(
        torch.tensor([server.tokenizer.begin(request["prompt"])]),
        Sampling(**sampling),
        max_new_tokens=request["max_new_tokens"],
        end=server.tokenizer.end,
        vocab_size=server.tokenizer.size,
        generator=torch.Generator().manual_seed(options["seed"]),
    )[0].tolist()
    is_end = tokens[-1] == server.tokenizer.end
    return tokens, server.tokenizer.decode(tokens), "stop" if is_end else "length"


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_concurrent_requests_get_the_tokens_of_generate(server):
    with ThreadPoolExecutor() as threads:
        together = list(threads.map(lambda request: generate(server, request), REQUESTS))
    assert together == [expected(server, request) for request in REQUESTS]
    assert generate(server, REQUESTS[0]) == together[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "Expecting property name"),
        (b"[" * 60_000, "recursion"),
        (b"", "expected a JSON object of at most 65536 bytes"),
        ([1], "expected a JSON object"),
        ({"text": "a"}, "text"),
        ({"prompt": 3}, "prompt is 3, expected str"),
        ({"prompt": "\ud800"}, "surrogates not allowed"),
        ({"max_new_tokens": True}, "max_new_tokens is True, expected int"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected a whole number of at least 1"),
        ({"temperature": -1}, "temperature is -1.0, expected 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan, expected 0 or more"),
        ({"top_p": 2}, "top_p is 2.0, expected above 0 and at most 1"),
        ({"top_k": 0}, "top_k is 0, expected a whole number of at least 1"),
    ],
)
def test_bad_requests_get_a_sentence(server, body, message):
    with send(server, body) as response:
        assert response.status == 400
        assert message in response.read().decode()


def test_requests_beyond_the_limit_are_rejected_until_a_client_disconnects(server):
    endless = {"prompt": "a", "max_new_tokens": 10**9, "temperature": 1, "seed": 1}
    wait_for(lambda: server.slots._value == 4)
    clients = [send(server, endless) for _ in range(4)]
    with send(server, REQUESTS[0]) as response:
        assert response.status == 503
        assert "try again" in response.read().decode()
    for client in clients:
        assert client.readline().startswith(b"data: ")
        client.close()
    wait_for(lambda: server.slots._value == 4 and not server.worker.batch.active)
    assert generate(server, REQUESTS[3])[2] == "length"


def test_the_load_test_prints_both_rates(capsys):
    load_test.main([CHECKPOINT, "--clients", "3", "--new-tokens", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["1 at a time", "3 at a time"]


@pytest.mark.slow
def test_an_interrupt_stops_the_server_with_a_request_running():
    command = [sys.executable, serve.__file__, CHECKPOINT, "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        port = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)\n", process.stdout.readline())[1]
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=300)
        connection.request("POST", "/generate", json.dumps({"max_new_tokens": 10**9}))
        assert connection.getresponse().readline().startswith(b"data: ")
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
