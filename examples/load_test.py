"""Measure the tokens per second of examples/serve.py: one client, then many at the same time.

python examples/load_test.py zoo/shakespeare_lightnet --clients 32
"""

import argparse
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from serve import Server

from onescan.inference.loading import load_language_model


def count_tokens(address, seed, new_tokens):
    """Send one request, read its events, and return the number of tokens."""
    connection = http.client.HTTPConnection(*address, timeout=600)
    options = {"prompt": "ROMEO:", "max_new_tokens": new_tokens, "seed": seed}
    connection.request("POST", "/generate", json.dumps(options))
    with connection.getresponse() as response:
        lines = response.read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    return sum(len(event["tokens"]) for event in events)


def tokens_per_second(address, clients, requests, new_tokens):
    """Return the rate over a number of requests, of which `clients` run at the same time."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        seeds = range(requests)
        counts = threads.map(lambda seed: count_tokens(address, seed, new_tokens), seeds)
        return sum(counts) / (time.perf_counter() - start)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="folder of a run, or zoo/NAME")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=200)
    arguments = parser.parse_args(argv)
    model, tokenizer = load_language_model(arguments.checkpoint)
    with Server(("127.0.0.1", 0), model, tokenizer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        count_tokens(server.server_address, 0, 2)  # warm up
        for clients, requests in ((1, 4), (arguments.clients, 2 * arguments.clients)):
            rate = tokens_per_second(server.server_address, clients, requests, arguments.new_tokens)
            print(f"{clients} at a time: {rate:.0f} tokens/s")
        server.shutdown()


if __name__ == "__main__":
    main()
