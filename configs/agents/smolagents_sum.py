"""A code agent of smolagents, run with env.command in the environment that has the package.

    uv venv smol && uv pip install --python smol "smolagents[openai]==1.26.0"
    python -m jaxrl.train --config=configs/quickstart.py --config.reward.functions=environment \
        --config.env.command="smol/bin/python configs/agents/smolagents_sum.py {task}" ...

The model writes Python between <code> and </code>, which smolagents runs, and ends with
final_answer(...). docs/how_to/agents.md has the full command.
"""

import json
import os
import re
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel  # pyright: ignore[reportMissingImports]

MAX_STEPS = 1  # then smolagents lets the model answer without code
MAX_TOKENS = 48  # of a turn
SYSTEM = """You solve a task with Python. Write code between <code> and </code>, as in
Task: What is 3 + 4?
<code>
final_answer(3 + 4)
</code>"""  # that of smolagents has 2,000 tokens


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = OpenAIModel("policy", api_base=base_url, api_key=key, max_tokens=MAX_TOKENS)
    agent = CodeAgent(tools=[], model=model, max_steps=MAX_STEPS, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = SYSTEM
    answer = str(agent.run(task["messages"][-1]["content"]))
    numbers = re.findall(r"\d+", answer)
    right = bool(numbers) and numbers[-1] == task["answer"]
    called = agent.memory.steps[-1].error is None  # the code ran
    print(json.dumps({"reward": float(right), "code": float(called)}))


if __name__ == "__main__":
    main()
