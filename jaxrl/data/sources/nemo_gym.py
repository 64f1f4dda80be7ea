"""Rows of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym): "nemo_gym:FILE.jsonl" as a data source."""

from typing import Any

from jaxrl.data.sources.files import read_rows

_ROLES = {"developer": "system"}  # as the endpoint of agents reads it


def gym_rows(source: str) -> list[dict[str, Any]]:
    """The rows of a "nemo_gym:" source; the prompt is the conversation in responses_create_params.

    extra_info has the row for env.agent="nemo_gym". Raises ValueError for another row.
    """
    path = source.removeprefix("nemo_gym:")
    rows = []
    for place, row in read_rows(path):
        params = row.get("responses_create_params")
        if not isinstance(params, dict) or not params.get("input"):
            raise ValueError(
                f"{place} has no responses_create_params with an input; is it a row of NeMo Gym?"
            )
        prompt = _messages(params, place)
        rows.append({"prompt": prompt, "answer": "", "extra_info": {"nemo_gym": row}})
    return rows


def _messages(params: dict[str, Any], place: str) -> list[dict[str, str]]:
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if instructions := params.get("instructions"):
        items = [{"role": "system", "content": instructions}, *items]
    return [_message(item, place) for item in items]


def _message(item: dict[str, Any], place: str) -> dict[str, str]:
    match item:
        case {"role": str(role), "content": str(text)}:
            return {"role": _ROLES.get(role, role), "content": text}
        case {"role": str(role), "content": [*parts]} if all("text" in part for part in parts):
            text = "".join(part["text"] for part in parts)
            return {"role": _ROLES.get(role, role), "content": text}
    raise ValueError(
        f"{place}: the input has {str(item)[:200]}, which is no message of text; remove the row"
    )
