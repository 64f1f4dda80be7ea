"""Keys of teachers at a server: requests for the logprobs of given tokens."""

import dataclasses

from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class TeacherEndpointConfig:
    timeout_s: float = key(120.0, "Seconds that one request may take", gt=0)
    attempts: int = key(3, "Requests per response until the server answers", ge=1, le=10)
    concurrency: int = key(32, "Requests in flight to each server, of each process", ge=1)
    max_error_fraction: float = key(
        0.1,
        "Largest fraction of a step's responses that a teacher may fail to read; these are left "
        "out of the update, and more of them stop the run",
        ge=0,
        le=1,
    )
    api_key_env: str = key("", "Environment variable with the server's API key; '' = no key")
    cache: str = key(
        "", "Folder that keeps the scores of responses, which are not requested again; '' = none"
    )
