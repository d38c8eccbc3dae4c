"""Serve a causal language model over HTTP with continuous batching.

python examples/serve.py zoo/shakespeare_lightnet --port 8000
curl -N localhost:8000/generate -d '{"prompt": "ROMEO:", "max_new_tokens": 200, "seed": 1}'

The response streams server-sent events with tokens and text, and ends with a finish_reason.
"""

import argparse
import json
import socket
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from onescan.configs import from_dict
from onescan.experiments.recipes.files import import_file
from onescan.inference.loading import load_language_model
from onescan.models.causal_lm import Sampling
from onescan.models.continuous_batch import BatchWorker, ContinuousBatch

MAX_BYTES = 2**16  # of a request
MAX_READ = 2**20  # bytes to read of a larger request, so that its client receives the reply
MAX_DIGITS = 15  # of an integer
READ_S = 30  # seconds to receive a whole request
MAX_READING = 128  # connections whose request is incomplete
BUSY = b"HTTP/1.0 503 Service Unavailable\r\n\r\ntoo many connections are open; try again\n"


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """The JSON object of a request, and its defaults."""

    temperature: float = 0.8
    top_p: float = 0.95
    prompt: str = ""
    max_new_tokens: int = 200
    seed: int = 0


class Server(ThreadingHTTPServer):
    """Each request has a thread that waits for its tokens; one more thread runs the model."""

    request_queue_size = 128

    def __init__(self, address, model, tokenizer, max_requests=64):
        self.tokenizer, self.device = tokenizer, model.network.device
        self.slots = threading.BoundedSemaphore(max_requests)
        self.reading = {}  # connections whose request is incomplete, and the time to stop reading
        batch = ContinuousBatch(model, end=tokenizer.end, vocab_size=tokenizer.size)
        self.worker = BatchWorker(batch)
        super().__init__(address, Handler)
        self.worker.start()

    def server_close(self):
        super().server_close()
        self.worker.stop()

    def process_request(self, request, client_address):
        """Start a thread for a connection, unless there are too many."""
        if len(self.reading) < MAX_READING:
            self.reading[request] = time.monotonic() + READ_S
            return super().process_request(request, client_address)
        with suppress(OSError):
            request.sendall(BUSY)
        return self.shutdown_request(request)

    def shutdown_request(self, request):
        self.reading.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self):
        """Stop reading requests that take too long; called twice per second."""
        for connection, deadline in list(self.reading.items()):
            if time.monotonic() > deadline:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # raised if the client has disconnected
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Send the tokens of one request."""

    timeout = 60  # seconds to wait for the client to send or to receive

    def do_POST(self):
        """Check a request, then stream its tokens."""
        try:
            prompt, tokens = self.generate(from_dict(Options, self.read_object()))
        except ValueError as error:
            return self.reply(400, "text/plain", f"{error}\n")
        if not self.server.slots.acquire(blocking=False):
            return self.reply(503, "text/plain", "too many requests are running; try again\n")
        try:  # an OSError means that the client has disconnected
            with closing(tokens), suppress(OSError):
                self.reply(200, "text/event-stream")
                self.send_tokens(prompt, tokens)
        finally:
            self.server.slots.release()

    def read_object(self):
        """Read the body, a JSON object."""
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) <= MAX_DIGITS):
            raise ValueError(f"Content-Length is {length!r}, expected the body's size in bytes")
        size = int(length)
        body = self.rfile.read(min(size, MAX_READ))
        self.server.reading.pop(self.connection, None)
        if size > MAX_BYTES:
            raise ValueError(f"the body has {size} bytes, expected at most {MAX_BYTES}")
        if len(body) < size:
            raise ValueError(f"the body ended after {len(body)} of {size} bytes")
        try:
            data = json.loads(body.decode(), parse_int=parse_int)
        except UnicodeDecodeError as error:
            raise ValueError(f"the body is not UTF-8 at byte {error.start}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"the body is not JSON at character {error.pos}") from error
        except RecursionError as error:
            raise ValueError("the body is nested too deeply, expected a JSON object") from error
        if not isinstance(data, dict):
            raise ValueError(f"the body is {json.dumps(data)[:20]}, expected a JSON object")
        return data

    def generate(self, options):
        """Return the tokens of a prompt, and an iterator over those to generate."""
        if options.seed < 0:
            raise ValueError(f"seed is {options.seed}, expected 0 or more")
        try:
            options.prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt is not valid Unicode at character {error.start}") from error
        prompt = self.server.tokenizer.begin(options.prompt)
        device, count = self.server.device, options.max_new_tokens
        rng, tokens = torch.Generator(device).manual_seed(options.seed), torch.tensor([prompt])
        stream = self.server.worker.stream
        return prompt, stream(tokens.to(device), options, max_new_tokens=count, generator=rng)

    def send_tokens(self, prompt, tokens):
        """Send an event for each piece of text, with the tokens since the last event."""
        new, sent = [], 0
        ids = (new.append(token) or token for token in tokens)
        try:
            for text in self.server.tokenizer.stream(ids, prompt):
                self.send({"text": text, "tokens": new[sent:]})
                sent = len(new)
        except RuntimeError as error:
            return self.send({"error": str(error)})
        reason = "stop" if new[-1] == self.server.tokenizer.end else "length"
        return self.send({"text": "", "tokens": new[sent:], "finish_reason": reason})

    def send(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def reply(self, status, kind, body=""):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode(errors="backslashreplace"))


def parse_int(text):
    """Convert a JSON integer; torch accepts only 64-bit integers."""
    if len(text) > MAX_DIGITS:
        raise ValueError(
            f"the body has an integer with {len(text)} digits, expected at most {MAX_DIGITS}"
        )
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="folder of a run, or zoo/NAME")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE.py",
        help="Python file to run first, because it defines classes of the run (repeatable)",
    )  # fmt: skip
    arguments = parser.parse_args()
    for file in arguments.imports:
        import_file(file)
    model, tokenizer = load_language_model(arguments.checkpoint)
    model, address = model.to(arguments.device), (arguments.host, arguments.port)
    try:
        server = Server(address, model, tokenizer)
    except OSError as error:
        parser.error(f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}")
    with server, suppress(KeyboardInterrupt):
        print(f"listening on {arguments.host}:{server.server_port}", flush=True)
        server.serve_forever()
