"""Functions for notebooks and scripts: the programs' configs and messages, without a command line.

    run = jaxrl.train("configs/quickstart.py", overrides={"total_steps": 24})
    run.metrics, run.samples, run.report(), run.export("my-model")

docs/tutorials/notebook.md explains them.
"""

from jaxrl.notebook.evaluation import evaluate, generate
from jaxrl.notebook.planning import plan
from jaxrl.notebook.run_folder import RunFolder
from jaxrl.notebook.training import train

__all__ = ["RunFolder", "evaluate", "generate", "plan", "train"]
