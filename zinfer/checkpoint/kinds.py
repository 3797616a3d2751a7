"""Files and folders that are mistaken for a checkpoint.

They are recognised before anything is parsed, so that the message says what they are.
"""

from pathlib import Path

from zinfer.system.documents import DocumentError, open_regular

ADAPTER = "adapter_config.json"
_MERGE = "merge it into its base model first (merge_and_unload of peft) and give that folder"
_INSTEAD = "give the folder or the hub id of the model in safetensors, or run the GGUF file with llama.cpp"


def unsupported_kind(path: Path) -> str | None:
    """Return what `path` is if it cannot be a checkpoint."""
    if not path.is_dir():
        return f"{path} is a GGUF file, which zinfer does not read: {_INSTEAD}" if _is_gguf(path) else None
    names = {file.name for file in path.iterdir()}
    if ADAPTER in names:
        if "config.json" not in names:
            return f"{path} is an adapter (LoRA or another kind of peft), not a whole model: {_MERGE}"
        if any(name.startswith("adapter_model.") for name in names):
            return f"{path} holds a model and an adapter beside it ({ADAPTER}): {_MERGE}, or remove the adapter's files"
    weights = {Path(name).suffix for name in names if name.endswith((".gguf", ".safetensors", ".bin", ".pt", ".pth"))}
    if weights == {".gguf"}:
        return f"{path} holds GGUF files only, which zinfer does not read: {_INSTEAD}"
    return None


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    try:
        with open_regular(path) as stream:
            return stream.read(4) == b"GGUF"
    except (OSError, DocumentError):
        return False
