"""Running a server in a thread and asking it; the same of the engine itself."""

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
from jaxrl.serve.__main__ import listener, open_service, read, server, url

KEY = "secret"


def arguments(folder, *more):
    """The command line of a small server: 4 responses in the batch, 2 that wait."""
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
    """A server in a thread, told to stop at the end."""
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
def serving(arguments, *, look_s=0.05):
    """A running server of its own: service, its URL, a client, and what was asked for."""
    options, run = read(arguments)
    service = open_service(options, run)
    if service.follower is not None:
        service.follower._look_s = look_s
    with listener(options.host, options.port) as listening, running(server(service), listening):
        base = url(listening)
        client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
        yield SimpleNamespace(service=service, base=base, client=client, run=run, options=options)


def wait_until(holds, timeout_s: float = 20):
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def direct(model, prompts, *, params=None, **wanted):
    """(tokens, logps, finish) of the engine of each prompt, text or ids; with other weights where they are given."""
    params = model.params if params is None else params
    tokenizer, made = model.renderer.tokenizer, {}
    with jax.set_mesh(model.mesh):
        for p in prompts:
            ids = np.array(tokenizer(p)["input_ids"] if isinstance(p, str) else p, np.int32)
            made[model.engine.submit(Request(tokens=ids, **wanted))] = ([], [], [])
        while model.engine.n_unfinished:
            for one in model.engine.generate(params):
                tokens, logps, finish = made[one.slot]
                tokens += one.tokens.tolist()
                logps += one.logp.tolist()
                finish.append(one.finish)
    return [(tokens, logps, finish[-1]) for tokens, logps, finish in made.values()]


def meter(served, name):
    text = httpx.get(f"{served.base}/metrics").text
    values = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(values[0]) if values else 0.0
