"""Source code of small environments, and of an agent."""

ENVIRONMENTS = '''
import time


class Echo:
    """Replies "c" until the completion is "d"."""

    def reset(self, prompt):
        return {"long": [{"role": "user", "content": "x" * 99}]}.get(prompt["answer"])

    def step(self, completion):
        if completion == "late":
            time.sleep(0.3)
        if completion == "raise":
            raise RuntimeError("out of cheese")
        return "c", 1.0 if completion == "d" else 0.5, completion == "d", {"calls": 1}


class Missing:
    """Fails in every reset."""

    def reset(self, prompt):
        raise FileNotFoundError("no such level")

    def step(self, completion):
        return "", 0.0, True


class Flaky:
    """Fails in reset for a third of the prompts and in step for half of the completions."""

    def reset(self, prompt):
        return [{"role": "user", "content": "x" * 999}] if prompt["seed"] % 3 == 0 else None

    def step(self, completion):
        if len(completion) % 2:
            raise RuntimeError("an odd number of characters")
        return "", len(completion) / 8, True


class Letters:
    """Three turns; each rewards the share of letters in the completion."""

    def __init__(self, turns=3):
        self.left = turns

    def reset(self, prompt):
        return [{"role": "user", "content": "Go."}]

    def step(self, completion):
        self.left -= 1
        return "More.", sum(c.isalpha() for c in completion) / 8, self.left == 0
'''

AGENT = '''
import json
import urllib.request


def turn(base_url, messages):
    data = json.dumps({"messages": messages, "max_tokens": 20}).encode()
    reply = urllib.request.urlopen(f"{base_url}/chat/completions", data).read()
    return json.loads(reply)["choices"][0]["message"]


def agent(base_url, api_key, task):
    """Two turns of one conversation, then one of a second; rewards the share of letters."""
    messages = list(task["messages"])
    for text in ("More.", "End."):
        messages += [turn(base_url, messages), {"role": "user", "content": text}]
    last = turn(base_url, [{"role": "user", "content": f"Sum up: {len(messages)}"}])
    texts = [messages[-4]["content"], messages[-2]["content"], last["content"]]
    return {"reward": sum(c.isalpha() for text in texts for c in text) / 24, "texts": 3}
'''
