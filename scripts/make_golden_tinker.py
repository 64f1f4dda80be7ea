"""Writes tests/api/golden: requests of forward_backward as the package `tinker` encodes them.

Run in an environment with `tinker` 0.38:

    python scripts/make_golden_tinker.py
"""

import json
import pathlib

import numpy as np
from tinker import types  # pyright: ignore[reportMissingImports]  only in that environment
from tinker.proto.request_conv import (  # pyright: ignore[reportMissingImports]
    forward_backward_request_to_proto,
)

FOLDER = pathlib.Path(__file__).parents[1] / "tests" / "api" / "golden"
REQUESTS = {  # name: (loss, options, forward only, tensors of each datum by name)
    "cross_entropy": ("cross_entropy", None, False, [{"weights": [0.0, 1.0, 0.5]}]),
    "ppo": (
        "ppo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        True,
        [{"logprobs": [-1.0, -2.0], "advantages": [0.5, -0.5]}] * 2,
    ),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (loss, options, forward_only, data) in REQUESTS.items():
        sent, expected = [], []
        for tensors in data:
            n = len(next(iter(tensors.values())))
            tokens, targets = list(range(5, 5 + n)), list(range(300, 300 + n))
            inputs = {k: np.array(v, np.float32) for k, v in tensors.items()}
            inputs["target_tokens"] = np.array(targets)
            sent.append(types.Datum(types.ModelInput.from_ints(tokens), inputs))
            expected.append({"tokens": tokens, "target_tokens": targets} | tensors)
        call = types.ForwardBackwardRequest(
            types.ForwardBackwardInput(sent, loss, options), model_id="s:train:0", seq_id=7
        )
        message = forward_backward_request_to_proto(call)
        message.forward_only = forward_only
        (FOLDER / f"{name}.bin").write_bytes(message.SerializeToString())
        fields = {"loss": loss, "options": options or {}, "forward_only": forward_only}
        text = json.dumps(fields | {"data": expected}, indent=1)
        (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
