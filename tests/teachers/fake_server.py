"""Servers of a teacher with a known distribution: vLLM's and SGLang's forms of prompt logprobs."""

import http.server
import itertools
import json
import threading

import numpy as np


def log_softmax(token: int, n_vocab: int) -> np.ndarray:
    """float64 [n_vocab], the distribution after a token: the teacher reads nothing else."""
    logits = np.random.default_rng(token).standard_normal(n_vocab) * 2
    return logits - np.log(np.exp(logits).sum())


class FakeServer:
    """Answers as a server of `form` does; `fail` says which completion requests get a status."""

    def __init__(
        self, tokenizer, n_vocab, form="vllm", *, max_logprobs=20, models=("m",), **fields
    ):
        self.tokenizer, self.n_vocab, self.form = tokenizer, n_vocab, form
        self.max_logprobs, self.models, self.fields = max_logprobs, models, fields
        self.bodies, self.fail = [], lambda body, n: 0
        self.has_tokenize = True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(outer.get(self.path))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(outer.post(self.path, body))

            def reply(self, found):
                status, value = found
                self.send_response(status)
                self.end_headers()
                self.wfile.write(value if isinstance(value, bytes) else json.dumps(value).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def get(self, path):
        if path != "/v1/models":
            return 404, {}
        return 200, {"data": [{"id": name, **self.fields} for name in self.models]}

    def post(self, path, body):
        if path == "/tokenize" and self.has_tokenize:
            ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return 200, {"tokens": ids}
        if path not in ("/v1/completions", "/generate") or (
            path == "/generate" and self.form != "sglang"
        ):
            return 404, {"error": "no such route"}
        self.bodies.append(body)
        if status := self.fail(body, len(self.bodies)):
            return (status, b"broken") if isinstance(status, int) else (200, status)
        if path == "/generate":
            return self.generate(body)
        return self.complete(body)

    def complete(self, body):
        tokens = body["prompt"]
        if max(tokens) >= self.n_vocab:
            return 400, {"error": f"token id {max(tokens)} is out of vocabulary"}
        choice = {"text": "x", "finish_reason": "length"}
        k = body.get("prompt_logprobs")
        if self.form == "vllm" and k is not None:
            if k > self.max_logprobs:
                return 400, {"error": f"at most {self.max_logprobs} logprobs"}
            rows = [None]
            for before, token in itertools.pairwise(tokens):
                logp = log_softmax(before, self.n_vocab)
                likely = [*np.argsort(-logp)[:k].tolist(), token]
                rows.append(
                    {str(i): {"logprob": logp[i], "decoded_token": self.text(i)} for i in likely}
                )
            choice["prompt_logprobs"] = rows
        return 200, {"choices": [choice]}

    def generate(self, body):
        tokens, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        own, tops = [], []
        for i in range(start, len(tokens)):
            if i == 0:
                own.append([None, tokens[0], self.text(tokens[0])])
                tops.append(None)
                continue
            logp = log_softmax(tokens[i - 1], self.n_vocab)
            own.append([logp[tokens[i]], tokens[i], self.text(tokens[i])])
            tops.append([[logp[j], j, self.text(j)] for j in np.argsort(-logp)[:k].tolist()])
        meta = {"input_token_logprobs": own}
        return 200, {"meta_info": meta | ({"input_top_logprobs": tops} if k else {})}

    def text(self, token):
        return self.tokenizer.decode([int(token)])
