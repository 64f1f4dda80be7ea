"""The hash that versions, models and datasets are compared by."""

import hashlib
from collections.abc import Iterable


def digest(parts: Iterable[bytes]) -> str:
    """Hash of the parts and their lengths, as twelve hex digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:12]
