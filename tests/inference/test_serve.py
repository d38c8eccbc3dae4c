"""The example server: the tokens of `generate`, bad requests, limits and disconnected clients."""

import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import load_test
import pytest
import serve
import torch

from onescan.inference.loading import load_language_model
from onescan.models.causal_lm import Sampling

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


def test_a_port_in_use_is_named_in_one_line(server):
    command = [sys.executable, serve.__file__, CHECKPOINT, "--port", str(server.server_port)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    assert f"error: cannot listen on 127.0.0.1:{server.server_port}: " in process.stderr


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


@pytest.mark.slow
def test_concurrent_requests_get_the_tokens_of_generate(server):
    with ThreadPoolExecutor() as threads:
        together = list(threads.map(lambda request: generate(server, request), REQUESTS))
    assert together == [expected(server, request) for request in REQUESTS]
    assert generate(server, REQUESTS[0]) == together[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON at character 1"),
        (b"hello", "the body is not JSON at character 0"),
        (b"[" * 60_000, "the body is nested too deeply"),
        (b"", "the body is not JSON at character 0"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8 at byte 12"),
        ('{"prompt": "a"}'.encode("utf-16"), "the body is not UTF-8 at byte 0"),
        (b" " * 70_000, "the body has 70000 bytes, expected at most 65536"),
        (b" " * 900_000, "the body has 900000 bytes, expected at most 65536"),
        ([1], "the body is [1], expected a JSON object"),
        (None, "the body is null, expected a JSON object"),
        ({"text": "a"}, "text"),
        ({"a\ud800": 1}, "a\\ud800 is unknown"),
        ({"prompt": 3}, "prompt is 3, expected str"),
        ({"prompt": "a\ud800"}, "prompt is not valid Unicode at character 1"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
        ({"seed": 2**70}, "the body has an integer with 22 digits, expected at most 15"),
        (b'{"max_new_tokens": 1%s}' % (b"0" * 5000), "an integer with 5001 digits"),
        ({"temperature": 10**400}, "an integer with 401 digits"),
        ({"temperature": float("inf")}, "temperature is inf, expected 0 or more"),
        ({"top_k": 10**30}, "an integer with 31 digits"),
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


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ({}, "''"),
        ({"Content-Length": "-1"}, "'-1'"),
        ({"Content-Length": "two"}, "'two'"),
        ({"Content-Length": "1_0"}, "'1_0'"),
        ({"Content-Length": "9" * 5000}, "'999"),
        ({"Transfer-Encoding": "chunked"}, "''"),
    ],
)
def test_requests_without_a_valid_length_are_rejected(server, headers, length):
    connection = http.client.HTTPConnection(*server.server_address, timeout=300)
    connection.putrequest("POST", "/generate")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    with connection.getresponse() as response:
        assert response.status == 400
        assert f"Content-Length is {length}" in response.read().decode()


def begun(server, sent):
    """Open a connection and send the beginning of a request."""
    client = socket.create_connection(server.server_address, timeout=300)
    client.sendall(sent)
    return client


HALF = b"POST /generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (HALF, b"the body ended after 1 of 100 bytes"),
        (b"POST /generate HTTP/1.1\r\nX: y", b"Content-Length is ''"),
        (b"", b""),
    ],
)
def test_a_slow_request_is_ended(server, monkeypatch, sent, reply):
    monkeypatch.setattr(serve, "READ_S", 0.1)
    with begun(server, sent) as client:
        assert reply in client.makefile("rb").read()
    wait_for(lambda: not server.reading)


def test_incomplete_requests_are_limited(server, monkeypatch):
    monkeypatch.setattr(serve, "MAX_READING", 3)
    clients = [begun(server, HALF) for _ in range(3)]
    wait_for(lambda: len(server.reading) == 3)
    with begun(server, b"") as client:
        assert b"503" in client.makefile("rb").read()
    for client in clients:
        client.close()
    wait_for(lambda: not server.reading)
    assert generate(server, REQUESTS[3])[2] == "length"


def test_a_client_that_leaves_before_its_reply_is_ignored(server, capsys):
    for sent in (HALF, HALF + b" " * 99, b"GET / HTTP/1.1\r\n\r\n", b""):
        client = begun(server, sent)
        reset = struct.pack("ii", 1, 0)  # close without waiting, so that sending fails
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        client.close()
    wait_for(lambda: not server.reading)
    assert generate(server, REQUESTS[3])[2] == "length"
    assert capsys.readouterr().err == ""


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
