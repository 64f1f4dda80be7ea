"""Writes the divergences of TRL's GKD and SDPO trainers to tests/kernels/golden/distillation.json.

It has logits of a student and a teacher; for each case beta, the temperature or the number of the
teacher's most likely ids, the loss of every token that TRL 1.16 computes, and the gradient of their
sum with respect to the student's logits.

torch and trl are not dependencies of the project; run this in a separate environment:
    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch trl==1.16.0
    /tmp/trl/bin/python scripts/make_golden_distillation.py tests/kernels/golden
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import trl  # pyright: ignore[reportMissingImports]
from trl.experimental.gkd import GKDTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.sdpo.sdpo_trainer import (  # pyright: ignore[reportMissingImports]
    add_tail_bucket,
    compute_divergence,
)

N, V, K = 3, 12, 4


def gkd(student, teacher, beta: float, temperature: float):
    """The loss of every token over the whole vocabulary."""
    per_id = GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=beta, temperature=temperature, reduction="none"
    )
    return per_id[0].sum(-1)


def sdpo(student, teacher, beta: float):
    """The loss of every token over the teacher's most likely ids and one bucket for the others."""
    logp, logq = (torch.log_softmax(logits, dim=-1) for logits in (student, teacher))
    logq, ids = torch.topk(logq, K, dim=-1)
    logp = torch.gather(logp, dim=-1, index=ids)
    return compute_divergence(add_tail_bucket(logp), add_tail_bucket(logq), beta)


def case(loss, student, teacher, **keys) -> dict:
    leaf = torch.tensor(student, requires_grad=True)
    per_token = loss(leaf, torch.tensor(teacher), **keys)
    (slope,) = torch.autograd.grad(per_token.sum(), [leaf])
    return keys | {"loss": per_token.tolist(), "gradient": slope.tolist()}


def main() -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.standard_normal((2, N, V)).astype(np.float32) * 2
    betas = (0.0, 0.1, 0.5, 0.9, 1.0)
    found = {
        "trl": trl.__version__,
        "student": student.tolist(),
        "teacher": teacher.tolist(),
        "vocabulary": [
            case(gkd, student, teacher, beta=beta, temperature=temperature)
            for beta in betas
            for temperature in (1.0, 0.7)
        ],
        "k": K,
        "most_likely": [case(sdpo, student, teacher, beta=beta) for beta in betas],
    }
    text = json.dumps(found, indent=0).replace(",\n", ", ").replace("[\n", "[").replace("\n]", "]")
    Path(sys.argv[1], "distillation.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
