"""Runs a server in a thread, and the engine directly for comparison."""

import contextlib
import re
import threading
import time
from types import SimpleNamespace

import httpx2 as httpx
import jax
import numpy as np
import openai

from jaxrl.engine.api import Request
from jaxrl.http.listener import listener, url
from jaxrl.serve.__main__ import open_service, read, server

KEY = "secret"


def arguments(folder, *more):
    """Arguments of a small server: 4 responses in the batch, 2 in the queue."""
    return [
        f"--model={folder}",
        "--name=tiny",
        "--port=0",
        f"--api-key={KEY}",
        "--max-len=1024",
        "--max-waiting=2",
        "--timeout-s=60",
        "--config.rollout.max_num_seqs=4",
        "--config.rollout.max_num_batched_tokens=256",
        "--config.mesh.fsdp=1",
        *more,
    ]


@contextlib.contextmanager
def running(web, listening):
    """Runs a server in a thread and stops it at the end."""
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    thread.start()
    wait_until(lambda: web.started)
    try:
        yield
    finally:
        web.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def serving(arguments, *, poll_s=0.05):
    """A running server: service, base URL, client, and the parsed arguments."""
    options, run = read(arguments)
    service = open_service(options, run)
    if service.watcher is not None:
        service.watcher._poll_s = poll_s
    with (
        listener(options.host, options.port) as listening,
        running(server(service, options), listening),
    ):
        base = url(listening)
        client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
        yield SimpleNamespace(service=service, base=base, client=client, run=run, options=options)


def wait_until(condition, timeout_s: float = 20):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def direct(model, prompts, *, params=None, **options):
    """(tokens, logps, finish) per prompt from the engine itself, without the server.

    Prompts are text or token ids; `options` are fields of the engine's Request. `params` replace
    the model's weights.
    """
    params = model.params if params is None else params
    tokenizer, results = model.renderer.tokenizer, {}
    with jax.set_mesh(model.mesh):
        for p in prompts:
            ids = np.array(tokenizer(p)["input_ids"] if isinstance(p, str) else p, np.int32)
            results[model.engine.submit(Request(tokens=ids, **options))] = ([], [], [])
        while model.engine.n_unfinished:
            for generated in model.engine.generate(params):
                tokens, logps, finish = results[generated.slot]
                tokens += generated.tokens.tolist()
                logps += generated.logp.tolist()
                finish.append(generated.finish)
    return [(tokens, logps, finish[-1]) for tokens, logps, finish in results.values()]


def metric(served, name):
    """The value of a metric at /metrics; 0 if it is not there."""
    text = httpx.get(f"{served.base}/metrics").text
    values = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(values[0]) if values else 0.0
