"""What an accuracy is of: the text that is followed and the model, in the words of a record."""

import platform
from pathlib import Path

from zinfer.record.accuracy import AccuracyError
from zinfer.spec.checkpoint import Checkpoint
from zinfer.spec.model import ModelSpec


def text_of(name: str) -> tuple[str, str]:
    """What the text is called, and the text. Raises AccuracyError for what cannot be read."""
    if name == "default":
        from pydoc_data.topics import topics

        return f"the manual of Python {platform.python_version()}", "\n".join(topics[key] for key in sorted(topics))
    try:
        return Path(name).name, Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise AccuracyError(f"--prompt-file {name} cannot be read: {reason}") from None


def told_of(spec: ModelSpec) -> str:
    """What the model is: its shape, and what its file says of where it came from."""
    told = (
        f"{spec.architecture}, {spec.parameters / 1e6:,.0f} million weights, {spec.num_layers} layers, "
        f"{spec.num_heads} heads of {spec.head_dim}, {spec.num_kv_heads} of keys and values"
    )
    if spec.directory is None:
        return f"{told}; random weights"
    from safetensors import safe_open

    with safe_open(next(iter(Checkpoint.open(Path(spec.directory)).tensors.values())).file, framework="np") as file:
        origin = (file.metadata() or {}).get("source")
    return f"{told}; {origin}" if origin else told
