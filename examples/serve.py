"""Serve a causal language model over HTTP with continuous batching.

python examples/serve.py zoo/shakespeare_lightnet --port 8000
curl -N localhost:8000/generate -d '{"prompt": "ROMEO:", "max_new_tokens": 200, "seed": 1}'

The response streams server-sent events with tokens and text, and ends with a finish_reason.
"""

import argparse
import json
import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from onescan.configs import from_dict
from onescan.models.causal_lm import Sampling
from onescan.models.continuous_batch import BatchWorker, ContinuousBatch
from onescan.training.loading import load_language_model

MAX_BYTES = 2**16  # of a request


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
        batch = ContinuousBatch(model, end=tokenizer.end, vocab_size=tokenizer.size)
        self.worker = BatchWorker(batch)
        super().__init__(address, Handler)
        self.worker.start()

    def server_close(self):
        super().server_close()
        self.worker.stop()


class Handler(BaseHTTPRequestHandler):
    """Send the tokens of one request."""

    timeout = 60  # seconds to wait for the client

    def do_POST(self):
        """Check a request, then stream its tokens."""
        try:
            size = int(self.headers.get("Content-Length", 0))
            data = json.loads(self.rfile.read(size)) if 0 < size <= MAX_BYTES else None
            if not isinstance(data, dict):
                raise ValueError(f"expected a JSON object of at most {MAX_BYTES} bytes")
            tokens = self.generate(from_dict(Options, data))
        except (ValueError, RecursionError) as error:
            return self.reply(400, "text/plain", f"{error}\n")
        if not self.server.slots.acquire(blocking=False):
            return self.reply(503, "text/plain", "too many requests are running; try again\n")
        try:  # an OSError means that the client has disconnected
            with closing(tokens), suppress(OSError):
                self.reply(200, "text/event-stream")
                self.send_tokens(tokens)
        finally:
            self.server.slots.release()

    def generate(self, options):
        """Return an iterator over the tokens of a request."""
        tokenizer, device = self.server.tokenizer, self.server.device
        prompt = torch.tensor([tokenizer.begin(options.prompt)], device=device)
        rng, count = torch.Generator(device).manual_seed(options.seed), options.max_new_tokens
        return self.server.worker.stream(prompt, options, max_new_tokens=count, generator=rng)

    def send_tokens(self, tokens):
        """Send an event for each piece of text, with the tokens since the last event."""
        new, sent = [], 0
        ids = (new.append(token) or token for token in tokens)
        try:
            for text in self.server.tokenizer.stream(ids):
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
        self.wfile.write(body.encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="folder of a run, or zoo/NAME")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    model, tokenizer = load_language_model(arguments.checkpoint)
    model, address = model.to(arguments.device), (arguments.host, arguments.port)
    with Server(address, model, tokenizer) as server, suppress(KeyboardInterrupt):
        print(f"listening on {arguments.host}:{server.server_port}", flush=True)
        server.serve_forever()
